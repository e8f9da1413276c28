"""Two towers: one turns a user into a vector, one a film; the nearer they are, the more the user likes the film."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from examples.columns import Columns

TEMPERATURE = 0.1  # of the softmax over the films of a batch


class UserTower(torch.nn.Module):
    def __init__(self, num_users: int, dim: int) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(num_users + 1, dim, sparse=True)
        self.out = torch.nn.Linear(dim, dim)

    def forward(self, users: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.out(self.users(users)), dim=1)


class FilmTower(torch.nn.Module):
    def __init__(self, num_films: int, num_genres: int, dim: int) -> None:
        super().__init__()
        self.films = torch.nn.Embedding(num_films + 1, dim, sparse=True)
        self.genres = torch.nn.Embedding(num_genres + 1, dim, sparse=True)
        self.out = torch.nn.Linear(2 * dim, dim)

    def forward(self, films: torch.Tensor, genres: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.out(torch.cat([self.films(films), self.genres(genres)], dim=1)), dim=1)


class TwoTower(torch.nn.Module):
    """Plain torch: `fleet.distributed_model` moves its sparse embeddings to the servers.

    The towers are called by themselves, in training and in prediction; the model as a whole scores given pairs.
    """

    def __init__(self, num_users: int, num_films: int, num_genres: int, dim: int = 16) -> None:
        super().__init__()
        self.user, self.film = UserTower(num_users, dim), FilmTower(num_films, num_genres, dim)

    def forward(self, users: torch.Tensor, films: torch.Tensor, genres: torch.Tensor) -> torch.Tensor:
        return (self.user(users) * self.film(films, genres)).sum(dim=1)


def loss_of(model: TwoTower, batch: Columns, correct: bool = True) -> torch.Tensor:
    """In-batch negatives: of all films of the batch, which one did the user like?

    A popular film is in more batches, and so more often a negative. `correct` takes the logarithm of its share off its
    scores (logQ correction): then the softmax over a batch estimates that over all films.
    """
    scores = model.user(batch["user"]) @ model.film(batch["film"], batch["genre"]).T / TEMPERATURE
    if correct:
        scores = scores - batch["log_q"]
    is_same = batch["film"].unsqueeze(0) == batch["film"].unsqueeze(1)
    is_same.fill_diagonal_(False)  # the same film again is no negative
    return F.cross_entropy(scores.masked_fill(is_same, -torch.inf), torch.arange(len(scores)))
