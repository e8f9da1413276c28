"""Text from outside on its way to a terminal: what would command the terminal is taken out, colours stay."""

from __future__ import annotations

import re
from typing import TextIO

# Sequences that command a terminal, as ECMA-48 has them; the first alternative, colours and the like, stays.
_SEQUENCE = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # cursor, screen, modes
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"  # strings: titles, links, the clipboard
    r"|\x1b[ -/]*[0-~]?"  # all others
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]",  # single characters; a tab stays
    re.DOTALL,
)
_RESET = "\x1b[0m"


def printable(line: str) -> str:
    """The line without anything that commands a terminal, but for colours, which end with it.

    Of a line that was written over, as progress bars do, the last state is left.
    """
    last = line.rstrip("\r\n").rpartition("\r")[2]
    shown = _SEQUENCE.sub(lambda found: found["colour"] or "", last)
    return shown + _RESET if "\x1b" in shown else shown


def bare(text: str) -> str:
    """A name or a message without colours either, and in one line: for tables and texts of our own."""
    return _SEQUENCE.sub("", text.replace("\n", " "))


def escaped(text: str, most: int = 120) -> str:
    """A value from outside within a text of our own: what cannot be printed as an escape, what is long cut short."""
    shown = repr(text[: most + 1])[1:-1]
    return shown if len(shown) <= most else f"{shown[:most]}..."


def say(text: str, file: TextIO | None = None) -> None:
    """Print text that may hold names and messages from outside."""
    print("\n".join(bare(line) for line in text.split("\n")), file=file, flush=True)
