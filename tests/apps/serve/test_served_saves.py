"""Graph and numbers that are served belong to one save: after refused, killed and repeated saves, too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import processes
from support.extras import needing
from support.messages import naming
from support.serving import as_json, serving
from support.signed_model import IDS, Signed, job, predictions

import torchfleet as fleet
from torchfleet.api.serving.description import read_description
from torchfleet.apps.serve.plain_network import plain_network
from torchfleet.apps.serve.served_model import ServedModel
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint import save_files
from torchfleet.ps.checkpoint.compaction import compact
from torchfleet.ps.checkpoint.manifest import read_manifest

pytestmark = [pytest.mark.slow, needing("uvicorn", "httptools")]


def served(folder: Path) -> list[float]:
    """What `fleet serve` answers."""
    with serving(folder) as running:
        status, found = running.infer(as_json({"ids": IDS}))
    assert status == 200, found
    answers: list[float] = found["outputs"][0]["data"]
    return answers


def computed(folder: Path) -> list[float]:
    """As `served`, without a process."""
    with torch.no_grad():
        found: list[float] = plain_network(str(folder), "ids")(IDS)[0].tolist()
    return found


def refusal(folder: Path) -> str:
    """What `fleet serve` says of a model that it cannot serve."""
    command = [sys.executable, "-m", "torchfleet.observe.commands", "serve", str(folder), "--port", "0"]
    done = processes.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode != 0
    return str(done.stdout)


def test_a_refused_delta_leaves_graph_and_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with job(1.0, 1.0) as model:
        fleet.save_persistables(str(folder))
        expected = predictions(model)
    with job(-1.0, 3.0), pytest.raises(fleet.FleetError):
        fleet.save_persistables(str(folder), mode=1)
    assert served(folder) == expected


def test_the_graph_of_a_job_that_saves_in_turns_with_another_is_its_own(tmp_path: Path) -> None:
    folder, script = tmp_path / "model", tmp_path / "other.py"
    script.write_text(
        "import sys\n"
        "import torchfleet as fleet\n"
        "from support.signed_model import job\n"
        "with job(-1.0, 3.0):\n"
        "    fleet.save_persistables(sys.argv[1])\n"
    )
    with job(1.0, 1.0) as model:
        fleet.save_persistables(str(folder))
        processes.run([sys.executable, str(script), str(folder)], timeout=120, check=True)
        assert max(computed(folder)) < 0
        fleet.save_persistables(str(folder))
        assert served(folder) == computed(folder) == predictions(model)


def test_a_job_that_never_called_its_model_saves_no_graph(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with job(1.0, 1.0):
        fleet.save_persistables(str(folder))
    with job(-1.0, 3.0, calls=False):
        fleet.save_persistables(str(folder))
    text = refusal(folder)
    assert re.search(naming("serving.json", "worker 0", "fleet.init_worker"), text), text
    assert not (folder / "serving.json").exists()


def test_a_job_that_continues_a_model_keeps_its_graph_until_it_calls_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with job(1.0, 1.0) as model:
        fleet.save_persistables(str(first))
        expected = predictions(model)
    with job(1.0, 5.0, loaded=str(first), calls=False):
        fleet.save_persistables(str(first), mode=1)
        fleet.save_persistables(str(second))
    assert served(second) == computed(first) == expected


class Wider(Signed):
    """Has a buffer more."""

    def __init__(self, sign: float) -> None:
        super().__init__(sign)
        self.register_buffer("seen", torch.zeros(2))


def test_a_graph_is_not_kept_for_other_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    with monkeypatch.context() as changed:
        changed.setattr("support.signed_model.Signed", Wider)
        with job(1.0, 1.0):
            fleet.save_persistables(str(folder))
    with job(1.0, 1.0, loaded=str(folder), calls=False):
        fleet.save_persistables(str(folder))
    with pytest.raises(fleet.FleetError, match=naming("serving.json", "worker 0")):
        computed(folder)


class Images:
    """Copies of a folder as a kill would leave it, before each call that changes a name in it."""

    def __init__(self, folder: Path, place: Path) -> None:
        self._folder, self._place = folder, place
        self._lock = threading.Lock()
        self.copies: list[Path] = []

    def __enter__(self) -> None:
        self._patches = [mock.patch.object(os, name, self._noted(getattr(os, name))) for name in _CALLS]
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: Any) -> None:
        for patch in self._patches:
            patch.stop()
        self.copy()

    def copy(self) -> None:
        with self._lock:  # servers change names in threads of their own
            copied = self._place / str(len(self.copies))
            with mock.patch.multiple(os, **_CALLS):
                shutil.copytree(self._folder, copied)
            self.copies.append(copied)

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(path: Any, *rest: Any, **named: Any) -> Any:
            if isinstance(path, (str, Path)) and str(path).startswith(str(self._folder)):
                self.copy()
            return call(path, *rest, **named)

        return noted


_CALLS: dict[str, Any] = {
    name: getattr(os, name) for name in ("replace", "rename", "remove", "unlink", "mkdir", "rmdir")
}


@pytest.mark.parametrize("mode", [0, 1])
def test_a_save_that_is_killed_at_any_moment_leaves_one_model(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "model"
    with job(1.0, 1.0) as model:
        fleet.save_persistables(str(folder))
        first = predictions(model)
    with job(-1.0, 3.0, loaded=str(folder) if mode else None) as model:
        images = Images(folder, tmp_path)
        with images:
            number = fleet.save_persistables(str(folder), mode=mode)
        second = predictions(model)
    assert first != second
    found = [(read_manifest(Storage(str(copy))).number == number, computed(copy)) for copy in images.copies]
    assert found == [(is_second, second if is_second else first) for is_second, _ in found]
    assert {is_second for is_second, _ in found} == {False, True}


def test_a_save_of_an_earlier_release_has_its_description_beside_the_manifest(tmp_path: Path) -> None:
    folder, compacted = tmp_path / "model", tmp_path / "compacted"
    with job(1.0, 1.0) as model:
        number = fleet.save_persistables(str(folder))
        expected = predictions(model)
    (folder / f"save-{number:06}" / "serving.json").unlink()
    assert served(folder) == expected
    command = [sys.executable, "-m", "torchfleet.observe.commands", "compact", str(folder), "--output", str(compacted)]
    processes.run(command, timeout=120, check=True)
    assert computed(compacted) == expected
    with job(-1.0, 3.0), pytest.raises(fleet.FleetError):
        fleet.save_persistables(str(folder), mode=1)
    assert computed(folder) == expected


@pytest.mark.parametrize("is_old", [False, True])
def test_a_save_that_is_made_while_a_model_is_read_is_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """`is_old`: the replaced save has its description beside the manifest alone, where the new save's replaces it."""
    folder = tmp_path / "model"
    with job(1.0, 1.0):
        number = fleet.save_persistables(str(folder))
    if is_old:
        (folder / f"save-{number:06}" / "serving.json").unlink()
    expected: list[float] = []
    begun: list[bool] = []
    read = save_files.serving_of

    def between(storage: Storage, save: str) -> bytes | None:
        if not begun:
            begun.append(True)  # a save reads what is there, too
            with torch.enable_grad(), job(-1.0, 3.0) as model:
                fleet.save_persistables(str(folder))
                expected.extend(predictions(model))
        return read(storage, save)

    monkeypatch.setattr(save_files, "serving_of", between)
    assert computed(folder) == expected


