"""Who liked what: users and items with tastes, made up. The last like of every user is held out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

NUM_TASTES = 30

Batch = dict[str, torch.Tensor]  # users, items and the items' kinds, one of each per like


def generated(num_users: int, num_items: int, num_likes: int, seed: int = 0) -> tuple[Batch, Batch]:
    """(likes to train on, one like of every user that is held out). An item's kind is its number % NUM_TASTES.

    A user has two tastes, and nine of ten likes are of a kind that is to the user's taste: no model can do better.
    """
    rng = np.random.default_rng(seed)
    tastes = rng.integers(0, NUM_TASTES, (num_users, 2))
    users = np.concatenate([np.arange(num_users), rng.integers(0, num_users, num_likes)])  # the first are held out
    kinds = tastes[users, rng.integers(0, 2, len(users))]
    by_chance = rng.random(len(users)) < 0.1
    kinds[by_chance] = rng.integers(0, NUM_TASTES, by_chance.sum())
    items = rng.integers(0, num_items // NUM_TASTES, len(users)) * NUM_TASTES + kinds
    likes = {"users": users, "items": items, "kinds": kinds}
    held_out = {name: torch.from_numpy(column[:num_users]) for name, column in likes.items()}
    return {name: torch.from_numpy(column[num_users:]) for name, column in likes.items()}, held_out


def batches(likes: Batch, batch_size: int, worker: int, num_workers: int, seed: int) -> Iterator[Batch]:
    """A worker's share, in an order of its own; all workers get as many batches, as sync mode needs."""
    num = len(likes["users"]) // num_workers // batch_size
    own = np.arange(worker, len(likes["users"]), num_workers)
    order = np.random.default_rng([seed, worker]).permutation(own)
    for start in range(0, num * batch_size, batch_size):
        at = torch.from_numpy(order[start : start + batch_size])
        yield {name: column[at] for name, column in likes.items()}
