"""Processor instructions without a Python equivalent, as functions for kernels."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

# Whether random reads are quicker with prefetch instructions than with loads whose results are not needed: 48 and 66 ns
# a key on Skylake, 22 and 13 ns a cache line on Neoverse-N1.
PREFETCHES = platform.machine() in ("x86_64", "AMD64")


@intrinsic
def copy_words(typing_context: Any, to: Any, to_at: Any, source: Any, source_at: Any, num_words: Any) -> Any:
    """Copy `num_words` 32-bit words between flat positions of two arrays.

    A single memcpy: for a row of ten floats it takes a seventh of the time of the equivalent loop, whose vectorized
    form checks at every row that the two arrays do not overlap.
    """
    signature = types.void(to, to_at, source, source_at, num_words)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pointer(place: int) -> Any:
            data = context.make_array(signature.args[place])(context, builder, args[place]).data
            return builder.gep(data, [as_int(place + 1)])

        def as_int(place: int) -> Any:
            return context.cast(builder, args[place], signature.args[place], types.intp)

        cgutils.raw_memcpy(builder, pointer(0), pointer(2), as_int(4), 4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_words(typing_context: Any, to: Any, to_at: Any, source: Any, source_at: Any, num_words: Any) -> Any:
    """to[to_at + i] += source[source_at + i] for i below `num_words`: float32, arrays that do not overlap.

    Uses vectors of four, two and one: the equivalent loop is vectorized only behind an overlap check at every row, and
    takes 1.5 times as long for a row of ten.
    """
    signature = types.void(to, to_at, source, source_at, num_words)
    integer, number = ir.IntType(64), ir.FloatType()

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def as_int(place: int) -> Any:
            return context.cast(builder, args[place], signature.args[place], types.intp)

        def pointer(place: int) -> Any:
            data = context.make_array(signature.args[place])(context, builder, args[place]).data
            return builder.gep(data, [as_int(place + 1)])

        pointers, num = (pointer(0), pointer(2)), as_int(4)

        def add(at: Any, lanes: int) -> None:
            kind = ir.VectorType(number, lanes) if lanes > 1 else number
            places = [builder.bitcast(builder.gep(start, [at]), kind.as_pointer()) for start in pointers]
            sum_so_far, more = (builder.load(place) for place in places)
            sum_so_far.align = more.align = 4
            builder.store(builder.fadd(sum_so_far, more), places[0]).align = 4

        fours = builder.and_(num, integer(-4))
        with cgutils.for_range_slice(builder, integer(0), fours, integer(4)) as (at, _):
            add(at, 4)
        for lanes, at in ((2, fours), (1, builder.and_(num, integer(-2)))):
            with builder.if_then(builder.icmp_unsigned("!=", builder.and_(num, integer(lanes)), integer(0))):
                add(at, lanes)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def prefetch_word(typing_context: Any, source: Any, at: Any) -> Any:
    """Prefetch the memory at a flat position of an array. The position may lie behind its end."""
    signature = types.void(source, at)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.gep(data, [context.cast(builder, args[1], signature.args[1], types.intp)])
        place, integer = builder.bitcast(place, ir.IntType(8).as_pointer()), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, integer, integer, integer])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, [place, integer(0), integer(3), integer(1)])  # for reading, high locality, data cache
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def load_word(typing_context: Any, source: Any, at: Any) -> Any:
    """Eight bytes at position `at` of a flat array of bytes, of any alignment, as a little-endian number."""
    signature = types.uint64(source, at)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.gep(data, [context.cast(builder, args[1], signature.args[1], types.intp)])
        word = builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return signature, codegen


@intrinsic
def trailing_zeros(typing_context: Any, x: Any) -> Any:
    """The number of lowest bits that are 0; 64 for zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic
def leading_zeros(typing_context: Any, x: Any) -> Any:
    """The number of highest bits that are 0; 64 for zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic
def system_call(typing_context: Any, number: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The result of a system call of Linux with up to four arguments, or -errno."""
    word = ir.IntType(64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = [context.cast(builder, *pair, types.int64) for pair in zip(args, signature.args, strict=True)]
        call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(word, [word], True), "syscall")
        result = builder.call(call, [*words, word(0)])
        kind = ir.FunctionType(ir.IntType(32).as_pointer(), [])
        place = builder.call(cgutils.get_or_insert_function(builder.module, kind, "__errno_location"), [])
        error = builder.sext(builder.load(place), word)
        return builder.select(builder.icmp_signed("<", result, word(0)), builder.neg(error), result)

    return types.int64(number, a, b, c, d), codegen
