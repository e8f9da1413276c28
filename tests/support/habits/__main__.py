"""`PYTHONPATH=.:tests python -m support.habits --write` writes docs/torch_habits.md.

Without --write it only says what is wrong.

A row with an outcome that is neither honoured nor refused nor explained is left out of the page and printed; the exit
status is then 1.
"""

from __future__ import annotations

import argparse
import sys

import torch
from support.habits import page


def main() -> int:
    parser = argparse.ArgumentParser(prog="support.habits", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--accept", action="store_true", help="also if something that was honoured is refused now")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sections, wrong = {}, []
    for group in page.GROUPS:
        rows = page.rows_of(group)
        sections[group.title] = page.section(group, rows)
        wrong += [f"{group.title}: {line}" for line in page.wrong(rows)]
    text = page.page(sections)
    before = page.PAGE.read_text() if page.PAGE.exists() else ""
    lost = page.given_up(before, text)
    for line in wrong:
        print("wrong:", line)
    for line in lost:
        print("refused, and honoured before:", line)
    if options.write and (options.accept or not lost):
        page.PAGE.write_text(text)
        print(f"wrote {page.PAGE}")
    return 1 if wrong or (lost and not options.accept) else 0


if __name__ == "__main__":
    sys.exit(main())
