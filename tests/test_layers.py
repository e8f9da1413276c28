"""Which room of the package may import which.

A room is a folder, or a file that stands at the top or on a floor of its own. Rooms are listed from the ground up, and
one imports only what stands above it in the list: so no arrow runs upwards and there is no circle, of types either.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchfleet

PACKAGE = Path(torchfleet.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_FILES = 16  # of one folder: what a reader takes in

TABLES = {"tables", "tables/settings", "tables/rows"}
WORKER = {
    "worker",
    "worker/client",
    "worker/batch",
    "worker/weights",
    "worker/row_state",
    "worker/lookup",
    "worker/modes",
}
CORE = {
    "collective/world",
    "collective/tensors",
    "collective/buckets",
    "collective/closures",
    "collective/strategy",
}

# Room → the rooms below it that it may import. A new room is one line here, behind everything that it needs.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "extras": {"errors"},
    "cgroups": set(),
    "adoption": set(),
    "guard": {"errors"},
    "background": {"errors"},
    "exchange": {"errors"},
    "kernels": {"guard", "errors"},
    "monitor": {"errors"},
    "monitor/prometheus": {"monitor", "extras", "errors"},
    "role": {"errors"},
    "storage": {"errors"},
    "fetch": {"errors"},
    "net": {"guard", "errors"},
    "coordination": {"guard", "errors"},
    "tracing": {"extras", "errors"},
    "profiling": {"tracing", "monitor", "errors"},
    # tables and their servers: no torch
    "tables/settings": {"monitor", "kernels", "errors"},
    "tables/rows": {"tables/settings", "kernels", "cgroups", "errors"},
    "tables/policies": {"tables/settings", "tables/rows", "kernels", "errors"},
    "tables": {"tables/settings", "tables/rows", "tables/policies", "kernels", "errors"},
    "checkpoint": {*TABLES, "storage", "errors"},
    "checkpoint/exporting": {"checkpoint", "storage", "extras", "errors"},
    "server/meeting": {"net", "role", "errors"},
    "server/state": {
        *TABLES,
        "server/meeting",
        "monitor",
        "monitor/prometheus",
        "net",
        "kernels",
        "cgroups",
        "guard",
        "errors",
    },
    "server/saving": {
        *TABLES,
        "server/state",
        "checkpoint",
        "storage",
        "net",
        "kernels",
        "background",
        "monitor",
        "errors",
    },
    "server/traces": {"net", "tracing", "monitor", "errors"},
    "server": {
        *TABLES,
        "tables/policies",
        "server/meeting",
        "server/state",
        "server/saving",
        "server/traces",
        "net",
        "kernels",
        "background",
        "monitor",
        "errors",
    },
    "server/log": {
        *TABLES,
        "tables/policies",
        "server",
        "server/meeting",
        "server/state",
        "server/saving",
        "net",
        "kernels",
        "background",
        "monitor",
        "errors",
    },
    "server/replicas": {"server/log", "server", "coordination", "net", "errors"},
    "server/__main__": {
        "tables/settings",
        "role",
        "server",
        "server/log",
        "server/state",
        "server/traces",
        "tracing",
        "net",
        "errors",
    },
    # workers
    "strategy": {"errors"},
    "worker/client": {*TABLES, "checkpoint", "net", "tracing", "monitor", "kernels", "errors"},
    "worker/batch": {"worker/client", "errors"},
    "worker/weights": {"errors"},
    "worker/row_state": {*TABLES, "worker/client", "monitor", "errors"},
    "worker/lookup": {
        *TABLES,
        "worker/client",
        "worker/batch",
        "worker/weights",
        "worker/row_state",
        "checkpoint",
        "kernels",
        "errors",
    },
    "worker/modes": {
        "strategy",
        *TABLES,
        "worker/client",
        "worker/batch",
        "worker/row_state",
        "worker/lookup",
        "net",
        "tracing",
        "kernels",
        "background",
        "errors",
    },
    "worker": {*TABLES, *WORKER, "checkpoint", "storage", "role", "net", "kernels", "adoption", "background", "errors"},
    "data/samples": {"tables/rows", "kernels", "errors"},
    "data/columns": {"data/samples", "kernels", "extras", "errors"},
    "data/reading": {"data/samples", "data/columns", "kernels", "errors"},
    "data": {
        "data/samples",
        "data/columns",
        "data/reading",
        "tables/rows",
        "monitor",
        "kernels",
        "background",
        "extras",
        "errors",
    },
    "training": {"data", "data/samples", "worker", "worker/lookup", "fetch", "monitor", "background", "errors"},
    # collective training
    "collective/world": {"role", "strategy", "errors"},
    "collective/tensors": {"errors"},
    "collective/buckets": {"collective/world"},
    "collective/closures": set(),
    "collective/strategy": {"collective/world", "strategy"},
    "collective/gradient_average": {*CORE, "strategy", "errors"},
    "collective/strategies/layerwise": {*CORE, "strategy", "errors"},
    "collective/strategies/recomputation": {*CORE, "strategy", "errors"},
    "collective/strategies/mixed_precision": {*CORE, "strategy", "errors"},
    "collective/strategies/sharding": {*CORE, "collective/strategies/mixed_precision", "strategy", "errors"},
    "collective/strategies": {*CORE, "collective/strategies/layerwise", "strategy", "errors"},
    "collective/pipeline": {
        *CORE,
        "collective/gradient_average",
        "collective/strategies/recomputation",
        "strategy",
        "errors",
    },
    "collective/meeting": {"collective/world", "background", "errors"},
    "collective/layers": {*CORE, "collective/gradient_average", "strategy", "errors"},
    "collective/checkpoint": {
        *CORE,
        "collective/strategies/sharding",
        "checkpoint",
        "storage",
        "monitor",
        "background",
        "errors",
    },
    "collective": {
        *CORE,
        "collective/gradient_average",
        "collective/meeting",
        "collective/checkpoint",
        "role",
        "strategy",
        "profiling",
        "tracing",
        "monitor",
        "monitor/prometheus",
        "adoption",
        "errors",
    },
    # jobs, and what users import
    "hybrid": {
        *WORKER,
        "collective",
        "collective/world",
        "collective/tensors",
        "collective/meeting",
        "collective/strategy",
        "kernels",
        "monitor",
        "net",
        "role",
        "strategy",
        "background",
        "errors",
    },
    "callbacks": {"monitor", "extras", "errors"},
    "options": {"strategy"},
    "nn": {"worker/lookup", "collective/layers", "errors"},
    "job/attaching": {
        *WORKER,
        "server",
        "server/saving",
        "profiling",
        "tracing",
        "role",
        "net",
        "adoption",
    },
    "job": {
        *TABLES,
        *WORKER,
        "job/attaching",
        "hybrid",
        "server",
        "server/state",
        "server/saving",
        "server/replicas",
        "coordination",
        "server/log",
        "server/traces",
        "profiling",
        "tracing",
        "checkpoint",
        "storage",
        "strategy",
        "monitor",
        "monitor/prometheus",
        "fetch",
        "role",
        "net",
        "adoption",
        "background",
        "errors",
    },
    "facade": {
        *WORKER,
        "callbacks",
        "tables/settings",
        "checkpoint",
        "storage",
        "collective",
        "collective/checkpoint",
        "data",
        "data/samples",
        "fetch",
        "job",
        "monitor",
        "role",
        "strategy",
        "training",
        "adoption",
        "errors",
    },
    "fleet": {"facade"},
    "util": {"fleet", "errors"},
    "metrics": {"fleet", "util", "errors"},
    "datasets": {"fleet", "data", "data/reading", "data/samples", "errors"},
    "infer": {
        *TABLES,
        "worker/client",
        "worker/row_state",
        "worker/lookup",
        "collective/checkpoint",
        "checkpoint",
        "storage",
        "fleet",
        "errors",
    },
    "plain": {"worker/lookup", "worker/row_state", "fleet", "errors"},
    "preparation": {"fleet", "collective/tensors", "role", "strategy", "errors"},
    "lightning": {
        "fleet",
        "preparation",
        "exchange",
        "worker/row_state",
        "collective/tensors",
        "strategy",
        "role",
        "extras",
        "errors",
    },
    "transformers": {
        "fleet",
        "preparation",
        "collective",
        "collective/tensors",
        "strategy",
        "role",
        "extras",
        "errors",
    },
    "online": {"data", "storage", "fleet", "metrics", "extras", "errors"},
    "word2vec": {
        "worker/lookup",
        "worker/modes",
        "data/reading",
        "checkpoint",
        "storage",
        "monitor",
        "kernels",
        "fleet",
        "errors",
    },
    "classify": {"collective/layers", "fleet", "strategy", "errors"},
    # command lines
    "watch": {"monitor", "monitor/prometheus", "cgroups", "guard", "extras", "errors"},
    "watch/dashboard": {"watch", "monitor", "guard", "errors"},
    "doctor": {"watch", "tables", "tables/settings", "net", "cgroups", "errors"},
    "commands/profile": {"tracing", "guard", "errors"},
    "commands": {
        "watch",
        "watch/dashboard",
        *TABLES,
        "commands/profile",
        "doctor",
        "worker/client",
        "collective/checkpoint",
        "checkpoint",
        "checkpoint/exporting",
        "storage",
        "monitor",
        "net",
        "guard",
        "errors",
    },
    "simulate/network": {"errors"},
    "simulate/inside": {"simulate/network", "worker", "worker/lookup", "worker/modes", "job", "net", "errors"},
    "simulate": {
        "simulate/network",
        "simulate/inside",
        "server",
        "fleet",
        "preparation",
        "util",
        "metrics",
        "net",
        "errors",
    },
    "launch/machines": {"net", "errors"},
    "launch/endurance": {"role", "coordination", "worker/client", "net", "errors"},
    "launch": {
        "watch",
        "watch/dashboard",
        "launch/machines",
        "launch/endurance",
        "role",
        "tables/settings",
        "worker/client",
        "monitor",
        "monitor/prometheus",
        "net",
        "simulate",
        "cgroups",
        "simulate/network",
        "guard",
        "errors",
    },
    "launch/clusters/on_ray": {"watch", "launch", "launch/endurance", "monitor", "net", "extras", "errors"},
    "launch/clusters/k8s": {"launch", "monitor", "monitor/prometheus", "net", "guard", "extras", "errors"},
    "launch/clusters": {
        "watch",
        "launch",
        "launch/machines",
        "launch/endurance",
        "launch/clusters/on_ray",
        "launch/clusters/k8s",
        "tables/settings",
        "coordination",
        "role",
        "monitor",
        "net",
        "cgroups",
        "guard",
        "errors",
    },
    "launch/launchers": {"launch", "launch/clusters"},
    "launch/cli": {
        "watch",
        "launch",
        "launch/launchers",
        "launch/clusters",
        "tracing",
        "net",
        "guard",
        "extras",
        "errors",
    },
    "launch/__main__": {"launch/cli"},
    "ray": {"launch/cli", "launch/launchers", "launch/clusters", "launch/clusters/on_ray", "errors"},
    "notebook": {"launch/cli", "launch/launchers", "launch/clusters", "fleet", "exchange", "extras", "errors"},
    "__init__": set(),  # loads its names when they are first used
}
WITHOUT_TORCH = {
    "background",
    "cgroups",
    "checkpoint",
    "coordination",
    "errors",
    "extras",
    "guard",
    "kernels",
    "monitor",
    "net",
    "server",
    "storage",
    "tables",
    "tracing",
}


def room_of(path: Path) -> str:
    """The room that a file of the package belongs to."""
    place = path.relative_to(PACKAGE).with_suffix("")
    if str(place) in MAY_IMPORT:
        return str(place)
    return str(place.parent) if place.parent != Path() else place.name


@functools.cache
def room_of_module(name: str) -> str | None:
    """The room of `torchfleet.a.b.C`, which may be a module, or something in one; None for the package itself."""
    path = PACKAGE.joinpath(*name.split(".")[1:])
    for place in (path, path.parent):
        if place != PACKAGE and place.with_suffix(".py").exists():
            return room_of(place.with_suffix(".py"))
        if place != PACKAGE and (place / "__init__.py").exists():
            return room_of(place / "__init__.py")
    return None


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements of a file, in their order; an import is never part of anything smaller."""
    yield node
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, part, ()):
            yield from statements(inner)


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names of everything that is imported, anywhere in the file; `package` is what a dot stands for."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (origin, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


