"""Keeps the job running when the reader of the launcher's output is gone."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable


class Shown:
    """Writes output from any thread until the reader is gone, as with `| head`. After that it does nothing."""

    def __init__(self) -> None:
        self.is_gone = sys.stdout is None
        self._lock = threading.RLock()

    def __call__(self, show: Callable[[], object]) -> None:
        with self._lock:
            if self.is_gone:
                return
            try:
                _show_in_letters_it_has(show)
            except (OSError, ValueError):  # the terminal or the reader is gone, or the stream is closed
                self.is_gone = True
                _write_to_nowhere()


def _show_in_letters_it_has(show: Callable[[], object]) -> None:
    """Replace characters that the terminal's encoding lacks, and lone surrogates, by escapes."""
    try:
        show()
    except UnicodeEncodeError:
        if not isinstance(sys.stdout, io.TextIOWrapper):
            raise
        sys.stdout.reconfigure(errors="backslashreplace")
        show()


def _write_to_nowhere() -> None:
    """Redirect stdout to /dev/null, so that no later error ends the launcher or changes its exit status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
    finally:
        os.close(nowhere)
