"""Many small arrays in one frame: what is sent arrives, and what the header does not say is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.cases import each_of
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import WireError
from torchfleet.ps.net.joined_arrays import ENTRY, JoinedArrays
from torchfleet.ps.net.wire import FEW_ARRAYS, HEADER, Array, Command, Message, decode, encode

DTYPES = [np.dtype(name) for name in ("u1", "<u8", "<f4", "<f8")]
SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=5)
ARRAYS = st.builds(
    Array, st.integers(0, 2**32 - 1), st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))
)


@given(arrays=st.lists(ARRAYS, min_size=FEW_ARRAYS + 1, max_size=FEW_ARRAYS + 6))
@settings(max_examples=examples(60))
def test_arrays_of_a_shared_frame_arrive_one_by_one_and_together(arrays: list[Array]) -> None:
    frames = encode(Message(Command.PING, arrays=arrays))
    assert len(frames) == 2
    found = decode(frames).arrays
    assert isinstance(found, JoinedArrays)
    for both in (
        list(found),
        [found[i] for i in range(len(found))],
        found[:],
        [found[i - len(found)] for i in range(len(found))],
    ):
        for got, sent in zip(both, arrays, strict=True):
            assert got.number == sent.number
            assert got.data.dtype == sent.data.dtype
            assert got.data.shape == sent.data.shape
            assert got.data.tobytes() == sent.data.tobytes()
    again = encode(Message(Command.PING, arrays=found))
    assert [bytes(memoryview(frame).cast("B")) for frame in again] == [bytes(frame) for frame in frames]


def joined(entries: list[tuple[int, int, int, int]], num_words: int) -> list[object]:
    """A message with these entries (number, code, columns, rows) and a frame of this number of words."""
    made = np.zeros(len(entries), ENTRY)
    for i, entry in enumerate(entries):
        made[i] = entry
    header = encode(Message(Command.PING))[0]
    numbers = list(HEADER.unpack(header))
    numbers[6] = len(entries)
    return [HEADER.pack(*numbers) + made.tobytes(), np.zeros(num_words, np.uint64)]


WORD = (1, 2, 1, 1)


@each_of(
    "wrong, num_words, told",
    [
        ((1, 9, 1, 1), 9, ("array 3", 9)),
        ((1, 0, 1, 1), 9, ("array 3", 0)),
        ((1, 2, 1, 2), 9, ("array 8",)),
        ((1, 2, 1, 0), 9, (64, 72)),
        ((1, 2, 1, 2**63), 9, ("array 3", 2**63)),
        ((1, 1, 2**32 - 1, 2**30), 9, ("array 3", 2**30)),
        ((1, 2, 0, 2**40), 9, ("array 3", 2**40)),
    ],
)
def test_entries_that_do_not_fill_the_frame_are_refused(
    wrong: tuple[int, int, int, int], num_words: int, told: tuple[object, ...]
) -> None:
    entries = [WORD] * 9
    assert len(decode(joined(entries, num_words)).arrays) == 9
    entries[3] = wrong
    with pytest.raises(WireError, match=naming(*told)):
        decode(joined(entries, num_words))


def test_an_entry_is_that_of_the_protocol() -> None:
    made = np.zeros(1, ENTRY)
    made[0] = 7, 3, 10, 9
    assert made.tobytes() == struct.pack("<IBxxxIQ", 7, 3, 10, 9)
