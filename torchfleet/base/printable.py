"""Makes untrusted text safe for a terminal: control sequences are removed, colours are kept."""

from __future__ import annotations

import re
from typing import TextIO

# Control sequences of ECMA-48. The first alternative, colours and other attributes, is kept.
_SEQUENCE = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # cursor, screen, modes
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"  # strings: titles, links, the clipboard
    r"|\x1b[ -/]*[0-~]?"  # all others
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]",  # single control characters; a tab is kept
    re.DOTALL,
)
_RESET = "\x1b[0m"


def printable(line: str) -> str:
    """The line without control sequences except colours, which are reset at its end.

    Of a line that was overwritten, as by progress bars, only the last state is kept.
    """
    last = line.rstrip("\r\n").rpartition("\r")[2]
    shown = _SEQUENCE.sub(lambda found: found["colour"] or "", last)
    return shown + _RESET if "\x1b" in shown else shown


def bare(text: str) -> str:
    """A name or a message without colours, on one line, for use in tables and messages of ours."""
    return _SEQUENCE.sub("", text.replace("\n", " "))


def escaped(text: str, most: int = 120) -> str:
    """An untrusted value for use in a message: unprintable characters are escaped, long values are truncated."""
    shown = repr(text[: most + 1])[1:-1]
    return shown if len(shown) <= most else f"{shown[:most]}..."


def say(text: str, file: TextIO | None = None) -> None:
    """Print text that may contain untrusted names and messages."""
    print("\n".join(bare(line) for line in text.split("\n")), file=file, flush=True)
