"""DIN: attention over a history that shares its table with the film at hand, trained by a fleet as by plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.example_scripts import (
    WORKERS,
    assert_trained_as_by_torch,
    by_a_fleet,
    click_loss,
    number,
    printed,
    train_plain,
)
from support.extras import Late

from examples.columns import auc, predicted, split
from examples.din.model import DIN, Attention
from examples.movielens.generate import NUM_GENRES, generated

oracle = Late("sklearn.metrics")

SIZES = {"users": 300, "films": 200, "ratings": 12_000, "history": 5, "dim": 4, "seed": 1}
FLAGS = [text for name, value in SIZES.items() for text in (f"--{name}", value)]
BATCH, LR = 64, 0.1


def test_attention_weighs_each_member_of_a_history_by_itself_and_passes_over_what_is_not_there() -> None:
    torch.manual_seed(0)
    attention, candidate, history = Attention(6), torch.randn(3, 6), torch.randn(3, 4, 6)
    is_there = torch.tensor([[True, True, False, True], [False] * 4, [True, False, False, False]])
    found = attention(candidate, history, is_there)
    for row in range(3):
        expected = torch.zeros(6)
        for member, there in zip(history[row], is_there[row], strict=True):
            beside = torch.cat([member, candidate[row], member - candidate[row], member * candidate[row]])
            expected = expected + (attention.weigh(beside) * member if there else 0)
        torch.testing.assert_close(found[row], expected)


def test_two_workers_in_sync_mode_train_attention_over_histories_as_torch_does() -> None:
    ratings = generated(50, 40, 2000, seed=1)
    sizes = ratings.num_users, ratings.num_films, NUM_GENRES
    columns = {name: column[-320:] for name, column in ratings.columns(history=5).items()}

    def make() -> DIN:
        """With rows so large that attention has something to learn within ten steps."""
        model = DIN(*sizes, 4)
        for table in (model.users, model.films, model.genres):
            table.weight.data.mul_(10)
        return model

    assert_trained_as_by_torch(make, click_loss, columns, 0.5, 32, ["users", "films", "genres"])


@pytest.mark.slow
def test_two_servers_and_two_workers_tell_likes_as_well_as_plain_torch(tmp_path: Path) -> None:
    flags = ["--epochs", 1, "--batch_size", WORKERS * BATCH, "--lr", LR, "--save", tmp_path / "model", *FLAGS]
    output = by_a_fleet(tmp_path / "log", "din/train.py", *flags)

    ratings = generated(SIZES["users"], SIZES["films"], SIZES["ratings"], SIZES["seed"])
    samples, held_out = split(ratings.columns(SIZES["history"]))
    sizes = ratings.num_users, ratings.num_films, NUM_GENRES, SIZES["dim"]
    torch.manual_seed(SIZES["seed"])
    model = DIN(*sizes)
    train_plain(model, click_loss, torch.optim.Adagrad(model.parameters(), LR), samples, BATCH, SIZES["seed"])
    scores = predicted(model, held_out)
    expected_auc = oracle.roc_auc_score(held_out["label"], scores)
    assert expected_auc > 0.75  # by chance 0.5
    assert auc(scores, held_out["label"]) == pytest.approx(expected_auc)
    assert number(r"AUC ([0-9.]+) on [0-9,]+ held-out ratings", output) == pytest.approx(expected_auc, abs=2e-3)

    shown = printed("din/predict.py", "--model", tmp_path / "model", *FLAGS)
    assert number(r"AUC ([0-9.]+) on", shown) == pytest.approx(expected_auc, abs=2e-3)
    assert "because of" in shown
