"""Small matrix products on rows of tables, in registers.

The compiler by itself neither keeps a tile of sums in registers nor sees that two rows do not overlap, so these are
written as vector instructions. A row is found through a list of row numbers; its width is that of the array, a multiple
of LANES (`padded`). Capital letters are two-dimensional arrays.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import intrinsic

from torchfleet.ps.kernels.vector_instructions import INT, LANES, ZERO, Code

_LINE = 16  # floats in a cache line


def make_products(num_x: int, num_y: int) -> Any:
    """An intrinsic: out[at + i · stride + j] = X[x_rows[x_at + i]] · Y[y_rows[y_at + j]], i < num_x, j < num_y."""

    @intrinsic
    def products(
        typing: Any, X: Any, x_rows: Any, x_at: Any, Y: Any, y_rows: Any, y_at: Any, out: Any, at: Any, stride: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            width, x_first, y_first = code.width(0), code.at(code.pointer(1), code.integer(2)), code.integer(5)
            xs = [code.row(code.pointer(0), x_first, INT(i), width) for i in range(num_x)]
            ys = [code.row(code.pointer(3), code.at(code.pointer(4), y_first), INT(j), width) for j in range(num_y)]

            def add_up(d: Any, sums: list[Any]) -> list[Any]:
                x_parts, y_parts = [code.load(x, d) for x in xs], [code.load(y, d) for y in ys]
                pairs = [(x, y) for x in x_parts for y in y_parts]
                return [code.multiply_add(x, y, total) for (x, y), total in zip(pairs, sums, strict=True)]

            sums = code.loop(INT(0), width, LANES, [ZERO] * (num_x * num_y), add_up)
            place, step = code.at(code.pointer(6), code.integer(7)), code.integer(8)
            for i in range(num_x):
                for j in range(num_y):
                    builder.store(code.total(sums[i * num_y + j]), code.at(place, code.times(step, i), j))
            return context.get_dummy_value()

        return types.void(X, x_rows, x_at, Y, y_rows, y_at, out, at, stride), codegen

    return products


def make_combinations(num_out: int, num_vectors: int, add: bool) -> Any:
    """An intrinsic: OUT[out_row + i] = (OUT[out_row + i] +, if `add`) Σ_j<count g[at + i · i_step + j · j_step] ·
    Y[y_rows[y_at + j]], i < num_out. `num_vectors` of each row are in registers at a time."""

    @intrinsic
    def combinations(
        typing: Any, g: Any, at: Any, i_step: Any, j_step: Any, Y: Any, y_rows: Any, y_at: Any, count: Any,
        OUT: Any, out_row: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            width, first, j_step, count = code.width(4), code.integer(9), code.integer(3), code.integer(7)
            factors = [
                code.at(code.pointer(0), code.integer(1), code.times(code.integer(2), i)) for i in range(num_out)
            ]
            numbers, Y = code.at(code.pointer(5), code.integer(6)), code.pointer(4)
            outs = [code.at(code.pointer(8), builder.mul(width, builder.add(first, INT(i)))) for i in range(num_out)]

            def columns(num: int, start: Any, stop: Any) -> None:
                """`num` vectors of every row, from `start` on."""

                def one_stretch(d: Any, _: list[Any]) -> list[Any]:
                    places = [(i, LANES * c) for i in range(num_out) for c in range(num)]

                    def add_up(j: Any, sums: list[Any]) -> list[Any]:
                        y = code.at(code.row(Y, numbers, j, width), d)
                        parts = [code.load(y, LANES * c) for c in range(num)]
                        gs = [code.spread(builder.load(code.at(factor, builder.mul(j, j_step)))) for factor in factors]
                        pairs = [(g, part) for g in gs for part in parts]
                        return [code.multiply_add(g, part, s) for (g, part), s in zip(pairs, sums, strict=True)]

                    before = [code.load(outs[i], d, c) if add else ZERO for i, c in places]
                    sums = code.loop(INT(0), count, 1, before, add_up)
                    for (i, c), total in zip(places, sums, strict=True):
                        code.store(total, outs[i], d, c)
                    return []

                code.loop(start, stop, num * LANES, [], one_stretch)

            stretch = INT(num_vectors * LANES)
            rest = builder.mul(builder.sdiv(width, stretch), stretch)
            columns(num_vectors, INT(0), rest)
            columns(1, rest, width)
            return context.get_dummy_value()

        return types.void(g, at, i_step, j_step, Y, y_rows, y_at, count, OUT, out_row), codegen

    return combinations


@intrinsic
def add_row(typing: Any, OUT: Any, out_row: Any, X: Any, x_row: Any) -> Any:
    """OUT[out_row] += X[x_row]"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        width = code.width(0)
        out = code.at(code.pointer(0), builder.mul(code.integer(1), width))
        x = code.at(code.pointer(2), builder.mul(code.integer(3), width))

        def add(d: Any, _: list[Any]) -> list[Any]:
            code.store(builder.fadd(code.load(out, d), code.load(x, d)), out, d)
            return []

        code.loop(INT(0), width, LANES, [], add)
        return context.get_dummy_value()

    return types.void(OUT, out_row, X, x_row), codegen


@intrinsic
def prefetch_row(typing: Any, X: Any, row: Any) -> Any:
    """Prefetch a row."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        width = code.width(0)
        first = code.at(code.pointer(0), builder.mul(code.integer(1), width))

        def ask(d: Any, _: list[Any]) -> list[Any]:
            code.prefetch(code.at(first, d))
            return []

        code.loop(INT(0), width, _LINE, [], ask)
        return context.get_dummy_value()

    return types.void(X, row), codegen
