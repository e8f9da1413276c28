"""Bag-of-words matching: a pairwise loss over bags that share one table, trained by a fleet as by plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.example_scripts import WORKERS, assert_trained_as_by_torch, by_a_fleet, number, printed, train_plain
from support.messages import naming
from torch.nn import functional as F

import torchfleet as fleet
from examples.columns import Columns, predicted
from examples.matching.data import LENGTH, bags_of, generated, read
from examples.matching.model import Matching, hinge, in_order

SIZES = {"pairs": 8000, "films": 300, "dim": 8, "seed": 1}
FLAGS = [text for name, value in SIZES.items() for text in (f"--{name}", value)]
BATCH, LR = 64, 0.1


def shared_words(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return ((left.unsqueeze(2) == right.unsqueeze(1)) & (left > 0).unsqueeze(2)).any(dim=2).sum(dim=1).float()


def test_the_loss_is_that_of_torch_and_a_tie_is_half_a_pair_in_order() -> None:
    cosines = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.5, 0.4]])
    expected = F.margin_ranking_loss(*cosines.unbind(dim=1), torch.ones(4), margin=0.3)
    torch.testing.assert_close(hinge(cosines, 0.3), expected)
    assert in_order(cosines) == 2.5 / 4


def test_words_are_bags_without_a_dictionary(tmp_path: Path) -> None:
    (bag,) = bags_of(["The cat the mat"])
    assert bag[0] == bag[2] == fleet.hash_string("the") % 49_999 + 1
    assert (bag > 0).sum() == 4
    assert bags_of(["word " * 50])[0].tolist() == [bags_of(["word"])[0, 0]] * LENGTH
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"query {i}\ttitle {i}\n" for i in range(20)))
    pairs, held_out = read(file)
    assert (len(pairs["query"]), len(held_out["query"])) == (18, 2)
    for part in (pairs, held_out):
        assert not (part["title"] == part["other"]).all(dim=1).any(), "a title beside itself"
    file.write_text("query without a title\n")
    with pytest.raises(SystemExit, match=naming("line 1", 1)):
        read(file)


def loss_of(model: torch.nn.Module, batch: Columns) -> torch.Tensor:
    return hinge(model(batch))


def test_two_workers_in_sync_mode_train_a_pairwise_loss_over_shared_words_as_torch_does() -> None:
    """With few words, so that those of query and titles are often the same, within a text and between them."""
    rng = torch.Generator().manual_seed(0)
    columns = {name: torch.randint(0, 30, (320, 6), generator=rng) for name in ("query", "title", "other")}
    assert_trained_as_by_torch(lambda: Matching(8, num_words=30), loss_of, columns, 2.0, 32, ["words"])


@pytest.mark.long
@pytest.mark.slow
def test_two_servers_and_two_workers_find_titles_as_well_as_plain_torch(tmp_path: Path) -> None:
    flags = ["--epochs", 1, "--batch_size", WORKERS * BATCH, "--lr", LR, "--save", tmp_path / "model", *FLAGS]
    output = by_a_fleet(tmp_path / "log", "matching/train.py", *flags)

    pairs, held_out = generated(SIZES["pairs"], SIZES["films"], SIZES["seed"])
    torch.manual_seed(SIZES["seed"])
    model = Matching(SIZES["dim"])
    train_plain(model, loss_of, torch.optim.Adagrad(model.parameters(), LR), pairs, BATCH, SIZES["seed"])
    expected = in_order(predicted(model, held_out))
    both = [shared_words(held_out["query"], held_out[name]) for name in ("title", "other")]
    assert expected > in_order(torch.stack(both, dim=1)) + 0.1, "it knows more than which words are in both texts"
    assert expected > 0.8
    assert number(r"in order ([0-9.]+) of 800 held-out pairs", output) == pytest.approx(expected, abs=5e-3)

    shown = printed("matching/predict.py", "--model", tmp_path / "model", *FLAGS)
    assert number(r"in order ([0-9.]+) of 800 held-out pairs", shown) == pytest.approx(expected, abs=5e-3)
