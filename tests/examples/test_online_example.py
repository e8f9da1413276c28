"""examples/online from end to end: hours are generated, evaluated, trained and saved, in one process and by a fleet; a
second run goes on where the first one was."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from support import jobs
from support.extras import needs
from support.messages import lines_naming
from support.paths import ROOT
from support.scripts.launching import forked_fleetrun
from support.scripts.online_parts import assert_same

from torchfleet.apps import online
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.xdist_group("example_online")  # its fixtures are made once

EXAMPLE = ROOT / "examples" / "online"
SMALL = ("--rows", "1000", "--new_items", "20", "--batch_size", "50", "--parts", "2")


def run(script: str, *arguments: object) -> str:
    """What an example prints, run in this process."""
    out = io.StringIO()
    before = sys.argv, list(sys.path), torch.get_num_threads(), sys.modules.pop("generate", None)
    sys.argv = [script, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), jobs.clean_facade():
            runpy.run_path(str(EXAMPLE / script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before[:2]
        torch.set_num_threads(before[2])
        sys.modules.pop("generate", None)  # another example has one, too
    return out.getvalue()


def passes(text: str) -> list[tuple[str, float, int]]:
    """(part, AUC, rows) of the lines that were printed."""
    found = re.findall(r"^pass (\S+) \| auc (\d\.\d+) \| [\d,]+ samples/s \| saved .* \| rows ([\d,]+) \|", text, re.M)
    return [(part, float(auc), int(rows.replace(",", ""))) for part, auc, rows in found]


def mean_auc(text: str) -> float:
    (found,) = re.findall(r"^mean AUC (\d\.\d+) over \d+ hours$", text, re.M)
    return float(found)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def six_hours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(model, output) of an uninterrupted run on generated data."""
    folder = tmp_path_factory.mktemp("online")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder / "online_model", run("train.py", "--hours", 6, *SMALL)


def ids(folder: Path, part: str, place: int) -> list[int]:
    lines = [line for path in sorted((folder / part).glob("part-*")) for line in path.read_text().splitlines()]
    return [int(line.split()[place]) for line in lines]


def test_hours_are_generated_in_the_multi_slot_format_and_finished(here: Path) -> None:
    text = run("generate.py", "--out", "clicks", "--hours", 25, "--rows", 90, "--parts", 3)
    assert text.splitlines()[0] == "clicks/20261115/00"
    assert text.splitlines()[-1] == "clicks/20261116/00"
    part = here / "clicks" / "20261115" / "07"
    assert sorted(path.name for path in part.iterdir()) == ["_SUCCESS", "part-0", "part-1", "part-2"]
    lines = [line for i in range(3) for line in (part / f"part-{i}").read_text().splitlines()]
    assert len(lines) == 90
    assert all(re.fullmatch(r"1 [01] 1 1 1 \d+ 1 \d+ 2 \d+ \d+", line) for line in lines)


def test_items_come_and_go(here: Path) -> None:
    run("generate.py", "--out", "clicks", "--hours", 72, "--rows", 300, "--new_items", 10)
    first, soon, late = (set(ids(here / "clicks", part, 7)) for part in ("20261115/00", "20261115/01", "20261117/23"))
    assert soon & first
    assert soon - first
    assert not late & first
    users = [set(ids(here / "clicks", part, 5)) for part in ("20261115/00", "20261117/23")]
    assert users[0] & users[1]


def test_an_hour_is_always_the_same_and_is_not_written_twice(here: Path) -> None:
    run("generate.py", "--out", "a", "--hours", 3, "--rows", 50)
    run("generate.py", "--out", "b", "--hours", 1, "--rows", 50, "--start", "20261115")
    run("generate.py", "--out", "c", "--hours", 1, "--rows", 50, "--seed", 1)
    texts = [(here / name / "20261115" / "00" / "part-0").read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]
    run("generate.py", "--out", "a", "--hours", 1, "--rows", 60)
    assert (here / "a" / "20261115" / "00" / "part-0").read_text() == texts[0]


