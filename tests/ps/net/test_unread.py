"""Which frame of a reply says that it has been sent, and that its bytes are counted until then."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import zmq
from support.cases import each_of
from support.fleets import WAIT

from torchfleet.ps.net.unread import COUNTED, MAX_UNREAD, Unread, size_of

LARGE, SMALL = np.zeros(COUNTED, np.uint8), np.zeros(8, np.uint8)


@each_of(
    ("frames", "index"),
    [
        ([b"header", LARGE], 1),
        ([b"header", LARGE, SMALL], 1),
        ([b"header", LARGE, *[SMALL[:0]] * 3], 1),
        ([b"header", *[LARGE[:-1]] * 5], 5),
        ([b"header", LARGE, *[LARGE[:-1]] * 5, SMALL[:0]], 6),
        ([bytes(COUNTED)], 0),
    ],
    ids=["one array", "numbers behind it", "nothing behind it", "many small ones", "much behind it", "a header alone"],
)
def test_a_reply_is_counted_by_a_frame_with_little_behind_it(frames: list, index: int) -> None:
    unread = Unread()
    sent = unread.count(b"peer", frames, size_of(frames))
    assert [isinstance(frame, zmq.Frame) for frame in sent] == [i == index for i in range(len(frames))]
    assert [bytes(memoryview(frame)) for frame in sent] == [bytes(memoryview(frame)) for frame in frames]
    assert unread._bytes == {b"peer": size_of(frames)}
    del sent
    wait_until(lambda: not unread.refusal(b"peer") and unread._bytes == {})


def test_a_peer_that_was_refused_may_go_on_when_half_is_read() -> None:
    unread = Unread()
    held = [unread.count(b"peer", [LARGE], MAX_UNREAD // 4) for _ in range(4)]
    assert unread.refusal(b"peer") == "", "as much as that may wait"
    assert unread.refusal(b"peer", 1)
    assert unread.refusal(b"other", MAX_UNREAD) == ""
    del held[:1]
    wait_until(lambda: bool(unread.refusal(b"peer")) and unread._bytes[b"peer"] == 3 * MAX_UNREAD // 4)
    assert unread.refusal(b"peer"), "no work is done for a reply that may have no room"
    del held[:1]
    wait_until(lambda: unread.refusal(b"peer") == "")


def wait_until(is_true: Callable[[], bool]) -> None:
    """Frames are freed by a thread of pyzmq."""
    gc.collect()
    deadline = time.monotonic() + WAIT
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
