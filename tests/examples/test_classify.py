"""torchfleet.apps.Entry and examples/classify: settings are checked, ranks learn what one process learns, training
goes on from a save on another number of ranks, features come from files."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.grids import first_of
from support.messages import lines_naming, naming
from support.paths import ROOT
from support.ranks import Ranks
from support.scripts.launching import forked_fleetrun
from torch.utils.data import TensorDataset

import torchfleet as fleet
from torchfleet.apps.classify import Entry
from torchfleet.base.errors import FleetError

pytestmark = pytest.mark.xdist_group("example_classify")

SCRIPT = ROOT / "examples" / "classify" / "train.py"
QUICK = ("--num_classes", "60", "--width", "16", "--emb_dim", "16", "--steps", "60", "--batch_size", "64")


def example(arguments: list[str]) -> dict[str, Any]:
    """What train.py prints on this rank."""
    out, sys.argv = io.StringIO(), [str(SCRIPT), *arguments]
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return {"output": out.getvalue()}


def accuracy(output: str) -> float:
    (found,) = re.findall(r"^accuracy (\d\.\d+)$", output, re.MULTILINE)
    return float(found)


def run(ranks: Ranks, *arguments: object, size: int) -> str:
    first, *others = ranks.run(example, size, arguments=[str(argument) for argument in (*QUICK, *arguments)])
    assert all(result["output"] == "" for result in others)  # one rank reports for all
    return str(first["output"])


@pytest.mark.parametrize("loss_type", first_of(["arcface", "softmax"]))
def test_ranks_learn_to_tell_classes(ranks: Ranks, loss_type: str) -> None:
    output = run(ranks, "--loss_type", loss_type, size=2)
    assert accuracy(output) > 0.9, output  # one of sixty by chance
    assert re.search(r"^epoch 2 of 2: loss \d+\.\d+, \d+ samples/s in all$", output, re.MULTILINE)


@pytest.mark.long
def test_one_process_and_a_save_that_two_go_on_from(ranks: Ranks, tmp_path: Path) -> None:
    whole = run(ranks, "--save", tmp_path / "whole", size=1)
    first = run(ranks, "--save", tmp_path / "parts", "--epochs", 1, size=1)
    second = run(ranks, "--save", tmp_path / "parts", "--epochs", 2, size=2)
    assert accuracy(first) < accuracy(whole)
    assert "epoch 1" in second
    assert "epoch 1 of" not in second
    assert accuracy(second) > 0.9


@pytest.mark.long
def test_in_mixed_precision(ranks: Ranks) -> None:
    assert accuracy(run(ranks, "--bf16", size=2)) > 0.9


def test_features_from_files(ranks: Ranks, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    centers = random.normal(size=(10, 6))
    for name, num in (("train0", 300), ("train1", 301), ("test", 101)):
        labels = random.integers(0, 10, num)
        np.savez(tmp_path / f"{name}.npz", features=centers[labels] + 0.1 * random.normal(size=(num, 6)), labels=labels)
    output = run(ranks, "--data", tmp_path, "--batch_size", 32, "--epochs", 8, size=2)
    assert accuracy(output) > 0.95


@pytest.mark.slow
def test_fleetrun_and_an_accuracy_that_is_not_reached(tmp_path: Path) -> None:
    few = ("--num_classes", "5000", "--steps", "2", "--epochs", "1", "--min_accuracy", "0.9")
    with forked_fleetrun(tmp_path, "--nproc_per_node", "2", str(SCRIPT), *few) as job:
        assert job.wait() != 0
        assert lines_naming(job.output, "--min_accuracy", "0.9")


def entry() -> Entry:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(33, 4, generator=random)
    labels = torch.arange(33) % 3
    samples = TensorDataset(inputs + 4 * torch.eye(4)[labels], labels)
    backbone = torch.nn.Linear(4, 4)
    made = Entry().set_class_num(3).set_model(backbone, emb_dim=4).set_dataset(samples, samples)
    return made.set_loss_type("cosface", scale=16.0).set_train_batch_size(7).set_log_period(0)


def own_optimizer() -> dict[str, Any]:
    """Learning rates after the steps at which they change, on samples that do not divide evenly."""
    rates: list[float] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        rates.append(0.0)
        optimizer.register_step_post_hook(lambda stepped, *_: rates.append(stepped.param_groups[0]["lr"]))
        return optimizer

    torch.manual_seed(0)
    made = entry().set_optimizer(make).set_lr_steps([2, 4]).set_lr_decay_factor(0.5).set_num_epochs(2)
    trained = made.train()
    score = made.test()
    classes, scores = made.predict(torch.eye(4)[: 3 - fleet.worker_index() * 3])  # the second rank has nothing to ask
    made.stop()
    return {"rates": torch.tensor(rates[1:]), "steps": trained.num_steps, "accuracy": score, "classes": classes,
            "scores": scores}  # fmt: skip


def test_entry_with_an_optimizer_of_ones_own(ranks: Ranks) -> None:
    for size in (1, 2):
        results = ranks.run(own_optimizer, size)
        steps = 5 if size == 1 else 3  # 33 samples in batches of 7; 17 each
        assert [result["steps"] for result in results] == [steps] * size
        expected = [0.01 * (1.0 if step < 2 else 0.5 if step < 4 else 0.25) for step in range(2 * steps)]
        torch.testing.assert_close(results[0]["rates"], torch.tensor(expected))
        assert len({result["accuracy"] for result in results}) == 1
        assert [len(result["classes"]) for result in results] == [3, 0][:size]


@pytest.mark.parametrize(
    ("setter", "value", "text"),
    [
        ("set_class_num", 0, "set_class_num 1 0"),
        ("set_emb_dim", 1.5, "set_emb_dim 1 1.5"),
        ("set_model", "resnet", "set_model torch.nn.Module str"),
        ("set_dataset", 3, "set_dataset train Dataset int"),
        ("set_train_reader", 3, "set_train_reader int"),
        ("set_batch_size", True, "set_train_batch_size 1 True"),
        ("set_train_epochs", -1, "set_train_epochs 1 -1"),
        ("set_loss_type", "triplet", "set_loss_type arcface cosface softmax 'triplet'"),
        ("set_learning_rate", float("nan"), "set_learning_rate nan"),
        ("set_optimizer", "sgd", "set_optimizer str"),
        ("set_lr_steps", [0], "set_lr_steps 1 0"),
        ("set_checkpoint_dir", "", "set_checkpoint_dir ''"),
        ("set_strategy", {}, "set_strategy fleet.DistributedStrategy dict"),
    ],
)
def test_wrong_settings_are_named(setter: str, value: Any, text: str) -> None:
    with pytest.raises(FleetError, match=naming(*text.split())):
        getattr(Entry(), setter)(value)


def test_missing_settings_are_named() -> None:
    with pytest.raises(FleetError, match="set_class_num"):
        Entry().train()
    with pytest.raises(FleetError, match="set_model"):
        Entry().set_class_num(3).set_emb_dim(4).test()
    with pytest.raises(FleetError, match=naming("set_loss_type", "'margin'", "scale", "m1", "m2", "m3")):
        Entry().set_loss_type("arcface", margin=0.5)
