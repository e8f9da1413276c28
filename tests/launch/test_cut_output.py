"""fleetrun whose output is not read to its end."""

from __future__ import annotations

import os
import subprocess
import sys

from support import processes
from support.scripts.launching import TINY, clean_environment


def test_a_reader_that_leaves_early_ends_a_dry_run_without_a_traceback() -> None:
    """As `fleetrun --dry_run ... | head -1` does."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "torchfleet.launch", "--dry_run", TINY]
    with open(write, "w") as nobody:
        done = processes.run(command, timeout=200, stdout=nobody, stderr=subprocess.PIPE, env=clean_environment())
    assert (done.returncode, done.stderr) == (1, "")
