"""`fleet profile`: one trace of some steps of all processes of a job, and a summary."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torchfleet.base.errors import FleetError
from torchfleet.base.own_folders import own_folder
from torchfleet.base.printable import say
from torchfleet.base.tracing.profile_folder import LIFE, MOST_STEPS, NAME, VARIABLE, ProfileRequest, new_request
from torchfleet.observe.profile.chrome_trace import ChromeTrace
from torchfleet.observe.profile.phase_summary import Summary
from torchfleet.observe.profile.profile_run import ProfileRun

_LONGEST = 7 * 24 * 3600.0  # seconds to wait for a profile
_GRACE = 20.0  # seconds that a job has to end
_DESCRIPTION = """Record some steps of a job: phases of every worker's step, what torch.profiler sees, requests and what
servers do for them. Writes one trace of all processes, on one time axis, for chrome://tracing or ui.perfetto.dev, and
prints a summary. Behind its own options stand those of fleetrun, with the script: the job is started, profiled and
ended. Or the folder of logs of a job that is running, which goes on."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command `profile`."""
    made = commands.add_parser(
        "profile",
        help="one Chrome trace of some steps of all processes of a job",
        usage="fleet profile [--steps N] [--skip N] [--out FILE] FLEETRUN_OPTIONS SCRIPT ... | LOG_DIR",
        description=_DESCRIPTION,
    )
    made.add_argument("--steps", type=_count, default=20, help="steps of every worker (default: 20)")
    made.add_argument("--skip", type=_count_or_none, help="steps before them (default: 10; of a running job 0)")
    made.add_argument("--out", default="trace.json", help="the file to write; NAME.gz is compressed (trace.json)")
    made.add_argument("--no_torch", action="store_true", help="without torch.profiler: phases and requests only")
    made.add_argument("--keep_running", action="store_true", help="the job that was started goes on to its end")
    made.add_argument("--timeout", type=_seconds, default=LIFE, help="seconds to wait for the profile (default: 600)")
    made.add_argument("job", nargs="*", help="options of fleetrun and the script; or a folder of logs")
    own = {name: action.nargs == 0 for action in made._actions for name in action.option_strings}
    parse = made.parse_known_args

    def parse_known_args(args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None) -> object:
        """Take this command's options, which come first. The rest belongs to fleetrun and the script."""
        given = list(args or ())
        num = _num_own(given, own)
        found, _ = parse(given[:num], namespace)
        found.job = given[num + 1 :] if given[num : num + 1] == ["--"] else given[num:]
        return found, []

    made.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]
    made.set_defaults(run=profile, usage_error=made.error)


def profile(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    if not options.job:
        options.usage_error("give options of fleetrun and a script, or the folder of logs of a job that is running")
    out = Path(options.out)
    if not out.absolute().parent.is_dir() or out.is_dir():
        raise FleetError(f"--out {out}: expected the name of a file in a folder that is there")
    if len(options.job) == 1 and not Path(options.job[0]).exists():
        raise FleetError(
            f"{options.job[0]} is not there: expected the folder of logs of a job that is running, or the one that its "
            f"processes were given by {VARIABLE}, which must be there before they start; or options of fleetrun and a "
            "script"
        )
    if len(options.job) == 1 and Path(options.job[0]).is_dir():
        if options.keep_running:
            options.usage_error("--keep_running is for a job that is started; one that runs goes on in any case")
        root = running_folder(Path(options.job[0]))
        request = new_request(options.steps, options.skip or 0, not options.no_torch, life=options.timeout)
        return _record(ProfileRun(root, request, lambda: None, options.timeout), out)
    skip = 10 if options.skip is None else options.skip
    request = new_request(options.steps, skip, not options.no_torch, life=options.timeout)
    return _start_and_record(options, request, out)


def running_folder(log_dir: Path) -> Path:
    """Where the processes of the newest run below `log_dir` look for requests. Raises FleetError if no run is found, or
    another profile is under way."""
    run_dir = (log_dir / "latest").resolve() if (log_dir / "latest").exists() else log_dir.resolve()
    for root in (run_dir, run_dir / NAME):
        if (root / "request.json").exists():
            raise FleetError(f"{root} has a request already: another profile is under way, or remove request.json")
    if any(run_dir.glob("*.here")) or os.environ.get(VARIABLE) == str(run_dir):
        return run_dir
    if not any(run_dir.glob(".status.*")):
        raise FleetError(
            f"no job is running in {run_dir}: expected the folder of logs of one (fleetrun --log_dir), with the status "
            "files of its processes. To start a job: fleet profile --server_num 2 --worker_num 2 train.py"
        )
    return run_dir / NAME


def _start_and_record(options: argparse.Namespace, request: ProfileRequest, out: Path) -> int:
    with own_folder("profile") as folder:
        command = [sys.executable, "-m", "torchfleet.launch", *options.job]
        job = subprocess.Popen(command, env={**os.environ, VARIABLE: str(folder)}, stdin=subprocess.DEVNULL)
        try:
            code = _record(ProfileRun(folder, request, job.poll, options.timeout), out, job)
            if options.keep_running:
                return job.wait() or code
        finally:
            _end(job)
    return code


def _record(run: ProfileRun, out: Path, job: subprocess.Popen[bytes] | None = None) -> int:
    with run:
        parts = run.parts()
        trace = ChromeTrace(parts, run.torch_traces(parts))
        trace.write(out)
    if job is not None and job.poll() is None:
        print()
    for line in Summary(parts).lines():
        say(line)
    say(f"trace of {len(parts)} processes in {out}: open it in chrome://tracing or ui.perfetto.dev")
    return 0


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the job after it has delivered its profile."""
    if job.poll() is None:
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(_GRACE)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def _num_own(given: Sequence[str], own: dict[str, bool]) -> int:
    """How many of the arguments are options of this command; `own`: by name, whether it takes no value."""
    num = 0
    while num < len(given):
        name, equals, _ = given[num].partition("=")
        if name not in own:
            return num
        num += 1 if equals or own[name] else 2
    return min(num, len(given))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_STEPS):
        raise argparse.ArgumentTypeError(f"expected a number of steps from 1 to {MOST_STEPS}, found {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= _LONGEST:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of seconds from 0 to {_LONGEST:g}, found {text!r}")


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)
