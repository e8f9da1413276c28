"""Errors, help and `fleet docs` lead to pages of the documents that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.messages import names
from support.paths import ROOT

from torchfleet.base.pages import addresses, text_of
from torchfleet.observe.commands import command

PACKAGE = ROOT / "torchfleet"


def strings_of(path: Path) -> Iterator[ast.Constant]:
    """Texts of a file that are no docstrings."""
    source = path.read_text()
    if "docs/" not in source:
        return
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node


def test_messages_name_pages_by_the_command_that_shows_them() -> None:
    """An installed package has no folder docs."""
    found = {
        f"{path.relative_to(ROOT)}:{text.lineno}"
        for path in PACKAGE.rglob("*.py")
        for text in strings_of(path)
        if re.search(r"\bdocs/", str(text.value)) and path.name != "pages.py"
    }
    assert not found


def test_every_page_that_a_message_names_exists() -> None:
    named = set()
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        named |= set(re.findall(r"\bpage\(['\"]([^'\"{]+)['\"]\)", source))
        named |= set(re.findall(r"\bfleet docs ([\w/]+(?:#[\w-]+)?)", source)) - {"faults#backups"}
    assert len(named) > 10
    for address in named:
        assert text_of(address).startswith(("#", "---"))


def test_pages_and_sections_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["docs", "modes/async"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "modes" / "async.md").read_text()
    assert command.main(["docs", "faults#backups"]) == 0
    section = capsys.readouterr().out
    assert section.startswith("## Backups\n")
    assert section in (ROOT / "docs" / "faults.md").read_text()
    assert len(re.findall(r"^## ", section, re.MULTILINE)) == 1
    assert command.main(["docs"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(addresses())


def test_a_page_or_section_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for address, near in (("fault", "faults"), ("faults#bakups", "backups"), ("#backups", "fleet docs")):
        assert command.main(["docs", address]) == 1
        assert names(capsys.readouterr().err, near)
