"""Which part of the package may import which, and what none of it may do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchfleet

PACKAGE = Path(torchfleet.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Part of the package → the other parts that it may import. A new module or folder is one line here.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),  # loads its names when they are first used
    "errors": set(),
    "status": set(),
    "role": {"errors"},
    "settings": {"errors"},
    "checks": {"settings", "errors"},
    "strategy": {"checks", "prototxt", "settings", "errors"},
    "options": {"settings", "strategy", "prototxt", "errors"},
    "prototxt": {"paddle_fields", "settings", "textformat", "errors"},
    "paddle_fields": set(),
    "textformat": {"errors"},
    "collective": {"checkpoint", "data", "role", "settings", "status", "strategy", "errors"},
    "classify": {"collective", "data", "fleet", "strategy", "errors"},
    "nn": {"collective", "tables", "errors"},
    "fetch": {"errors"},
    "training": {"data", "fetch", "ps", "errors"},
    "fleet": {
        "checkpoint",
        "collective",
        "data",
        "fetch",
        "job",
        "printing",
        "ps",
        "role",
        "status",
        "strategy",
        "tables",
        "training",
        "errors",
    },
    "datasets": {"fleet", "data", "errors"},
    "util": {"fleet", "errors"},
    "job": {"checkpoint", "net", "nn", "ps", "role", "server", "status", "strategy", "tables", "errors"},
    "printing": {"job", "ps", "role"},
    "launch": {"net", "ps", "status", "errors"},
    "kernels": set(),
    "data": {"tables", "kernels", "errors"},
    "checkpoint": {"tables", "errors"},
    "word2vec": {"checkpoint", "data", "fleet", "kernels", "nn", "ps", "errors"},
    "infer": {"collective", "fleet", "nn", "ps", "checkpoint", "tables", "errors"},
    "metrics": {"fleet", "util", "errors"},
    "command": {"checkpoint", "collective", "commands", "data", "errors"},
    "commands": {"checkpoint", "collective", "data", "net", "ps", "tables", "errors"},
    "online": {"checkpoint", "data", "fleet", "metrics", "errors"},
    "tables": {"kernels", "errors"},
    "net": {"errors"},
    "server": {"checkpoint", "net", "tables", "kernels", "errors"},
    "ps": {"checkpoint", "net", "nn", "tables", "kernels", "errors"},
}
WITHOUT_TORCH = {"checkpoint", "errors", "kernels", "tables", "net", "server"}
RUNS_FOREIGN_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but for what only a type checker sees."""
    is_for_types = isinstance(tree, ast.If) and ast.unparse(tree.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    yield tree
    for node in tree.orelse if is_for_types else ast.iter_child_nodes(tree):
        yield from walk(node)


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names of everything that is imported, anywhere in the file; `package` is what a dot stands for."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (origin, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def offences(tree: ast.AST) -> list[str]:
    """What runs code out of data: pickle and its like, eval and exec, torch.load and numpy.load that unpickle."""
    imports = [name for name in imported(tree, "torchfleet") if name.split(".")[0] in RUNS_FOREIGN_CODE]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return imports + [f"line {call.lineno}: {ast.unparse(call)}" for call in calls if is_unsafe(call)]


def is_unsafe(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return (
        name in ("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec")
        or name.rpartition(".")[2] in ("recv_pyobj", "send_pyobj")
        or (name == "torch.load" and options.get("weights_only") != "True")
        or options.get("allow_pickle", "False") != "False"
    )


def parse(file: Path) -> ast.AST:
    return ast.parse(file.read_text(), str(file))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_module_imports_only_the_layers_below_it(file: Path) -> None:
    part = part_of(file)
    assert part in MAY_IMPORT, f"'{part}' is new: say what it may import in MAY_IMPORT in {Path(__file__).name}"
    package = ".".join(("torchfleet", *file.relative_to(PACKAGE).parts[:-1]))
    for name in imported(parse(file), package):
        top, *rest = name.split(".")
        if top == "torchfleet" and rest:
            target = rest[0]
            assert target == part or target in MAY_IMPORT[part], (
                f"{file.relative_to(PACKAGE)} imports {name}, but '{part}' may import only {sorted(MAY_IMPORT[part])}"
            )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_what_a_bare_server_needs_imports_no_torch(file: Path) -> None:
    if part_of(file) in WITHOUT_TORCH:
        assert not [name for name in imported(parse(file), "torchfleet") if name.split(".")[0] == "torch"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_module_can_run_code_out_of_data(file: Path) -> None:
    assert not offences(parse(file))


def test_every_line_of_the_table_is_about_something_that_exists() -> None:
    assert set(MAY_IMPORT) == {part_of(file) for file in FILES}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "def f():\n    import dill",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "socket.recv_pyobj()",
    ],
)
def test_the_check_sees_code_that_runs_data(line: str) -> None:
    assert offences(ast.parse(line))


@pytest.mark.parametrize("line", ["model.eval()", "torch.load(path, weights_only=True)", "re.compile('a')"])
def test_the_check_lets_honest_code_pass(line: str) -> None:
    assert not offences(ast.parse(line))


def test_the_check_sees_every_way_to_import_but_for_types() -> None:
    code = "if TYPE_CHECKING:\n    import z\nelse:\n    import y\n"
    assert list(imported(ast.parse(code), "torchfleet.net")) == ["y"]
    code = "import a.b\nfrom torchfleet import errors\nfrom . import wire\nfrom .. import ps\nfrom ..tables import spec"
    found = list(imported(ast.parse(code), "torchfleet.net"))
    assert found == ["a.b", "torchfleet.errors", "torchfleet.net.wire", "torchfleet.ps", "torchfleet.tables.spec"]
