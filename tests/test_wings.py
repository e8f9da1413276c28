"""Which part of the package may import which: the wings from the ground up, and the floors of ps/ among themselves.

A module imports only its own part and parts that stand before it in `PARTS`: so no arrow runs upwards and there is no
circle, of types either. Thin modules at the top, which users import by name, stand above all of them.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

import torchfleet

PACKAGE = Path(torchfleet.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PARTS = (
    "base",
    "ps/kernels",
    "ps/net",
    "ps/coordination",
    "ps/tables",
    "ps/checkpoint",
    "ps/server",
    "ps/gpu",
    "ps/worker",
    "data",
    "collective",
    "api",
    "apps",
    "observe",
    "launch",
)
TOP = "what users import by name"
WITHOUT_TORCH = ("ps/kernels", "ps/net", "ps/coordination", "ps/tables", "ps/checkpoint", "ps/server")
MOST_FOLDERS = 10
MOST_LINES_AT_THE_TOP = 60
FEWEST_MODULES = 3  # of a folder; a smaller one is part of the folder above it


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if file.name == "__init__.py" else parts)


MODULES = {module_of(file): file for file in FILES}


def part_of(module: str) -> str:
    """The part that a module of the package belongs to."""
    place = module.replace(".", "/").removeprefix("torchfleet/")
    return next((part for part in PARTS if place == part or place.startswith(f"{part}/")), TOP)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements of a file, in their order; an import is never part of anything smaller."""
    yield node
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, part, ()):
            yield from statements(inner)


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything that is imported, anywhere in the file."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the package imports its modules by their whole names"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def imports_of(file: Path) -> list[str]:
    return list(imported(ast.parse(file.read_text(), str(file))))


def targets(name: str) -> Iterator[str]:
    """The module of the package that importing `name` (a module, or something in one) leads to."""
    yield from [module for module in (name, name.rpartition(".")[0]) if module in MODULES][:1]


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Module → the modules of the package that it imports."""
    return {module: {to for name in imports_of(file) for to in targets(name)} for module, file in MODULES.items()}


@pytest.mark.slow
def test_a_module_imports_only_the_parts_below_it() -> None:
    """What only a type checker imports counts too."""
    height = {part: floor for floor, part in enumerate((*PARTS, TOP))}
    upwards = [
        f"{module} imports {target}"
        for module, found in arrows().items()
        for target in found - {"torchfleet"}
        if height[part_of(target)] > height[part_of(module)]
    ]
    assert not upwards, "\n".join(upwards)


def test_no_modules_import_each_other_in_a_circle() -> None:
    order: set[str] = {"torchfleet"}  # its __init__ imports nothing of the package until a name is used
    left = {module: found for module, found in arrows().items() if module not in order}
    while ready := [module for module in left if module not in order and left[module] - {module} <= order]:
        order.update(ready)
    assert not set(left) - order, "these import each other"


def test_every_module_belongs_to_a_wing_or_is_thin() -> None:
    thin = [file for module, file in MODULES.items() if part_of(module) == TOP and file.parent == PACKAGE]
    others = [module for module, file in MODULES.items() if part_of(module) == TOP and file not in thin]
    assert others == ["torchfleet.ps"]
    thick = {file.name: lines for file in thin if (lines := len(file.read_text().splitlines())) > MOST_LINES_AT_THE_TOP}
    assert not thick


def test_the_package_opens_on_few_folders() -> None:
    folders = {file.relative_to(PACKAGE).parts[0] for file in FILES if file.parent != PACKAGE}
    assert len(folders) <= MOST_FOLDERS
    assert folders == {part.split("/")[0] for part in PARTS}


def test_docs_list_the_folders_of_every_wing() -> None:
    """In docs/architecture.md: the wings in their order, and inside of ps/ the folders, too."""
    table = re.findall(r"^\| `(\w+)/` \| (`.*?`) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    told = {wing: re.findall(r"`(\w+)/`", folders) for wing, folders in table}
    assert list(told) == list(dict.fromkeys(part.partition("/")[0] for part in PARTS))
    assert told["ps"] == [part.removeprefix("ps/") for part in PARTS if part.startswith("ps/")]
    for wing, folders in told.items():
        assert sorted(folders) == sorted(file.parent.name for file in (PACKAGE / wing).glob("*/__init__.py"))


def test_no_folder_holds_only_one_or_two_modules() -> None:
    modules = Counter(file.parent for file in FILES if file.name != "__init__.py")
    wings = {PACKAGE / part.split("/")[0] for part in PARTS}
    small = {str(folder): num for folder, num in modules.items() if num < FEWEST_MODULES and folder not in wings}
    assert not small


@pytest.mark.slow
def test_what_a_bare_server_needs_imports_no_torch() -> None:
    """By the text of its modules, and by what a process has loaded that can serve, log, replicate and save."""
    bare = [file for module, file in MODULES.items() if part_of(module) in WITHOUT_TORCH]
    found = {str(file): name for file in bare for name in imports_of(file) if name.split(".")[0] == "torch"}
    assert len(bare) > 100
    assert not found
    modules = [module for module in MODULES if part_of(module) in WITHOUT_TORCH]
    modules.append("torchfleet.apps.serve.versions.follow_process")  # the writer of versions
    code = "import importlib, sys\n["
    code += "importlib.import_module(name) for name in sys.argv[1:]]\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *modules], check=True, timeout=200)


def test_the_check_sees_every_way_to_import() -> None:
    code = "if TYPE_CHECKING:\n    import z\nelse:\n    import y\n"
    assert list(imported(ast.parse(code))) == ["z", "y"]
    assert list(imported(ast.parse("import a.b\nfrom torchfleet import errors"))) == ["a.b", "torchfleet.errors"]


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("torchfleet.base.errors", "base"),
        ("torchfleet.collective.world", "collective"),
        ("torchfleet.ps.tables.rows.keymap", "ps/tables"),
        ("torchfleet.online", TOP),
    ],
)
def test_the_check_knows_the_part_of_a_module(module: str, part: str) -> None:
    assert part_of(module) == part


TESTS = Path(__file__).parent
# Folders of tests that are about whole jobs or other code, not about one folder of the package.
WHOLE = ("benchmarks", "collective/gpu", "ecosystem", "examples", "extensions", "integration", "support")
ELSEWHERE = {"collective/test_pairs.py", "observe/doctor/test_links.py", "ps/server/test_worker_loss.py"}
"""Named by what they test, which is not the module of that name in another wing."""


def test_the_tests_mirror_the_package() -> None:
    """A folder of tests is a folder of the package; a file that has a module's name lies in that module's folder."""
    homes: dict[str, set[Path]] = {}
    for file in (file for file in FILES if file.parent != PACKAGE):
        homes.setdefault(file.stem, set()).add(file.parent.relative_to(PACKAGE))
    folders = {home for found in homes.values() for home in found}
    astray = []
    for file in TESTS.rglob("test_*.py"):
        place = file.relative_to(TESTS)
        if place.parent == Path() or str(place) in ELSEWHERE or str(place).startswith(WHOLE):
            continue
        module = file.stem.removeprefix("test_")
        if place.parent not in folders or place.parent not in homes.get(module, {place.parent}):
            astray.append(str(place))
    assert not astray
