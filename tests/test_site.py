"""The site of the documents: its menu has every page, its reference every public name; nothing comes from elsewhere.

`make docs` builds it, and finds broken links. These tests need no mkdocs.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from support.cases import each_of
from support.extras import needing
from support.paths import ROOT

import torchfleet

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"

with_lightning = pytest.mark.xdist_group("lightning")  # which takes seconds to import
with_all_packages = needing("lightning", "transformers", "accelerate")


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without what its tags stand for."""


Loader.add_multi_constructor("", lambda loader, suffix, node: None)  # type: ignore[no-untyped-call]


def settings() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    return found


def hook(name: str) -> ModuleType:
    """A file of docs/hooks, as mkdocs loads it."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return hook("repository_pages")


@pytest.fixture(scope="module")
def markdown() -> ModuleType:
    return hook("github_markdown")


def menu(part: Any) -> Iterator[str]:
    """The pages of `nav`."""
    if isinstance(part, str):
        yield part
    for entry in part if isinstance(part, list) else part.values() if isinstance(part, dict) else ():
        yield from menu(entry)


def described(page: Path) -> list[str]:
    return re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)


def test_the_menu_has_every_page_once(pages: ModuleType) -> None:
    listed = [page for page in menu(settings()["nav"]) if not page.startswith("repository/")]
    assert sorted(listed) == sorted(pages.uri_of(page) for page in DOCS.rglob("*.md"))


def test_no_two_pages_are_the_index_of_one_folder(pages: ModuleType) -> None:
    """mkdocs takes a README.md for an index.md, and leaves one of them out."""
    uris = [pages.uri_of(page).replace("README.md", "index.md") for page in DOCS.rglob("*.md")]
    assert len(set(uris)) == len(uris)
    assert pages.site_text("[all](docs/README.md#guides)", ROOT, "repository/README.md") == "[all](../pages.md#guides)"


def test_the_menus_pages_from_outside_docs_are_linked_from_a_page(pages: ModuleType) -> None:
    listed = {page for page in menu(settings()["nav"]) if page.startswith("repository/")}
    assert listed <= set(pages.linked(sorted(DOCS.rglob("*.md"))))


def test_nothing_is_loaded_from_elsewhere() -> None:
    """No fonts, and no script but our own; the worker's name is what keeps the offline plugin from loading its own."""
    found = settings()
    assert found["theme"]["font"] is False
    assert found["extra"]["polyfills"] == ["assets/iframe-worker.js"]
    assert (DOCS / "assets" / "iframe-worker.js").exists()
    assert "offline" in found["plugins"]
    assert "://" not in (ROOT / "mkdocs.yml").read_text()
    assert "repo_url" not in found  # the theme would ask the repository's host for its stars


@each_of(
    "loading",
    ['<script src="https://x.y/a.js">', "<link rel=stylesheet href=//x.y/a.css>", '<img alt="a" src="http://x.y/a.png">',
     "a { background: url('https://x.y/a.png') }", '@import "//x.y/a.css";'],
)  # fmt: skip
def test_a_page_that_loads_from_elsewhere_fails_the_build(loading: str) -> None:
    assets = hook("own_assets")
    assert len(list(assets.loaded_from_elsewhere(loading))) == 1
    own = '<a href="https://x.y">a link</a><script src="assets/a.js"></script><img src="../a.png">url(data:image/png)'
    assert list(assets.loaded_from_elsewhere(own)) == []


def test_the_hooks_of_the_site_are_those_in_its_folder() -> None:
    assert sorted(settings()["hooks"]) == sorted(f"docs/hooks/{file.name}" for file in (DOCS / "hooks").glob("*.py"))


@pytest.mark.slow
@with_lightning
@with_all_packages
def test_the_reference_has_every_public_name() -> None:
    named = {name for page in REFERENCE.glob("*.md") for name in described(page)}
    modules = {
        "callbacks",
        "data",
        "elastic",
        "lightning",
        "metrics",
        "nn",
        "notebook",
        "online",
        "optim",
        "ray",
        "transformers",
        "util",
    }
    wanted = {name for name in torchfleet.__all__ if name not in modules}
    last = {name.rpartition(".")[2] for name in named}
    assert sorted(wanted - last) == []
    for name in modules - {"metrics", "util"}:  # which have no __all__
        module = getattr(torchfleet, name)
        assert sorted(set(module.__all__) - last) == [], module.__name__


def test_every_function_of_fleet_says_what_it_does_and_what_its_arguments_are() -> None:
    missing = {}
    for name in described(REFERENCE / "fleet.md"):
        found = getattr(torchfleet, name.rpartition(".")[2])
        text = inspect.getdoc(found) or ""
        if inspect.isfunction(found):
            words = [word for word in inspect.signature(found).parameters if word not in text]
            if words or not text:
                missing[name] = words or "no docstring"
    assert missing == {}


@pytest.mark.slow
@with_lightning
@with_all_packages
@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.name)
def test_every_name_of_the_reference_exists(page: Path) -> None:
    for name in described(page):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
        assert page.read_text().count(f"::: {name}\n") == 1, name


def test_a_link_out_of_docs_leads_to_a_page_below_repository(pages: ModuleType) -> None:
    text = "[changes](../CHANGELOG.md#unreleased), [code](../torchfleet/api/saves.py), [data](data.md#slots), [web](https://x.y)"
    moved = pages.site_text(text, DOCS, "README.md")
    assert moved == (
        "[changes](repository/CHANGELOG.md#unreleased), [code](repository/torchfleet/api/saves.py.md), "
        "[data](data.md#slots), [web](https://x.y)"
    )


def test_a_page_below_repository_finds_the_documents_and_its_neighbours(pages: ModuleType) -> None:
    text = "[page](docs/modes/README.md), [rules](CONTRIBUTING.md), [example](examples/resnet/)"
    moved = pages.site_text(text, ROOT, "repository/README.md")
    assert moved == "[page](../modes/README.md), [rules](CONTRIBUTING.md), [example](examples/resnet/README.md)"


def test_links_in_code_and_to_nothing_stay(pages: ModuleType) -> None:
    text = "[gone](../none.md)\n```\n[changes](../CHANGELOG.md)\n```\n"
    assert pages.site_text(text, DOCS, "README.md") == text


def test_a_file_and_a_folder_become_pages(pages: ModuleType) -> None:
    assert pages.text_of(ROOT / "Makefile").startswith("# Makefile\n\n`````text\n")
    assert "[train.py](train.py)" in pages.text_of(ROOT / "examples" / "ctr_dnn")
    found = pages.linked([DOCS / "ctr_dnn.md"])
    assert {"repository/examples/ctr_dnn/index.md", "repository/examples/ctr_dnn/train.py.md"} <= set(found)


def test_lists_and_tables_behind_prose_get_an_empty_line(markdown: ModuleType) -> None:
    assert markdown.as_on_github("Say:\n- a\n  more\n- b\n") == "Say:\n\n- a\n  more\n- b\n"
    assert markdown.as_on_github("It has\n| a |\n|---|\n| b |\n") == "It has\n\n| a |\n|---|\n| b |\n"
    assert markdown.as_on_github("text\n```\nx\n- y\n```\n") == "text\n```\nx\n- y\n```\n"
    assert markdown.as_on_github("| `a\\|b` | c \\| d |\n") == "| `a|b` | c \\| d |\n"
