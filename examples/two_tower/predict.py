"""Retrieve with a saved two-tower model in one plain process, each tower by itself: no server, no fleetrun.

python examples/two_tower/predict.py --model model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import torchfleet as fleet
from torchfleet.options import HelpFormatter

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.columns import Columns
from examples.movielens.generate import add_options, ratings_of
from examples.two_tower.data import Likes, likes_of
from examples.two_tower.model import TwoTower

_CHUNK = 1024  # users or films at once


@torch.no_grad()
def film_vectors(model: TwoTower, genres: torch.Tensor) -> torch.Tensor:
    """What a search index would be built from: the film tower alone, over all films; film 0, for none, is zeros."""
    films = torch.arange(1, len(genres))
    parts = [model.film(some, genres[some]) for some in films.split(_CHUNK)]
    return torch.cat([torch.zeros(1, parts[0].shape[1]), *parts])


@torch.no_grad()
def retrieve(model: TwoTower, users: torch.Tensor, vectors: torch.Tensor, seen: Columns, num: int = 20) -> torch.Tensor:
    """The `num` nearest films of each user, nearest first, among all that the user has not seen.

    The user tower alone, and every film compared: an index would answer the same question faster, and not always right.
    """
    found = []
    for some in users.split(_CHUNK):
        scores = model.user(some) @ vectors.T
        scores[:, 0] = -torch.inf
        scores[seen_of(some, seen)] = -torch.inf
        found.append(scores.topk(num).indices)
    return torch.cat(found)


def seen_of(users: torch.Tensor, seen: Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """(places in `users`, films that they have seen), to index a table of scores with."""
    first, end = (torch.searchsorted(seen["user"], users, right=right) for right in (False, True))
    rows = torch.repeat_interleave(torch.arange(len(users)), end - first)
    within = torch.arange(len(rows)) - torch.repeat_interleave(
        torch.cumsum(end - first, 0) - (end - first), end - first
    )
    return rows, seen["film"][first[rows] + within]


def recall(model: TwoTower, likes: Likes, num: int = 20) -> float:
    """Of which part of the held-out likes the film is among the `num` that are retrieved for the user."""
    vectors = film_vectors(model, likes.genres)
    users, films = likes.held_out["user"], likes.held_out["film"]
    return float((retrieve(model, users, vectors, likes.seen, num) == films.unsqueeze(1)).any(dim=1).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", required=True, help="the folder that train.py --save wrote to")
    parser.add_argument("--dim", type=int, default=16, help="as given to train.py")
    parser.add_argument("--seed", type=int, default=0, help="as given to train.py")
    add_options(parser)
    options = parser.parse_args()
    ratings = ratings_of(options)
    shape = ratings.num_users, ratings.num_films, len(ratings.genre_names) - 1
    model, likes = fleet.load_inference_model(options.model, TwoTower(*shape, options.dim)), likes_of(ratings)
    users = likes.held_out["user"].unique()[:3]
    for user, films in zip(
        users, retrieve(model, users, film_vectors(model, likes.genres), likes.seen, 3), strict=True
    ):
        print(f"user {user}: {', '.join(ratings.titles[film] for film in films)}")
    found, num = recall(model, likes), len(likes.held_out["user"])
    print(f"recall@20 {found:.4f} of {num:,} held-out likes, from {options.model}")


if __name__ == "__main__":
    main()
