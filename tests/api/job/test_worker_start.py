"""What a worker says of those it waits for, by a clock of the test's own."""

from __future__ import annotations

import pytest
from support.messages import names

from torchfleet.api.job import worker_start
from torchfleet.api.job.worker_start import WaitingLines, _by_state


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
