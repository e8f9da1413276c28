"""The parser of every command line of torchfleet: an error is one line, and names the option that was meant. An empty
value is an error, never the same as an option that is left out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Parsers of its sub-commands are of this class, too."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        options, others = super().parse_known_args(args, namespace)
        for action in self._actions:
            found = getattr(options, action.dest, None)
            is_empty = any(isinstance(each, str) and not each for each in _values(found))
            if action.option_strings and is_empty and found not in (action.default, action.const):
                self.error(f"argument {'/'.join(action.option_strings)}: expected a value, found {found!r}")
        return options, others

    def said(self, options: argparse.Namespace) -> dict[str, str]:
        """Return the options whose value differs from the one that holds without them: the name of the value, and the
        option's last name, or for a positional argument the name that --help shows."""
        return {
            action.dest: action.option_strings[-1] if action.option_strings else action.dest
            for action in self._actions
            if action.dest in options and getattr(options, action.dest) not in (action.default, [])
        }

    def error(self, message: str) -> NoReturn:
        """Exit with status 2. For an unknown option, name the known one that is nearest to it. The list of all options
        is left to --help: a reader would have to look for the error below it."""
        unknown = re.findall(r"(?<!\S)--([\w-]+)", message) if message.startswith("unrecognized") else []
        commands = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [self, *(parser for parsers in commands for parser in parsers.values())]
        known = sorted({name for parser in parsers for name in parser._option_string_actions if name.startswith("--")})
        near = [get_close_matches(f"--{name.replace('-', '_')}", known, n=1) for name in unknown]
        meant = ", ".join(name for names in near for name in names)
        if meant:
            message = f"{message}. Did you mean {meant}?"
        print(f"{self.prog}: error: {message}\nAll options: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _values(found: Any) -> Sequence[Any]:
    return found if isinstance(found, (list, tuple)) else [found]
