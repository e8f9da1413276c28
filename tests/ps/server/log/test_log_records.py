"""Records of a log: what was whole is read back, what was never finished is left out, what is damaged is refused."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from support.cases import each_of
from support.logged_work import Work, make_server, whole_state
from support.messages import naming

from torchfleet.base.errors import LogError
from torchfleet.ps.server.log import log_records
from torchfleet.ps.server.log.durable_server import Durability, begin_log, go_on
from torchfleet.ps.server.log.log_entry import Effects, Entry, Kind, decode_entry, encode_entry
from torchfleet.ps.server.log.log_records import LONG, Records, crc32c, record_of
from torchfleet.ps.server.log.log_start import read_start
from torchfleet.ps.server.log.replay import Replay

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


def written(entries: list[Entry], num_synced: int = 0) -> bytes:
    return b"".join(bytes(buffer) for entry in entries for buffer in record_of(encode_entry(entry), num_synced))


def read(data: bytes, salt: int = 0) -> tuple[list[Entry], Records]:
    records = Records(memoryview(data), "a file", salt=salt)
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


@given(some.lists(ENTRIES, min_size=1, max_size=4), some.booleans(), some.data())
def test_a_flipped_bit_anywhere_in_what_was_synced_is_refused_by_name(
    entries: list[Entry], is_followed: bool, data: some.DataObject
) -> None:
    damaged = bytearray(written(entries))
    bit = data.draw(some.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    if is_followed:  # by a record that says what was synced
        damaged += written(entries[:1], len(damaged))
    with pytest.raises(LogError, match=naming("a file", "byte")):
        list(Records(memoryview(bytes(damaged)), "a file", is_synced=not is_followed))


@given(some.lists(ENTRIES, min_size=2, max_size=4), some.data())
def test_a_flipped_bit_of_what_may_not_be_synced_is_refused_too_where_nothing_is_blank(
    entries: list[Entry], data: some.DataObject
) -> None:
    for entry in entries:
        entry.frames = [b"x" * 600]
    damaged = bytearray(written(entries))
    bit = data.draw(some.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(LogError, match=naming("a file", "byte")):
        read(bytes(damaged))


@given(some.lists(ENTRIES, min_size=3, max_size=6), some.integers(0, 3), some.data())
def test_a_loss_of_power_takes_what_was_not_synced_and_nothing_else(
    entries: list[Entry], num_kept: int, data: some.DataObject
) -> None:
    """Any sectors of any records behind what was synced may read as zeros."""
    for entry in entries[::2]:
        entry.frames = [b"x" * 1500]
    num_kept = min(num_kept, len(entries) - 1)
    before = written(entries[:num_kept])
    start = len(before)
    whole = bytearray(before + written(entries[num_kept:], start))
    sectors = range(start // 512, -(-len(whole) // 512))
    for sector in data.draw(some.sets(some.sampled_from(sectors), min_size=1)):
        lost = slice(max(start, sector * 512), min(len(whole), sector * 512 + 512))
        whole[lost] = bytes(lost.stop - lost.start)
    found, records = read(bytes(whole))
    assert found[:num_kept] == entries[:num_kept]
    assert found == entries[: len(found)]
    assert records.is_torn == (len(found) < len(entries))


@given(ENTRIES)
def test_zeros_in_what_was_synced_are_damage(entry: Entry) -> None:
    whole = written([entry])
    for lost in (bytes(-len(whole) % 512), bytes(-len(whole) % 512 + 512)):
        assert read(whole + lost)[0] == [entry]
        behind = len(whole) + len(lost)
        assert read(whole + lost + written([entry], len(whole)))[1].is_torn
        with pytest.raises(LogError, match=naming(f"byte {len(whole):,}")):
            read(whole + lost + written([entry], behind))
        with pytest.raises(LogError, match=naming("a file", f"byte {len(whole):,}")):
            list(Records(memoryview(whole + lost), "a file", is_synced=True))


@given(ENTRIES, some.integers(1, 2**63 - 1))
def test_what_a_client_sends_is_not_taken_for_a_record(entry: Entry, salt: int) -> None:
    """It would say that all bytes were synced, so that a loss of power would make the log unusable."""
    forged = bytes(record_of(encode_entry(entry), 1 << 40)[0])
    sent = Entry(Kind.REQUEST, frames=[forged * 3])
    first, last = (b"".join(map(bytes, record_of(encode_entry(one), 0, salt))) for one in (entry, sent))
    records = Records(memoryview(first + bytes(-len(first) % 512 + 512) + last), "a file", salt=salt)
    assert [decode_entry(frames) for frames in records] == [entry]
    assert records.is_torn


@each_of(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_the_checksum_is_crc_32c(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected
    assert crc32c(memoryview(b"x" + data)[1:]) == expected  # whatever the alignment
    assert crc32c(bytearray(data)) == expected


@pytest.mark.parametrize("has_instruction", [True, False])
def test_the_checksum_of_parts_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, has_instruction: bool) -> None:
    monkeypatch.setattr(log_records, "HAS_INSTRUCTION", has_instruction and log_records.HAS_INSTRUCTION)
    rows = np.random.default_rng(0).random((30_001, 2), np.float32)[1:]
    data = rows.tobytes()
    whole = google_crc32c.extend(0, data)
    assert crc32c(data) == crc32c(memoryview(rows)) == whole
    for at in (1, LONG - 1, LONG, LONG + 3, len(data) - LONG + 1, len(data) - 1):
        assert crc32c(data[at:], crc32c(memoryview(data)[:at])) == whole


@given(some.lists(ENTRIES, min_size=1, max_size=3))
def test_a_log_of_another_format_is_refused_by_name(entries: list[Entry]) -> None:
    other = bytearray(written(entries))
    other[:4] = b"TFL2"
    other[28:32] = struct.pack("<I", zlib.crc32(other[:28]))
    for is_synced in (False, True):
        with pytest.raises(LogError, match="is a log of format 2"):
            list(Records(memoryview(bytes(other)), "a file", is_synced=is_synced))


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
    whole, salt = segment.read_bytes(), read_start(tmp_path / "log").salt
    entries, _ = read(whole, salt)
    ends, at = [], 0
    for entry in entries:
        at += sum(memoryview(buffer).nbytes for buffer in record_of(encode_entry(entry), 0))
        ends.append(at)
    dice, loaded = random.Random(0), set()
    for cut in (dice.randrange(len(whole) + 1) for _ in range(1000)):
        num_whole = sum(end <= cut for end in ends)
        found, records = read(whole[:cut], salt)
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
