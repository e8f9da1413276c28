"""The modules of a script's folder that a script imports, found by reading sources: nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from torchfleet.base.errors import RoleError

OWN = "torchfleet"  # the nodes have it: it is not sent even if it lies beside the script
_DYNAMIC = ("import_module", "__import__")  # followed if the name of the module is a literal
_MOST_NAME = 200  # characters of a text that may be the path of a file


@dataclass
class Sources:
    """The sources that a script consists of, and the files of its folder that they name without importing them."""

    folder: Path
    otherwise: str  # what the user can do about a source that cannot be read
    files: list[Path] = field(default_factory=list)  # the script first, each file before those that only it imports
    mentioned: dict[Path, Path] = field(default_factory=dict)  # by file: the source that names it
    compiled: list[Path] = field(default_factory=list)  # modules without a Python source
    unknown: dict[Path, list[int]] = field(default_factory=dict)  # by source: lines that import a computed name

    def follow(self, scripts: Sequence[Path]) -> Sources:
        """Add the scripts and all modules of the folder that they import, directly or indirectly. Raises
        RoleError.
        """
        waiting = list(scripts)
        while waiting:
            path = waiting.pop(0)
            if path in self.files:
                continue
            self.files.append(path)
            tree = self._parse(path)
            package = path.parent.relative_to(self.folder).parts
            for name in _imports(tree, package):
                waiting += self._modules(name)
            if lines := _unknown_imports(tree, package):
                self.unknown[path] = lines
            for text in _texts(tree):
                if (named := self._named(text)) is not None:
                    self.mentioned.setdefault(named, path)
        return self

    def modules(self, dotted: str) -> list[Path]:
        """The sources that `python -m` executes for this module or package; empty if it is not in the folder."""
        return [
            *dict.fromkeys((*self._modules(tuple(dotted.split("."))), *self._modules((*dotted.split("."), "__main__"))))
        ]

    def _modules(self, name: tuple[str, ...]) -> Iterator[Path]:
        """The files that are executed when this dotted name is imported; empty for a module from elsewhere."""
        place = self.folder
        if name[:1] == (OWN,):
            return
        for part in name:
            if not part.isidentifier():
                return
            compiled = next((place / f for f in _names(place) if f.startswith(f"{part}.") and f.endswith(".so")), None)
            place = place / part
            if (place / "__init__.py").is_file():
                yield place / "__init__.py"
            elif compiled is not None:
                if compiled not in self.compiled:
                    self.compiled.append(compiled)
                return
            elif place.with_name(f"{part}.py").is_file():
                yield place.with_name(f"{part}.py")
                return
            elif not place.is_dir():
                return

    def _parse(self, path: Path) -> ast.Module:
        try:
            return ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError) as error:
            raise RoleError(
                f"{path} cannot be read as Python, so that its imports are not known: {error}. Mend it, or "
                f"{self.otherwise}"
            ) from None
        except OSError as error:
            raise RoleError(f"cannot read {path}, which is sent with the script: {error}") from None

    def _named(self, text: str) -> Path | None:
        if len(text) > _MOST_NAME or not ("." in text or "/" in text) or "\0" in text:
            return None
        path = self.folder / text
        try:
            is_below = path.resolve().is_relative_to(self.folder.resolve())
            return path if is_below and path.is_file() and not path.name.startswith(".") else None
        except (OSError, RuntimeError, UnicodeError):  # links in a circle, or a text that no path can have
            return None


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The dotted names that a file of `package` imports anywhere, also inside of functions. What is imported `from` a
    package may be a module or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute("." * node.level + (node.module or ""), package)
            if module is not None:
                yield from ((*module, alias.name) for alias in node.names)
        elif _is_dynamic(node):
            name = _dynamic_name(node, package)
            if name is not None:
                yield name
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_called(target) == "__all__" for target in targets):
                # `from package import *` imports the modules that are named here
                yield from ((*package, text) for text in _texts(node.value))


def _unknown_imports(tree: ast.Module, package: tuple[str, ...]) -> list[int]:
    """The lines that import a module whose name is not a literal."""
    return sorted(
        {node.lineno for node in ast.walk(tree) if _is_dynamic(node) and _dynamic_name(node, package) is None}
    )


def _is_dynamic(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and _called(node.func) in _DYNAMIC and bool(node.args or node.keywords)


def _dynamic_name(call: ast.Call, package: tuple[str, ...]) -> tuple[str, ...] | None:
    """The dotted name of import_module("name", package="package"); None if it is not a literal."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    name = call.args[0] if call.args else given.get("name")
    anchor = given.get("package")
    if _called(call.func) == "import_module" and len(call.args) > 1:
        anchor = call.args[1]
    if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
        return None
    if not name.value.startswith(".") or anchor is None or _called(anchor) in ("__package__", "__name__"):
        return _absolute(name.value, package)
    if isinstance(anchor, ast.Constant) and isinstance(anchor.value, str):
        return _absolute(name.value, tuple(anchor.value.split(".")))
    return None


def _absolute(name: str, package: tuple[str, ...]) -> tuple[str, ...] | None:
    """Resolve leading dots; None if they lead out of all packages."""
    level = len(name) - len(name.lstrip("."))
    if level > len(package):
        return None
    base = package[: len(package) - level + 1] if level else ()
    return (*base, *(part for part in name[level:].split(".") if part))


def _called(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _texts(tree: ast.AST) -> Iterator[str]:
    """The words of all string literals of a source, except docstrings."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield from node.value.split()
