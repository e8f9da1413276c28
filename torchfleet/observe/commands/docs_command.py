"""`fleet docs`: shows a page of the documents at the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from torchfleet.base.pages import addresses, text_of, title_of
from torchfleet.base.printable import say


def add_commands(commands: Any) -> None:
    """As command.py describes."""
    made = commands.add_parser(
        "docs",
        help="the documents, at the terminal",
        description="Print a page of the documents, or one section of it; without a page, list all pages.",
    )
    made.add_argument("page", nargs="?", default="", help="such as faults, modes/async, faults#backups")
    made.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.page:
        say(text_of(options.page).rstrip("\n"))
        return 0
    pages = addresses()
    width = max(map(len, pages), default=0)
    for address, path in pages.items():
        say(f"{address:<{width}}  {title_of(path)}")
    return 0
