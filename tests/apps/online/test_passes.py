"""The pass loop on one worker: every part is evaluated, trained and saved once, in order; after a crash anywhere the
next run goes on from the last complete pass, with exactly the model of that moment."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.messages import lines_naming, names, naming
from support.scripts import online_job
from support.scripts.online_parts import HOURS, Parts, Tiny, assert_same, held, step

import torchfleet as fleet
from torchfleet.api import current_job
from torchfleet.api.job.ps_job import ParameterServerJob
from torchfleet.apps import online
from torchfleet.apps.online import agreement, pass_progress, passes
from torchfleet.apps.online.parts import time_of
from torchfleet.apps.online.pass_progress import KEPT
from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.worker import model_saving


@contextlib.contextmanager
def local(folder: str | Path, does_load: bool = True, policy: Any = None) -> Iterator[Callable[[online.Part], None]]:
    """A job in this process; what it gives is a function that trains a part, two steps that no other part makes."""
    with jobs.clean_facade():
        fleet.init()
        torch.manual_seed(0)
        model = fleet.distributed_model(Tiny(policy))
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.05))
        fleet.init_worker(online.model_to_load(str(folder)) if does_load else None)

        def train(part: online.Part) -> None:
            for i in range(2):
                step(model, optimizer, 10 * int(part.time) + i)

        yield train
        if current_job.current.job is not None:
            fleet.stop_worker()


def run_local(
    folder: str | Path, source: Any = None, policy: Any = None, **options: Any
) -> tuple[list[str], list[online.PassReport]]:
    """(parts that were trained, reports)."""
    trained: list[str] = []
    with local(folder, policy=policy) as train_part:

        def train(part: online.Part, files: list[str]) -> None:
            trained.append(part.name)
            train_part(part)

        reports = online.train_passes(source or Parts(), str(folder), train, poll_seconds=0.001, **options)
    return trained, reports


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    trained, reports = run_local(folder)
    assert trained == [report.part for report in reports] == HOURS
    return folder


def test_every_part_is_trained_once_and_in_order(whole: Path) -> None:
    kept = held(whole)[1]["online"]
    assert (kept["part"], kept["passes"], kept["position"]) == (HOURS[-1], 6, 6)
    assert [entry[:3] for entry in kept["history"]] == [[name, None, 16] for name in HOURS]


def test_a_day_begins_with_a_full_save_and_goes_on_with_deltas(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kinds: list[list[int]] = []
    _, reports = run_local(
        tmp_path / "m",
        on_pass=lambda report: kinds.append(
            [link.number for link in read_manifest(Storage(str(tmp_path / "m"))).links()]
        ),
    )
    assert kinds == [[1], [1, 2], [1, 2, 3], [4], [4, 5], [4, 5, 6]]
    assert [report.deltas for report in reports] == [0, 1, 2, 0, 1, 2]
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("pass ")]
    assert len(lines) == 6
    assert lines[0].startswith(f"pass {HOURS[0]} | ")
    assert names(lines[0], "samples/s", "full", "rows")
    assert names(lines[2], "delta 2", "rows")
    assert lines[2].endswith(" s")


def test_a_run_in_the_middle_of_a_day_begins_with_a_full_save(tmp_path: Path) -> None:
    run_local(tmp_path / "m", Parts(HOURS[1:3]))
    assert [link.parent for link in read_manifest(Storage(str(tmp_path / "m"))).links()] == [0, 1]


def test_order_within_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def note(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            happened.append(name)
            return real(*arguments, **options)

        return call

    for name in ("set_time", "save_persistables", "flush", "shrink"):
        monkeypatch.setattr(fleet, name, note(name, (lambda: {}) if name == "shrink" else getattr(fleet, name)))
    source = Parts(HOURS[2:4])
    source.done = note("done", source.done)  # type: ignore[method-assign]
    with local(tmp_path / "m"):
        online.train_passes(
            source,
            str(tmp_path / "m"),
            lambda part, files: happened.append(f"train {part.name} {files}"),
            evaluate=lambda part, files: happened.append(f"evaluate {files}"),
            on_pass=lambda report: happened.append(f"on_pass {report.part}"),
            shrink=True,
        )
    expected = []
    for name in HOURS[2:4]:
        files = [f"{name} 0 of 1"]
        expected += ["set_time", f"evaluate {files}", f"train {name} {files}", "flush", "shrink", "save_persistables"]
        expected += ["done", f"on_pass {name}"]
    assert happened == expected  # both are full saves, and shrunk before: the first of all, and the first of a day


def test_tables_go_by_the_time_of_the_part(tmp_path: Path) -> None:
    run_local(tmp_path / "m")
    assert read_manifest(Storage(str(tmp_path / "m"))).time == time_of("20261116", 2)


def test_the_auc_is_that_of_the_part_before_it_is_trained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    meter = fleet.metrics.AUC()
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=500), rng.integers(0, 2, 500)
    meter.update(torch.from_numpy(scores), torch.from_numpy(labels))
    _, reports = run_local(tmp_path / "m", Parts(HOURS[:1]), evaluate=lambda part, files: meter)
    assert reports[0].auc == meter.compute()[0]
    assert reports[0].samples == 500
    assert lines_naming(capfd.readouterr().out, HOURS[0], "auc", f"{meter.compute()[0]:.4f}")
    assert held(tmp_path / "m")[1]["online"]["history"][0][:3] == [HOURS[0], meter.compute()[0], 500]


def test_nothing_to_evaluate_is_no_auc(tmp_path: Path) -> None:
    _, reports = run_local(tmp_path / "m", Parts(HOURS[:1]), evaluate=lambda part, files: None)
    assert (reports[0].auc, reports[0].samples) == (None, 0)


def test_max_passes(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "m"
    assert run_local(folder, max_passes=0)[0] == []
    assert online.model_to_load(str(folder)) is None
    assert run_local(folder, max_passes=2)[0] == HOURS[:2]
    assert online.model_to_load(str(folder)) == str(folder)
    assert run_local(folder, max_passes=3)[0] == HOURS[2:5]
    assert run_local(folder)[0] == HOURS[5:]
    assert run_local(folder)[0] == []
    assert_same(folder, whole)


def test_a_job_may_train_passes_more_than_once(tmp_path: Path, whole: Path) -> None:
    folder = str(tmp_path / "m")
    with local(folder) as train_part:
        for num, wanted in ((1, 1), (2, 2), (None, 3)):
            reports = online.train_passes(Parts(), folder, lambda part, files: train_part(part), max_passes=num)
            assert len(reports) == wanted
    assert_same(folder, whole)


def test_a_missing_part_is_waited_for_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "BEAT", 0.01)
    source = Parts(HOURS[:3], after={HOURS[1]: 30, HOURS[2]: 60})
    assert run_local(tmp_path / "m", source)[0] == HOURS[:3]
    out = capfd.readouterr().out
    assert len(lines_naming(out, "waiting")) == 2
    assert lines_naming(out, "waiting", HOURS[0])
    assert source.num_asked >= 60


def test_questions_are_not_asked_more_often_than_poll_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "BEAT", 0.02)
    source = Parts(HOURS[:1], after={HOURS[0]: 2})
    with local(tmp_path / "m"):
        start = time.monotonic()
        online.train_passes(source, str(tmp_path / "m"), lambda part, files: None, poll_seconds=0.2)
        assert time.monotonic() - start >= 0.4
    assert source.num_asked == 4  # twice for nothing, then the part, then the end


class Crash(Exception):
    pass


class Crashes:
    """Raises once in each of some parts, at one place of the pass."""

    def __init__(self, place: str, parts: set[str]) -> None:
        self.place, self.parts = place, parts
        self._now = ""

    def at(self, place: str, part: str = "") -> None:
        """Worker 0 has come to this place, of this part or of the one that it was at last."""
        self._now = part or self._now
        if place == self.place and self._now in self.parts:
            self.parts.remove(self._now)
            raise Crash(self._now)

    def before(self, place: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            parts = [given.name for given in arguments if isinstance(given, online.Part)]
            self.at(place, *parts)
            return real(*arguments, **options)

        return call


class CrashingParts(Parts):
    def __init__(self, crashes: Crashes) -> None:
        super().__init__()
        self.files_of = crashes.before("files_of", self.files_of)  # type: ignore[method-assign]
        self.done = crashes.before("done", self.done)  # type: ignore[method-assign]
        self._crashes = crashes

    def next(self, position: Any) -> online.Part | None:
        part = super().next(position)
        self._crashes.at("next", part.name if part is not None else "")
        return part


def run_crashing(folder: Path, crashes: Crashes) -> bool:
    """Whether it came to its end."""
    with pytest.MonkeyPatch.context() as patch, local(folder) as train_part:

        def train(part: online.Part, files: list[str]) -> None:
            train_part(part)
            crashes.at("train")

        def evaluate(part: online.Part, files: list[str]) -> None:
            crashes.at("evaluate")

        for name in ("set_time", "flush", "save_persistables"):
            patch.setattr(fleet, name, crashes.before(name, getattr(fleet, name)))
        patch.setattr(model_saving, "write_manifest", crashes.before("half a save", model_saving.write_manifest))
        patch.setattr(model_saving, "write_donefile", crashes.before("most of a save", model_saving.write_donefile))
        try:
            online.train_passes(
                CrashingParts(crashes),
                str(folder),
                train,
                evaluate=evaluate,
                on_pass=lambda report: crashes.at("on_pass"),
            )
        except Crash:
            assert current_job.current.job is None  # it has left, so that no worker waits for it
            return False
        return True


PLACES = ["next", "set_time", "files_of", "evaluate", "train", "flush"]
PLACES += ["save_persistables", "half a save", "most of a save", "done", "on_pass"]


@pytest.mark.parametrize("place", PLACES)
def test_a_crash_anywhere_loses_and_repeats_nothing(tmp_path: Path, whole: Path, place: str) -> None:
    """In the second and in the fourth pass, of which one saves a delta and one everything."""
    crashes = Crashes(place, {HOURS[1], HOURS[3]})
    assert [run_crashing(tmp_path / "m", crashes) for _ in range(3)] == [False, False, True]
    found, wanted = held(tmp_path / "m"), held(whole)
    assert found[0] == wanted[0]
    assert found[1]["online"]["position"] == 6
    assert [entry[0] for entry in found[1]["online"]["history"]] == HOURS


def test_a_model_that_the_servers_have_not_loaded_is_an_error(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "m")
    with (
        local(tmp_path / "m", does_load=False),
        pytest.raises(FleetError, match=naming("server 0", "fleet.init_server")),
    ):
        online.train_passes(Parts(), str(tmp_path / "m"), lambda part, files: None)


def test_a_model_of_other_training_can_be_gone_on_from(tmp_path: Path) -> None:
    """Saved without any passes: the first part is the first, and the first save is full."""
    with local(tmp_path / "m"):
        fleet.save_persistables(str(tmp_path / "m"))
    assert run_local(tmp_path / "m", Parts(HOURS[:2]))[0] == HOURS[:2]
    assert [link.number for link in read_manifest(Storage(str(tmp_path / "m"))).links()] == [2, 3]


def test_where_a_run_cannot_begin_with_a_delta_everything_is_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its tables have another policy than those of the run before."""
    run_local(tmp_path / "m", Parts(HOURS[:2]))
    _, reports = run_local(tmp_path / "m", Parts(HOURS[:4]), policy=fleet.Shrink(ttl_days=30))
    assert [report.deltas for report in reports] == [0, 0]
    assert lines_naming(capfd.readouterr().err, HOURS[2], "'ids'")
    _, reports = run_local(tmp_path / "m", Parts(HOURS[:5]), policy=fleet.Shrink(ttl_days=30))
    assert [report.deltas for report in reports] == [1]


