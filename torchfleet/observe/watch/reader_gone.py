"""The launcher's output when nobody reads it any more: the job goes on."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable


class Shown:
    """Shows things, from any thread, until whoever reads is gone, as behind `| head`. Then it does nothing."""

    def __init__(self) -> None:
        self.is_gone = sys.stdout is None
        self._lock = threading.RLock()

    def __call__(self, show: Callable[[], object]) -> None:
        with self._lock:
            if self.is_gone:
                return
            try:
                _show_in_letters_it_has(show)
            except (OSError, ValueError):  # the terminal, or whoever reads, is gone; or the stream is closed
                self.is_gone = True
                _write_to_nowhere()


def _show_in_letters_it_has(show: Callable[[], object]) -> None:
    """A terminal of another encoding has not all letters, and nothing has half a character: escapes stand for them."""
    try:
        show()
    except UnicodeEncodeError:
        if not isinstance(sys.stdout, io.TextIOWrapper):
            raise
        sys.stdout.reconfigure(errors="backslashreplace")
        show()


def _write_to_nowhere() -> None:
    """What is still printed goes there, so that no error ends the launcher or changes its exit status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
    finally:
        os.close(nowhere)
