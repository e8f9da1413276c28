"""What a message must carry, in whatever words: names, numbers, flags, paths."""

from __future__ import annotations

import re

INTERNAL_ERROR = "internal error"
"""How a server answers its own mistakes: searches look for it, and tests/ps/server/test_commands.py holds it."""


def naming(*values: object) -> str:
    """A pattern for `match=`: every one of `values` occurs in the message, in any order, as a whole word or number."""
    assert values
    return r"(?s)\A" + "".join(f"(?=.*{_whole(str(value))})" for value in values)


def names(text: str, *values: object) -> bool:
    """Whether every one of `values` occurs in `text`, in any order, as a whole word or number."""
    return re.search(naming(*values), text) is not None


def lines_naming(text: str, *values: object) -> list[str]:
    """The lines of `text` in which every one of `values` occurs."""
    return [line for line in text.splitlines() if names(line, *values)]


def _whole(value: str) -> str:
    """A pattern that finds `16` in neither `160` nor `1,600` nor `0.16`, and `lr` not in `lr_decay`."""
    before = r"(?<!\w)(?<!\d[.,])" if value[:1].isdigit() else r"(?<!\w)" if _is_word(value[:1]) else ""
    after = r"(?!\w|\.\d|,\d{3}(?!\d))" if value[-1:].isdigit() else r"(?!\w)" if _is_word(value[-1:]) else ""
    return before + re.escape(value) + after


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