@functools.cache
def imports_of(file: Path) -> list[str]:
    package = ".".join(("torchfleet", *file.relative_to(PACKAGE).parts[:-1]))
    return list(imported(ast.parse(file.read_text(), str(file)), package))


def test_a_module_imports_only_the_rooms_below_it() -> None:
    """What only a type checker imports counts too."""
    new = {room_of(file) for file in FILES} - set(MAY_IMPORT)
    assert not new, f"{sorted(new)}: say what they may import in MAY_IMPORT in {Path(__file__).name}"
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}, but '{room}' may import only {sorted(MAY_IMPORT[room])}"
        for file in FILES
        if (room := room_of(file)) != "__init__"
        for name in imports_of(file)
        if name.startswith("torchfleet.") and room_of_module(name) not in {None, room, *MAY_IMPORT[room]}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_arrow_between_rooms_runs_down_the_list() -> None:
    floors = {room: floor for floor, room in enumerate(MAY_IMPORT)}
    upwards = [(room, below) for room in floors for below in MAY_IMPORT[room] - {room} if floors[below] >= floors[room]]
    assert not upwards


def test_no_modules_of_one_room_import_each_other_in_a_circle() -> None:
    modules = {".".join(("torchfleet", *file.relative_to(PACKAGE).with_suffix("").parts)): file for file in FILES}
    arrows = {
        module: {target for name in imports_of(file) for target in targets(name, modules)}
        for module, file in modules.items()
        if room_of(file) != "__init__"
    }
    order: list[str] = []
    while ready := [module for module in arrows if module not in order and arrows[module] - {module} <= set(order)]:
        order += ready
    assert not set(arrows) - set(order), "these import each other"


