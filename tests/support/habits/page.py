"""The page of torch's habits, docs/torch_habits.md: every cell is the outcome of a run."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping

from support.habits import embeddings, files, loops, optimizers
from support.habits.habit import DIFFERS, HONOURED, MODES, REFUSED, WRONG, Cell, Group, cells
from support.paths import ROOT

PAGE = ROOT / "docs" / "torch_habits.md"
GROUPS = (
    embeddings.LAYERS,
    embeddings.BAGS,
    embeddings.SPARSE,
    optimizers.ROWS,
    optimizers.NETWORK,
    optimizers.GROUPS,
    optimizers.SCHEDULERS,
    loops.LOOPS,
    loops.WRITES,
    loops.HOOKS,
    files.LOADERS,
    files.CHECKPOINTS,
    files.TRANSFORMS,
)
LONG = (optimizers.NETWORK, files.TRANSFORMS)  # `make test-long` runs them: seconds each
LONGEST = 240  # characters of a sentence on the page
Rows = dict[str, dict[str, Cell]]  # by habit and mode

HEAD = """# Torch's habits in every mode

`make habits` writes this page: it runs every line as plain torch and again in each mode, and compares losses,
parameters and whatever else a user would look at. A test fails where the page says something else than a run. How to
do what is refused is in [At home in PyTorch](torch.md).

| a cell | means |
|---|---|
| honoured | equal to plain torch, to 1e-5 of a number |
| refused | an error of torchfleet; the number leads to its sentence below the table |
| differs | not equal, for the reason below the table |

One process has its servers within. The other modes are a job of two servers and one worker; a step is applied before
the next one begins, because the table is about what an option means, not about how old the values are that
[several workers](modes/README.md) read. Tables are moved by `sparse=1`, however small they are.
"""


def rows_of(group: Group) -> Rows:
    """Runs all habits of a group in all modes."""
    return {habit.name: cells(habit) for habit in group.habits}


def part_of(group: Group) -> Rows:
    """Runs all habits of a group, each in two of the modes: the six modes take turns over the rows."""
    half = len(MODES) // 2
    turns = ((MODES[i % len(MODES)], MODES[(i + half) % len(MODES)]) for i in range(len(group.habits)))
    return {habit.name: cells(habit, modes) for habit, modes in zip(group.habits, turns, strict=True)}


def kinds_of(rows: Rows, text: str) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], str]]:
    """By habit and mode: the kinds of these cells as the runs gave them, and as a section's text has them."""
    said = _by_row(text)
    found = {(name, mode): cell.kind for name, by_mode in rows.items() for mode, cell in by_mode.items()}
    return found, {(name, mode): said[_escaped(name)][MODES.index(mode)] for name, mode in found}


def wrong(rows: Rows) -> list[str]:
    """Outcomes that are none of the three kinds, one line each; modes with the same outcome share one."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, by_mode in rows.items():
        for mode, cell in by_mode.items():
            if cell.kind == WRONG:
                found.setdefault((name, cell.sentence), []).append(mode)
    return [f"{name} ({', '.join(modes)}): {sentence:.400}" for (name, sentence), modes in found.items()]


def section(group: Group, rows: Rows) -> str:
    """The table of a group, without rows that have a wrong outcome, and the sentences below it."""
    numbers: dict[tuple[str, str], int] = {}
    lines = [f"| {group.title} | {' | '.join(MODES)} |", "|---" * (1 + len(MODES)) + "|"]
    for name, by_mode in rows.items():
        if any(cell.kind == WRONG for cell in by_mode.values()):
            continue
        shown = [_shown(by_mode[mode], numbers) for mode in MODES]
        lines.append(f"| {_escaped(name)} | {' | '.join(shown)} |")
    notes = [_wrapped(f"{at}. {kind}: ", _escaped(_shortened(text))) for (kind, text), at in numbers.items()]
    about = [textwrap.fill(group.about, 100), ""] if group.about else []
    return "\n".join([f"## {group.title}", *about, *lines, *([""] if notes else []), *notes, ""])


def summary(counts: Mapping[str, Counter[str]]) -> str:
    """How many cells of each kind the groups have."""
    kinds = (HONOURED, REFUSED, DIFFERS)
    lines = [f"| cells of | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    total: Counter[str] = Counter()
    for title, count in counts.items():
        anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        lines.append(f"| [{title}](#{anchor}) | {' | '.join(str(count[kind]) for kind in kinds)} |")
        total.update(count)
    return "\n".join([*lines, f"| all | {' | '.join(str(total[kind]) for kind in kinds)} |", ""])


def page(sections: Mapping[str, str]) -> str:
    """The page of these sections, by title."""
    counts = {title: Counter(kinds_in(text)) for title, text in sections.items()}
    return "\n".join([HEAD, summary(counts), *sections.values()])


def sections_of(text: str) -> dict[str, str]:
    """The sections of a page as it stands, by title."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part.rstrip("\n") + "\n" for part in parts}


def kinds_in(text: str) -> list[str]:
    """The kinds of all cells of a section."""
    return [kind for kinds in _by_row(text).values() for kind in kinds]


def given_up(before: str, after: str) -> list[str]:
    """Cells that were honoured and are refused now, in words."""
    old, new = _by_row(before), _by_row(after)
    return [
        f"{name} ({mode})"
        for name in old.keys() & new.keys()
        for mode, was, now in zip(MODES, old[name], new[name], strict=True)
        if was == HONOURED and now == REFUSED
    ]


def _by_row(text: str) -> dict[str, list[str]]:
    kinds = (HONOURED, REFUSED, DIFFERS)
    rows = (line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| "))
    found = ((row[0].strip(), [cell.split()[0] for cell in row[1:] if cell.split()]) for row in rows)
    return {name: cells for name, cells in found if len(cells) == len(MODES) and set(cells) <= set(kinds)}


def _shown(cell: Cell, numbers: dict[tuple[str, str], int]) -> str:
    if cell.kind == HONOURED:
        return HONOURED
    return f"{cell.kind} ({numbers.setdefault((cell.kind, cell.sentence), len(numbers) + 1)})"


def _shortened(sentence: str) -> str:
    plain = re.sub(r"0x[0-9a-f]+", "0x...", sentence)
    return plain if len(plain) <= LONGEST else plain[:LONGEST].rsplit(" ", 1)[0] + " ..."


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", text)


def _wrapped(number: str, text: str) -> str:
    return textwrap.fill(number + text, 100, subsequent_indent=" " * 3, break_on_hyphens=False, break_long_words=False)
