"""Who liked which film: likes of examples/movielens to train on, and later ones that are held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from examples.columns import Columns, split
from examples.movielens.data import Ratings


@dataclass(frozen=True)
class Likes:
    """`training` has `user`, `film`, `genre` and `log_q`, the logarithm of how probable the film is in a batch.

    `held_out` has likes of the last tenth of the time, by users that have training likes. `seen` are all pairs of user
    and film of the time before, sorted by user: what a user has rated is not retrieved again. `genres` has each film's.
    """

    training: Columns
    held_out: Columns
    seen: Columns
    genres: torch.Tensor


def likes_of(ratings: Ratings) -> Likes:
    before, after = split(ratings.columns())
    training, held_out = (only(columns, columns["label"] > 0) for columns in (before, after))
    counts = np.bincount(training["film"], minlength=ratings.num_films + 1)
    training["log_q"] = torch.from_numpy(np.log(counts[training["film"]] / counts.sum())).float()
    held_out = only(held_out, torch.isin(held_out["user"], training["user"]))
    seen = only({name: before[name] for name in ("user", "film")}, torch.argsort(before["user"], stable=True))
    return Likes(training, held_out, seen, torch.from_numpy(ratings.genres))


def only(columns: Columns, which: torch.Tensor) -> Columns:
    return {name: column[which] for name, column in columns.items() if name != "label"}
