"""A sync of the log that fails: it is not repeated, nothing is confirmed after it, and the server ends."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fleets import Talk, push_arrays
from support.logged_work import SPECS, make_server
from support.scripts.launching import SOON, wait_until

from torchfleet.base.errors import LogError
from torchfleet.ps.net.wire import Command, decode_reply, encode, pack
from torchfleet.ps.server.job.server_run import Place, ServerRun
from torchfleet.ps.server.log.durable_server import Durability, DurableServer, begin_log, go_on
from torchfleet.ps.server.log.log_entry import Entry, Kind, encode_entry
from torchfleet.ps.server.log.log_folder import LogFolder
from torchfleet.ps.server.log.log_writer import LogWriter

SPEC = SPECS[0]
ENTRY = encode_entry(Entry(Kind.TICK, 1))


class FailingSyncs:
    """The calls of os.fdatasync and os.fsync of a log, of which some fail as a full or broken disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self._number, self.is_failing, self.num_failed, self.num_later = number, False, 0, 0
        self.num_done = 0
        for name in ("fdatasync", "fsync"):
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def run(file: int) -> None:
            if self.is_failing:
                self.is_failing, self.num_failed = False, self.num_failed + 1
                raise OSError(self._number, os.strerror(self._number))
            self.num_later += bool(self.num_failed)
            sync(file)
            self.num_done += 1

        return run


@pytest.fixture(params=[errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=["full", "broken", "quota"])
def syncs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FailingSyncs:
    return FailingSyncs(monkeypatch, request.param)


def begun(path: Path) -> LogFolder:
    folder = LogFolder(path)
    folder.begin("run")
    folder.begin_segment()
    return folder


@pytest.mark.parametrize("step", ["begin_segment", "end_copy"])
def test_a_sync_in_the_middle_of_a_step_is_not_repeated(tmp_path: Path, syncs: FailingSyncs, step: str) -> None:
    folder = begun(tmp_path / "log")
    writer, num_done = LogWriter(folder, 0, 1e6, lambda: None), syncs.num_done
    writer.append(1, ENTRY)
    writer.flush()
    wait_until(lambda: writer.confirmed() == 1 and syncs.num_done > num_done, SOON, "the entry is written and synced")
    syncs.is_failing = True
    getattr(writer, step)()
    writer.append(2, ENTRY)
    writer.flush()
    wait_until(lambda: bool(writer.failure), SOON, "the log says that it has failed")
    assert (syncs.num_failed, syncs.num_later) == (1, 0)
    assert writer.confirmed() == 1
    writer.close()
    assert (syncs.num_failed, syncs.num_later) == (1, 0), "closing it does not sync again"
    folder.close()


@pytest.mark.parametrize("fsync_ms", [0.0, 1.0])
def test_nothing_is_confirmed_after_a_sync_has_failed(tmp_path: Path, syncs: FailingSyncs, fsync_ms: float) -> None:
    folder = begun(tmp_path / "log")
    writer = LogWriter(folder, 0, fsync_ms, lambda: None)
    syncs.is_failing = True
    writer.append(1, ENTRY)
    writer.flush()
    wait_until(lambda: bool(writer.failure), SOON, "the log says that it has failed")
    confirmed = writer.confirmed()
    assert confirmed <= (1 if fsync_ms else 0)
    writer.append(2, ENTRY)
    writer.flush()
    writer.close()
    assert writer.confirmed() == confirmed
    assert folder.num_synced == 0
    assert syncs.num_later == 0
    folder.close()


def test_a_term_is_noted_once_there_is_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`start` is a new file each time, so that a sync of it may fail and be tried again with another."""
    folder = begun(tmp_path / "log")
    monkeypatch.setattr("torchfleet.ps.server.log.log_writer._PAUSE", 0.01)
    writer, sync, failures = LogWriter(folder, 0, 1e6, lambda: None), os.fsync, [errno.ENOSPC, errno.ENOSPC]

    def full_at_first(file: int) -> None:
        if failures:
            raise OSError(failures.pop(), "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full_at_first)
    writer.note_term(7)
    wait_until(lambda: writer.term == 7, SOON, "the term is in `start`")
    assert not writer.failure
    writer.close()
    folder.close()


def test_a_server_whose_sync_fails_ends_and_a_new_one_has_what_it_answered(tmp_path: Path, syncs: FailingSyncs) -> None:
    durable, talk = begin_log(make_server(), Durability(tmp_path, 0.0)), Talk(make_server())
    _answered(durable, talk.message(Command.CREATE_TABLE, pack(SPEC)))
    for _ in range(3):
        _answered(durable, _push(talk))
    syncs.is_failing = True
    assert not durable.handle(b"p", encode(_push(talk)), None)
    durable.rest()
    with pytest.raises(LogError):
        wait_until(lambda: bool(durable.tick(time.monotonic())), SOON, "an answer that must not come")
    durable.close()
    again = make_server()
    restored = go_on(again, Durability(tmp_path, 0.0), print)
    assert restored is not None
    assert again.state.tables[SPEC.number].step in (3, 4)  # the one that was not answered may be there
    restored.close()


def _push(talk: Talk) -> Any:
    return talk.message(Command.PUSH, *push_arrays(SPEC, [1, 2], np.ones((2, SPEC.dim))), once=True)


def _answered(durable: DurableServer, message: Any) -> None:
    replies = durable.handle(b"p", encode(message), None)
    durable.rest()
    wait_until(lambda: bool(replies.extend(durable.ready()) or replies), SOON, "an answer")
    assert decode_reply(replies[0][1]).status == 0


def test_a_log_that_fails_at_the_end_of_a_job_is_kept_for_those_who_were_not_answered(
    tmp_path: Path, syncs: FailingSyncs
) -> None:
    server = make_server()
    run, talk = ServerRun(server, Place()), Talk(server)
    run.durable = durable = begin_log(server, Durability(tmp_path, 0.0))
    syncs.is_failing = True
    assert not durable.handle(b"p", encode(talk.message(Command.CREATE_TABLE, pack(SPEC))), None)
    server.state.is_stopping = True
    durable.rest()
    wait_until(lambda: bool(durable._writer.failure), SOON, "the log says that it has failed")
    run.close()
    restored = go_on(make_server(), Durability(tmp_path, 0.0), print)
    assert restored is not None
    restored.close()
