"""Nothing that comes from outside is executed: what the package may call, and what a server is seen to do.

Every place that could run code out of data, start a process or open an address is in EXCEPTIONS, with its reason. A new
one fails this test until it is there; docs/security.md has what users need to know of it.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cases import each_of
from support.paths import ROOT, SCRIPTS, TESTS

import torchfleet

PACKAGE = Path(torchfleet.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Modules that turn data into code or objects of any class.
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "jsonpickle",
    "code",
    "codeop",
}
# Calls that run code, start processes, or open what an address names. A name that ends in .* stands for all below it.
WATCHED = (
    "eval", "exec", "compile", "__import__", "builtins.e*", "builtins.compile",
    "runpy.*", "importlib.*", "ctypes.CDLL", "ctypes.cdll.*",
    "os.system", "os.popen", "os.exec*", "os.spawn*", "os.posix_spawn*", "os.fork", "os.forkpty", "pty.spawn",
    "subprocess.*", "multiprocessing.*", "asyncio.create_subprocess*", "yaml.*", "fsspec.*", "urllib.request.*",
    "torch.hub.*", "torch.load", "numpy.load", "np.load", "joblib.*",
)  # fmt: skip
# File and call → why it may be there.
EXCEPTIONS = {
    ("base/lazy_names.py", "importlib.import_module"): "names of the package itself, in its stub files",
    ("collective/build.py", "importlib.import_module"): "strategies, in a table",
    (
        "collective/strategies/compiler_counts.py",
        "importlib.import_module",
    ): "torch's own modules, by names in the code",
    ("collective/strategies/layerwise/multi_tensor.py", "importlib.util.find_spec"): "whether triton is there",
    ("collective/strategies/fusion.py", "importlib.util.find_spec"): "whether triton is there",
    ("base/entry.py", "importlib.import_module"): "the two command lines, by names in the code",
    ("base/pages.py", "importlib.metadata.files"): "where pip has put the pages of the documents",
    ("base/extras.py", "importlib.import_module"): "packages of extras, by their names in the code",
    ("base/extras.py", "importlib.util.find_spec"): "whether the package of an option is there",
    ("collective/checkpoint/tensor_files.py", "fsspec.open"): "a save that the script names",
    ("data/reading/streams.py", "fsspec.open"): "data files that the script names",
    ("api/datasets.py", "fsspec.core.url_to_fs"): "a folder of Parquet files that the script names",
    ("apps/online/listing.py", "fsspec.core.url_to_fs"): "a folder of data that the script names",
    ("base/storage.py", "fsspec.core.url_to_fs"): "a folder of saves: what arrives by message is checked before",
    ("observe/profile/profile_command.py", "subprocess.Popen"): "fleetrun, with the user's own arguments",
    ("data/reading/pipe.py", "subprocess.Popen"): "with a shell: the pipe command is the user's own",
    ("data/reading/watchdog.py", "subprocess.run"): "a watchdog of our own",
    ("observe/doctor/machine_facts.py", "ctypes.CDLL"): "adjtimex of the C library",
    ("observe/doctor/software_facts.py", "importlib.metadata.version"): "versions of packages that are installed",
    ("observe/doctor/software_facts.py", "importlib.metadata.requires"): "the package's own requirements",
    ("observe/plan/model_plan.py", "importlib.import_module"): "the user's own model, by the name on the command line",
    ("launch/cli.py", "importlib.import_module"): "sub-commands, in a table",
    ("launch/clusters/job_options.py", "importlib.util.find_spec"): "whether the user's training module is there",
    ("launch/clusters/k8s/k8s_yaml.py", "yaml.dump"): "manifests, written",
    ("launch/clusters/on_ray/ray_cluster.py", "importlib.import_module"): "Ray's own modules, by names in the code",
    ("launch/clusters/on_ray/ray_room.py", "importlib.import_module"): "Ray's own modules, by names in the code",
    ("launch/clusters/k8s/adopt.py", "urllib.request.Request"): "the API server of the pod's own cluster",
    ("launch/clusters/k8s/adopt.py", "urllib.request.urlopen"): "the API server of the pod's own cluster",
    ("launch/clusters/on_ray/ray_node.py", "importlib.import_module"): "Ray, by its name in the code",
    (
        "launch/clusters/on_ray/run.py",
        "importlib.import_module",
    ): "Ray's serialization, for what the user's own call sends and gets",
    ("launch/clusters/on_ray/called.py", "importlib.import_module"): "the same, in a process of that user's job",
    (
        "launch/handover.py",
        "importlib.import_module",
    ): "cloudpickle, for a function of the user's own cell, in sealed memory that only this user's processes inherit",
    ("launch/ranks/agent.py", "subprocess.Popen"): "the user's training script, of a rank that is replaced",
    ("launch/ranks/standby.py", "subprocess.Popen"): "a process of our own that waits to become such a rank",
    ("launch/ranks/standby.py", "ctypes.CDLL"): "prctl of the C library",
    ("launch/run_as_main.py", "runpy.run_path"): "the user's training script, of a simulated or a replaced rank",
    ("launch/run_as_main.py", "runpy.run_module"): "the user's training module, of a simulated or a replaced rank",
    ("launch/clusters/member.py", "subprocess.Popen"): "the user's training script",
    ("launch/clusters/slurm_launcher.py", "subprocess.run"): "scontrol, with the number of this job",
    ("launch/processes.py", "subprocess.Popen"): "the user's training script",
    ("ps/net/long_messages.py", "ctypes.CDLL"): "libzmq, as pyzmq has loaded it",
    ("ps/server/job/process.py", "subprocess.Popen"): "a server of our own",
    ("ps/server/job/warm.py", "subprocess.Popen"): "a compiler of our own kernels",
    ("launch/simulate/forks.py", "os.fork"): "simulated processes",
    ("launch/simulate/forks.py", "ctypes.CDLL"): "prctl of the C library",
    ("ps/tables/rows/memory.py", "ctypes.CDLL"): "mallopt of the C library",
    ("apps/serve/versions/follow_process.py", "subprocess.Popen"): "the writer of versions, of our own",
    ("apps/serve/serving_processes.py", "subprocess.Popen"): "serving processes of our own",
    ("apps/serve/user_network.py", "importlib.util.spec_from_file_location"): "the user's own file (--network)",
    ("apps/serve/user_network.py", "importlib.util.module_from_spec"): "the user's own file (--network)",
    ("launch/script_trees.py", "importlib.util.find_spec"): "where the user's training module is",
    ("launch/server_nursery.py", "subprocess.Popen"): "the process that forks servers, of our own",
    ("ps/server/job/nursery.py", "os.fork"): "servers of our own",
    ("ps/server/job/nursery.py", "os.execv"): "a server of our own, with options of the launcher",
    ("ps/server/job/nursery.py", "ctypes.CDLL"): "prctl of the C library",
    ("ps/tables/tiers/disk.py", "ctypes.CDLL"): "io_submit, which the C library calls by its number",
}
SAFE_OPTIONS = ("weights_only", "allow_pickle", "shell")
SHELLS = {("data/reading/pipe.py", "subprocess.Popen")}


@functools.lru_cache(maxsize=1)
def nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the full name of what is called, as far as imports tell it."""
    names: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
                      for alias in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes(tree):
        if isinstance(node, ast.Call) and (path := dotted(node.func)):
            yield ".".join((names.get(path[0], path[0]), *path[1:])), node


