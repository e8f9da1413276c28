"""`fleet rollback`: lists the versions of a served model, goes back to one of them, or resumes."""

from __future__ import annotations

import argparse
import time
from typing import Any

from torchfleet.base.printable import say


def add_commands(commands: Any) -> None:
    """As command.py describes."""
    rollback = commands.add_parser(
        "rollback",
        help="go back to an older version of a model that is served",
        description="Go back to an older version of a model that `fleet serve --follow` serves on this machine, and "
        "stay there until --resume. Without --to and --resume, print the versions that one can go back to.",
    )
    rollback.add_argument(
        "model", help="the folder or URL of the model, as given to `fleet serve`; or the folder of its versions"
    )
    asked = rollback.add_mutually_exclusive_group()
    asked.add_argument("--to", type=_version, metavar="VERSION", help="the version to serve")
    asked.add_argument("--resume", action="store_true", help="serve the newest version again, and follow")
    rollback.set_defaults(run=_run)


def _version(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text!r}")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    from torchfleet.apps.serve.versions.rollback import ask, served_folder, versions

    folder = served_folder(options.model)
    if options.to is not None or options.resume:
        made = ask(folder, 0 if options.resume else options.to)
        say(f"version {made.number} is current: {made.source}")
        return 0
    for version in versions(folder):
        mark = "  current" if version.is_current else ""
        age = time.time() - version.created
        say(f"{version.number:>8}  {age:>10,.0f} s old  {version.source}{mark}")
    return 0
