"""A user's script or module, run in this process as Python would run it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def run_as_main(target: str, arguments: Sequence[str], is_module: bool) -> None:
    """Run `target` as `python TARGET ARGUMENTS` does, or as `python -m` does: with the same sys.argv, and with the
    script's folder, or for a module the working directory, first in sys.path.
    """
    sys.argv = [target, *arguments]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")
