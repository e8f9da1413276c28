"""Pages read on the site as they do on GitHub, where two rules of Markdown differ. mkdocs.yml names this under `hooks`.

A list or a table may follow a line of prose without an empty line between. In a table `\\|` stands for a bar, also
between backticks.
"""

from __future__ import annotations

import re
from typing import Any

_FENCE = re.compile(r"^ *(`{3,})")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_CODE = re.compile(r"`[^`]*`")


def as_on_github(text: str) -> str:
    """The same page, for a reader of Markdown that wants empty lines before lists and tables."""
    lines: list[str] = []
    fence, before = "", ""  # the backticks of an open block; the line before
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if fence:
            fence = "" if mark and line.strip() == fence else fence
        elif mark:
            fence = mark[1]
        else:
            if _begins(line, before):
                lines.append("")
            line = _CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line  # noqa: PLW2901
        lines.append(line)
        before = line
    return "\n".join(lines) + "\n"


def _begins(line: str, before: str) -> bool:
    """Whether a list or a table begins with this line, right behind prose or a block of code."""
    if not before.strip() or before.startswith((" ", "#")):
        return False
    if _ITEM.match(line):
        return not _ITEM.match(before)
    return line.startswith("|") and not before.startswith("|")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return as_on_github(markdown)
