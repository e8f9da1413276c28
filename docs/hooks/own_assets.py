"""The site works without a network: a build fails if a page would load something from another host.

Links that a reader follows may lead anywhere. mkdocs.yml names this file under `hooks`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

_TAG = re.compile(r"<(?:script|link|img|iframe|source|video|audio|object|embed|use)\b[^>]*>", re.IGNORECASE)
_ADDRESS = re.compile(r"\b(?:src|href|data|srcset|poster)\s*=\s*[\"']?\s*((?:https?:)?//[^\"'\s>]+)", re.IGNORECASE)
_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?\s*((?:https?:)?//[^\"')\s;]+)", re.IGNORECASE)


def loaded_from_elsewhere(text: str) -> Iterator[str]:
    """Addresses on other hosts that a browser asks for when it shows this page or style sheet."""
    for tag in _TAG.finditer(text):
        yield from _ADDRESS.findall(tag[0])
    yield from _STYLE.findall(text)


def on_post_build(config: MkDocsConfig) -> None:
    """Called by mkdocs when all pages are written."""
    from mkdocs.exceptions import PluginError

    folder = Path(config.site_dir)
    files = (file for file in sorted(folder.rglob("*")) if file.suffix in (".html", ".css"))
    found = [
        f"{file.relative_to(folder)}: {address}"
        for file in files
        for address in loaded_from_elsewhere(file.read_text(encoding="utf-8"))
    ]
    if found:
        raise PluginError("the site has to work without a network, but loads\n" + "\n".join(found))
