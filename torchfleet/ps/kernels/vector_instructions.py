"""Vector instructions for intrinsics: loops that numba does not reliably vectorize are written out here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types


def _host_lanes() -> int:
    """Floats in the widest vector of this processor."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") else 4


LANES = _host_lanes()
REGISTERS = 16 if LANES == 8 else 32
FLOAT, INT = ir.FloatType(), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)


def padded(dim: int) -> int:
    """The padded width of rows of `dim` numbers; the padding stays zero."""
    return -(-dim // LANES) * LANES


class Code:
    """Emits the instructions of one intrinsic, whose arguments are given by their numbers."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        self._context, self._types, self._args = context, signature.args, args

    def pointer(self, place: int) -> Any:
        return self._context.make_array(self._types[place])(self._context, self.builder, self._args[place]).data

    def width(self, place: int) -> Any:
        """The row length of a two-dimensional argument."""
        array = self._context.make_array(self._types[place])(self._context, self.builder, self._args[place])
        return cgutils.unpack_tuple(self.builder, array.shape)[1]

    def integer(self, place: int) -> Any:
        return self._context.cast(self.builder, self._args[place], self._types[place], types.intp)

    def at(self, pointer: Any, *steps: Any) -> Any:
        for step in steps:
            pointer = self.builder.gep(pointer, [INT(step) if isinstance(step, int) else step], inbounds=True)
        return pointer

    def times(self, number: Any, factor: int) -> Any:
        return self.builder.mul(number, INT(factor))

    def row(self, array: Any, numbers: Any, place: Any, width: Any) -> Any:
        """Where row numbers[place] of an array begins."""
        number = self.builder.sext(self.builder.load(self.at(numbers, place)), INT)
        return self.at(array, self.builder.mul(number, width))

    def load(self, pointer: Any, *steps: Any) -> Any:
        vector = self.builder.load(self.builder.bitcast(self.at(pointer, *steps), VECTOR.as_pointer()))
        vector.align = 4
        return vector

    def store(self, vector: Any, pointer: Any, *steps: Any) -> None:
        self.builder.store(vector, self.builder.bitcast(self.at(pointer, *steps), VECTOR.as_pointer())).align = 4

    def spread(self, number: Any) -> Any:
        """A vector of which every element is `number`."""
        undefined, first = ir.Constant(VECTOR, ir.Undefined), ir.IntType(32)(0)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self.builder.shuffle_vector(self.builder.insert_element(undefined, number, first), undefined, zeros)

    def multiply_add(self, x: Any, y: Any, addend: Any) -> Any:
        return self._call(f"llvm.fmuladd.v{LANES}f32", VECTOR, [x, y, addend])

    def total(self, vector: Any) -> Any:
        """The sum of a vector's elements, in the fastest order."""
        return self._call(f"llvm.vector.reduce.fadd.v{LANES}f32", FLOAT, [FLOAT(-0.0), vector], ("reassoc",))

    def prefetch(self, pointer: Any) -> None:
        bytes_there = self.builder.bitcast(pointer, ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        # For reading, in the second-level cache; the first is full with the current operands.
        self._call("llvm.prefetch.p0", ir.VoidType(), [bytes_there, number(0), number(2), number(1)])

    def loop(
        self, start: Any, stop: Any, step: int, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """for i in range(start, stop, step): carried = body(i, carried). Returns what is carried at the end."""
        builder, before = self.builder, self.builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        index, values = builder.phi(INT), [builder.phi(value.type) for value in carried]
        for phi, value in zip([index, *values], [start, *carried], strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
        builder.position_at_end(inside)
        following = [builder.add(index, INT(step)), *body(index, values)]
        for phi, value in zip([index, *values], following, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return values

    def _call(self, name: str, result: Any, args: list[Any], fastmath: tuple[str, ...] = ()) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, args, fastmath=fastmath)
