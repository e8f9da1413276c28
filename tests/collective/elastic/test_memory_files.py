"""Files of copies: a copy is there when all of it is, and survives the process that wrote it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from torchfleet.collective.elastic.memory_files import VARIABLE, MemoryFile, MemoryFiles
from torchfleet.collective.elastic.random_states import random_states, set_random_states
from torchfleet.launch.ranks.rank_memory import RankMemory


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "copy").touch()
    return str(tmp_path / "copy")


def fill(file: MemoryFile, step: int, data: bytes, description: bytes) -> None:
    file.grow(len(data)).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    file.complete(step, len(data), description)


def test_a_copy_is_read_by_another_process_of_the_file(path: str) -> None:
    assert MemoryFile(path).step == -1
    fill(MemoryFile(path), 7, b"0123456789", b"about it")
    found = MemoryFile(path)
    assert (found.step, bytes(found.tensors().tolist()), found.description()) == (7, b"0123456789", b"about it")


def test_a_copy_that_was_begun_is_none_until_it_is_complete(path: str) -> None:
    file = MemoryFile(path)
    fill(file, 7, b"0123456789", b"about it")
    file.begin()
    assert MemoryFile(path).step == -1
    fill(file, 8, b"01", b"x")  # smaller: what is behind it in the file does not matter
    found = MemoryFile(path)
    assert (found.step, bytes(found.tensors().tolist()), found.description()) == (8, b"01", b"x")


def test_head_and_body_make_the_same_copy_elsewhere(path: str, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    file, other = MemoryFile(path), MemoryFile(str(tmp_path / "other"))
    fill(file, 7, bytes(range(200)), b"about it")
    body = other.body_for(file.head())
    body.copy_(file.body())
    assert other.step == -1
    other.set_head(file.head())
    assert (other.step, other.description()) == (7, b"about it")
    assert torch.equal(other.tensors(), file.tensors())


def test_the_launcher_keeps_the_files_of_each_rank_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RankMemory(2)
    made = []
    for rank in range(2):
        monkeypatch.setenv(VARIABLE, memory.variables(rank)[VARIABLE])
        found = MemoryFiles.of_launcher()
        assert found is not None
        made.append(found)
    files = [file for rank in made for pair in rank for file in pair]
    for step, file in enumerate(files):
        fill(file, step, os.urandom(5), b"")
    assert [file.step for file in files] == list(range(8))


def test_random_numbers_go_on_where_they_were() -> None:
    def drawn() -> tuple[float, ...]:
        return random.gauss(0, 1), random.random(), *np.random.randn(3), *torch.rand(2).tolist()

    drawn()  # Python's and numpy's generators hold back every second normal number
    states = random_states(torch.device("cpu"))
    expected = [drawn(), drawn()]
    set_random_states(states, torch.device("cpu"))
    assert [drawn(), drawn()] == expected
