"""Which scripts servers do without, decided from their sources alone: in any doubt they run the script."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import ROOT

from torchfleet.launch.server_branch import ServerBranch, read_branch

HEAD = """
import argparse
import sys
import torch
import torchfleet as fleet
fleet.init()
model = fleet.distributed_model(torch.nn.Linear(1, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
resume = sys.argv[1]
"""
TAIL = """
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    fleet.stop_worker()
"""
MAIN = """
def main():
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    print("trained")
"""


def read(folder: Path, text: str, *arguments: str) -> ServerBranch:
    (folder / "train.py").write_text(text)
    return read_branch(str(folder / "train.py"), arguments, is_module=False)


PLAIN = {
    "if and else": HEAD + TAIL,
    "the other way round": HEAD
    + "if fleet.is_worker():\n    fleet.init_worker()\nelse:\n    fleet.init_server()\n    fleet.run_server()\n",
    "not": HEAD
    + "if not fleet.is_server():\n    fleet.init_worker()\nelse:\n    fleet.init_server()\n    fleet.run_server()\n",
    "a role maker of the environment": HEAD.replace("fleet.init()", "fleet.init(fleet.PaddleCloudRoleMaker())") + TAIL,
    "sys.exit": HEAD + TAIL.replace("run_server()\nelse", "run_server()\n    sys.exit(0)\nelse") + "print('done')\n",
    "a function that returns": HEAD + MAIN + "if __name__ == '__main__':\n    main()\n",
    "what only workers do": HEAD
    + TAIL
    + "    if fleet.is_worker() and fleet.is_first_worker():\n        print('done')\n",
    "a variable that is read": HEAD + "import os\nprint(os.environ.get('HOME'), os.environ['PATH'])\n" + TAIL,
}


@pytest.mark.parametrize("text", PLAIN.values(), ids=PLAIN)
def test_servers_do_without_a_script_that_only_inits_and_runs_them(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == ServerBranch(("--of_job",))


MORE = {
    "a line in the branch": HEAD + TAIL.replace("    fleet.run_server()", "    print('here')\n    fleet.run_server()"),
    "a line behind it": HEAD + TAIL + "print('everybody')\n",
    "a line behind the function": HEAD + MAIN + "main()\nprint('everybody')\n",
    "a function that something else calls": HEAD + MAIN + "call(main)\n",
    "another condition": HEAD + TAIL.replace("fleet.is_server()", "fleet.is_server() and resume"),
    "two branches": HEAD + "if fleet.is_server():\n    print('here')\n" + TAIL,
    "the server's number": HEAD + "print(fleet.server_index())\n" + TAIL,
    "the other case of is_worker": HEAD + "if fleet.is_worker():\n    a = 1\nelse:\n    print('here')\n" + TAIL,
    "a role that the script sets": HEAD.replace("init()", "init(fleet.UserDefinedRoleMaker())") + TAIL,
    "a role maker from elsewhere": HEAD.replace("init()", "init(made())") + TAIL,
    "a variable of the job": HEAD + "import os\nprint(os.environ.get('FLEET_ROLE'))\n" + TAIL,
    "a variable that is set": HEAD + "import os\nos.environ['AWS_PROFILE'] = 'x'\n" + TAIL,
    "servers that meet": HEAD + TAIL + "    fleet.util.all_gather(1, 'all')\n",
    "a rule of its own": HEAD + "from torchfleet.ps.tables.settings.rule import RULES\n" + TAIL,
    "a changed module": HEAD + "fleet.nn.SparseEmbedding = None\n" + TAIL,
    "a computed name": HEAD + "getattr(fleet, resume)()\n" + TAIL,
    "a computed import": HEAD + "import importlib\nimportlib.import_module(resume)\n" + TAIL,
    "a store's settings": HEAD + "import fsspec\n" + TAIL,
    "a model that workers do not know": HEAD + TAIL.replace("init_server()", "init_server(resume)"),
    "a model that workers know by another name": HEAD
    + TAIL.replace("init_server()", "init_server(resume)").replace("init_worker()", "init_worker(resume or None)"),
    "a name that changes between the two": HEAD
    + "if fleet.is_server():\n    fleet.init_server(resume)\n    fleet.run_server()\nelse:\n    resume = None\n"
    + "    fleet.init_worker(resume)\n",
}


@pytest.mark.parametrize("text", MORE.values(), ids=MORE)
def test_servers_run_a_script_that_may_do_more_on_them(tmp_path: Path, text: str) -> None:
    found = read(tmp_path, text)
    assert found.options is None
    assert "train.py, line " in found.reason


@pytest.mark.parametrize(
    "text", ["print('a script without torchfleet')", "def broken(", "import torchfleet as fleet\nfleet.init()\n"]
)
def test_a_script_that_shows_no_server_branch_is_run_without_a_word(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == ServerBranch(None)


def test_a_model_that_is_written_out_is_an_option_of_the_server(tmp_path: Path) -> None:
    found = read(tmp_path, HEAD + TAIL.replace("init_server()", "init_server('model', var_names=['a', 'b'])"))
    assert found.options == ("--of_job", "--load=model", "--load_name=a", "--load_name=b")


def test_a_model_that_workers_load_by_the_same_words_is_named_by_worker_0(tmp_path: Path) -> None:
    same = TAIL.replace("init_server()", "init_server(resume)").replace("init_worker()", "init_worker(resume)")
    assert read(tmp_path, HEAD + same).options == ("--of_job", "--load_by_worker")
    found = read(tmp_path, HEAD + same, "--resume=hdfs://host/model", "local").options
    assert found == ("--of_job", "--load_by_worker", "--load_store", "hdfs://host/model")


def test_prepare_has_a_server_branch_of_its_own(tmp_path: Path) -> None:
    text = "import torchfleet as fleet\nmodel, optimizer = fleet.prepare(None, None, dirname='x')\nprint(model)\n"
    assert read(tmp_path, text).options == ("--of_job", "--load_by_worker")
    assert read(tmp_path, text.replace("fleet.prepare", "other.prepare")) == ServerBranch(None)


def test_modules_that_are_not_installed_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.syspath_prepend(str(elsewhere))
    for place, name in ((tmp_path, "beside_train"), (elsewhere, "far_from_train")):
        module = place / f"{name}.py"
        module.write_text("import os\n")
        assert read(tmp_path, HEAD + f"import {name}\n" + TAIL).options
        module.write_text("import os\nos.environ.update(FLEET_X='1')\n")
        found = read(tmp_path, HEAD + f"import {name}\n" + TAIL)
        assert found.options is None
        assert name in found.reason


@pytest.mark.parametrize("script", ["ctr_dnn", "online", "word2vec", "wide_deep", "deepctr", "din", "two_tower"])
def test_servers_of_the_examples_do_without_the_script(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert read_branch(str(ROOT / "examples" / script / "train.py"), (), is_module=False).options is not None


def test_a_module_is_found_as_python_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").write_text("")
    (tmp_path / "job" / "train.py").write_text(HEAD + TAIL)
    assert read_branch("job.train", (), is_module=True).options == ("--of_job",)
    assert read_branch("torchfleet.launch.cell_process", (), is_module=True) == ServerBranch(None)
