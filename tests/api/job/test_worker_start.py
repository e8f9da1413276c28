"""What a worker says of those it waits for, by a clock of the test's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from support.messages import names, naming

from torchfleet.api.job import worker_start
from torchfleet.api.job.worker_start import WaitingLines, _by_state, wait_for_backups, wait_for_servers
from torchfleet.base.errors import FleetError
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.ps.server.replicas.pace import NO_BACKUP


def test_lines_come_when_something_changes_and_else_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(worker_start.time, "monotonic", lambda: now)
    lines = WaitingLines()

    def waits_for() -> list[str]:
        return ["server 0: it is starting" if now < 100 else "server 0: it is loading model"]

    while now < 300:
        now = round(now + 0.1, 1)
        lines.look(waits_for)
    told = capsys.readouterr().out.splitlines()
    assert [line.rsplit(", ")[-1] for line in told if "starting" in line] == ["5 s", "15 s", "35 s", "75 s"]
    assert [line.rsplit(", ")[-1] for line in told if "loading" in line] == [
        "100 s",
        "110 s",
        "130 s",
        "170 s",
        "230 s",
        "290 s",
    ]


def test_servers_that_do_the_same_share_a_line_and_silent_ones_are_told_by_their_address() -> None:
    waiting = {f"server {i} (tcp://127.0.0.1:{7000 + i})": "it is starting" for i in range(30)}
    waiting["server 30 (tcp://127.0.0.1:7030)"] = ""
    starting, silent = _by_state(waiting)
    assert names(starting, *(f"server {i}" for i in range(20)), 10, "it is starting")
    assert not names(starting, "server 20")
    assert names(silent, "server 30", "tcp://127.0.0.1:7030")


class Servers:
    """A client of two servers, of which the second has a backup from a moment on. Time passes with every request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, begins: float) -> None:
        self.now, self._begins = 0.0, begins
        monkeypatch.setattr(worker_start.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(worker_start.time, "sleep", lambda seconds: None)

    def stats(self) -> list[dict[str, Any]]:
        self.now += 1.0
        return [{"has_backup": True}, {"has_backup": self.now >= self._begins}]

    def unready(self, timeout: float) -> dict[str, str]:
        self.now += 1.0
        return {} if self.now >= self._begins else {"server 1 (tcp://b:1)": NO_BACKUP}


@pytest.mark.parametrize("changed", [{}, {"restart": 1}, {"min_workers": 1}, {"waits_for_backups": False}])
def test_a_worker_begins_when_every_server_has_its_backup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changed: dict[str, Any]
) -> None:
    servers: Any = Servers(monkeypatch, 30.0)
    wait_for_backups(servers, RoleInfo(**changed))
    assert servers.now == (0.0 if changed else 30.0)
    assert bool(capsys.readouterr().out) != bool(changed), "who waits says so"


@pytest.mark.parametrize("is_let_in", [False, True])
def test_a_backup_that_never_comes_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch, is_let_in: bool) -> None:
    servers: Any = Servers(monkeypatch, 1e9)
    wait = partial(wait_for_servers, servers, 60.0)
    if is_let_in:
        wait = partial(wait_for_backups, servers, RoleInfo(start_timeout=60.0))
    with pytest.raises(FleetError, match=naming("server 1", 60, "--no_wait_for_backups")):
        wait()
    assert 60.0 <= servers.now < 70.0
