"""Blocks of README, of the landing page and of docs/scripts.md run when they are pasted: Python in an empty folder,
command lines as far as they end soon.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from support import pages, processes
from support.cases import each_of
from support.paths import ROOT
from support.scripts.launching import clean_environment, forked_fleetrun

from torchfleet.base.strategy.collective_fields import SWITCHES
from torchfleet.launch import cli
from torchfleet.observe.commands import command

BLOCKS = [block for page in ("README.md", "docs/scripts.md", "docs/index.md") for block in pages.blocks(ROOT / page)]
SCRIPTS = [block.text for block in BLOCKS if block.language == "python"]
LINES = [line for block in BLOCKS if block.language == "" for line in block.commands()]


def arguments_of(line: str) -> list[str]:
    return shlex.split(line, comments=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, but for README's script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLEET_KEY_DIR", raising=False)
    (tmp_path / "train.py").write_text(SCRIPTS[0])
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_block_of_python_runs_as_it_is(number: int, tmp_path: Path) -> None:
    (tmp_path / "pasted.py").write_text(SCRIPTS[number])
    environment = clean_environment(PYTHONPATH=str(ROOT))
    done = processes.run([sys.executable, "pasted.py"], cwd=tmp_path, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_script_runs_with_servers_and_workers(folder: Path) -> None:
    line = next(line for line in LINES if line.startswith("fleetrun --server_num 2 --worker_num 2 train.py"))
    with forked_fleetrun(folder / "log", *arguments_of(line)[1:], PYTHONPATH=str(ROOT)) as job:
        assert job.wait() == 0
    assert (folder / "model").is_dir()


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("fleetrun")])
def test_a_line_of_fleetrun_is_understood(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as `--dry_run` goes. Hosts and keys of an example are replaced by those that are here."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if "--keygen" in line:
        assert cli.main(arguments_of(line)[1:]) == 0
        return
    cli.main(["--keygen", "keys"])
    given = re.sub(r"(?<= )examples/", f"{ROOT}/examples/", line)
    assert cli.main(pages.planning(arguments_of(given))) == 0


@each_of("line", [line for line in LINES if line.startswith("fleet ")])
def test_a_line_of_fleet_is_understood(line: str) -> None:
    assert command._parser().parse_args(arguments_of(line)[1:]).command == arguments_of(line)[1]


@each_of("line", [line for line in LINES if re.match(r"python examples/|fleetrun .*examples/", line)])
def test_options_of_examples_are_there(line: str) -> None:
    words = arguments_of(line)
    place = next(i for i, word in enumerate(words) if word.startswith("examples/"))
    sources = "".join(file.read_text() for file in (ROOT / words[place]).parent.glob("*.py"))
    for option in (word for word in words[place:] if word.startswith("--")):
        assert f'"{option}"' in sources or option[2:] in SWITCHES, option


def test_every_line_is_looked_at() -> None:
    """By one of the tests above, or by a target of the Makefile, which tests/test_document_links.py looks at."""
    known = ("make ", "fleetrun ", "fleet ", "python examples/", "python train.py")
    assert [line for line in LINES if not line.startswith(known)] == []
    assert len(SCRIPTS) == 6
    assert any("fleet.prepare(" in script for script in SCRIPTS)
