"""Screens of fleetrun's display for the documents: real jobs in tmux, 120 x 40, captured and written as SVG.

python -m benchmarks.terminal_screens            both, into docs/screens/: about two minutes

`terminal.svg` is Wide & Deep on two servers and two workers. `terminal_100.svg` is a job of 100 processes that compute
nothing and report made-up numbers, one of them slow: that many real processes would not fit a small machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.timing import log
from torchfleet.ps.server.job.warm import compile_all

_ROOT = Path(__file__).resolve().parent.parent
_WIDTH, _HEIGHT = 120, 40
_MOST = 300  # seconds until a screen shows what is waited for
# A process that plays a role: it writes statuses as a real one does, and trains nothing.
_PLAYED = """
import json, os, random, signal, sys, time
path, is_server = os.environ["FLEET_STATUS_FILE"], os.environ["FLEET_ROLE"] == "SERVER"
index = int(os.environ["FLEET_SERVER_INDEX" if is_server else "FLEET_WORKER_INDEX"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
random.seed(index)
speed, steps, started = 0.3 if index == 17 and not is_server else 1.0, 0, time.time()
while time.time() - started < 600:
    steps += int(40 * speed)
    if is_server:
        rows = {"deep": 400_000 + 1000 * index, "wide": 400_000}
        tables = {name: {"kind": "sparse", "rows": num, "bytes": 80 * num} for name, num in rows.items()}
        told = {"role": "server", "requests": 9 * steps, "requests_per_s": random.gauss(700, 20), "rows": rows,
                "busy": min(1, random.gauss(0.55, 0.03)), "tables": tables, "memory": 640_000_000,
                "staleness_dense": {"0": 90 * steps, "1": 300 * steps, "2": 60 * steps, "4": 9 * steps},
                "staleness_sparse": {"0": 50 * steps, "1": 200 * steps, "3": 90 * steps, "16": 20 * steps}}
    else:
        rate = speed * random.gauss(20_000, 300)
        told = {"role": "worker", "mode": "async", "steps": steps, "steps_per_s": rate / 512, "samples": 512 * steps,
                "samples_per_s": rate, "samples_per_s_mean": 20_000 * speed, "queue": random.choice((0, 0, 1)),
                "queue_size": 2, "waiting": random.gauss(0.12, 0.01), "left": False, "retries": 0,
                "pull_wait_ms": random.gauss(2.5, 0.1), "push_wait_ms": 0.4, "memory": 470_000_000,
                "metrics": {"loss": 0.3 + 0.4 / (1 + steps / 900) + random.gauss(0, 0.002)},
                "progress": {"epoch": 0, "epochs": 2, "done": steps, "total": 4000, "unit": "batches",
                             "eta_s": (8000 - steps) / 80}}
    with open(path + ".part", "w") as file:
        json.dump({**told, "pid": os.getpid(), "host": "node"}, file)
    os.replace(path + ".part", path)
    time.sleep(0.5)
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.terminal_screens", description=__doc__)
    parser.add_argument("--out", type=Path, default=_ROOT / "docs" / "screens")
    parser.add_argument("--only", choices=("terminal", "terminal_100"))
    chosen = parser.parse_args()
    if shutil.which("tmux") is None:
        sys.exit("tmux is not installed: it is the terminal that the screens are of")
    chosen.out.mkdir(exist_ok=True)
    compile_all()  # a display of servers that wait for kernels shows little else
    with tempfile.TemporaryDirectory() as folder:
        played = Path(folder) / "train.py"
        played.write_text(_PLAYED)
        example = str(_ROOT / "examples" / "wide_deep" / "train.py")
        jobs = {
            "terminal": (["--server_num", "2", "--worker_num", "2", example, "--rows", "600000"], _has_trained),
            "terminal_100": (["--server_num", "10", "--worker_num", "90", str(played)], _has_warned),
        }
        for name, (arguments, is_there) in jobs.items():
            if chosen.only in (None, name):
                screen = captured(arguments, is_there, Path(folder))
                written = chosen.out / f"{name}.svg"
                written.write_text(as_svg(screen, f"fleetrun, {_WIDTH} x {_HEIGHT}"))
                log(f"{written} is written")


def captured(arguments: Sequence[str], is_there: Callable[[str], bool], folder: Path) -> str:
    """The screen, with its colours, as soon as it shows what is waited for; the job is ended."""
    socket = f"torchfleet-screens-{os.getpid()}"
    tmux = ["tmux", "-L", socket, "-f", os.devnull]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "torchfleet.launch", "--log_dir", "log", *arguments]
    size = ["-x", str(_WIDTH), "-y", str(_HEIGHT)]
    subprocess.run([*tmux, "new-session", "-d", *size, *command], check=True, env=environment, cwd=folder)
    try:
        deadline = time.monotonic() + _MOST
        while time.monotonic() < deadline:
            time.sleep(0.5)
            screen = subprocess.run([*tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True)
            if is_there(Text.from_ansi(screen.stdout).plain):
                return screen.stdout
        raise TimeoutError(f"the screen did not show what was waited for in {_MOST} s; it shows:\n{screen.stdout}")
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run([*tmux, "send-keys", "C-c"], check=True, capture_output=True)
            for _ in range(100):  # fleetrun ends its processes, and then the session ends
                time.sleep(0.2)
                subprocess.run([*tmux, "has-session"], check=True, capture_output=True)
            subprocess.run([*tmux, "kill-server"], check=True, capture_output=True)


def as_svg(screen: str, title: str) -> str:
    # What is drawn is recorded: nothing is shown.
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=_WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi(screen.rstrip("\n")), soft_wrap=True)
        drawn = console.export_svg(title=title, unique_id="torchfleet")
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # fonts of other hosts


def _has_trained(screen: str) -> bool:
    """Both workers report, and a good part of an epoch is done."""
    found = re.search(r"^epoch .* (\d+) %  ETA", screen, re.MULTILINE)
    return found is not None and 30 <= int(found[1]) <= 95 and screen.count("loss") > 3


def _has_warned(screen: str) -> bool:
    return "is slow" in screen


if __name__ == "__main__":
    main()
