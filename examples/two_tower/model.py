"""Two towers: one turns a user into a vector, one an item; the nearer they are, the more the user likes the item."""

from __future__ import annotations

import torch
from data import NUM_TASTES, Batch
from torch.nn import functional as F

TEMPERATURE = 0.2  # of the softmax over the items of a batch


class UserTower(torch.nn.Module):
    def __init__(self, num_users: int, dim: int) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(num_users, dim, sparse=True)
        self.out = torch.nn.Linear(dim, dim)

    def forward(self, users: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.out(self.users(users)), dim=1)


class ItemTower(torch.nn.Module):
    def __init__(self, num_items: int, dim: int) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(num_items, dim, sparse=True)
        self.kinds = torch.nn.Embedding(NUM_TASTES, dim, sparse=True)
        self.out = torch.nn.Linear(2 * dim, dim)

    def forward(self, items: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.out(torch.cat([self.items(items), self.kinds(kinds)], dim=1)), dim=1)


class TwoTower(torch.nn.Module):
    """Plain torch: `fleet.distributed_model` moves its sparse embeddings to the servers.

    The towers are called by themselves, in training and in prediction; the model as a whole scores given pairs.
    """

    def __init__(self, num_users: int, num_items: int, dim: int = 16) -> None:
        super().__init__()
        self.user, self.item = UserTower(num_users, dim), ItemTower(num_items, dim)

    def forward(self, users: torch.Tensor, items: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return (self.user(users) * self.item(items, kinds)).sum(dim=1)


def loss_of(model: TwoTower, batch: Batch) -> torch.Tensor:
    """In-batch negatives: of all items of the batch, which one did the user like?"""
    scores = model.user(batch["users"]) @ model.item(batch["items"], batch["kinds"]).T / TEMPERATURE
    is_same = batch["items"].unsqueeze(0) == batch["items"].unsqueeze(1)
    is_same.fill_diagonal_(False)  # the same item again is no negative
    return F.cross_entropy(scores.masked_fill(is_same, -torch.inf), torch.arange(len(scores)))
