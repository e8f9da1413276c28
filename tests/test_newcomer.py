"""The six tasks of docs/architecture.md: what their lists name is there."""

from __future__ import annotations

import re

from support.cases import each_of
from support.paths import ROOT

TASKS = ("a row rule", "a table kind", "a command of the server", "a header field", "a strategy", "a `fleet` command")
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def task_lines(task: str) -> list[str]:
    section = TEXT.partition(f"### Add {task}\n")[2].partition("\n#")[0]
    return re.findall(r"^\d+\. (.*)$", section, re.MULTILINE)


def place(path: str) -> str:
    return path if path.split("/", maxsplit=1)[0] in ("docs", "tests", "benchmarks") else f"torchfleet/{path}"


@each_of("task", TASKS)
def test_files_and_names_of_the_list_exist(task: str) -> None:
    lines = task_lines(task)
    assert len(lines) >= 2
    for line in lines:
        spans = re.findall(r"`([^`]+)`", line)
        paths = [span for span in spans if "/" in span]
        assert paths, line
        missing = [path for path in paths if not (ROOT / place(path)).exists()]
        assert not missing
        files = [ROOT / place(path) for path in paths if path.endswith(".py")]
        sources = "\n".join(file.read_text() for file in files)
        names = [span for span in spans if "/" not in span]
        if files:
            unknown = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", sources)]
            assert not unknown, line


@each_of("task", TASKS)
def test_where_the_list_ends_there_is_something_that_shows_it(task: str) -> None:
    assert re.search(r"`(?:tests|docs)/", task_lines(task)[-1])


def test_the_page_lists_these_tasks_and_no_others() -> None:
    assert tuple(re.findall(r"^### Add (.*)$", TEXT, re.MULTILINE)) == TASKS


def test_the_ten_files_come_first_and_exist() -> None:
    table = TEXT.partition("## Ten files to read first\n")[2].partition("\n## ")[0]
    files = re.findall(r"^\| `([\w/]+\.py)` \|", table, re.MULTILINE)
    assert len(files) == 10
    assert all((ROOT / "torchfleet" / file).exists() for file in files)
    assert TEXT.index("## Ten files to read first") == TEXT.index("\n## ") + 1
