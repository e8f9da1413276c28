"""The files of the page, read into memory once: no request reaches the file system through their names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class PageFile:
    content_type: str
    body: bytes


@cache
def page_files() -> dict[str, PageFile]:
    """By path of the URL."""
    found = {
        f"/{path.relative_to(_FOLDER).as_posix()}": PageFile(_TYPES[path.suffix], path.read_bytes())
        for path in _FOLDER.rglob("*")
        if path.suffix in _TYPES
    }
    return {"/": found["/index.html"], **found}
