"""Arithmetic on whole rows as functions for kernels, in vectors of eight floats.

The same loops over the numbers of a row are vectorized by the compiler only behind a check for overlap at every row,
and load and store a sum of rows once for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_LANES = 8  # floats of a vector; a processor with shorter ones takes several
_TILES = (32, 16, 8, 4, 2, 1)  # numbers of a row that are handled at once, from the widest down


class _Code:
    """Emits the instructions of one intrinsic, whose arguments are given by their numbers."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        self._context, self._types, self._args = context, signature.args, args

    def pointer(self, place: int) -> Any:
        return self._context.make_array(self._types[place])(self._context, self.builder, self._args[place]).data

    def floats(self, place: int) -> Any:
        """As `pointer`, for 32-bit words of any type."""
        return self.builder.bitcast(self.pointer(place), _FLOAT.as_pointer())

    def integer(self, place: int) -> Any:
        return self._context.cast(self.builder, self._args[place], self._types[place], types.intp)

    def row(self, index: Any, i: Any, size: Any) -> Any:
        """Where row index[i] begins."""
        number = self.builder.load(self.builder.gep(index, [i]))
        return self.builder.mul(self.builder.sext(number, _INT) if number.type.width < 64 else number, size)

    def load(self, data: Any, at: Any, lanes: int) -> list[Any]:
        """The `lanes` numbers from `at` on, as vectors."""
        found = []
        for place in self._places(data, at, lanes):
            found.append(self.builder.load(place))
            found[-1].align = 4
        return found

    def store(self, vectors: list[Any], data: Any, at: Any, lanes: int) -> None:
        for vector, place in zip(vectors, self._places(data, at, lanes), strict=True):
            self.builder.store(vector, place).align = 4

    def spread(self, number: float, lanes: int) -> list[Any]:
        """Vectors of which every element is `number`."""
        width = min(lanes, _LANES)
        one = ir.Constant(_FLOAT, number) if width == 1 else ir.Constant(ir.VectorType(_FLOAT, width), [number] * width)
        return [one] * (lanes // width)

    def in_tiles(self, size: Any, body: Callable[[Any, int], None]) -> None:
        """body(at, lanes) until `size` numbers are handled."""
        builder = self.builder
        at = builder.and_(size, _INT(-_TILES[0]))
        with cgutils.for_range_slice(builder, _INT(0), at, _INT(_TILES[0])) as (begin, _):
            body(begin, _TILES[0])
        for lanes in _TILES[1:]:
            left = builder.and_(size, _INT(lanes))
            with builder.if_then(builder.icmp_unsigned("!=", left, _INT(0))):
                body(at, lanes)
            at = builder.add(at, left)

    def _places(self, data: Any, at: Any, lanes: int) -> list[Any]:
        width = min(lanes, _LANES)
        kind = _FLOAT if width == 1 else ir.VectorType(_FLOAT, width)
        starts = [self.builder.add(at, _INT(first)) for first in range(0, lanes, width)]
        return [self.builder.bitcast(self.builder.gep(data, [start]), kind.as_pointer()) for start in starts]


@intrinsic
def sum_rows(typing_context: Any, out: Any, to: Any, rows: Any, index: Any, start: Any, stop: Any, size: Any) -> Any:
    """out[to:to + size] = Σ of the rows index[start:stop], in this order; a row has `size` numbers. All indices must
    be rows; out must not overlap them.
    """
    signature = types.void(out, to, rows, index, start, stop, size)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(context, builder, signature, args)
        sums, data, numbers = code.pointer(0), code.pointer(2), code.pointer(3)
        begin, end, width = code.integer(4), code.integer(5), code.integer(6)

        def body(at: Any, lanes: int) -> None:
            kept = [cgutils.alloca_once_value(builder, zero) for zero in code.spread(0.0, lanes)]
            for place, zero in zip(kept, code.spread(0.0, lanes), strict=True):
                builder.store(zero, place)
            with cgutils.for_range_slice(builder, begin, end, _INT(1)) as (i, _):
                more = code.load(data, builder.add(code.row(numbers, i, width), at), lanes)
                for place, row in zip(kept, more, strict=True):
                    builder.store(builder.fadd(builder.load(place), row), place)
            found = [builder.load(place) for place in kept]
            code.store(found, sums, builder.add(code.integer(1), at), lanes)

        code.in_tiles(width, body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_to_rows(
    typing_context: Any, sums: Any, index: Any, start: Any, stop: Any, row: Any, source: Any, factor: Any, size: Any
) -> Any:
    """sums[u] += factor · row[source:source + size] for every u in index[start:stop]; sums has rows of `size` numbers.
    All indices must be rows; the arrays must not overlap.
    """
    signature = types.void(sums, index, start, stop, row, source, types.float32, size)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(context, builder, signature, args)
        data, numbers, added = code.pointer(0), code.pointer(1), code.pointer(4)
        begin, end, width = code.integer(2), code.integer(3), code.integer(7)

        def body(at: Any, lanes: int) -> None:
            factors = [_splat(builder, args[6], min(lanes, _LANES))] * max(1, lanes // _LANES)
            parts = code.load(added, builder.add(code.integer(5), at), lanes)
            scaled = [builder.fmul(part, by) for part, by in zip(parts, factors, strict=True)]
            with cgutils.for_range_slice(builder, begin, end, _INT(1)) as (i, _):
                to = builder.add(code.row(numbers, i, width), at)
                so_far = code.load(data, to, lanes)
                code.store([builder.fadd(x, y) for x, y in zip(so_far, scaled, strict=True)], data, to, lanes)

        code.in_tiles(width, body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def copy_row(typing_context: Any, to: Any, to_at: Any, source: Any, source_at: Any, size: Any) -> Any:
    """Copy `size` 32-bit words between flat positions of two arrays. For the short rows of tables, quicker than the
    call of memcpy in `copy_words`.
    """
    signature = types.void(to, to_at, source, source_at, size)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(context, builder, signature, args)
        there, here = code.floats(0), code.floats(2)

        def body(at: Any, lanes: int) -> None:
            found = code.load(here, builder.add(code.integer(3), at), lanes)
            code.store(found, there, builder.add(code.integer(1), at), lanes)

        code.in_tiles(code.integer(4), body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def subtract_scaled(
    typing_context: Any, to: Any, to_at: Any, source: Any, source_at: Any, size: Any, factor: Any
) -> Any:
    """to[to_at + d] -= factor · source[source_at + d] for d below `size`; the arrays must not overlap."""
    signature = types.void(to, to_at, source, source_at, size, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(context, builder, signature, args)
        there, here = code.pointer(0), code.pointer(2)

        def body(at: Any, lanes: int) -> None:
            place, by = builder.add(code.integer(1), at), _splat(builder, args[5], min(lanes, _LANES))
            parts = code.load(here, builder.add(code.integer(3), at), lanes)
            pairs = zip(code.load(there, place, lanes), parts, strict=True)
            code.store([builder.fsub(x, builder.fmul(by, y)) for x, y in pairs], there, place, lanes)

        code.in_tiles(code.integer(4), body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def sum_of_squares(typing_context: Any, source: Any, source_at: Any, size: Any) -> Any:
    """Σ of the squares of `size` numbers, in eight lanes: an order that is the same on every processor.

    Lane j has the numbers j, 8 + j, ... of the whole eights, lane 0 also the rest. The lanes are added as
    ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
    """
    signature = types.float32(source, source_at, size)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(context, builder, signature, args)
        data, start, size = code.pointer(0), code.integer(1), code.integer(2)
        total = cgutils.alloca_once(builder, ir.VectorType(_FLOAT, _LANES))
        builder.store(code.spread(0.0, _LANES)[0], total)
        whole = builder.and_(size, _INT(-_LANES))
        with cgutils.for_range_slice(builder, _INT(0), whole, _INT(_LANES)) as (at, _):
            (part,) = code.load(data, builder.add(start, at), _LANES)
            builder.store(builder.fadd(builder.load(total), builder.fmul(part, part)), total)
        lanes = [builder.extract_element(builder.load(total), ir.IntType(32)(lane)) for lane in range(_LANES)]
        first = cgutils.alloca_once(builder, _FLOAT)
        builder.store(lanes[0], first)
        with cgutils.for_range_slice(builder, whole, size, _INT(1)) as (at, _):
            (part,) = code.load(data, builder.add(start, at), 1)
            builder.store(builder.fadd(builder.load(first), builder.fmul(part, part)), first)
        lanes[0] = builder.load(first)
        a, b, c, d = (builder.fadd(lanes[i], lanes[i + 4]) for i in range(4))
        return builder.fadd(builder.fadd(a, c), builder.fadd(b, d))

    return signature, codegen


def _splat(builder: Any, number: Any, lanes: int) -> Any:
    """A vector of which every element is `number`; the number itself for one lane."""
    if lanes == 1:
        return number
    vector = ir.Constant(ir.VectorType(_FLOAT, lanes), ir.Undefined)
    for lane in range(lanes):
        vector = builder.insert_element(vector, number, ir.IntType(32)(lane))
    return vector
