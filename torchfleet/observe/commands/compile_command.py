"""`fleet compile`: compiles the kernels of servers and workers before the first job."""

from __future__ import annotations

import argparse
from typing import Any

from torchfleet.base.monitor.progress import Progress
from torchfleet.base.printable import say


def add_commands(commands: Any) -> None:
    """As command.py describes."""
    made = commands.add_parser(
        "compile",
        help="compile the kernels of servers and workers before the first job on a machine",
        description="Compile all kernels of servers and workers for this processor, and keep them on disk, where jobs "
        "find them. Without this, the first job compiles those that it uses: a minute on two cores, more on busy ones. "
        "Takes a second if they are there already. For images, and for machines that are set up by a script.",
    )
    made.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from torchfleet.ps.kernels.jit import mark_of_all
    from torchfleet.ps.server.job.warm import compile_shown

    progress = Progress("fleet compile")
    compile_shown(progress.show)
    progress.end("done")
    say(f"the kernels of servers and workers are compiled, in {mark_of_all().parent}")
    return 0
