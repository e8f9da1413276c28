"""How the command lines begin. Imports nothing that takes time, so that Ctrl-C during the imports is handled, too."""

from __future__ import annotations

from importlib import import_module


def run(module: str) -> int:
    """Import the module and call its `main`. Returns the exit status: 130, without a traceback, after Ctrl-C."""
    try:
        return int(import_module(module).main())
    except KeyboardInterrupt:
        return 130
