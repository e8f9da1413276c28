"""A save that is killed at any moment leaves the model of the last complete one; the next save removes its remains."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import jobs
from support.messages import naming
from support.one_number import Model, held, set_all
from support.paths import SCRIPTS

from torchfleet.base import removed_files
from torchfleet.base import storage as storages
from torchfleet.base.errors import FleetError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import DONEFILE, FILE, read_manifest

NUM_KILLS = 12


class Dead(OSError):
    """Nothing is done any more by a process that was killed."""


class Disk:
    """What Storage uses, counted; from operation number `last` on, which is half done, all of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int = 1 << 30) -> None:
        self.num, self._last, self._lock = 0, last, threading.Lock()
        self.done: list[str] = []
        own = {name: self._counted(name) for name in ("makedirs", "fsync", "replace", "remove")}
        monkeypatch.setattr(storages, "os", SimpleNamespace(**{**vars(os), **own}))
        monkeypatch.setattr(removed_files, "shutil", SimpleNamespace(rmtree=self._rmtree))
        monkeypatch.setattr(storages, "open", self._open, raising=False)

    def step(self, what: str) -> bool:
        """Whether this operation is the one in which the kill comes; raises after it."""
        with self._lock:
            self.num += 1
            if self.num > self._last:
                raise Dead(what)
            self.done.append(what)
            return self.num == self._last

    def _counted(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> None:
            if self.step(f"{name} {Path(str(arguments[-1])).name}"):
                raise Dead(name)
            getattr(os, name)(*arguments, **options)

        return call

    def _rmtree(self, path: str, ignore_errors: bool) -> None:
        if self.step("rmtree"):
            os.remove(os.path.join(path, sorted(os.listdir(path))[0]))
            raise Dead("rmtree")
        shutil.rmtree(path, ignore_errors)

    def _open(self, path: str, mode: str, **options: Any) -> Any:
        if mode == "rb":
            return open(path, mode)
        disk = self
        disk.step("open")

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                if disk.step("write"):
                    super().write(bytes(data)[: len(data) // 2])
                    raise Dead("write")
                return super().write(data)

        return File(path, mode)


@pytest.fixture
def part() -> Iterator[jobs.Part]:
    with jobs.one_worker(Model(), num_servers=2) as made:
        yield made


def num_operations(part: jobs.Part, folder: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        part.worker.save(folder, "full")
        return disk.done


def test_a_kill_at_any_operation_leaves_the_last_complete_model(part: jobs.Part, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    set_all(part, 1)
    part.worker.save(folder, "full")
    set_all(part, 2)
    operations = num_operations(part, folder)
    assert len(operations) > 40
    last, seen = 2, set()
    for point in range(1, len(operations) + 1):
        set_all(part, last + 1)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, point)
            with pytest.raises((FleetError, OSError)):
                part.worker.save(folder, "full")
        found = held(part, folder)
        is_replaced = f"replace {FILE}" in disk.done[: point - 1]  # till then it is the old model, then the new one
        assert found == (last + 1 if is_replaced else last), f"killed at operation {point}"
        seen.add(found - last)
        last = int(found)
        if point % 10 == 0:  # else remains of several kills lie about together
            part.worker.save(folder, "full")
            last = int(held(part, folder))
            assert len(os.listdir(folder)) == 3  # manifest, donefile, one save
    assert seen == {0, 1}
    set_all(part, 1000)
    part.worker.save(folder, "full")
    manifest = read_manifest(Storage(folder))
    assert held(part, folder) == 1000
    assert sorted(os.listdir(folder)) == [DONEFILE, FILE, manifest.save]
    files = sorted([*(part.file for part in manifest.parts), "serving.json"])
    assert sorted(os.listdir(tmp_path / "model" / manifest.save)) == files


def test_a_first_save_that_is_killed_leaves_no_model_and_the_next_one_is_whole(part: jobs.Part, tmp_path: Path) -> None:
    set_all(part, 1)
    operations = num_operations(part, str(tmp_path / "other"))
    for point in range(1, operations.index(f"replace {FILE}") + 2, 7):
        folder = str(tmp_path / f"model{point}")
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, point)
            with pytest.raises((FleetError, OSError)):
                part.worker.save(folder, "full")
        with pytest.raises(FleetError, match=naming("manifest.json")):
            held(part, folder)
        part.worker.save(folder, "full")
        assert held(part, folder) == 1
        assert len(os.listdir(folder)) == 3  # manifest, donefile, one save


def test_killed_processes_leave_the_last_complete_model(tmp_path: Path) -> None:
    script = str(SCRIPTS / "killed_saves.py")
    output = jobs.command([script, str(tmp_path / "model"), str(NUM_KILLS), "1"], 200)
    *rounds, end = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(rounds) == NUM_KILLS
    for found in rounds:
        assert found["held"] in ([found["complete"]], [found["complete"] + 1])
    assert end["held"] == [end["last"]]
    assert len(end["left"]) == 3