def test_a_compaction_and_deltas_keep_the_graph_of_their_save(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with job(1.0, 1.0):
        fleet.save_persistables(str(folder))
    with job(-1.0, 1.0, loaded=str(folder)) as model:
        fleet.save_persistables(str(folder), mode=1)
        compact(str(folder))
        assert computed(folder) == predictions(model)
        (folder / "serving.json").unlink()  # a copy
        assert computed(folder) == predictions(model)
        fleet.save_persistables(str(folder), mode=1)
        assert computed(folder) == predictions(model)


def test_a_store_elsewhere_has_the_description_in_the_save(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}"
    with job(1.0, 1.0) as model:
        fleet.save_persistables(place)
        fleet.save_inference_model(f"{place}-for-prediction")
        expected = predictions(model)
    for name in (place, f"{place}-for-prediction"):
        own = read_manifest(Storage(name)).save
        assert Storage(name).read(f"{own}/serving.json") == Storage(name).read("serving.json")
        with torch.no_grad():
            assert plain_network(name, "ids")(IDS)[0].tolist() == expected


class OpenSource:
    """A source whose version has no table that the graph looks up."""

    def __init__(self, folder: Path) -> None:
        self.is_open = True
        self._described = read_description(Storage(str(folder)))

    def current(self) -> Any:
        return SimpleNamespace(number=1, described=self._described, tables={}, parameters=dict, dim=lambda table: 7)

    def tell(self, take: Callable[[Any], None]) -> None:
        take(self.current())

    def close(self) -> None:
        self.is_open = False


def test_a_model_that_cannot_be_served_closes_its_source(tmp_path: Path) -> None:
    with job(1.0, 1.0):
        fleet.save_persistables(str(tmp_path))
    source = OpenSource(tmp_path)
    with pytest.raises(fleet.FleetError, match=naming("rows", 7, 1)):
        ServedModel(ServeSettings(str(tmp_path)).checked(), source)
    assert not source.is_open
