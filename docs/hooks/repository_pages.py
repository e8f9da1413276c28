"""Files of the repository outside docs/, as pages of the site: every link of a page works there, also offline.

A page of docs/ may link to `../CHANGELOG.md`, `../examples/ctr_dnn/` or `../torchfleet/api/saves.py`, as it does in the
repository. What such a link leads to becomes a page below `repository/`: Markdown as it is, a folder as its README or
a list of its files, other text as one block of code. docs/README.md, which lists all pages, becomes `pages.md`: the
site opens on docs/index.md, and mkdocs takes both for the same page. mkdocs.yml names this file under `hooks`.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BELOW = "repository"  # the folder of the site
ALL_PAGES = "pages.md"  # docs/README.md on the site
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json"}

_FENCED = re.compile(r"^(`{3,}).*?^\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)(#[^)\s]*)?(?=\))")
_NAMED = re.compile(r"\bdocs/((?:\w+/)*\w+)\.md(#[\w-]+)?")  # a page, as docstrings name it

_log = logging.getLogger("mkdocs.hooks.repository_pages")  # below mkdocs: --strict counts its warnings


def uri_of(path: Path) -> str:
    """Where a file or folder of the repository stands on the site, as the source of a page."""
    if path.is_dir():
        path = path / ("README.md" if (path / "README.md").exists() else "index.md")
    if path == DOCS / "README.md":
        return ALL_PAGES
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = f"{BELOW}/{path.relative_to(ROOT).as_posix()}"
    return uri if path.suffix == ".md" else f"{uri}.md"


def outside_code(text: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each with whether it is prose."""
    end = 0
    for block in _FENCED.finditer(text):
        yield text[end : block.start()], True
        yield block[0], False
        end = block.end()
    yield text[end:], True


def target_of(link: str, folder: Path) -> Path | None:
    """What a link of a page in `folder` leads to; None if that is no file of the repository."""
    path = (folder / link).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None


def targets(text: str, folder: Path) -> Iterator[Path]:
    """All files and folders of the repository that a page in `folder` links to."""
    for piece, is_prose in outside_code(text):
        for link in _LINK.finditer(piece) if is_prose else ():
            target = target_of(link[1], folder)
            if target is not None:
                yield target


def site_text(text: str, folder: Path, uri: str) -> str:
    """The page's text with links as they are on the site, where the page is `uri`. Links to nothing stay."""

    def moved(link: re.Match[str]) -> str:
        target = target_of(link[1], folder)
        if target is None:
            return link[0]
        return posixpath.relpath(uri_of(target), posixpath.dirname(uri) or ".") + (link[2] or "")

    return "".join(_LINK.sub(moved, piece) if is_prose else piece for piece, is_prose in outside_code(text))


def text_of(path: Path) -> str:
    """A file or folder as Markdown."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = sorted(p.name for p in path.iterdir() if p.suffix in {*LANGUAGES, ".md"})
        return f"# {name}/\n\n" + "".join(f"- [{file}]({file})\n" for file in files)
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"# {name}\n\n`````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n`````\n"


def linked(sources: list[Path]) -> dict[str, Path]:
    """The pages outside docs/ that these lead to, over any number of links: uri to file or folder."""
    found: dict[str, Path] = {}
    waiting = [(source.read_text(encoding="utf-8"), source.parent) for source in sources]
    while waiting:
        text, folder = waiting.pop()
        for target in targets(text, folder):
            path = target / "README.md" if (target / "README.md").exists() else target
            uri = uri_of(path)
            if uri not in found and not path.is_relative_to(DOCS):
                found[uri] = path
                waiting.append((text_of(path), path if path.is_dir() else path.parent))
    return found


_pages: dict[str, Path] = {}  # of the present build


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs once: adds the pages."""
    from mkdocs.structure.files import File, InclusionLevel

    _pages.clear()
    _pages.update(linked(sorted(DOCS.rglob("*.md"))))
    _pages[ALL_PAGES] = DOCS / "README.md"
    for uri, path in sorted(_pages.items()):
        files.append(File.generated(config, uri, content=text_of(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Called by mkdocs for every page: its links, as they are on the site."""
    uri = page.file.src_uri
    path = _pages.get(uri, DOCS / uri)
    return site_text(markdown, path if path.is_dir() else path.parent, uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Called by mkdocs for every page: `docs/data.md` in a docstring becomes a link."""
    if not page.file.src_uri.startswith("reference/"):
        return html

    def linked_name(name: re.Match[str]) -> str:
        target = files.get_file_from_path(f"{name[1]}.md")
        if target is None:
            _log.warning("%s: a docstring names %s, which does not exist", page.file.src_uri, name[0])
            return name[0]
        return f'<a href="{target.url_relative_to(page.file)}{name[2] or ""}">{name[0]}</a>'

    return _NAMED.sub(linked_name, html)
