"""The parser of every command line of torchfleet: an error is one line, and names the option that was meant."""

from __future__ import annotations

import argparse
import re
import sys
from difflib import get_close_matches
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Parsers of its sub-commands are of this class, too."""

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
