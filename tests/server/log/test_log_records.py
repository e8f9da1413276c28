"""Records of a log: what was whole is read back, what was never finished is left out, what is damaged is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from support.logged_work import Work, make_server, whole_state

from torchfleet.errors import LogError
from torchfleet.server.log.durable_server import Durability, begin_log, go_on
from torchfleet.server.log.log_entry import Effects, Entry, Kind, decode_entry, encode_entry
from torchfleet.server.log.log_records import PREFIX, Records, record_of
from torchfleet.server.log.replay import Replay

FRAMES = some.lists(some.binary(max_size=40), max_size=4)
ENTRIES = some.builds(
    Entry,
    some.sampled_from(list(map(int, Kind))),
    some.integers(0, 2**64 - 1),
    some.integers(0, 2**64 - 1),
    some.integers(-(2**63), 2**63 - 1),
    some.floats(allow_nan=False),
    some.floats(allow_nan=False),
    some.integers(0, 255),
    some.binary(max_size=20),
    some.builds(Effects, num_errors=some.integers(0, 9), token=some.integers(0, 2**64 - 1)),
    FRAMES,
)


def written(entries: list[Entry]) -> bytes:
    return b"".join(bytes(buffer) for entry in entries for buffer in record_of(encode_entry(entry)))


def read(data: bytes) -> tuple[list[Entry], Records]:
    records = Records(memoryview(data), "a file")
    return [decode_entry(frames) for frames in records], records


@given(some.lists(ENTRIES, max_size=5))
def test_entries_are_read_as_they_were_written(entries: list[Entry]) -> None:
    found, records = read(written(entries))
    assert found == entries
    assert not records.is_torn


@given(some.lists(ENTRIES, min_size=1, max_size=4), some.data())
def test_a_cut_leaves_whole_records_alone_and_takes_nothing_for_one(
    entries: list[Entry], data: some.DataObject
) -> None:
    whole = written(entries)
    ends = [len(written(entries[:i])) for i in range(len(entries) + 1)]
    cut = data.draw(some.integers(0, len(whole)))
    found, records = read(whole[:cut])
    assert found == entries[: sum(end <= cut for end in ends[1:])]
    assert records.is_torn == (cut not in ends)


@given(some.lists(ENTRIES, min_size=1, max_size=4), some.data())
def test_a_flipped_bit_anywhere_is_refused_by_name(entries: list[Entry], data: some.DataObject) -> None:
    damaged = bytearray(written(entries))
    bit = data.draw(some.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(LogError, match="a file: the record at byte"):
        read(bytes(damaged))


@given(ENTRIES, ENTRIES)
def test_room_that_was_never_written_is_not_damage(entry: Entry, last: Entry) -> None:
    """After a loss of power the end of a file may be zeros: whole, or by sectors of the disk."""
    for lost in (bytes(600), bytes(PREFIX)):
        found, records = read(written([entry]) + lost)
        assert found == [entry]
        assert records.is_torn
    last.frames = [b"x" * 2000]
    whole, start = bytearray(written([entry, last])), len(written([entry]))
    sector = -(-(start + PREFIX) // 512) * 512 + 512
    whole[sector : sector + 512] = bytes(512)
    assert read(bytes(whole))[0] == [entry]
    with pytest.raises(LogError, match="zeros, and something behind them"):
        read(written([entry]) + bytes(PREFIX) + written([entry]))


@given(some.binary(max_size=200))
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    for frames in ([data], [data, data], [data[:60], data[60:]]):
        with pytest.raises(LogError):
            decode_entry(frames)


def test_of_a_thousand_cuts_of_a_log_none_is_loaded_wrong(tmp_path: Path) -> None:
    """Each gives a state that the server had, by the entries before the cut, or is refused."""
    durable = begin_log(make_server(), Durability(tmp_path / "log"))
    work = Work(durable, 1)
    work.steps(25)
    durable.close()
    segment = next((tmp_path / "log").glob("segment*"))
    whole = segment.read_bytes()
    entries = [decode_entry(frames) for frames in Records(memoryview(whole), "all")]
    ends, at = [], 0
    for entry in entries:
        at += sum(memoryview(buffer).nbytes for buffer in record_of(encode_entry(entry)))
        ends.append(at)
    dice, loaded = random.Random(0), set()
    for cut in (dice.randrange(len(whole) + 1) for _ in range(1000)):
        num_whole = sum(end <= cut for end in ends)
        found, records = read(whole[:cut])
        assert found == entries[:num_whole]
        assert records.is_torn == (cut not in (0, *ends))
        if num_whole not in loaded:  # what is loaded follows from the entries that are found
            loaded.add(num_whole)
            segment.write_bytes(whole[:cut])
            check_loaded(tmp_path / "log", entries[:num_whole])
    assert len(loaded) > 20


def check_loaded(folder: Path, entries: list[Entry]) -> None:
    server, replay = make_server(), Replay(make_server())
    try:
        gone_on = go_on(server, Durability(folder), lambda text: None)
    except LogError:
        gone_on = None
    assert (gone_on is None) == (len(entries) < 2)  # not even the state that the log begins with
    if gone_on is None:
        return
    gone_on.close()
    for entry in entries:
        replay.apply(entry)
    assert whole_state(server) == whole_state(replay.server)
