"""The documents: links lead somewhere, paths that they name exist, the index lists every page.

Code blocks and tables of docs/collective, and the links there, are held by tests/collective/test_documents.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from support.cases import each_of
from support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(
    page
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "CODE_OF_CONDUCT.md",
        ROOT / "CHANGELOG.md",
        ROOT / "tests" / "README.md",
        ROOT / "benchmarks" / "README.md",
        ROOT / "examples" / "README.md",
        *ROOT.glob("examples/*/README.md"),
        *DOCS.rglob("*.md"),
    )
    if page.exists()
)
FOLDERS = ("torchfleet", "tests", "docs", "examples", "benchmarks")  # of the repository: what begins so is a path in it
# Files of Paddle's examples, and of a user's own job.
FOREIGN = {"dataset_generator.py", "local_train_example.py", "eval.py"}

ENDINGS = ("py", "pyi", "md", "js", "json", "toml", "yaml", "yml", "sh", "txt", "css", "html")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans(page: Path) -> list[str]:
    """What stands between backticks in a line."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def code(page: Path) -> list[str]:
    """Spans and blocks."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return spans(page) + blocks


def repository_paths(page: Path) -> Iterator[str]:
    """Paths from the root of the repository: words of the code that begin with one of its folders."""
    for text in code(page):
        for word in text.split():
            match = re.match(rf"\(?((?:{'|'.join(FOLDERS)})/[\w./-]*)$", word.rstrip(",;:.)"))
            if match:
                yield match[1]


def short_paths(page: Path) -> Iterator[str]:
    """Files and folders named by the end of their path: `wire.py`, `net/wire.py`, `tables/rows/`."""
    for span in spans(page):
        if re.fullmatch(r"[\w-][\w./-]*(\.py|\.md|\.toml)|[a-z_0-9]+(/[a-z_0-9]+)*/", span):
            yield span


def own_files(page: Path) -> set[str]:
    """Those that a reader of the page writes: the titles of its blocks."""
    return set(re.findall(r'^```\w+ title="([^"]+)"$', page.read_text(), re.MULTILINE))


@functools.cache
def existing() -> set[str]:
    """Every file of the repository, and every folder with a slash behind it, by every end of its path."""
    ends = set()
    for top in (ROOT, *(ROOT / folder for folder in FOLDERS)):
        for path in top.glob("*") if top == ROOT else top.rglob("*"):
            parts = path.relative_to(ROOT).parts
            if "__pycache__" not in parts:
                slash = "/" if path.is_dir() else ""
                ends |= {"/".join(parts[start:]) + slash for start in range(len(parts))}
    return ends


def links(page: Path) -> list[tuple[str, str]]:
    """(path, anchor) of every link within the repository; either may be empty."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    targets = [link.partition("#") for link in found if "://" not in link]
    return [(path, anchor) for path, _, anchor in targets]


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_of("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


@each_of("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_paths_between_backticks_exist(page: Path) -> None:
    """But for the changelog, which also names what was."""
    known = existing() | own_files(page)
    assert [path for path in repository_paths(page) if not (ROOT / path).exists()] == []
    assert [path for path in short_paths(page) if path not in known | FOREIGN] == []


def test_the_way_of_a_step_names_what_the_code_has() -> None:
    """Every line `names   file` of the drawings: the file has these names."""
    text = (DOCS / "architecture.md").read_text()
    steps = re.findall(r"^[ │├└]*(\w[\w.,:\[\] ]*?)  +((?:\w+/)+\w+\.py)", text, re.MULTILINE)
    assert len(steps) > 20
    for names, file in steps:
        source = (ROOT / "torchfleet" / file).read_text()
        assert [name for name in re.findall(r"\w+", names) if not re.search(rf"\b{name}\b", source)] == [], file


def code_of(path: Path) -> str:
    """Without lines that import."""
    return "\n".join(line for line in path.read_text().splitlines() if "import" not in line)


def unknown_names(text: str) -> list[str]:
    """Names between backticks, as `state.work`, of which no code has the last two parts as `work.slices`, no class or
    module of the first of them the second.
    """
    files = {path: code_of(path) for path in (ROOT / "torchfleet").rglob("*.py")}
    unknown = []
    for owner, name in re.findall(r"`(?:\w+\.)*(\w+)\.(\w+)(?:\(\))?`", text):
        if name in ENDINGS or any(re.search(rf"\b{owner}\.{name}\b", code) for code in files.values()):
            continue
        holders = [code for path, code in files.items() if path.stem == owner or f"class {owner}" in code]
        if not any(re.search(rf"\b{name}\b", code) for code in holders):
            unknown.append(f"{owner}.{name}")
    return unknown


def test_fields_that_the_architecture_names_exist() -> None:
    assert unknown_names((DOCS / "architecture.md").read_text()) == []
    assert unknown_names("`state.long_work`, `state.work.slices`, `Client.pull_tables`, `Client.no_such_call()`") == [
        "state.long_work",
        "Client.no_such_call",
    ]


def test_the_index_lists_every_page_of_the_documents() -> None:
    listed = {(DOCS / path).resolve() for path, _ in links(DOCS / "README.md")}
    assert [name_of(page) for page in DOCS.rglob("*.md") if page not in {*listed, DOCS / "README.md"}] == []


def test_the_checks_see_what_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    block = "```\npython examples/none.py --data a/b\n```\n"
    page.write_text(f"`torchfleet/none.py`, `nothing.py`, [here](gone.md#x)\n{block}")
    assert list(repository_paths(page)) == ["torchfleet/none.py", "examples/none.py"]
    assert list(short_paths(page)) == ["torchfleet/none.py", "nothing.py"]
    assert links(page) == [("gone.md", "x")]
