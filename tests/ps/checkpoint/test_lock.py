"""Two saves into one folder at the same moment, saves that fail, and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import jobs
from support.messages import naming
from support.one_number import Model, held, set_all

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import RESERVED, is_held, remove_abandoned, reserve
from torchfleet.ps.checkpoint.manifest import FILE, read_manifest

ROUNDS = 15


def test_two_jobs_that_save_into_one_folder_at_once_leave_a_whole_model(tmp_path: Path) -> None:
    """Each writes its own save; the one that ends last is the model, and only then does the other go."""
    folder = str(tmp_path / "model")
    with jobs.one_worker(Model(), num_servers=2) as first, jobs.one_worker(Model(), num_servers=1) as second:
        for number in range(1, ROUNDS + 1):
            errors: list[BaseException] = []
            set_all(first, number)
            set_all(second, 100 + number)
            start = threading.Barrier(2)

            def save(part: jobs.Part, start: threading.Barrier = start, errors: list = errors) -> None:
                try:
                    start.wait(60)
                    part.worker.save(folder, "full")
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=save, args=(part,)) for part in (first, second)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert not errors
            assert held(first, folder) in (number, 100 + number)
            manifest = read_manifest(Storage(folder))
            assert len(os.listdir(folder)) == 3  # manifest, donefile, one save
            files = sorted([*(part.file for part in manifest.parts), "serving.json"])
            assert sorted(os.listdir(f"{folder}/{manifest.save}")) == files


def test_a_name_is_given_once_and_its_folder_stays_while_its_process_lives(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "model"))
    with reserve(storage, 1, 7) as first, reserve(storage, 1, 8) as second:
        assert (first.folder, second.folder) == ("save-000001", "save-000002")
        assert is_held(storage, first.folder)
        remove_abandoned(storage)
        assert sorted(storage.folders()) == [first.folder, second.folder]
        second.release()
    assert not is_held(storage, first.folder)
    remove_abandoned(storage)  # there is no manifest: nothing of it is a model
    assert list(storage.folders()) == []


@pytest.mark.slow
def test_a_save_of_a_process_that_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "model"))
    code = f"""
import os, signal
from torchfleet.ps.checkpoint.lock import reserve
from torchfleet.base.storage import Storage
held = reserve(Storage({storage.path!r}), 1, 7)
open(os.path.join({storage.path!r}, held.folder, "half.safetensors.tmp"), "wb").write(b"x" * 1000)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path / "model" / "save-000001")) == ["half.safetensors.tmp", RESERVED]
    with reserve(storage, 1, 8) as held:
        assert held.folder == "save-000001"
        assert os.listdir(tmp_path / "model" / held.folder) == [RESERVED]
        held.release()


def test_a_save_that_fails_leaves_nothing_and_the_model_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full: what was written of the save that failed would make every later one fail as well."""
    folder = str(tmp_path / "model")
    with jobs.one_worker(Model(), num_servers=2) as part:
        set_all(part, 1)
        part.worker.save(folder, "full")
        before, room, write = sorted(os.listdir(folder)), [3], Storage.write

        def write_until_full(self: Storage, name: str, buffers: object) -> None:
            room[0] -= 1
            if room[0] < 0:
                raise OSError(28, "No space left on device")
            write(self, name, buffers)  # type: ignore[arg-type]

        monkeypatch.setattr(Storage, "write", write_until_full)
        for _ in range(2):
            room[0] = 3
            with pytest.raises(CheckpointError, match="No space left on device"):
                part.worker.save(folder, "full")
            assert sorted(os.listdir(folder)) == before
        monkeypatch.undo()
        assert held(part, folder) == 1
        set_all(part, 2)
        part.worker.save(folder, "full")
        assert held(part, folder) == 2


def test_the_model_of_before_goes_only_when_the_new_one_is_there(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    with jobs.one_worker(Model(), num_servers=1) as part:
        set_all(part, 1)
        manifest = part.worker.save(folder, "full")
        real = part.worker.client.save

        def lose_one(*args: object, **more: object) -> object:
            saved = real(*args, **more)  # type: ignore[arg-type]
            os.remove(f"{args[0]}/{args[1]}/{saved[0].parts[0].file}")
            return saved

        part.worker.client.save = lose_one  # type: ignore[method-assign,assignment]
        with pytest.raises(CheckpointError, match=naming("save-000002/")):
            part.worker.save(folder, "full")
        assert read_manifest(Storage(folder)) == manifest
        assert held(part, folder) == 1
        assert FILE in os.listdir(folder)
