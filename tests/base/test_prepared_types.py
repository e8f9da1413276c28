"""Types of messages are described once, whatever threads decode them first."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import processes

import torchfleet

PACKAGE = Path(torchfleet.__file__).parent
SCRIPT = """
import sys, threading
import msgspec
from torchfleet.base.prepared_types import prepared

def make():
    told = msgspec.defstruct("Told", [("samples", float | None, None), ("rates", list[float], [])], array_like=True)
    return msgspec.defstruct("Decided", [("told", dict[int, told], {}), ("members", list[int], [])])

def work(kind, start, found):
    start.wait()
    found.append(msgspec.msgpack.decode(data, type=prepared(kind)))

sys.setswitchinterval(1e-6)
data = msgspec.msgpack.encode({"told": {0: [8.0, [0.5]], 1: [None, []]}, "members": [0, 1]})
for _ in range(300):
    kind, start, found = make(), threading.Barrier(3), []
    threads = [threading.Thread(target=work, args=(kind, start, found)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.told[0].samples, one.told[0].rates, one.told[1].samples, one.members) for one in found] == 3 * [
        (8.0, [0.5], None, [0, 1])
    ]
print("all equal")
"""


@pytest.mark.slow
def test_threads_that_decode_a_type_first_at_the_same_time_all_get_the_message() -> None:
    """Without `prepared`, msgspec 0.22 ends the process within a few of these rounds."""
    done = processes.run([sys.executable, "-c", SCRIPT], timeout=100)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["all equal"]), done.stdout


def test_every_decode_of_the_package_names_its_type_by_prepared() -> None:
    files = [(path, ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py") if "msgspec" in path.read_text()]
    wrong = [
        f"{path.relative_to(PACKAGE)}:{kind.lineno}: {ast.unparse(kind)}"
        for path, tree in files
        if path.name != "prepared_types.py"
        for kind in _types_of_decodes(tree)
        if not _is_prepared(kind)
    ]
    assert wrong == [], "give the type as prepared(...)"
    assert sum(len(list(_types_of_decodes(tree))) for _, tree in files) > 40, "the decodes of the package are not found"


def _types_of_decodes(tree: ast.Module) -> Iterator[ast.expr]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("msgspec."):
            continue
        named = next((one.value for one in call.keywords if one.arg == "type"), None)
        place = {"convert": 1, "Decoder": 0}.get(ast.unparse(call.func).rpartition(".")[2])
        if named is not None:
            yield named
        elif place is not None and len(call.args) > place:
            yield call.args[place]


def _is_prepared(kind: ast.expr) -> bool:
    """Or made of types that msgspec knows itself."""
    if isinstance(kind, ast.Call):
        return ast.unparse(kind.func) == "prepared"
    names = {one.id for one in ast.walk(kind) if isinstance(one, ast.Name)}
    return names <= {"dict", "list", "tuple", "str", "int", "float", "bytes", "bool", "Any"}
