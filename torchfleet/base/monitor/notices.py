"""Lines for people, on stderr."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """Print a line. stderr may lead to a disk that is full: then nobody is told, and the process goes on."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
