"""docs/tutorials: every page is followed from top to bottom, and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import pages
from support.paths import ROOT

TUTORIALS = ROOT / "docs" / "tutorials"
# What a page's commands print, and how large it has to be at least, each time that they print it.
FIGURES = {
    "ten_minutes": (r"AUC (0\.\d+)", 0.80),
    "criteo": (r"(?:test |^)AUC (0\.\d+)", 0.65),
    "word_vectors": (r"total +([\d.]+) %", 95),
    "streaming": (r"(?:07|08|09|10) \| auc (0\.\d+)", 0.6),
    "collective": (r"accuracy (\d\.\d+)", 0.5),
    "cluster": (r"job-clicks-(?:server|worker)\.yaml()", 0),
    "gpus": (r"accuracy (\d\.\d+)", 0.9),
    "serving": (r": \[(0\.\d+)", 0.7),
}
PAGES = sorted(page for page in TUTORIALS.glob("*.md") if page.stem != "README")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Empty, but for the examples of the repository."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path, folder: Path) -> None:
    printed = pages.follow(page, folder)
    print(printed)
    pattern, least = FIGURES[page.stem]
    found = [float(figure) for figure in re.findall(pattern, printed)]
    assert found, printed
    assert min(found) > least, found


# What holds the pages to it


def page_of(folder: Path, *parts: str) -> Path:
    page = folder / "page.md"
    page.write_text("\n".join(parts) + "\n")
    return page


def test_files_are_written_changed_and_run(tmp_path: Path) -> None:
    file = '```python title="a.py"\nimport sys\nprint(6 * 7)\n```'
    change = '```diff title="a.py"\n import sys\n-print(6 * 7)\n+print(6 * 7, sys.argv[1])\n```'
    page = page_of(tmp_path, file, change, "```bash\npython a.py \\\n    x   # why\n```", "```text\n41 x\n```")
    assert pages.follow(page, tmp_path) == "42 x\n"


@pytest.mark.parametrize("shown", ["42", "x 42 y", "forty-two"])
def test_what_is_shown_has_to_be_printed(tmp_path: Path, shown: str) -> None:
    page = page_of(tmp_path, "```bash\necho 'x 42'\n```", f"```text\n...\n{shown}\n```")
    with pytest.raises(AssertionError, match="shows"):
        pages.follow(page, tmp_path)


@pytest.mark.parametrize(
    "block",
    ["```bash\nfalse | cat; exit 3\n```", "```bash\npython -c 'raise SystemExit(3)'\n```", "```python\nx = 1\n```",
     "<!-- not run: needs two machines -->\n```bash\nfleetrun --no_such_option train.py\n```",
     "<!-- only: gpu -->\n```bash\nfleetrun --no_such_option train.py\n```"],
)  # fmt: skip
def test_what_fails_or_is_not_understood_fails_the_page(tmp_path: Path, block: str) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(AssertionError):
        pages.follow(page_of(tmp_path, block), tmp_path)


def test_a_block_may_be_for_some_tests_only(tmp_path: Path) -> None:
    page = page_of(tmp_path, "<!-- only: gpu -->\n```bash\necho on a GPU\n```", "```bash\necho anywhere\n```")
    assert pages.follow(page, tmp_path) == "anywhere\n"
    assert pages.follow(page, tmp_path, "gpu") == "on a GPU\nanywhere\n"


def test_a_change_needs_one_place() -> None:
    for text in ("a\n", "b\nb\n"):
        with pytest.raises(AssertionError, match="places"):
            pages.changed(text, " b\n+c\n")
