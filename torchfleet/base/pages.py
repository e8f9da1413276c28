"""Addresses of the documents' pages, and the pages as text: those of the checkout, or those that the wheel installs."""

from __future__ import annotations

import re
from pathlib import Path

from torchfleet.base.errors import FleetError

_CHECKOUT = Path(__file__).parents[2] / "docs"
INSTALLED = "share/doc/torchfleet"  # data-files of pyproject.toml


def page(address: str) -> str:
    """The command that shows a page, for errors and help: `page("faults#backups")` is "fleet docs faults#backups"."""
    return f"fleet docs {address}"


def addresses() -> dict[str, Path]:
    """The files of all pages by address: docs/modes/async.md is "modes/async", docs/modes/README.md is "modes"."""
    if (_CHECKOUT.parent / "pyproject.toml").is_file():  # other packages may install a folder docs beside this one
        files = {str(path.relative_to(_CHECKOUT)): path for path in _CHECKOUT.rglob("*.md")}
    else:
        from importlib import metadata

        own = metadata.files("torchfleet") or []
        places = {str(file).partition(f"{INSTALLED}/")[2]: Path(str(file.locate())) for file in own}
        files = {name: path for name, path in places.items() if name.endswith(".md")}
    found = {name.removesuffix(".md").removesuffix("/README"): path for name, path in files.items()}
    return {address: found[address] for address in sorted(found) if address != "index"}


def text_of(address: str) -> str:
    """A page, or with `#anchor` its section of that name. Raises FleetError if there is none."""
    name, _, anchor = address.partition("#")
    pages = addresses()
    if name not in pages:
        parts = [known for known in pages if name.lower() in known.lower()] if name else []
        near = f" Near: {', '.join(parts)}." if parts else ""
        raise FleetError(f"expected a page, found {name!r}.{near} `fleet docs` lists all pages")
    text = pages[name].read_text(encoding="utf-8")
    return _section(text, address, anchor) if anchor else text


def title_of(path: Path) -> str:
    """The heading of a page."""
    first = next((line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")), "")
    return first.removeprefix("# ")


def _section(text: str, address: str, anchor: str) -> str:
    headings = _headings(text.splitlines())
    for place, (line, depth, name) in enumerate(headings):
        if name == anchor:
            end = next((later for later, level, _ in headings[place + 1 :] if level <= depth), None)
            return "\n".join(text.splitlines()[line:end]) + "\n"
    known = ", ".join(name for _, _, name in headings[1:])
    raise FleetError(f"expected a section of that page, found {address!r}. Its sections: {known}")


def _headings(lines: list[str]) -> list[tuple[int, int, str]]:
    """(line, depth, anchor) of each heading; comments of code between ``` do not count."""
    found, is_code = [], False
    for number, line in enumerate(lines):
        is_code ^= line.startswith("```")
        depth = len(line) - len(line.lstrip("#"))
        if depth and not is_code and line[depth : depth + 1] == " ":
            found.append((number, depth, _anchor(line[depth:])))
    return found


def _anchor(heading: str) -> str:
    """As GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
