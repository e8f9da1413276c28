"""Processes that tests fork from the nursery behave as those that Python starts anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import processes
from support.extras import EXTRAS
from support.jobs import wait_until
from support.paths import ROOT

pytestmark = pytest.mark.slow  # it starts processes

COMMANDS = {
    "output": "import sys; print(sys.argv); print('wrong', file=sys.stderr)",
    "status": "import sys; sys.exit(7)",
    "a status in words": "import sys; sys.exit('no')",
    "an error": "1 / 0",
    "Ctrl-C": "import signal; signal.raise_signal(signal.SIGINT)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "at exit": "import atexit; atexit.register(print, 'over')",
    "a thread": "import threading, time; threading.Timer(0.1, print, ['late']).start()",
    "a child": "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'exit(3)']).returncode)",
    "another program": "import subprocess; print(subprocess.check_output(['echo', 'a']))",
    "replaced": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1); exit(4)'])",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_it_prints_and_ends_as_a_new_process_does(name: str) -> None:
    command = [sys.executable, "-c", COMMANDS[name], "some", "arguments"]
    with processes.interruptible():
        new = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    forked = processes.run(command, stderr=subprocess.PIPE, timeout=200)
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_scripts_and_modules_find_what_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "script.py").write_text("import beside, sys\nprint(beside.NAME, __name__, __file__, sys.argv[1:])\n")
    for command in ([str(tmp_path / "script.py"), "a"], ["-m", "script", "a"]):
        done = processes.run([sys.executable, *command], cwd=tmp_path, timeout=200)
        assert done.stdout == f"beside __main__ {tmp_path}/script.py ['a']\n", done.stdout


def test_it_has_the_environment_and_the_signals_that_it_is_given() -> None:
    code = "import os, time; print(os.environ['COLOUR'], 'HOME' in os.environ, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code]
    with processes.Popen(command, env={"COLOUR": "red"}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "red False\n"
        assert processes.environment_of(psutil.Process(process.pid)) == {"COLOUR": "red"}
        assert process.poll() is None
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def test_it_ends_with_the_process_that_started_it() -> None:
    inner = "import time; time.sleep(600)"
    code = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {inner!r}]).pid, flush=True); input()"
    )
    command = [sys.executable, "-c", code]
    with processes.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        started = int(process.stdout.readline())
        assert psutil.pid_exists(started)
        process.kill()
    wait_until(lambda: not psutil.pid_exists(started), "what it had started has ended", 60)


def test_a_nursery_that_has_imported_more_is_used_where_it_is_asked_for() -> None:
    command = [sys.executable, "-c", "import sys; print('mailbox' in sys.modules)"]
    with processes.preloaded("mailbox"):
        inside = processes.run(command, timeout=200)
    outside = processes.run(command, timeout=200)
    assert (inside.stdout, outside.stdout) == ("True\n", "False\n")


def test_without_the_packages_of_extras_tests_run_or_are_skipped() -> None:
    without = str(ROOT / "tests" / "support" / "scripts" / "without_extras")
    environment = {**os.environ, "PYTHONPATH": without, "FLEET_TEST_WITHOUT": " ".join(EXTRAS)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    forked = "tests/test_processes.py::test_scripts_and_modules_find_what_lies_beside_them"
    skipped = "tests/apps/serve/endpoints/test_grpc_app.py"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", forked, skipped]
    with processes.interruptible():  # a Python of its own, with a nursery of its own
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert "need torchfleet[serve]" in done.stdout