def test_six_hours_are_learned_from(six_hours: tuple[Path, str]) -> None:
    text = six_hours[1]
    found = passes(text)
    assert [part for part, _, _ in found] == [f"20261115/{hour:02}" for hour in range(6)]
    assert found[0][1] == 0.5
    assert all(0.64 < auc < 0.9 for _, auc, _ in found[1:])
    assert mean_auc(text) == pytest.approx(sum(auc for _, auc, _ in found) / 6, abs=1e-4)
    assert [rows for _, _, rows in found] == sorted(rows for _, _, rows in found)


@pytest.mark.long
def test_a_second_run_goes_on_exactly(here: Path, six_hours: tuple[Path, str]) -> None:
    first = run("train.py", "--hours", 2, *SMALL)
    second = run("train.py", "--hours", 6, *SMALL)
    assert lines_naming(second, "20261115/01", 2)
    assert passes(first) + passes(second) == passes(six_hours[1])
    assert mean_auc(second) == mean_auc(six_hours[1])  # of all hours
    assert_same("online_model", six_hours[0])
    assert passes(run("train.py", "--hours", 6, *SMALL)) == []


@pytest.mark.long
def test_rows_come_late_and_go(here: Path, six_hours: tuple[Path, str]) -> None:
    policies = ("--count", 2, "--unseen_days", 0.05, "--shrink_hours", 1, "--threshold", -100)
    found = passes(run("train.py", "--hours", 6, *SMALL, *policies))
    plain = passes(six_hours[1])
    assert found[-1][2] < 0.5 * plain[-1][2]
    assert found[-1][1] > 0.6
    tables = {table.name: table for table in read_manifest(Storage("online_model")).tables}
    assert tables["vectors"].shrink["delete_after_unseen_days"] == 0.05


@pytest.mark.long
def test_a_plot_of_all_hours(here: Path, six_hours: tuple[Path, str]) -> None:
    needs("matplotlib")
    text = run("train.py", "--hours", 2, *SMALL, "--plot", "auc.png")
    assert lines_naming(text, "AUC", 2, "auc.png")
    assert (here / "auc.png").read_bytes().startswith(b"\x89PNG")


def test_hours_that_somebody_else_writes(here: Path) -> None:
    run("generate.py", "--out", "clicks", "--hours", 3, "--rows", 200)
    text = run("train.py", "--data", "clicks", "--hours", 3)
    assert [part for part, _, _ in passes(text)] == [f"20261115/{hour:02}" for hour in range(3)]
    assert not (here / "online_data").exists()


@pytest.mark.slow
def test_a_fleet_in_step_trains_what_one_process_trains(here: Path, six_hours: tuple[Path, str]) -> None:
    given = ("--hours", "6", *SMALL, "--mode", "sync", "--data", str(six_hours[0].parent / "online_data"))
    roles = ("--server_num", "2", "--worker_num", "2")
    with forked_fleetrun(here / "log", *roles, str(EXAMPLE / "train.py"), *given, FLEET_WORKER_TIMEOUT="60") as job:
        assert job.wait() == 0, job.output
    found = passes((here / "log" / "latest" / "workerlog.0").read_text())
    wanted = passes(six_hours[1])
    assert [part for part, _, _ in found] == [part for part, _, _ in wanted]
    assert [auc for _, auc, _ in found] == pytest.approx([auc for _, auc, _ in wanted], abs=2e-3)
    assert [rows for _, _, rows in found] == [rows for _, _, rows in wanted]
    assert len(online.history("online_model")) == 6


@pytest.mark.parametrize(
    ("script", "arguments", "text"),
    [
        ("generate.py", ("--hours", 0), "must be at least 1"),
        ("train.py", ("--hours", 0), "generated data needs --hours"),
        ("train.py", ("--batch_size", 0), "--batch_size must be at least 1"),
        ("train.py", ("--mode", "geo"), "invalid choice: 'geo'"),
    ],
)
def test_a_mistake_is_named(
    script: str, arguments: tuple[object, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        run(script, *arguments)
    assert error.value.code not in (0, None)
    assert text in capsys.readouterr().err