def targets(name: str, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that importing `name` (a module, or something in one) leads to."""
    yield from (module for module in (name, name.rpartition(".")[0]) if module in modules)


def test_no_folder_has_more_files_than_a_reader_takes_in() -> None:
    folders = {file.parent for file in FILES} - {PACKAGE / "kernels"}
    crowded = {str(folder): num for folder in folders if (num := len(list(folder.glob("*.py")))) > MOST_FILES}
    assert not crowded


def test_every_file_name_is_used_once() -> None:
    names = [file.name for file in FILES if not file.name.startswith("__")]
    assert sorted(names) == sorted(set(names))


def test_what_a_bare_server_needs_imports_no_torch() -> None:
    bare = [file for file in FILES if room_of(file).split("/")[0] in WITHOUT_TORCH]
    found = {str(file): name for file in bare for name in imports_of(file) if name.split(".")[0] == "torch"}
    assert len(bare) > 100
    assert not found


def test_every_line_of_the_table_is_about_something_that_exists() -> None:
    assert set(MAY_IMPORT) == {room_of(file) for file in FILES}


def test_the_check_sees_every_way_to_import() -> None:
    code = "if TYPE_CHECKING:\n    import z\nelse:\n    import y\n"
    assert list(imported(ast.parse(code), "torchfleet.net")) == ["z", "y"]
    code = (
        "import a.b\nfrom torchfleet import errors\nfrom . import wire\nfrom .. import worker\nfrom ..tables import x"
    )
    found = list(imported(ast.parse(code), "torchfleet.net"))
    assert found == ["a.b", "torchfleet.errors", "torchfleet.net.wire", "torchfleet.worker", "torchfleet.tables.x"]


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("torchfleet.errors.FleetError", "errors"),
        ("torchfleet.collective.world", "collective/world"),
        ("torchfleet.collective.world.World", "collective/world"),
        ("torchfleet.collective.build.build", "collective"),
        ("torchfleet.tables.rows.keymap.KeyMap", "tables/rows"),
        ("torchfleet.online.Part", "online"),
    ],
)
def test_the_check_knows_the_room_of_a_name(name: str, room: str) -> None:
    assert room_of_module(name) == room
