"""Lines above a table on a terminal: wrapped where there is room, otherwise without their less important parts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from torchfleet.observe.watch.columns_fit import cropped

_INDENT = "  "


@dataclass(frozen=True)
class Part:
    """A part of a line. `rank`: parts with a higher rank are left out first. `gap`: what stands before it."""

    text: Text
    rank: int = 0
    gap: str = "  "


def wrapped(parts: Sequence[Part], width: int) -> list[Text]:
    """As many lines as the parts need, all but the first indented. A part longer than a line is wrapped by words."""
    lines: list[list[Part]] = []
    for part in parts:
        if lines and _joined([*lines[-1], part]).cell_len <= width - len(_INDENT):
            lines[-1].append(part)
        else:
            lines.append([part])
    texts = [Text(_INDENT if number else "").append_text(_joined(line)) for number, line in enumerate(lines)]
    return [text for line in texts for text in _by_words(line, width)]


def fitted(parts: Sequence[Part], width: int) -> Text:
    """One line: without the parts that matter least, as far as they do not fit."""
    kept = list(parts)
    while len(kept) > 1 and _joined(kept).cell_len > width:
        worst = max(range(len(kept)), key=lambda place: (kept[place].rank, place))
        del kept[worst]
    return cropped(_joined(kept), width)


def _joined(parts: Sequence[Part]) -> Text:
    line = Text()
    for number, part in enumerate(parts):
        line.append(part.gap if number else "").append_text(part.text)
    return line


def _by_words(line: Text, width: int) -> list[Text]:
    if line.cell_len <= width:
        return [line]
    style = line.spans[0].style if line.spans else line.style
    texts = textwrap.wrap(line.plain, max(len(_INDENT) + 1, width), subsequent_indent=_INDENT)
    return [cropped(Text(text, style), width) for text in texts]
