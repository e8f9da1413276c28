"""The syntax trees of a script and of the modules that it imports: where a function is called, and what runs after it.

Nothing is executed. Where the trees do not tell, the answer is the one with which servers run the script.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.script_imports import OWN, Sources

_BLOCKS = ("body", "orelse", "handlers", "finalbody")


class NeedsScript(Exception):
    """Servers must run the script, for the reason in the text. The text is empty if the source cannot be read or does
    not even show that servers serve.
    """


class ScriptTree:
    """The tree of one file. `aliases`: the names under which it has imported torchfleet."""

    def __init__(self, path: Path, is_script: bool) -> None:
        """Raises OSError, SyntaxError or ValueError if the file cannot be read as Python."""
        self.path, self.is_script = path, is_script
        self.tree = ast.parse(path.read_bytes(), str(path))
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        imports = [alias for node in self.nodes if isinstance(node, ast.Import) for alias in node.names]
        self.aliases = {alias.asname or OWN for alias in imports if alias.name == OWN}
        docstrings = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        constants = [node for node in self.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        self.texts = [node for node in constants if id(node) not in docstrings]

    def place(self, node: ast.AST) -> str:
        return f"{self.path.name}, line {getattr(node, 'lineno', 1)}"

    def fleet_call(self, node: ast.AST | None) -> str:
        """The name of the function of torchfleet that this node calls as `fleet.NAME(...)`; "" if it does not."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return ""
        is_fleet = isinstance(node.func.value, ast.Name) and node.func.value.id in self.aliases
        return node.func.attr if is_fleet else ""

    def mentions(self, function: ast.FunctionDef) -> Iterator[ast.AST]:
        """The nodes that may mean this function of one of the files: its name here, or where it is imported, and every
        attribute of its name."""
        is_own = function in self.parents
        is_known = is_own or any(isinstance(node, ast.alias) and node.name == function.name for node in self.nodes)
        for node in self.nodes:
            if (isinstance(node, ast.Name) and is_known) or isinstance(node, ast.Attribute):
                if name_of(node) == function.name:
                    yield node
            elif isinstance(node, ast.FunctionDef) and is_own and node is not function and node.name == function.name:
                yield node

    def fleet_names(self) -> set[str]:
        """The names that imports of torchfleet, or of something in it, have bound."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names = [alias.asname or OWN for alias in node.names if alias.name.split(".")[0] == OWN]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == OWN:
                names = [alias.asname or alias.name for alias in node.names]
            else:
                continue
            found.update(names)
        return found

    def function_of(self, node: ast.AST) -> ast.AST:
        """The function in which a node stands, or the module."""
        while not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module, ast.Lambda, ast.ClassDef)):
            node = self.parents[node]
        return node

    def statement_of(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def top_imports(self) -> Iterator[tuple[ast.AST, str]]:
        """The dotted names that are imported anywhere in the file, except relative ones."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node, node.module
                yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def read_trees(folder: Path, script: str, is_module: bool) -> list[ScriptTree]:
    """Return the trees of the script in `folder` and of all sources that it imports and that are not installed. Raises
    NeedsScript if one of them cannot be read."""
    roots = {folder: Sources(folder, "")}
    trees: dict[Path, ScriptTree] = {}
    try:
        first = roots[folder].modules(script) if is_module else [Path(script).absolute()]
        roots[folder].follow(first)
        while new := [path for sources in roots.values() for path in sources.files if path not in trees]:
            trees |= {path: ScriptTree(path, path in first) for path in new}
            for name in {name for path in new for _, name in trees[path].top_imports()}:
                root = _root_of(name.split(".")[0], folder)
                if root is not None:
                    sources = roots.setdefault(root, Sources(root, ""))
                    sources.follow(sources.modules(name))
    except (RoleError, OSError, SyntaxError, ValueError, RecursionError):
        raise NeedsScript("") from None  # the script itself will say what is wrong
    for sources in roots.values():
        for path, lines in sources.unknown.items():
            raise NeedsScript(f"{path.name}, line {lines[0]}, imports a module whose name is computed")
        if sources.compiled:
            raise NeedsScript(f"{sources.compiled[0].name} cannot be read")
    return list(trees.values())


def _root_of(name: str, folder: Path) -> Path | None:
    """The folder from which a module of this name is imported. None if it is installed, or if it is in the script's
    folder, where it has been read already."""
    if name in (OWN, *sys.stdlib_module_names) or (folder / name).is_dir() or (folder / f"{name}.py").is_file():
        return None
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        return None  # the script will not find it either
    if found is None or found.origin in ("built-in", "frozen"):
        return None
    places = list(found.submodule_search_locations or [])
    place = Path(places[0]) if places else Path(str(found.origin))
    installed = tuple(str(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    is_installed = {"site-packages", "dist-packages"} & set(place.parts) or str(place).startswith(installed)
    return None if is_installed else place.parent


def name_of(node: ast.AST) -> str:
    """The last name of `a`, `a.b` or an imported name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2]
    return node.id if isinstance(node, ast.Name) else ""


def is_last(
    trees: Sequence[ScriptTree], own: ScriptTree, statement: ast.stmt, seen: frozenset[int] = frozenset()
) -> bool:
    """Whether the process ends when this statement of the file `own` has been executed, as far as the trees tell."""
    parent = own.parents[statement]
    blocks = [block for name in _BLOCKS if isinstance(block := getattr(parent, name, None), list)]
    block = next((block for block in blocks if statement in block), [])
    if not block or block[-1] is not statement:
        return False
    if isinstance(parent, ast.Module):
        return own.is_script
    if isinstance(parent, ast.If):
        return is_last(trees, own, parent, seen)
    if isinstance(parent, ast.Try):
        is_plain = statement in parent.body and not parent.orelse and not parent.finalbody
        return is_plain and is_last(trees, own, parent, seen)
    return isinstance(parent, ast.FunctionDef) and ends_with(trees, parent, seen)


def ends_with(trees: Sequence[ScriptTree], function: ast.FunctionDef, seen: frozenset[int] = frozenset()) -> bool:
    """Whether the process ends when this function has returned: every mention of its name is a call at the end."""
    if id(function) in seen or function.decorator_list:
        return False
    mentions = [(tree, node) for tree in trees for node in tree.mentions(function)]
    return bool(mentions) and all(_calls_last(trees, tree, node, seen | {id(function)}) for tree, node in mentions)


def _calls_last(trees: Sequence[ScriptTree], tree: ScriptTree, node: ast.AST, seen: frozenset[int]) -> bool:
    call = tree.parents.get(node)
    if not isinstance(call, ast.Call) or call.func is not node:
        return False
    statement = tree.statement_of(call)
    if ends_process(statement) and call in ast.walk(statement):
        return True
    if isinstance(statement, ast.Return) and statement.value is call:
        function = tree.function_of(statement)
        return isinstance(function, ast.FunctionDef) and ends_with(trees, function, seen)
    is_whole = isinstance(statement, ast.Expr) and statement.value is call
    return is_whole and is_last(trees, tree, statement, seen)


def ends_process(statement: ast.stmt) -> bool:
    """Whether this is sys.exit(...) or raise SystemExit."""
    if isinstance(statement, ast.Raise) and statement.exc is not None:
        raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return name_of(raised) == "SystemExit"
    called = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(called, ast.Call) and name_of(called.func) == "exit"
