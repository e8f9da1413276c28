"""docs/migrate: the scripts of torchfleet run as they stand, alone and as a fleet; what the pages name exists."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import pages, processes
from support.paths import ROOT
from support.scripts.launching import clean_environment, forked_fleetrun

import torchfleet

PAGES = sorted(page for page in (ROOT / "docs" / "migrate").glob("*.md") if page.name != "README.md")
OTHERS = ("paddle", "torchrec", "tensorflow")  # what a block imports that is not ours


def name_of(page: Path) -> str:
    return page.stem


def blocks(page: Path) -> list[str]:
    return [block.text for block in pages.blocks(page) if block.language == "python"]


def script(page: Path) -> str:
    """The whole script of torchfleet: a page has one."""
    (found,) = [block for block in blocks(page) if "import torchfleet as fleet\n" in block]
    return found


def named(tree: ast.AST) -> Iterator[str]:
    """fleet.nn.SparseEmbedding and the like, each as the longest chain that the code has."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            parts, at = [], node
            while isinstance(at, ast.Attribute):
                parts.append(at.attr)
                inner.add(id(at))
                at = at.value  # type: ignore[assignment]
            if isinstance(at, ast.Name) and at.id == "fleet":
                yield ".".join(reversed(parts))


def exists(name: str) -> bool:
    try:
        functools.reduce(getattr, name.split("."), torchfleet)
    except AttributeError:
        return False
    return True


def test_there_is_a_page_for_each_library() -> None:
    assert [page.stem for page in PAGES] == sorted(OTHERS)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_python(page: Path) -> None:
    for block in blocks(page):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_script_and_the_tables_name_what_torchfleet_has(page: Path) -> None:
    assert [name for name in named(ast.parse(script(page))) if not exists(name)] == []
    rows = [line.split("|")[2] for line in page.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    assert [name for span in spans for name in re.findall(r"\bfleet\.([\w.]+)", span) if not exists(name)] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_script_runs_in_one_process(page: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(page))
    environment: dict[str, Any] = clean_environment(PYTHONPATH=str(ROOT))
    done = processes.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_script_runs_with_servers_and_workers(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLEET_KEY_DIR", raising=False)
    (tmp_path / "train.py").write_text(script(page))
    options = ("--server_num", "2", "--worker_num", "2", "train.py")
    with forked_fleetrun(tmp_path / "log", *options, PYTHONPATH=str(ROOT)) as job:
        assert job.wait() == 0