def dotted(node: ast.AST) -> list[str]:
    """a.b.c as its parts; of a method of what a call gave, the method alone."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [*(dotted(node.value) or ["()"]), node.attr]
    return []


@functools.cache
def is_watched(name: str) -> bool:
    return any(name == known or (known.endswith("*") and name.startswith(known[:-1])) for known in WATCHED)


def modules(tree: ast.AST) -> set[str]:
    found = {alias.name for node in nodes(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in nodes(tree) if isinstance(node, ast.ImportFrom)}
    extras = [call.args[0] for name, call in calls(tree) if name == "torchfleet.base.extras.required"]
    found |= {name.value for name in extras if isinstance(name, ast.Constant)}
    return {name.split(".")[0] for name in found}


def offences(tree: ast.AST, file: str = "") -> list[str]:
    """What is forbidden everywhere, and watched calls that are no exception."""
    found = sorted(modules(tree) & FORBIDDEN_MODULES)
    for name, call in calls(tree):
        options = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg in SAFE_OPTIONS}
        is_wrong = (
            (is_watched(name) and (file, name) not in EXCEPTIONS and not _is_safe_load(name, options))
            or name.rpartition(".")[2] in ("recv_pyobj", "send_pyobj")
            or options.get("allow_pickle", "False") != "False"
            or (options.get("shell", "False") != "False" and (file, name) not in SHELLS)
        )
        if is_wrong:
            found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


def _is_safe_load(name: str, options: dict[str | None, str]) -> bool:
    return (name == "torch.load" and options.get("weights_only") == "True") or name in ("numpy.load", "np.load")


@pytest.mark.slow
def test_no_module_can_run_code_out_of_data_and_every_exception_is_needed() -> None:
    wrong, called = {}, set()
    for path in FILES:
        tree, file = ast.parse(path.read_text()), str(path.relative_to(PACKAGE))
        wrong[file] = offences(tree, file)
        called |= {(file, name) for name, _ in calls(tree)}
    assert {file: found for file, found in wrong.items() if found} == {}
    assert set(EXCEPTIONS) <= called


@each_of(
    "line",
    [
        "import pickle",
        "from torchfleet.base.extras import required\nrequired('dill', 'x', 'y')",
        "from marshal import loads",
        "def f():\n    import dill",
        "eval('1')",
        "exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "from importlib import import_module as load\nload(name)",
        "import os\nos.system(text)",
        "from os import popen\npopen(text)",
        "import os\nos.execv(text, [])",
        "import subprocess as s\ns.run(['ls'])",
        "anything(text, shell=True)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.safe_load(text)",
        "import fsspec\nfsspec.open(path)",
        "from fsspec import open as o\no(path)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "socket.recv_pyobj()",
    ],
)
def test_the_check_sees_code_that_runs_data(line: str) -> None:
    assert offences(ast.parse(line))


@each_of(
    "line",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "re.compile('a')",
        "np.load(path)",
        "import torch\ntorch.compile(m)",
    ],
)
def test_the_check_lets_honest_code_pass(line: str) -> None:
    assert not offences(ast.parse(line))


@pytest.mark.slow
def test_a_server_under_fuzzed_messages_runs_nothing_and_writes_in_its_folder_only(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "audited_server.py"), str(tmp_path / "own"), "6000"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=environment, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["seen"] == {}
    assert found["answers"] > 4000
    assert found["written"] > 3, "saves were made under the hook"
    assert found["control"] == ["compile b'1'", f"open {tmp_path}/own.outside"], "the hook sees what it must"
