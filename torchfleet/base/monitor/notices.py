"""Messages for users, on stderr."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """Print a line to stderr. If stderr cannot be written, as on a full disk, the line is lost and the process
    continues.
    """
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
