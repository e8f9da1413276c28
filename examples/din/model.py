"""DIN (Zhou et al. 2018): what a user has liked before counts as far as it has to do with the film at hand."""

from __future__ import annotations

import torch

from examples.columns import Columns


class DIN(torch.nn.Module):
    """Logits for a batch of examples/movielens: `user`, `film`, `genre`, `liked` (N, L) and `liked_genres` (N, L).

    Plain torch: `fleet.distributed_model` moves its sparse embeddings to the servers. The film at hand and the films of
    the history are looked up in the same table.
    """

    def __init__(self, num_users: int, num_films: int, num_genres: int, dim: int = 8, hidden: int = 32) -> None:
        super().__init__()
        self.users = _embedding(num_users, dim)
        self.films = _embedding(num_films, dim)
        self.genres = _embedding(num_genres, dim)
        self.attention = Attention(2 * dim)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(7 * dim, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)
        )

    def forward(self, batch: Columns) -> torch.Tensor:
        film = torch.cat([self.films(batch["film"]), self.genres(batch["genre"])], dim=1)
        liked = torch.cat([self.films(batch["liked"]), self.genres(batch["liked_genres"])], dim=2)
        interest = self.attention(film, liked, batch["liked"] > 0)
        together = [self.users(batch["user"]), film, interest, film * interest]
        return self.network(torch.cat(together, dim=1)).squeeze(1)


class Attention(torch.nn.Module):
    """The sum of a history, each member weighed by what a small network makes of it and the candidate.

    The weights need not add up to one: their size says how strong the interest is.
    """

    def __init__(self, dim: int, hidden: int = 16) -> None:
        super().__init__()
        self.weigh = torch.nn.Sequential(torch.nn.Linear(4 * dim, hidden), torch.nn.PReLU(), torch.nn.Linear(hidden, 1))

    def forward(self, candidate: torch.Tensor, history: torch.Tensor, is_there: torch.Tensor) -> torch.Tensor:
        """(N, dim) candidates, (N, L, dim) histories, and which of their members are there (N, L); gives (N, dim)."""
        beside = candidate.unsqueeze(1).expand_as(history)
        weights = self.weigh(torch.cat([history, beside, history - beside, history * beside], dim=2))
        return (weights * is_there.unsqueeze(2) * history).sum(dim=1)


def _embedding(num: int, dim: int) -> torch.nn.Embedding:
    """For the ids 1 to `num`; 0 is nothing."""
    embedding = torch.nn.Embedding(num + 1, dim, padding_idx=0, sparse=True)
    torch.nn.init.normal_(embedding.weight, std=0.1)
    with torch.no_grad():
        embedding.weight[0] = 0
    return embedding
