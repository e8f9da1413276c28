"""Rows on disk: what was written is read, and anything else is an error that names the folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.tiers import cold_rows, disk, pages
from torchfleet.ps.tables.tiers import scan as scan_module
from torchfleet.ps.tables.tiers.cold_rows import ColdRows
from torchfleet.ps.tables.tiers.pages import Layout
from torchfleet.ps.tables.tiers.scan import Scan

WORDS = 20
SEGMENT = 1 << 18


@pytest.fixture(params=["asynchronous", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "threads":
        monkeypatch.setattr(disk, "_NUMBERS", {})
    return str(request.param)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "BLOCK_BYTES", 1 << 14)


def records(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, (num, WORDS + pages.RECORD_HEAD), np.uint32)


def appended(cold: ColdRows, rows: np.ndarray) -> np.ndarray:
    cold.reserve(len(rows))
    return cold.append(rows, 0)


@pytest.mark.parametrize("words", [1, 20, 300, 5000])
def test_a_page_wastes_little(words: int):
    layout = Layout(words)
    assert layout.page_bytes % pages.SECTOR == 0
    assert layout.per_page * layout.record_words * 4 >= 0.85 * layout.page_bytes or layout.page_bytes > 1 << 16


@pytest.mark.usefixtures("way")
def test_records_are_read_as_they_were_written(tmp_path: Path):
    cold, rows = ColdRows(WORDS, str(tmp_path), SEGMENT), records(20_000)
    slots = np.concatenate([appended(cold, rows[start : start + 333]) for start in range(0, 20_000, 333)])
    order = np.random.default_rng(1).permutation(20_000)
    assert np.array_equal(cold.read(slots[order]), rows[order])
    assert np.all(np.diff(cold.ordinals(slots)) > 0)
    assert len(cold._used) == -(-len(cold.live) * cold.per_segment // 8)  # one bit for each record of all segments
    met, cursor = [], 0
    with Scan(cold) as scan:
        while cursor < cold.next_ordinal:
            _, keys, some, cursor = scan.take(cursor)
            met.append(np.column_stack([keys.view(np.uint32).reshape(-1, 2), some]))
    assert np.array_equal(np.concatenate(met), np.delete(rows, [2, 3], axis=1))
    assert not list(tmp_path.iterdir())  # the file has no name
    assert len(own_files(tmp_path)) == 1
    del cold, scan
    assert not own_files(tmp_path)


@pytest.mark.usefixtures("way")
def test_a_scan_leaves_out_what_has_moved_is_older_or_has_come(tmp_path: Path):
    """Against the same conditions in numpy, record by record, with a start and a beginning within pages."""
    cold, rows = ColdRows(WORDS, str(tmp_path), SEGMENT), records(5000)
    rows[:, 2], rows[:, 3] = np.random.default_rng(3).integers(0, 4, (2, 5000))  # the save that changed it; passes
    slots = np.concatenate([appended(cold, rows[start : start + 500]) for start in range(0, 5000, 500)])
    cold._changed[:] = 3  # blocks are left out by their largest number only
    gone = np.random.default_rng(4).random(5000) < 0.3
    cold.release(slots[gone])
    ordinals = cold.ordinals(slots)
    start, begun_at, since, bit = int(ordinals[1234]), int(ordinals[3001]), 2, 2
    wanted = ~gone & (ordinals >= start) & (rows[:, 2] >= since) & ~((ordinals >= begun_at) & (rows[:, 3] & bit > 0))
    numbers, met, cursor = [], [], start
    with Scan(cold, since, begun_at, bit) as scan:
        while cursor < cold.next_ordinal:
            where, _, some, cursor = scan.take(cursor)
            numbers.append(where)
            met.append(some)
    assert np.array_equal(np.concatenate(numbers), slots[wanted])
    assert np.array_equal(np.concatenate(met), rows[wanted][:, pages.RECORD_HEAD :])


@pytest.mark.usefixtures("way")
def test_blocks_that_are_written_again_while_a_scan_reads_ahead_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rows that stay come once, rows that were released before the scan came to them do not come."""
    monkeypatch.setattr(scan_module, "BLOCKS", 2)
    monkeypatch.setattr(scan_module, "PLANNED", 6)
    cold, dice = ColdRows(WORDS, str(tmp_path), SEGMENT), np.random.default_rng(5)
    rows = records(6000)
    keys = np.arange(6000, dtype=np.uint64)
    rows[:, :2] = keys.view(np.uint32).reshape(-1, 2)
    slots = appended(cold, rows)
    first_end, met, cursor, stays = cold.next_ordinal, [], 0, np.ones(6000, np.bool_)
    with Scan(cold) as scan:
        while cursor < first_end:
            _, found, some, cursor = scan.take(cursor)
            own = found < 6000
            assert np.array_equal(some[own], rows[found[own].astype(np.int64), pages.RECORD_HEAD :])
            met.extend(found[own].tolist())
            later = np.flatnonzero(stays & (cold.ordinals(slots) >= cursor))
            gone = dice.permutation(later)[: len(later) // 3] if dice.random() < 0.5 else later[:700]
            cold.release(slots[gone])
            stays[gone] = False
            others = records(2000)
            others[:, 1] = 1  # keys above those of this test
            cold.release(appended(cold, others))  # so that segments are written again
    assert len(set(met)) == len(met)
    assert set(np.flatnonzero(stays).tolist()) <= set(met)
    assert len(met) < 6000


@pytest.mark.usefixtures("way")
def test_what_was_read_ahead_is_what_is_there_now(tmp_path: Path):
    cold, rows = ColdRows(WORDS, str(tmp_path), SEGMENT), records(3000)
    slots = appended(cold, rows)
    cold._end_writes(len(cold._unwritten) - 1)
    old = slots[:1000]
    for some in (old, slots[500:2500], slots[:3], slots, slots[::7], slots[:100]):  # more than are kept
        cold.foresee(some)
    assert np.array_equal(cold.read(slots), rows)
    cold.foresee(old)
    cold.release(slots)
    newer = [appended(cold, records(3000, seed)) for seed in range(1, 12)]  # the first segment is written again
    assert np.intersect1d(old, np.concatenate(newer)).size
    for seed, where in enumerate(newer, 1):
        assert np.array_equal(cold.read(where), records(3000, seed))
        cold.release(where)


@pytest.mark.usefixtures("way")
def test_a_page_that_cannot_be_read_ahead_is_an_error_of_the_request_that_needs_it(tmp_path: Path):
    cold = ColdRows(WORDS, str(tmp_path), SEGMENT)
    slots = appended(cold, records(3000))
    cold._end_writes(len(cold._unwritten) - 1)
    plain = os.open(f"/proc/self/fd/{own_file(tmp_path)}", os.O_RDWR)
    os.pwrite(plain, b"x", 2 * cold.layout.page_bytes + 100)
    os.close(plain)
    cold.foresee(slots[:1000])
    with pytest.raises(TableError, match=str(tmp_path)):
        cold.read(slots[:1000])
    first = slots[: cold.layout.per_page]
    assert np.array_equal(cold.read(first), records(3000)[: len(first)])


def test_segments_whose_rows_have_moved_are_written_again(tmp_path: Path):
    cold = ColdRows(WORDS, str(tmp_path), SEGMENT)
    for seed in range(30):
        slots = appended(cold, records(3000, seed))
        assert np.array_equal(cold.read(slots), records(3000, seed))
        cold.release(slots)
    assert cold.num_bytes <= 6 * SEGMENT
    assert cold.num_live == 0


def own_file(folder: Path) -> int:
    """The descriptor of the file without a name below the folder."""
    [file] = own_files(folder)
    return file


def own_files(folder: Path) -> list[int]:
    return [int(fd) for fd in os.listdir("/proc/self/fd") if _target(fd).startswith(str(folder))]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # another thread has closed it since
        return ""


def test_what_was_cut_or_changed_on_disk_is_an_error(tmp_path: Path):
    """A thousand cuts and flips: a read returns what was written, or is an error that names the folder."""
    cold, rows = ColdRows(WORDS, str(tmp_path), SEGMENT), records(8000)
    slots = appended(cold, rows)
    while len(cold._unwritten) > 1:
        cold._end_writes(1)
    file, dice = own_file(tmp_path), np.random.default_rng(2)
    plain = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    on_disk = slots[slots // cold.layout.per_block < slots[-1] // cold.layout.per_block]
    num_errors = 0
    for cut in range(1000):
        at = int(dice.integers(0, int(on_disk[-1] // cold.layout.per_page) * cold.layout.page_bytes))
        before = os.pread(plain, 1 if cut % 2 else 1 << 30, at)
        if cut % 2:
            os.pwrite(plain, bytes([before[0] ^ (1 << int(dice.integers(0, 8)))]), at)
        else:
            os.truncate(plain, at)
        page = at // cold.layout.page_bytes
        some = np.arange(page * cold.layout.per_page, (page + 1) * cold.layout.per_page)
        with pytest.raises(TableError, match=str(tmp_path)):
            cold.read(some)
        num_errors += 1
        os.pwrite(plain, before, at)
    assert num_errors == 1000
    assert np.array_equal(cold.read(slots), rows)
    os.close(plain)


def test_a_full_disk_is_an_error_and_freed_space_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cold = ColdRows(WORDS, str(tmp_path), SEGMENT)
    slots = appended(cold, records(1000))
    is_full, allocate = [True], cold_rows.allocate

    def refuse(*arguments: int) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "full")
        allocate(*arguments)

    monkeypatch.setattr(cold_rows, "allocate", refuse)
    with pytest.raises(TableError, match=str(tmp_path)):
        cold.reserve(100_000)
    assert np.array_equal(cold.read(slots), records(1000))
    is_full[0] = False
    more = appended(cold, records(50_000, 3))
    assert np.array_equal(cold.read(more), records(50_000, 3))
    assert np.array_equal(cold.read(slots), records(1000))


@pytest.mark.usefixtures("way")
def test_a_write_that_fails_stays_in_memory_and_is_tried_again(tmp_path: Path):
    cold = ColdRows(WORDS, str(tmp_path), SEGMENT)
    is_failing, end_writes = [True], cold._disk.end_writes
    cold._disk.end_writes = lambda fewest: [  # type: ignore[method-assign]
        (block, -errno.EIO if is_failing[0] else result) for block, result in end_writes(fewest)
    ]
    rows = records(30_000)
    slots = appended(cold, rows[:20_000])
    assert np.array_equal(cold.read(slots), rows[:20_000])
    cold._end_writes(5)
    with pytest.raises(TableError, match=str(tmp_path)):
        cold.reserve(1)
    assert np.array_equal(cold.read(slots), rows[:20_000])
    is_failing[0] = False
    more = appended(cold, rows[20_000:])
    assert np.array_equal(cold.read(np.concatenate([slots, more])), rows)


def test_a_file_system_without_direct_reads_is_used_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    open_file = os.open

    def refuse(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    cold, rows = ColdRows(WORDS, str(tmp_path), SEGMENT), records(5000)
    assert not cold.is_direct
    assert np.array_equal(cold.read(appended(cold, rows)), rows)


@pytest.mark.parametrize("what", ["missing", "file"])
def test_a_folder_that_cannot_be_used_is_named(what: str, tmp_path: Path):
    place = tmp_path / "place"
    if what == "file":
        place.write_text("")
    with pytest.raises(TableError, match=str(place)):
        ColdRows(WORDS, str(place))
