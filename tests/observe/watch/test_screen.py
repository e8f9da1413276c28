"""The live display on a terminal of a given size. pyte, a terminal without a screen, says what a person would see."""

from __future__ import annotations

import io
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.extras import Late
from support.job_snapshots import TABLES, TRAINING, heter_worker, job, rank, server, worker
from support.messages import names

from torchfleet.base.monitor.snapshot import JobSnapshot
from torchfleet.observe.watch import display as display_module
from torchfleet.observe.watch.display import Display

pyte = Late("pyte")


class Terminal:
    """A stream that is a terminal, and what stands on its screen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int, height: int) -> None:
        self._monkeypatch, self.out = monkeypatch, io.StringIO()
        monkeypatch.setattr(self.out, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdout", self.out)
        monkeypatch.setenv("TERM", "xterm-256color")
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        self.screen = pyte.HistoryScreen(width, height, history=1000)
        self.screen.set_mode(pyte.modes.LNM)  # a terminal's driver makes a new line of \n
        self._stream, self._num_read = pyte.Stream(self.screen), 0
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        self._monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((width, height)))
        self.screen.resize(height, width)

    def lines(self) -> list[str]:
        text = self.out.getvalue()
        self._stream.feed(text[self._num_read :])
        self._num_read = len(text)
        return [line.rstrip() for line in self.screen.display if line.strip()]

    @property
    def num_scrolled(self) -> int:
        return len(self.screen.history.top)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_module, "usable_cores", lambda: 4)


def of_role(lines: list[str], name: str) -> dict[str, str]:
    """The row of a role, by headings. Texts begin where their heading does, numbers end where it does."""
    row = next(i for i, line in enumerate(lines) if re.match(rf"{name}(?!\d|:)", line))
    top = next(i for i in range(row, -1, -1) if lines[i].startswith("role "))
    found = {}
    for heading in re.finditer(r"\S+(?: \S+)*", lines[top]):
        if heading[0] in ("role", "state", "metrics"):
            found[heading[0]] = re.split("  ", lines[row][heading.start() :])[0]
        else:
            found[heading[0]] = re.split("  ", lines[row][: heading.end()])[-1].strip()
    return found


def shown(terminal: Terminal, snapshot: JobSnapshot, verbose: bool = False, num: int = 3) -> list[str]:
    display = Display(Path("/log/run"), verbose)
    for i in range(num):
        display.look(JobSnapshot(snapshot.time + i, snapshot.roles))
    lines = terminal.lines()
    display.close()
    return lines


def test_the_screen_has_the_numbers_of_the_job_and_of_every_role(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, 120, 40)
    roles = [server(0), server(1, memory=40_000_000), worker(0), worker(1, steps=7, metrics={"auc": 0.75})]
    roles += [worker(2, "starting"), worker(3, "failed"), worker(4, "done")]
    lines = shown(terminal, JobSnapshot(1000.0, roles))
    assert lines[0].startswith("async  2 servers × 5 workers  0:02  /log/run")
    text = "\n".join(lines)
    for part in (
        "epoch 1/3",
        "ETA 1:20",
        "41,472 samples/s (mean 76,000), 2.46 M samples",
        "loss 0.4568",
        "auc 0.7500",
    ):
        assert part in text
    for part in ("24,690 rows, 2.4 MB", "memory of servers 500 MB", "servers busy 97 %", "workers wait 61 %"):
        assert part in text
    assert any(names(line, "network 1", 3, "rows 2", 9) for line in lines)
    first = of_role(lines, "worker 0")
    expected = {
        "state": "running", "epoch": "1: 37 %", "steps": "1,200", "samples/s": "20,736", "queue": "1/2",
        "waits": "61 %", "pull ms": "3.2", "push ms": "0.5", "memory": "450 MB", "metrics": "loss 0.4568",
    }  # fmt: skip
    assert first == {"role": "worker 0", **expected}
    assert of_role(lines, "worker 1")["steps"] == "7"
    assert [of_role(lines, f"worker {i}")["state"] for i in (2, 3, 4)] == ["starting", "ended with -9", "done"]
    held = {"state": "running", "requests/s": "321", "busy": "97 %", "rows": "12,345", "bytes": "1.2 MB"}
    assert of_role(lines, "server 1") == {"role": "server 1", **held, "memory": "40 MB"}


@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24), (60, 24), (60, 12), (30, 8)])
@pytest.mark.parametrize("roles", [(1, 1), (3, 4), (10, 90), (0, 0)])
def test_it_never_leaves_the_screen_and_nothing_wraps(
    monkeypatch: pytest.MonkeyPatch, width: int, height: int, roles: tuple[int, int]
) -> None:
    terminal = Terminal(monkeypatch, width, height)
    names = {f"table_{i}": {**TABLES["words"], "bytes": 1000 + i} for i in range(14)}
    snapshot = job(*roles, metrics={f"a_long_name_of_a_metric_{i}": 0.5 for i in range(9)})
    many = [server(r.index, tables=names) if r.role == "server" else r for r in snapshot.roles]
    if not many:
        many = [rank(i) for i in range(100)]
    lines = shown(terminal, JobSnapshot(1000.0, many), verbose=True)
    assert terminal.num_scrolled == 0
    assert len(lines) < height
    starts = ("async", "collective", "epoch", "role", "server", "worker", "rank", "min", "max", "median", "staleness")
    beside = ("samples/s", " rows, ", "workers are what", "servers are full", "the machine is")
    for line in lines:  # what the terminal wraps begins in the middle of something; what the display wraps is indented
        assert line.startswith((*starts, "  ")) or any(part in line for part in beside), line
    if len(many) > 40 and height > 20:
        kind = "ranks" if roles == (0, 0) else "workers"
        assert any(line.startswith(kind) and "median" in line for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 40), (40, 24)])
def test_a_narrow_terminal_has_the_numbers_that_matter_and_whole_warnings(
    monkeypatch: pytest.MonkeyPatch, width: int, height: int
) -> None:
    terminal = Terminal(monkeypatch, width, height)
    display, lines = Display(Path("/log/run")), list[str]()
    for look in range(15):
        workers = [worker(i, steps=look, queue=2 - i, waiting=0.61) for i in range(2)]
        display.look(JobSnapshot(1000.0 + look, [server(0), server(1), *workers]))
        lines = terminal.lines()
    display.close()
    text = " ".join(line.strip() for line in lines)
    for part in ("41,472 samples/s (mean 38,000)", "loss 0.4568", "servers busy 97 %", "workers wait 61 %"):
        assert part in text, part
    assert names(text, "queue", "worker 0", "2 of 2", "--server_num")
    assert names(text, "network 1 (95 %: 3)", "rows 2 (95 %: 9)") or (width, height) == (40, 24)
    assert any(line.startswith("worker 0") for line in lines)


def test_heter_workers_have_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, 120, 40)
    lines = shown(terminal, JobSnapshot(1000.0, [server(0), worker(0), heter_worker(0), heter_worker(1, passes=7)]))
    held = {"state": "running", "workers": "2", "passes": "1,234", "busy": "50 %", "memory": "450 MB"}
    assert of_role(lines, "heter_worker 0") == {"role": "heter_worker 0", **held}
    assert of_role(lines, "heter_worker 1")["passes"] == "7"


def test_what_is_folded_is_told_by_its_median_least_and_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, 120, 40)
    roles = [worker(i, steps=i, waiting=i / 100) for i in range(100)]
    lines = shown(terminal, JobSnapshot(1000.0, roles))
    (row,) = (line for line in lines if re.match(r"workers \d", line))
    first = int(row.split()[1].partition("–")[0])
    assert row.split()[1] == f"{first}–99"
    assert of_role(lines, f"worker {first - 1}")["steps"] == str(first - 1)
    assert of_role(lines, r"workers \d+")["steps"] == f"{(first + 99) / 2:,.0f}"
    assert (of_role(lines, "min")["steps"], of_role(lines, "max")["steps"]) == (str(first), "99")
    assert of_role(lines, "max")["waits"] == "99 %"


def test_a_server_and_its_backup_are_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, 80, 24)
    backups = [replace(server(i, "starting" if i else "running", backup=True), replica=1) for i in range(2)]
    lines = shown(terminal, JobSnapshot(1000.0, [server(0), server(1), *backups, *map(worker, range(8))]))
    assert lines[0].startswith("async  2 servers × 8 workers")
    assert any(line.startswith("servers 0–1 median") for line in lines)


def test_a_narrow_terminal_loses_columns_and_keeps_those_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(Terminal(monkeypatch, 60, 24), job(2, 2))
    row = of_role(lines, "worker 0")
    assert {"role", "state", "samples/s", "waits", "steps"} <= set(row)
    assert "push ms" not in row
    assert row["samples/s"] == "20,736"


def test_a_collective_job_has_no_empty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(Terminal(monkeypatch, 120, 40), JobSnapshot(1000.0, [rank(0), rank(1)]))
    assert lines[0].startswith("collective  2 ranks")
    assert set(of_role(lines, "rank 1")) == {"role", "state", "steps", "samples/s", "memory", "metrics"}
    assert not any(word in line for line in lines for word in ("server", "rows", "queue"))


def test_every_table_is_shown_when_asked_for_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {f"t{i}": {"kind": "sparse", "rows": i, "bytes": 10 * i} for i in range(9)}
    snapshot = JobSnapshot(1000.0, [server(0, tables=tables), worker(0)])
    assert not any("t8" in line for line in shown(Terminal(monkeypatch, 120, 40), snapshot))
    lines = shown(Terminal(monkeypatch, 120, 40), snapshot, verbose=True)
    assert [line.split()[2] for line in lines if line.startswith("server 0: ")] == [f"t{i}" for i in range(8, -1, -1)]


def test_after_a_change_of_size_only_the_display_is_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, 120, 40)
    display, snapshot = Display(), job(2, 4)
    display.look(snapshot)
    before = terminal.lines()
    for i, (width, height) in enumerate(((70, 20), (160, 50), (60, 24))):
        terminal.resize(width, height)
        for seconds in (2 * i + 1, 2 * i + 2):
            display.look(JobSnapshot(snapshot.time + seconds, snapshot.roles))
        lines = terminal.lines()
        assert sum(line.startswith("async") for line in lines) == 1
        assert sum(line.startswith("worker 0") for line in lines) == 1
        assert len(lines) < height
    assert len(before) > 0
    display.close()
    assert terminal.lines() == []  # what changed in place is gone; what was noted would stay


def test_lines_stand_above_the_display_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, 100, 30)
    display = Display()
    display.look(job(1, 1))
    display.note("[worker 0] first", False)
    display.note("[worker 0] \x1b[31mred[/]\x1b[0m \x1b]52;c;ZXZpbA==\x07\x1b[2Jend", False)
    lines = terminal.lines()
    assert lines[:2] == ["[worker 0] first", "[worker 0] red[/] end"]
    assert lines[2].startswith("async")
    display.close()
    assert terminal.lines() == lines[:2]


def test_names_are_not_markup_and_do_not_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, 120, 40)
    tables = dict.fromkeys(("emb[/]", "[red]x:smile:", "a\x1b]52;c;ZXZpbA==\x07b"), TABLES["words"])
    roles = [server(0, tables=tables), worker(0, metrics={"auc[/bold]": 0.5, "\x1b[2Jloss": 0.25})]
    text = "\n".join(shown(terminal, JobSnapshot(1000.0, roles), verbose=True))
    for part in ("emb[/] ", "[red]x:smile: ", ": ab ", "auc[/bold] 0.5000", "loss 0.2500"):
        assert part in text


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_and_a_dumb_terminal_are_respected(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    terminal = Terminal(monkeypatch, 120, 40)
    monkeypatch.setenv(variable, value)
    display = Display()
    for i in range(3):
        display.look(JobSnapshot(1000.0 + 4 * i, job(1, 1).roles))
    display.close()
    written = terminal.out.getvalue()
    assert "\x1b[3" not in written  # a colour
    assert "loss 0.4568" in written
    if variable == "TERM":
        assert "\x1b" not in written
    assert TRAINING["steps"] == 1200


def test_the_path_of_a_log_in_a_line_of_the_launcher_is_a_link_to_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = Terminal(monkeypatch, 200, 20)
    shown = Display(tmp_path)
    shown.note(f"[fleetrun] worker 1 ended with 1. Last lines of {tmp_path}/workerlog.1:", True)
    shown.note(f"a line of a process that names {tmp_path}/workerlog.2", False)
    shown.close()
    assert re.findall(r"\x1b\]8;[^;]*;(file://[^\x1b]+)\x1b", terminal.out.getvalue()) == [
        (tmp_path / "workerlog.1").as_uri()
    ]
