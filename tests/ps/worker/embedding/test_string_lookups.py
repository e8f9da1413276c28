"""Embeddings called with strings: the rows are those of their hashes, in training and in a plain model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.jobs import fleet_optimizer, one_worker
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import WrongIds
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding


class Cities(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = SparseEmbedding(3, name="cities")

    def forward(self, cities: object) -> torch.Tensor:
        return self.rows(cities)


def test_strings_read_and_train_the_rows_of_their_hashes() -> None:
    cities = ["Köln", "Paris", "Köln"]
    ids = torch.from_numpy(fleet.hash_strings(cities))
    with one_worker(Cities(), fleet_optimizer("sgd", lr=0.5)) as part:
        before = part.model(ids).detach()
        for given in (cities, np.array(cities), np.array(cities, object), (np.array(cities), torch.tensor([0, 2]))):
            found = part.model(given).detach()
            expected = before if len(found) == 3 else torch.stack([before[:2].sum(0), before[2]])
            torch.testing.assert_close(found, expected)
        part.model(cities).sum().backward()
        part.optimizer.step()
        after = part.model(ids).detach()
    torch.testing.assert_close(after, before - 0.5 * torch.tensor([[2.0], [1.0], [2.0]]))


def test_a_table_of_a_fixed_size_says_how_to_hash_into_it() -> None:
    model = torch.nn.ModuleDict({"rows": SparseEmbedding(2, name="few", num_embeddings=10)})
    with one_worker(model, fleet_optimizer("sgd", lr=0.5)), pytest.raises(WrongIds, match=naming("size=10")):
        model["rows"](["a"])
