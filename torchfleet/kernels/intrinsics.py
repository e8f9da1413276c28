"""Instructions that Python has no word for."""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic


@intrinsic
def copy_words(typing_context: Any, to: Any, to_at: Any, source: Any, source_at: Any, num_words: Any) -> Any:
    """Copy `num_words` 32-bit words between flat places of two arrays.

    One call of memcpy: for a row of ten floats it takes a seventh of the time of the loop that it stands for, whose
    vectorised form first checks at every row that the two arrays do not overlap.
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
