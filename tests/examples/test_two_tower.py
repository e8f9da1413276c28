"""Two towers, each called by itself: trained by a fleet they are what plain torch makes of them, and they retrieve."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.paths import ROOT
from support.scripts.launching import forked_fleetrun

import torchfleet as fleet

pytestmark = pytest.mark.xdist_group("example_two_tower")  # its modules are imported once

FOLDER = ROOT / "examples" / "two_tower"
SMALL = {"users": 300, "items": 60, "likes": 4000, "dim": 8, "seed": 3}
FLAGS = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
BATCH, WORKERS = 50, 2


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The example's own modules, as its scripts import them."""
    names = ("data", "model", "predict", "train")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(FOLDER))
    import train

    yield argparse.Namespace(train=train, **{name: sys.modules[name] for name in ("data", "model", "predict")})
    sys.path.remove(str(FOLDER))
    for name in names:
        sys.modules.pop(name)
        if before[name] is not None:
            sys.modules[name] = before[name]


def plain_torch(example: Any) -> torch.nn.Module:
    """One pass in one process: a step is made with the mean of the workers' losses."""
    torch.manual_seed(SMALL["seed"])
    model = example.model.TwoTower(SMALL["users"], SMALL["items"], SMALL["dim"])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    likes, _ = example.data.generated(SMALL["users"], SMALL["items"], SMALL["likes"], SMALL["seed"])
    own = [example.data.batches(likes, BATCH, worker, WORKERS, SMALL["seed"]) for worker in range(WORKERS)]
    for together in zip(*own, strict=True):
        optimizer.zero_grad()
        torch.stack([example.model.loss_of(model, batch) for batch in together]).mean().backward()
        optimizer.step()
    return model


@pytest.mark.slow
def test_one_server_and_two_workers_in_sync_mode_train_to_the_result_of_torch(example: Any, tmp_path: Path) -> None:
    saved = str(tmp_path / "towers")
    script = [str(FOLDER / "train.py"), "--mode", "sync", "--epochs", "1", "--batch_size", str(BATCH), *FLAGS]
    with forked_fleetrun(
        tmp_path / "log", "--server_num", "1", "--worker_num", str(WORKERS), *script, "--save", saved
    ) as job:
        assert job.wait() == 0, job.output
    plain = plain_torch(example).eval()
    found = fleet.load_inference_model(saved, example.model.TwoTower(SMALL["users"], SMALL["items"], SMALL["dim"]))
    users, items = torch.arange(SMALL["users"]), torch.arange(SMALL["items"])
    kinds = items % example.data.NUM_TASTES
    with torch.no_grad():
        for trained, other in (
            (found.user.users(users), plain.user.users.weight),
            (found.item.items(items), plain.item.items.weight),
            (found.user(users), plain.user(users)),
            (found.item(items, kinds), plain.item(items, kinds)),
        ):
            torch.testing.assert_close(trained, other.detach(), rtol=0, atol=1e-5)
    log = (tmp_path / "log" / "latest" / "workerlog.0").read_text()
    _, held_out = example.data.generated(SMALL["users"], SMALL["items"], SMALL["likes"], SMALL["seed"])
    expected = example.predict.recall(
        plain, held_out["users"], held_out["items"], example.predict.item_vectors(plain, SMALL["items"])
    )
    printed = re.search(r"recall@20 ([0-9.]+) of 300 held-out likes", log)
    assert printed, log
    assert float(printed[1]) == pytest.approx(expected, abs=0.004), "one user of 300 may stand on the edge"


def run(script: str, *arguments: object) -> str:
    """What a script of the example prints, run in this process."""
    out, before = io.StringIO(), sys.argv
    sys.argv = [script, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), jobs.clean_facade():
            runpy.run_path(str(FOLDER / script), run_name="__main__")
    finally:
        sys.argv = before
    return out.getvalue()


def test_it_retrieves_what_was_liked_and_its_towers_predict_by_themselves(example: Any, tmp_path: Path) -> None:
    output = run("train.py", "--mode", "half_async", "--save", tmp_path)
    printed = re.search(r"recall@20 ([0-9.]+) of 2,000 held-out likes, among 300 items", output)
    assert printed, output
    assert float(printed[1]) > 0.5  # 0.07 by chance, 0.9 at most
    assert "468 steps, 119,808 samples" in output
    assert f"recall@20 {printed[1]} of 2,000 held-out likes" in run("predict.py", "--model", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "geo", "hybrid"])
def test_every_other_mode_retrieves_too(example: Any, mode: str) -> None:
    printed = re.search(r"recall@20 ([0-9.]+)", run("train.py", "--mode", mode))
    assert printed
    assert float(printed[1]) > 0.4


def test_options_that_make_no_sense_are_refused(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, text in ((("--items", 29), "--items at least 30"), (("--likes", 9), "--likes 9 is less than a batch")):
        with pytest.raises(SystemExit):
            run("train.py", *flags)
        assert text in capsys.readouterr().err
