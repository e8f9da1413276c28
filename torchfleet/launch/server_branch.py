"""Decides from a script's source whether its servers need the script.

Where the script does nothing on a server but fleet.init_server and fleet.run_server, or calls fleet.prepare, servers
are started without it (ps/server/job/bare_server.py): they import no torch. In any doubt they run the script.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchfleet.base.role.process_settings import OF_JOB
from torchfleet.launch.clusters.script_imports import OWN
from torchfleet.launch.script_trees import (
    NeedsScript,
    ScriptTree,
    ends_process,
    ends_with,
    is_last,
    name_of,
    read_trees,
)

_OURS = {f"{OWN}.lightning.FleetStrategy", f"{OWN}.transformers.FleetTrainer"}  # like fleet.prepare: servers run in it
_OF_SERVERS = {"is_server", "init_server", "run_server", "server_index", "UserDefinedRoleMaker", "DistributedInfer"}
_VARIABLES = ("FLEET_", "PADDLE_", "TRAINING_ROLE", "POD_IP", "PSERVER_")
_OF_WORKERS = ("FLEET_RESTART", "FLEET_WORKER_INDEX", "FLEET_DEVICE")  # scripts may read these
_WORLDS = ("server", "all")  # values of comm_world with which servers take part
_SETTERS = {"putenv", "unsetenv", "load_dotenv"}


@dataclass(frozen=True)
class ServerBranch:
    """`options`: those of `python -m torchfleet.server`, if servers do not need the script. None: servers run the
    script, for this reason."""

    options: tuple[str, ...] | None
    reason: str = ""


def read_branch(script: str, arguments: Sequence[str], is_module: bool) -> ServerBranch:
    """Read the server branch of a script, or of a module as `python -m` finds it from here."""
    folder = Path.cwd() if is_module else Path(script).absolute().parent
    try:
        trees = read_trees(folder, script, is_module)
        if not any(_serves(tree) for tree in trees):
            raise NeedsScript("")
        for tree in trees:
            _check_surroundings(tree)
        return ServerBranch((OF_JOB, *_options(trees, arguments)))
    except NeedsScript as error:
        return ServerBranch(None, str(error))


def _serves(tree: ScriptTree) -> bool:
    """Whether the file has a call with which a server serves."""
    is_called = any(tree.fleet_call(node) in ("run_server", "prepare") for node in tree.nodes)
    return is_called or any(name in _OURS for _, name in tree.top_imports())


def _check_surroundings(tree: ScriptTree) -> None:
    """Raise NeedsScript if the file may change what a server is: its variables, its role, its rules."""
    for node, name in tree.top_imports():
        parts = name.split(".")
        if parts[0] == OWN and len(parts) > 1 and (parts[1] == "ps" or parts[1] in _OF_SERVERS):
            raise NeedsScript(f"{tree.place(node)}, imports {name}, to which it may add")
        if parts[0] == "fsspec":
            raise NeedsScript(f"{tree.place(node)}, imports fsspec, whose settings servers need for saves")
    for node in tree.texts:
        if _is_about_role(name := str(node.value)):
            raise NeedsScript(f"{tree.place(node)}, names the variable {name}")
    own_names = tree.fleet_names()
    for node in tree.nodes:
        if _sets_variable(tree, node):
            raise NeedsScript(f"{tree.place(node)}, sets a variable of the environment")
        if isinstance(node, ast.Call) and any(_is_world(value) for value in _values(node)):
            raise NeedsScript(f"{tree.place(node)}, may meet servers (comm_world)")
        if isinstance(node, ast.Call) and name_of(node.func) == "getattr" and _first_name(node) in tree.aliases:
            raise NeedsScript(f"{tree.place(node)}, uses a name of torchfleet that is computed")
        if _changes_torchfleet(tree, node, own_names):
            raise NeedsScript(f"{tree.place(node)}, changes something in torchfleet")
        if tree.fleet_call(node) == "init" and isinstance(node, ast.Call):
            _check_role_maker(tree, node)


def _is_about_role(name: str) -> bool:
    return name.startswith(_VARIABLES) and name not in _OF_WORKERS


def _sets_variable(tree: ScriptTree, node: ast.AST) -> bool:
    if name_of(node) in _SETTERS:
        return True
    if name_of(node) != "environ" or not isinstance(node, (ast.Attribute, ast.Name)):
        return False
    user = tree.parents[node]
    if isinstance(user, (ast.Compare, ast.ImportFrom)):
        return False
    if isinstance(user, ast.Subscript):
        return not isinstance(user.ctx, ast.Load)
    return not (isinstance(user, ast.Attribute) and user.attr in ("get", "items", "keys", "values", "copy"))


def _changes_torchfleet(tree: ScriptTree, node: ast.AST, names: set[str]) -> bool:
    """Whether the node assigns to an attribute or an item of what was imported from torchfleet."""
    if isinstance(node, ast.Call) and name_of(node.func) in ("setattr", "patch", "object"):
        return any(_root(value) in names for value in node.args)
    is_assigned = isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load)
    return is_assigned and _root(node) in names


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return name_of(node)


def _first_name(call: ast.Call) -> str:
    return name_of(call.args[0]) if call.args else ""


def _values(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)


def _is_world(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in _WORLDS


def _check_role_maker(tree: ScriptTree, call: ast.Call) -> None:
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    given = call.args[0] if call.args else named.get("role_maker")
    if isinstance(given, ast.Name):
        stores = [node for node in tree.nodes if isinstance(node, ast.Assign) and name_of(node.targets[0]) == given.id]
        given = stores[0].value if len(stores) == 1 else given
    is_plain = given is None or (isinstance(given, ast.Constant) and given.value is None)
    if isinstance(given, ast.Call) and tree.fleet_call(given) == "PaddleCloudRoleMaker":
        is_plain = not given.args and all(keyword.arg == "is_collective" for keyword in given.keywords)
    if not is_plain:
        raise NeedsScript(f"{tree.place(call)}, gives fleet.init a role maker of its own")


def _options(trees: Sequence[ScriptTree], arguments: Sequence[str]) -> list[str]:
    """The options of the server that say what it loads."""
    told = ["--load_by_worker", *(part for url in _urls(arguments) for part in ("--load_store", url))]
    mentions = [(tree, node) for tree in trees for node in tree.nodes if _is_of_servers(tree, node)]
    if not mentions:
        return told
    tree, first = next((each for each in mentions if name_of(each[1]).startswith("is_")), mentions[0])
    branch = next((node for node in tree.nodes if isinstance(node, ast.If) and first in ast.walk(node.test)), None)
    if branch is None:
        raise NeedsScript(f"{tree.place(first)}, has {name_of(first)} in another form than `if fleet.is_server():`")
    initialize = _check_branch(trees, tree, branch)
    allowed = {id(node) for part in (branch.test, *_branch(tree, branch)) for node in ast.walk(part)}
    other = next(((tree, node) for tree, node in mentions if id(node) not in allowed), None)
    if other is not None:
        raise NeedsScript(f"{other[0].place(other[1])}, has {name_of(other[1])} outside of the server branch")
    return _loaded(trees, tree, initialize, told)


def _is_of_servers(tree: ScriptTree, node: ast.AST) -> bool:
    """Whether the node decides what a server does. `if fleet.is_worker():` without an `else` does not."""
    if name_of(node) != "is_worker":
        return name_of(node) in _OF_SERVERS
    user = tree.parents[tree.parents[node]]
    if isinstance(user, ast.BoolOp) and isinstance(user.op, ast.And):
        user = tree.parents[user]
    return not isinstance(user, ast.If) or bool(user.orelse)


def _branch(tree: ScriptTree, branch: ast.If) -> list[ast.stmt]:
    """The statements that run on a server. Raises NeedsScript for other conditions than is_server() and is_worker()."""
    test = branch.test
    is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    asked = tree.fleet_call(test.operand if isinstance(test, ast.UnaryOp) else test)
    if asked not in ("is_server", "is_worker"):
        raise NeedsScript(f"{tree.place(branch)}, has another condition than fleet.is_server()")
    return branch.body if (asked == "is_server") != is_negated else branch.orelse


def _check_branch(trees: Sequence[ScriptTree], tree: ScriptTree, branch: ast.If) -> ast.Call:
    """Raise NeedsScript unless a server does init_server and run_server here, and nothing afterwards. Returns the call
    of init_server."""
    statements = _branch(tree, branch)
    calls = [node.value if isinstance(node, ast.Expr) else None for node in statements[:2]]
    names = [tree.fleet_call(call) for call in calls]
    if names != ["init_server", "run_server"] or len(statements) > 3:
        raise NeedsScript(f"{tree.place(branch)}, does more on a server than init_server and run_server")
    last = statements[2] if len(statements) == 3 else None
    function = tree.function_of(branch)
    if last is None:
        is_over = is_last(trees, tree, branch)
    elif isinstance(last, ast.Return):
        is_over = isinstance(function, ast.FunctionDef) and ends_with(trees, function)
    else:
        is_over = ends_process(last)
    if not is_over:
        raise NeedsScript(f"{tree.place(branch)}, may do more on a server after run_server")
    assert isinstance(calls[0], ast.Call)
    return calls[0]


def _loaded(trees: Sequence[ScriptTree], tree: ScriptTree, call: ast.Call, told: list[str]) -> list[str]:
    """The options for the model that init_server loads: its literals, or what worker 0 passes to init_worker."""
    try:
        names = dict(zip(("dirname", "var_names"), (ast.literal_eval(node) for node in call.args), strict=False))
        names |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        return _same_for_workers(trees, tree, call, told)
    dirname, parts = names.get("dirname"), names.get("var_names") or []
    if dirname is None and not parts:
        return []
    if not isinstance(dirname, str) or not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise NeedsScript(f"{tree.place(call)}, gives init_server something else than names")
    return [f"--load={dirname}", *(f"--load_name={part}" for part in parts)]


def _same_for_workers(trees: Sequence[ScriptTree], tree: ScriptTree, call: ast.Call, told: list[str]) -> list[str]:
    """Return `told` if all workers pass the same expression to init_worker. Raises NeedsScript otherwise."""
    started = [(other, node) for other in trees for node in other.nodes if name_of(node) == "init_worker"]
    used = {node.id for value in _values(call) for node in ast.walk(value) if isinstance(node, ast.Name)}
    for other, node in started:
        same = other.parents.get(node)
        is_same = isinstance(same, ast.Call) and _arguments(same) == _arguments(call)
        if not is_same or other is not tree or other.function_of(node) is not tree.function_of(call):
            raise NeedsScript(
                f"{tree.place(call)}, passes a computed model to init_server, but not the same to init_worker in "
                "the same function"
            )
        between = range(call.lineno, getattr(node, "lineno", 0) + 1)
        stores = [n for n in tree.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id in used]
        if not between or any(name.lineno in between for name in stores):
            raise NeedsScript(f"{tree.place(call)}, loads what may be something else on workers")
    if not started:
        raise NeedsScript(f"{tree.place(call)}, passes a computed model to init_server, and nothing calls init_worker")
    return told


def _arguments(call: ast.Call) -> tuple[str, ...]:
    return tuple(ast.dump(node) for node in (*call.args, *call.keywords))


def _urls(arguments: Sequence[str]) -> list[str]:
    """The URLs among the script's arguments: stores that the user has named."""
    return [url for argument in arguments if "://" in (url := argument.rpartition("=")[2])]
