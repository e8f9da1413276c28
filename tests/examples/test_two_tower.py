"""Two towers, each called by itself: trained by a fleet they are what plain torch makes of them, and they retrieve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.example_scripts import assert_trained_as_by_torch, by_a_fleet, number, printed, train_plain
from support.grids import first_of
from support.messages import naming

from examples.movielens.generate import NUM_GENRES, generated
from examples.two_tower.data import likes_of
from examples.two_tower.model import TEMPERATURE, TwoTower, loss_of
from examples.two_tower.predict import film_vectors, recall, retrieve

SIZES = {"users": 300, "films": 150, "ratings": 10_000, "dim": 8, "seed": 1}
FLAGS = [text for name, value in SIZES.items() for text in (f"--{name}", value)]
BATCH, LR = 64, 0.2
RATINGS = generated(SIZES["users"], SIZES["films"], SIZES["ratings"], SIZES["seed"])
LIKES = likes_of(RATINGS)


def towers() -> TwoTower:
    return TwoTower(RATINGS.num_users, RATINGS.num_films, NUM_GENRES, SIZES["dim"])


def test_the_loss_is_a_softmax_over_the_films_of_the_batch_corrected_for_how_often_they_are_there() -> None:
    model, batch = towers(), {name: column[:40] for name, column in LIKES.training.items()}
    assert len(batch["film"].unique()) < 40, "some film is there twice"
    users = model.user(batch["user"]).detach().double().numpy()
    films = model.film(batch["film"], batch["genre"]).detach().double().numpy()
    counts = np.bincount(LIKES.training["film"].numpy())
    for correct in (True, False):
        terms = []
        for row, own in enumerate(batch["film"].tolist()):
            others = [place for place, film in enumerate(batch["film"].tolist()) if film != own or place == row]
            scores = {place: users[row] @ films[place] / TEMPERATURE for place in others}
            if correct:
                scores = {p: score - np.log(counts[batch["film"][p]] / counts.sum()) for p, score in scores.items()}
            terms.append(np.log(sum(map(np.exp, scores.values()))) - scores[row])
        assert loss_of(model, batch, correct).item() == pytest.approx(np.mean(terms), rel=1e-4)


def test_retrieval_is_that_of_a_search_through_all_films_that_were_not_seen() -> None:
    model = towers().eval()
    users = LIKES.held_out["user"].unique()[:20]
    vectors = film_vectors(model, LIKES.genres)
    found = retrieve(model, users, vectors, LIKES.seen, 5)
    cut = int(len(RATINGS.users) * 0.9)
    for user, films in zip(users.tolist(), found.tolist(), strict=True):
        seen = set(RATINGS.films[:cut][RATINGS.users[:cut] == user].tolist())
        with torch.no_grad():
            score = {film: float(model.user(torch.tensor([user]))[0] @ vectors[film]) for film in range(1, 151)}
        best = sorted((film for film in score if film not in seen), key=lambda film: -score[film])
        assert films == best[:5]


def test_two_workers_in_sync_mode_train_on_the_negatives_of_their_own_batches_as_torch_does() -> None:
    columns = {name: column[:320] for name, column in LIKES.training.items()}
    tables = ["user.users", "film.films", "film.genres"]
    assert_trained_as_by_torch(towers, loss_of, columns, 1.0, 32, tables)


@pytest.mark.slow
def test_two_servers_and_two_workers_retrieve_as_well_as_plain_torch(tmp_path: Path) -> None:
    flags = ["--mode", "sync", "--epochs", 1, "--batch_size", BATCH, "--lr", LR, "--save", tmp_path / "model", *FLAGS]
    output = by_a_fleet(tmp_path / "log", "two_tower/train.py", *flags)
    torch.manual_seed(SIZES["seed"])
    model = towers()
    train_plain(model, loss_of, torch.optim.Adagrad(model.parameters(), LR), LIKES.training, BATCH, SIZES["seed"])
    expected = recall(model, LIKES)
    assert expected > 0.3  # 0.13 by chance
    pattern = r"recall@20 ([0-9.]+) of \d+ held-out likes"
    assert number(pattern, output) == pytest.approx(expected, abs=0.01), "two likes of 231 may stand on the edge"
    shown = printed("two_tower/predict.py", "--model", tmp_path / "model", *FLAGS)
    assert number(pattern, shown) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("mode", first_of(["hybrid", "async", "geo"]))
def test_every_other_mode_retrieves_too(mode: str) -> None:
    output = printed("two_tower/train.py", "--mode", mode, "--epochs", 2, "--batch_size", BATCH, *FLAGS)
    assert number(r"recall@20 ([0-9.]+)", output) > 0.25


def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, text in (
        (("--films", 0), "--films must be at least 1, found 0"),
        (("--mode", "slow"), "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            printed("two_tower/train.py", *flags)
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit, match=naming(100000, 1)):
        printed("two_tower/train.py", "--batch_size", 100_000, *FLAGS)
