"""Recommenders as papers describe them, of torch's own sparse layers: two workers train to the result of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import jobs
from torch.nn import functional as F

BATCH, STEPS, WORKERS = 48, 5, 2
SIZES = (7, 30, 200, 11)  # ids of DLRM's categories
USERS, ITEMS = 60, 40
Columns = tuple[torch.Tensor, ...]


class MatrixFactorisation(torch.nn.Module):
    """A rating is a mean, two biases and a product."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.user, self.item = (torch.nn.Embedding(size, dim, sparse=True) for size in (USERS, ITEMS))
        self.user_bias, self.item_bias = (torch.nn.Embedding(size, 1, sparse=True) for size in (USERS, ITEMS))
        self.mean = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        biases = (self.user_bias(users) + self.item_bias(items)).squeeze(1)
        return self.mean + biases + (self.user(users) * self.item(items)).sum(1)


class DLRM(torch.nn.Module):
    """Numbers through a tower, categories through bags, products of all pairs of vectors through another tower."""

    def __init__(self, num_dense: int = 5, dim: int = 6) -> None:
        super().__init__()
        self.bottom = torch.nn.Sequential(torch.nn.Linear(num_dense, dim), torch.nn.ReLU())
        self.bags = torch.nn.ModuleList(torch.nn.EmbeddingBag(size, dim, mode="sum", sparse=True) for size in SIZES)
        num = len(SIZES) + 1
        self.register_buffer("pairs", torch.tril_indices(num, num, -1), persistent=False)
        self.top = torch.nn.Sequential(torch.nn.Linear(dim + num * (num - 1) // 2, 8), torch.nn.ReLU())
        self.out = torch.nn.Linear(8, 1)

    def forward(self, dense: torch.Tensor, *categories: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(bag(ids) for bag, ids in zip(self.bags, categories, strict=True))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.out(self.top(torch.cat([bottom, products], dim=1))).squeeze(1)


def ratings(num: int) -> Columns:
    draw = torch.Generator().manual_seed(0)
    users, items = (torch.randint(size, (num,), generator=draw) for size in (USERS, ITEMS))
    return users, items, torch.randint(1, 6, (num,), generator=draw).float()


def clicks(num: int) -> Columns:
    """Numbers, two or three ids of each category, and whether it was clicked."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(size, (num, 2 + size % 2), generator=draw) for size in SIZES]
    return torch.randn(num, 5, generator=draw), *ids, torch.randint(2, (num,), generator=draw).float()


def adagrad(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05)


@pytest.mark.parametrize(
    ("make_model", "columns", "loss_of"),
    [
        (MatrixFactorisation, ratings(BATCH * STEPS), F.mse_loss),
        (DLRM, clicks(BATCH * STEPS), F.binary_cross_entropy_with_logits),
    ],
    ids=["matrix factorisation", "DLRM"],
)
def test_two_workers_with_half_of_each_batch_train_to_the_result_of_torch(
    make_model: type[torch.nn.Module], columns: Columns, loss_of: Callable[..., torch.Tensor]
) -> None:
    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, own: Columns, size: int) -> torch.Tensor:
        for *inputs, target in zip(*(column.split(size) for column in own), strict=True):
            loss_of(model(*inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model(*columns[:-1]).detach()

    def body(part: jobs.Part) -> torch.Tensor:
        own = tuple(column[part.index :: WORKERS] for column in columns)
        return train(part.model, part.optimizer, own, BATCH // WORKERS)

    torch.manual_seed(0)  # as worker 0, whose first values are everybody's
    plain = make_model()
    expected = train(plain, adagrad(plain), columns, BATCH)
    for found in jobs.run(body, make_model, adagrad, num_workers=WORKERS).results:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
