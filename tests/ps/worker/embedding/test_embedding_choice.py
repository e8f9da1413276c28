"""A weight that an embedding shares with another layer: trained as plain torch trains it, or refused; never in part."""

from __future__ import annotations

import pytest
import torch
from support.jobs import one_worker
from support.messages import names, naming
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.embedding.embedding_choice import choose

NUM, DIM = 30, 6


class Language(torch.nn.Module):
    """The next word of a word, by the scores of all words."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(NUM, DIM, sparse=True)
        self.users = torch.nn.Embedding(NUM, DIM, sparse=True)
        self.scores = torch.nn.Linear(DIM, NUM, bias=False)
        if is_tied:
            self.scores.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scores(torch.tanh(self.words(ids) + self.users(ids)))


def pairs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randint(0, NUM, (2, 16), generator=torch.Generator().manual_seed(seed)))


def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for seed in range(10):
        ids, following = pairs(seed)
        loss = F.cross_entropy(model(ids), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_tied_before_it_stays_dense_trains_as_torch_does_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    plain = Language()
    expected = losses(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    torch.manual_seed(0)
    with one_worker(Language(), num_servers=2) as part:
        assert losses(part.model, part.optimizer) == pytest.approx(expected, rel=1e-6)
        assert list(part.job.plan.sparse) == ["users"]
        assert part.model.scores.weight is part.model.words.weight
        torch.testing.assert_close(part.model.words.weight, plain.words.weight, rtol=1e-6, atol=1e-6)
    assert names(capsys.readouterr().out, "'words'", "'scores.weight'")


def test_tied_afterwards_is_refused_where_it_is_used() -> None:
    with one_worker(Language(is_tied=False)) as part:
        part.model.scores.weight = part.model.words.weight
        with pytest.raises(ModelError, match=naming("'words.weight'", "'words'", "linear")):
            part.model(pairs(0)[0])


def test_two_embeddings_of_one_weight_are_one_table_and_hold_one_stand_in() -> None:
    model = Language(is_tied=False)
    model.users.weight = model.words.weight
    fleet.nn.convert(model)
    assert isinstance(model.users, fleet.nn.SparseEmbedding)
    assert model.users.weight is model.words.weight
    assert model.users.name == model.words.name == "words"
    assert model.words.weight.path == "words"


def test_a_weight_that_is_computed_is_not_read_for_the_choice() -> None:
    """Reading it in train mode is a step of spectral_norm's power iteration, as in a call of the model."""
    model = torch.nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(torch.nn.Embedding(NUM, DIM)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert choose(model, sparse=1).chosen == []
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