def test_later_a_delta_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    """Another job saves to the same folder: it is not overwritten."""
    folder = str(tmp_path / "m")

    def on_pass(report: online.PassReport) -> None:
        if report.part == HOURS[1]:
            fleet.save_persistables(folder)
            current_job.get_worker()._links.local._server.state.saves.chain.attempt = 0  # this job does not know of it

    with pytest.raises(CheckpointError, match=naming("mode=0")):
        run_local(folder, on_pass=on_pass)
    assert held(folder)[1] == {}


def test_what_is_kept_about_passes_must_be_readable(tmp_path: Path) -> None:
    with local(tmp_path / "m"):
        fleet.save_persistables(str(tmp_path / "m"), 0, {"online": {"passes": "many"}})
    with pytest.raises(CheckpointError, match=naming(tmp_path / "m")):
        run_local(tmp_path / "m")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"evaluate": lambda part, files: 0.7}, "evaluate fleet.metrics.AUC None float"),
        ({"poll_seconds": 0.0}, "poll_seconds 0"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with local(tmp_path / "m"), pytest.raises(FleetError, match=naming(*text.split())):
        online.train_passes(Parts(), str(tmp_path / "m"), lambda part, files: None, **options)


def test_a_worker_that_was_started_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local(tmp_path / "m"):
        monkeypatch.setattr(current_job.get_job(), "info", replace(current_job.get_job().info, restart=1))
        with pytest.raises(FleetError, match=naming("--max_job_restart", "--max_restart")):
            online.train_passes(Parts(), str(tmp_path / "m"), lambda part, files: None)


@pytest.mark.slow
def test_nothing_grows_with_the_number_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the fleet: this number of passes would take long with a real one."""
    saved: dict[str, Any] = {}
    job = ParameterServerJob(RoleInfo(), None)
    stand_in = SimpleNamespace(
        **{name: lambda *_, **__: None for name in ("set_time", "flush", "report", "stop_worker")},
        gather=lambda name, data: [data],
        is_first_worker=lambda: True,
        worker_index=lambda: 0,
        worker_num=lambda: 1,
        saved_extra=lambda dirname: saved or None,
        save_persistables=lambda dirname, mode, extra: saved.update(extra),
        stats=lambda: {"worker": {"samples": 0}, "servers": [{"model": "", "tables": {}}]},
        get_job=lambda: job,
    )
    for module in (passes, agreement, pass_progress):
        monkeypatch.setattr(module, "fleet", stand_in)
    monkeypatch.setattr(agreement, "process_role", stand_in)
    monkeypatch.setattr(passes, "current_job", stand_in)
    names = online_job.hours("20260101/00", 2 * KEPT)
    reports = online.train_passes(Parts(names), "nowhere", lambda part, files: None)
    assert [report.part for report in reports] == names[-KEPT:]
    assert [entry[0] for entry in saved["online"]["history"]] == names[-KEPT:]
    assert saved["online"]["passes"] == 2 * KEPT
    assert len(json.dumps(saved)) < 100_000
