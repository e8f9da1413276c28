"""fleet profile: one trace of all processes of a job that runs, or that it starts; and what it says of mistakes."""

from __future__ import annotations

import gzip
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import trace_events
from support.cases import each_of
from support.messages import lines_naming
from support.paths import SCRIPTS
from support.scripts.launching import SOON, TINY, Forked, forked_fleetrun, run_dir, wait_until

from torchfleet.base.tracing.profile_folder import ProfileRequest
from torchfleet.observe.commands import command
from torchfleet.observe.profile import profile_command
from torchfleet.observe.profile.profile_command import _num_own

Event = dict[str, Any]
STEPS = 4
SLACK = 200.0  # microseconds that torch's clock and ours may differ


def profile(*arguments: str) -> Forked:
    return Forked([sys.executable, "-m", "torchfleet.observe.commands", "profile", *arguments])


def slices(events: list[Event], **wanted: Any) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and all(event.get(k) == v for k, v in wanted.items())]


def is_within(inner: Event, outer: Event) -> bool:
    end = outer["ts"] + outer["dur"]
    return outer["ts"] - SLACK <= inner["ts"] and inner["ts"] + inner["dur"] <= end + SLACK


@pytest.mark.slow
def test_a_running_job_is_profiled_and_goes_on(tmp_path: Path) -> None:
    stop, out = tmp_path / "stop", tmp_path / "trace.json.gz"
    job_options = ["--server_num", "2", "--worker_num", "2", TINY, "--mode", "async", "--steps", "1000000"]
    with forked_fleetrun(tmp_path / "log", *job_options, "--pause", "0.005", "--until", str(stop)) as job:
        job.wait_for("is training")
        with profile("--steps", str(STEPS), "--out", str(out), str(tmp_path / "log")) as asked:
            assert asked.wait() == 0, asked.output
        assert job.process.poll() is None
        wait_until(lambda: not any((run_dir(tmp_path / "log") / ".profile").iterdir()), SOON, "an empty folder")
        stop.touch()
        assert job.wait() == 0
    assert lines_naming(asked.output, 2 * STEPS, 2, "async")
    assert re.search(r"\bserver \d", asked.output)
    document = json.loads(gzip.decompress(out.read_bytes()))
    trace_events.check(document)
    check_steps(document["traceEvents"], ("worker 0", "worker 1"))
    check_servers(document["traceEvents"])


def check_steps(events: list[Event], workers: tuple[str, ...]) -> None:
    """Every worker has its steps, and what torch saw of forward lies within the forward of a step."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for worker in workers:
        (pid,) = (pid for pid, name in names.items() if name.startswith(f"{worker} ("))
        assert len(slices(events, pid=pid, cat="step")) == STEPS
        forwards = slices(events, pid=pid, name="forward", cat="phase")
        backwards = slices(events, pid=pid, name="backward", cat="phase")
        assert len(forwards) == len(backwards) == STEPS
        linear = slices(events, pid=pid, name="aten::linear")
        assert len(linear) >= STEPS
        assert all(any(is_within(op, forward) for forward in forwards) for op in linear)
        assert all(any(is_within(op, forward) for op in linear) for forward in forwards)
        grads = slices(events, pid=pid, name="AddmmBackward0")
        assert grads
        assert all(any(is_within(op, backward) for backward in backwards) for op in grads)


def check_servers(events: list[Event]) -> None:
    """An arrow leads from a request to what a server did for it, which lies within it: one machine has one clock."""
    begins = {event["id"]: event for event in events if event["ph"] == "s" and event["cat"] == "request"}
    ends = {event["id"]: event for event in events if event["ph"] == "f" and event["cat"] == "request"}
    assert begins
    assert set(ends) == set(begins)
    requests = {(event["pid"], event["tid"], event["ts"]): event for event in slices(events, cat="request")}
    handled = {(event["pid"], event["tid"], event["ts"]): event for event in slices(events, cat="handle")}
    kinds = set()
    for number, begin in begins.items():
        end = ends[number]
        request = requests[begin["pid"], begin["tid"], begin["ts"]]
        handle = handled[end["pid"], end["tid"], end["ts"]]
        assert handle["pid"] != request["pid"]
        assert request["name"].split()[0] == handle["name"].split()[0]
        assert request["ts"] <= handle["ts"]
        assert handle["ts"] + handle["dur"] <= request["ts"] + request["dur"]
        kinds.add(handle["name"].split()[0])
    assert kinds == {"pull", "push"}


@pytest.mark.slow
def test_a_collective_job_is_started_profiled_and_ended(tmp_path: Path) -> None:
    out, script = tmp_path / "trace.json", str(SCRIPTS / "profiled_ranks.py")
    own = ["--steps", str(STEPS), "--skip", "2", "--out", str(out)]
    with profile(*own, "--log_dir", str(tmp_path / "log"), "--nproc_per_node", "2", script, "1000000") as asked:
        assert asked.wait() == 0, asked.output
    assert lines_naming(asked.output, 2 * STEPS, 2, "collective")
    document = json.loads(out.read_bytes())
    trace_events.check(document)
    events = document["traceEvents"]
    check_steps(events, ("rank 0", "rank 1"))
    assert slices(events, name="gloo:all_reduce")  # torch sees the exchange by itself


@pytest.mark.slow
def test_a_job_that_ends_too_soon_is_an_error_that_says_so(tmp_path: Path) -> None:
    own = ["--steps", "5", "--skip", "50", "--out", str(tmp_path / "t.json"), "--log_dir", str(tmp_path / "log")]
    with profile(*own, "--nproc_per_node", "1", str(SCRIPTS / "profiled_ranks.py"), "3") as asked:
        assert asked.wait() == 1
    assert "status 0" in asked.output
    assert "--skip" in asked.output
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        ([], 2, "give options of fleetrun and a script, or the folder of logs"),
        (["--steps", "0", "x"], 2, "expected a number of steps"),
        (["--steps", "-3", "x"], 2, "expected a number of steps"),
        (["--timeout", "nan", "x"], 2, "expected a number of seconds"),
        (["--timeout", "-1", "x"], 2, "expected a number of seconds"),
        (["--out", "/no/such/folder/t.json", "x"], 1, "--out"),
        (["."], 1, "no job is running"),
        (["no_such_folder"], 1, "no_such_folder is not there: expected the folder of logs"),
        (["--keep_running", "."], 2, "--keep_running is for a job that is started"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str],
    status: int,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = command.main(["profile", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == status
    assert part in capsys.readouterr().err


def test_processes_may_begin_for_as_long_as_the_profile_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that loads data for an hour looks for the request at its first step."""
    (tmp_path / ".status.worker.0").touch()
    asked: list[ProfileRequest] = []
    monkeypatch.setattr(profile_command, "ProfileRun", lambda root, request, ended, timeout: asked.append(request))
    monkeypatch.setattr(profile_command, "_record", lambda run, out: 0)
    assert command.main(["profile", "--timeout", "7200", "--out", str(tmp_path / "t.json"), str(tmp_path)]) == 0
    assert asked[0].until > time.time() + 7000


@each_of(
    ("arguments", "num"),
    [
        (["--steps", "5", "--server_num", "2", "t.py", "--steps", "9"], 2),
        (["--steps=5", "--no_torch", "t.py", "--out", "x"], 2),
        (["--steps"], 1),
        (["t.py"], 0),
        ([], 0),
    ],
)
def test_own_options_end_where_those_of_fleetrun_begin(arguments: list[str], num: int) -> None:
    assert _num_own(arguments, {"--steps": False, "--no_torch": True, "--out": False}) == num
