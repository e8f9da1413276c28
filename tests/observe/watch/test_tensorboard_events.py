"""Event files, read back by tensorboard's own reader: what they say is what history.jsonl says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.extras import Late, needing
from support.messages import lines_naming

from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.observe.watch.history import HistoryReader, HistoryWriter
from torchfleet.observe.watch.tensorboard_events import TensorBoardEvents, scalars_of, scalars_of_job

pytestmark = needing("tensorboard")
reading = Late("tensorboard.backend.event_processing.event_accumulator")


def job(now: float, steps: int) -> JobSnapshot:
    workers = [
        RoleSnapshot(
            "worker", i, "running", {"steps": steps + i, "samples_per_s": 10.0 * i, "metrics": {"loss": steps / 7 + i}}
        )
        for i in range(2)
    ]
    ages = {"staleness_dense": {"0": steps, "16": 3}, "staleness_sparse": {}}
    tables = {"items": {"kind": "sparse", "rows": steps, "bytes": 80 * steps}}
    server = {"busy": 0.5, "rows": {"items": steps}, "tables": tables, **ages}
    return JobSnapshot(now, [RoleSnapshot("server", 0, "running", server), *workers])


def read(folder: Path) -> Any:
    return reading.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0}).Reload()


def test_event_files_say_what_the_history_says(tmp_path: Path) -> None:
    writers = [HistoryWriter(tmp_path, ["train.py"]), TensorBoardEvents(tmp_path / "events", ["python", "a b.py"])]
    for second in range(5):
        for writer in writers:
            writer.look(job(2e9 + 30.0 * second, 10 * second))  # the job is old: a record each minute
    for writer in writers:
        writer.end(job(2e9 + 1000, 50))
        writer.close()
    records = [record for record in HistoryReader(tmp_path).records() if record["kind"] == "role"]
    for key in ("worker.0", "worker.1", "server.0"):
        found = read(tmp_path / "events" / key)
        own = [record for record in records if record["key"] == key]
        assert len(own) == 4
        job_steps = [round(record["status"]["steps"]) for record in records if record["key"] == "worker.1"]
        for tag in found.Tags()["scalars"]:
            expected = [
                (
                    pytest.approx(record["time"]),
                    record["status"].get("steps", step),
                    pytest.approx(scalars_of(role)[tag], rel=1e-6),
                )
                for record, step in zip(own, job_steps, strict=True)
                for role in [RoleSnapshot(key.split(".")[0], 0, "running", record["status"])]
            ]
            assert [(one.wall_time, one.step, one.value) for one in found.Scalars(tag)] == expected, tag
    assert {"rows/items", "bytes/items", "server/busy", "staleness/dense_median"} <= set(found.Tags()["scalars"])


def test_the_job_has_means_sums_histograms_and_its_command(tmp_path: Path) -> None:
    events = TensorBoardEvents(tmp_path, ["python", "a b.py"])
    events.end(job(1e9, 70))
    events.close()
    whole = read(tmp_path / "job")
    assert [(one.step, one.value) for one in whole.Scalars("metrics/loss")] == [(71, 10.5)]
    assert [one.value for one in whole.Scalars("speed/samples_per_s")] == [10.0]
    assert whole.Tensors("command")[0].tensor_proto.string_val[0].decode() == "python 'a b.py'"
    (ages,) = read(tmp_path / "server.0").Histograms("staleness/dense")
    assert (ages.histogram_value.num, ages.histogram_value.bucket_limit, ages.histogram_value.bucket) == (
        73,
        [0, 31],
        [70, 3],
    )


def test_only_workers_that_train_count_for_the_speed_of_the_job() -> None:
    trains = {"samples_per_s": 10.0, "steps_per_s": 2.0, "metrics": {"loss": 1.0}}
    roles = [
        RoleSnapshot("worker", 0, "running", trains),
        RoleSnapshot("worker", 1, "running", {**trains, "left": True}),
        RoleSnapshot("worker", 2, "done", {**trains, "metrics": {"loss": 4.0}}),
    ]
    found = scalars_of_job(JobSnapshot(1.0, roles))
    assert found == {"metrics/loss": 2.0, "speed/samples_per_s": 10.0, "speed/steps_per_s": 2.0}


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    events = TensorBoardEvents(tmp_path / "file", ["train.py"])
    for second in range(3):
        events.look(job(1e9 + second, second))
    events.close()
    assert len(lines_naming(capsys.readouterr().err, "[fleetrun]", tmp_path / "file")) == 1


@pytest.mark.slow
def test_no_torch_is_imported_for_event_files() -> None:
    code = (
        "import sys, tempfile; from pathlib import Path\n"
        "from torchfleet.observe.watch.tensorboard_events import TensorBoardEvents\n"
        "with tempfile.TemporaryDirectory() as folder: TensorBoardEvents(Path(folder), ['x']).close()\n"
        "print('torch' in sys.modules, 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == ["False", "False"]
