"""A server with a log on disk: it goes on where it was, cuts its log, and promises nothing while the disk is full."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fleets import Talk, push_arrays, refusal
from support.logged_work import SPECS, Work, make_server, whole_state
from support.messages import naming

from torchfleet.base.errors import LogError
from torchfleet.ps.net.wire import ERROR, NO_CREATE, SYNC, Command, Reply, decode_reply, encode, pack
from torchfleet.ps.server.log import durable_server
from torchfleet.ps.server.log.durable_server import Durability, DurableServer, begin_log, go_on
from torchfleet.ps.server.log.log_folder import LogFolder
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state import sessions
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.tables.settings.storage import IN_MEMORY, TierStorage


def begun(folder: Path, **options: Any) -> tuple[Server, DurableServer]:
    server = make_server()
    return server, begin_log(server, Durability(folder, **options))


def going_on(folder: Path, **options: Any) -> tuple[Server, DurableServer]:
    server = make_server()
    durable = go_on(server, Durability(folder, **options), lambda text: None)
    assert durable is not None
    return server, durable


def answer(durable: DurableServer, frames: list[Any], seconds: float = 10.0) -> Reply:
    """The next reply, once the disk has what it shows."""
    ready, deadline = durable.handle(b"p", frames, None), time.monotonic() + seconds
    while not ready:
        assert time.monotonic() < deadline, "no reply"
        durable.work()
        durable.rest()
        ready = durable.tick(time.monotonic())
    return decode_reply(ready[0][1])


@pytest.mark.parametrize("fsync_ms", [0.0, 10.0])
def test_a_server_that_ended_goes_on_with_all_of_it(tmp_path: Path, fsync_ms: float) -> None:
    server, durable = begun(tmp_path, fsync_ms=fsync_ms)
    for seed in range(3):
        Work(durable, seed).steps(60)
        durable.close()
        before, old = whole_state(server), server.incarnation
        server, durable = going_on(tmp_path, fsync_ms=fsync_ms)
        assert whole_state(server) == before
        assert server.incarnation == old  # clients do not take it for one that forgot them
    durable.close()


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_log_is_cut_when_it_has_grown_and_nothing_is_lost_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    monkeypatch.setattr(durable_server, "MIN_GROWTH", 20_000)
    server, durable = begun(tmp_path)
    begin_segment, disk = LogFolder.begin_segment, threading.Event()

    def wait_and_begin(folder: LogFolder) -> None:
        assert disk.wait(30)
        begin_segment(folder)

    monkeypatch.setattr(LogFolder, "begin_segment", wait_and_begin)
    if not is_slow:  # else the disk begins no segment before all work is done
        disk.set()
    Work(durable, 1).steps(400)
    disk.set()
    durable.close()
    names = sorted(file.name for file in tmp_path.glob("segment*"))
    assert names[0] > "segment-00000003.log"
    assert len(names) <= 2
    before = whole_state(server, False)
    server, durable = going_on(tmp_path)
    durable.close()
    assert whole_state(server, False) == before


def test_a_full_disk_refuses_changes_by_name_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, durable = begun(tmp_path)
    talk, spec = Talk(server), SPECS[0]
    assert answer(durable, encode(talk.message(Command.CREATE_TABLE, pack(spec)))).status == 0
    write, is_full = os.pwritev, [True]

    def pwritev(file: int, buffers: Any, offset: int) -> int:
        if is_full[0]:
            write(file, [memoryview(buffers[0])[:5]], offset)  # as much as there was room for
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    pushed = talk.message(Command.PUSH, *push_arrays(spec, [1, 2], np.ones((2, spec.dim))), once=True)
    assert not durable.handle(b"p", encode(pushed), None)  # taken in, and not promised
    durable.rest()
    _wait(lambda: bool(durable._writer.trouble()))
    refused = durable.handle(
        b"p", encode(talk.message(Command.PUSH, *push_arrays(spec, [1, 2], np.ones((2, spec.dim))), once=True)), None
    )
    assert not refused  # behind the one that is not promised
    is_full[0] = False
    _wait(lambda: not durable._writer.trouble())
    replies = []
    _wait(lambda: replies.extend(durable.tick(time.monotonic())) or len(replies) == 2)
    first, second = (decode_reply(frames) for _, frames in replies)
    assert first.status == 0
    kind, text = refusal(second)
    assert kind == "LogStuck"
    assert "No space left" in text
    durable.close()
    again, durable = going_on(tmp_path)
    assert again.state.tables[spec.number].step == 1
    durable.close()


def test_a_log_has_one_server_and_an_unusable_folder_is_named(tmp_path: Path) -> None:
    _, durable = begun(tmp_path / "log")
    with pytest.raises(LogError, match=naming(tmp_path / "log")):
        go_on(make_server(), Durability(tmp_path / "log"), print)
    durable.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match=naming(tmp_path / "file")):
        begin_log(make_server(), Durability(tmp_path / "file" / "log"))


def test_another_run_goes_on_with_the_rows_and_without_the_workers(tmp_path: Path) -> None:
    server, durable = begun(tmp_path, run="a")
    Work(durable, 1).steps(100)
    durable.close()
    rows = whole_state(server)["rows"]["ids"]
    for run, num_members in (("a", 2), ("b", 0), ("b", 0)):
        server, durable = going_on(tmp_path, run=run)
        assert len(server.state.meetings.presence.export()["members"]) == num_members
        assert whole_state(server)["rows"]["ids"] == rows
        durable.close()


def test_pushes_that_waited_in_an_earlier_run_keep_no_client_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_CLIENTS", 2)
    spec = SPECS[0]
    server, durable = begun(tmp_path, run="a")
    server.state.num_workers = 2
    Talk(server, client=9).create(spec)
    late = Talk(server, client=1)
    waits = late.message(Command.PUSH, *push_arrays(spec, [1], [[1.0] * spec.dim]), once=True, flags=SYNC)
    assert durable.handle(b"p", encode(waits), None) == []
    durable.close()
    server, durable = going_on(tmp_path, run="b")
    assert not server.state.pushes.step
    rows = whole_state(server)["rows"]
    assert answer(durable, encode(waits)).status != ERROR
    assert whole_state(server)["rows"] == rows  # a late copy changes nothing
    for client in (2, 3):
        push = Talk(server, client=client).message(Command.PUSH, *push_arrays(spec, [1], [[1.0] * spec.dim]), once=True)
        reply = answer(durable, encode(push))
        assert reply.status != ERROR, refusal(reply)
    durable.close()


PLACES = [("one", 64 << 20), ("two", 64 << 20), ("two", 80 << 20), ("", 0)]  # folder and memory of a table's rows


@pytest.mark.parametrize("before", PLACES[::3], ids=str)
@pytest.mark.parametrize("now", PLACES, ids=str)
def test_a_log_goes_on_wherever_rows_lie_now(tmp_path: Path, before: tuple[str, int], now: tuple[str, int]) -> None:
    def lying(place: tuple[str, int]) -> TableSpec:
        folder, memory = place
        storage = TierStorage(memory, str(tmp_path / folder)) if memory else IN_MEMORY
        return TableSpec("t", dim=2, rule=Rule("adagrad", lr=0.5), storage=storage)

    def made(place: tuple[str, int]) -> Server:
        server = Server(1 << 28)
        server.state.add_table(lying(place))
        return server

    keys = np.arange(1000, dtype=np.uint64)
    server = made(before)
    durable = begin_log(server, Durability(tmp_path / "log", run="a"))
    talk = Talk(server)
    create = talk.message(Command.CREATE_TABLE, pack(lying(before)))  # is in the log, too
    push = talk.message(Command.PUSH, *push_arrays(lying(before), keys, np.ones((1000, 2))), once=True)
    for message in (create, push):
        assert answer(durable, encode(message)).status != ERROR
    held = Talk(server).pull(lying(before), keys, flags=NO_CREATE)
    durable.close()
    server.state.close_tables()
    for _ in range(2):  # and once more from the log that it writes then
        server = made(now)
        again = go_on(server, Durability(tmp_path / "log", run="b"), lambda text: None)
        assert again is not None
        (table,) = server.state.tables.values()
        assert table.spec == lying(now)
        assert np.array_equal(Talk(server).pull(lying(now), keys, flags=NO_CREATE), held)
        again.close()
        server.state.close_tables()


def test_a_job_that_is_over_leaves_no_log(tmp_path: Path) -> None:
    _, durable = begun(tmp_path)
    Work(durable, 1).steps(5)
    durable.close(is_over=True)
    assert go_on(make_server(), Durability(tmp_path), print) is None


def _wait(is_so: Any) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
