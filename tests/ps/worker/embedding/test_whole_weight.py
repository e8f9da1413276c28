"""An embedding's weight in eval mode: all rows of a table of a declared size, read-only, as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import each_of
from support.jobs import MODES, Servers, one_worker
from support.messages import naming
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.errors import ModelError

NUM_USERS, NUM_ITEMS, DIM = 6, 9, 4


class Factors(torch.nn.Module):
    """Matrix factorisation, which trains pairs and predicts the scores of all items."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users = torch.nn.Embedding(NUM_USERS, DIM, sparse=True)
        self.items = torch.nn.Embedding(NUM_ITEMS, DIM, padding_idx=0, sparse=True)
        self.scale = torch.nn.Linear(1, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.scale((self.users(users) * self.items(items)).sum(1, keepdim=True))

    def scores(self, users: torch.Tensor) -> torch.Tensor:
        return self.users(users) @ self.items.weight.T


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ids = (torch.randint(num, (5,), generator=draw) for num in (NUM_USERS, NUM_ITEMS))
    optimizer.zero_grad()
    model(*ids).square().mean().backward()
    optimizer.step()


@each_of("mode", MODES)
def test_predicting_between_epochs_equals_plain_torch(mode: str) -> None:
    plain, everyone = Factors(), torch.arange(NUM_USERS)
    optimizer = sgd(plain)
    with one_worker(Factors(), sgd, mode=mode, num_servers=2) as part:
        for epoch in range(3):
            for made in ((part.model.train(), part.optimizer), (plain.train(), optimizer)):
                train(*made, epoch)
            part.model.eval()
            with torch.no_grad():
                torch.testing.assert_close(part.model.scores(everyone), plain.scores(everyone), rtol=1e-5, atol=1e-6)
                expected = F.linear(torch.ones(1, DIM), plain.items.weight)
                torch.testing.assert_close(F.linear(torch.ones(1, DIM), part.model.items.weight), expected)


READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "matmul": lambda model: torch.ones(2, DIM) @ model.items.weight.T,
    "getitem": lambda model: model.items.weight[torch.tensor([3, 1])],
    "list": lambda model: torch.cat([model.users.weight, model.items.weight]),
    "by name": lambda model: F.embedding(torch.tensor([2]), weight=model.items.weight),
    "norm": lambda model: model.items.weight.norm(dim=1),
    "clone": lambda model: model.items.weight.clone(),
}


@each_of("read", READS)
def test_what_reads_gets_the_values_of_plain_torch(read: str) -> None:
    expected = READS[read](Factors())
    with one_worker(Factors(), sgd) as part:
        model = part.model.eval()
        assert torch.equal(READS[read](model), expected)
        with torch.inference_mode():
            assert torch.equal(READS[read](model), expected)
        with torch.no_grad():
            assert torch.equal(READS[read](model), expected)


def test_rows_are_fetched_once_in_an_evaluation_and_anew_after_a_step_or_eval() -> None:
    servers = Servers()
    with one_worker(Factors(), sgd, servers=servers) as part:
        counts, weight = servers.servers[0].counts, part.model.eval().items.weight

        def requests_of_a_read() -> int:
            before = counts.total()
            weight.sum()
            return counts.total() - before

        assert requests_of_a_read() > 0
        assert requests_of_a_read() == 0
        before = weight.clone()
        train(part.model, part.optimizer, 0)  # in eval mode, as with frozen statistics
        assert requests_of_a_read() > 0
        assert not torch.equal(weight.clone(), before)
        part.model.eval()
        assert requests_of_a_read() > 0


def test_a_loaded_state_is_read() -> None:
    with one_worker(Factors(), sgd) as part:
        model = part.model.eval()
        assert model.items.weight.norm() > 0
        state = {name: torch.zeros_like(value) for name, value in Factors().state_dict().items()}
        model.load_state_dict(state)
        assert model.items.weight.norm() == 0


def test_a_copy_of_the_model_reads_as_well() -> None:
    with one_worker(Factors(), sgd) as part:
        copied = copy.deepcopy(part.model).eval()
        assert torch.equal(copied.scores(torch.tensor([1])), Factors().scores(torch.tensor([1])))


def test_nothing_is_trained_through_a_weight_that_was_read_whole() -> None:
    """In eval mode with gradients: backward says so, instead of leaving the rows as they are."""
    with one_worker(Factors(), sgd) as part:
        loss = part.model.eval().scores(torch.tensor([1])).sum()
        with pytest.raises(ModelError, match=naming("'items.weight'", "sparse=False", "torch.no_grad()")):
            loss.backward()


def test_frozen_rows_are_constants_in_backward() -> None:
    with one_worker(Factors(), sgd) as part:
        part.model.items.weight.requires_grad_(False)
        other = torch.ones(1, DIM, requires_grad=True)
        (other @ part.model.eval().items.weight.T).sum().backward()
        assert torch.equal(other.grad, Factors().items.weight.sum(0, keepdim=True).detach())


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda weight: weight.zero_(),
    "operator": lambda weight: weight.__iadd__(1),
    "item": lambda weight: weight.__setitem__(0, 1.0),
    "out": lambda weight: torch.add(weight, weight, out=weight),
    "init": torch.nn.init.normal_,
    "data": lambda weight: setattr(weight, "data", torch.ones(NUM_ITEMS, DIM)),
    "copy": lambda weight: weight.copy_(torch.ones(NUM_ITEMS, DIM)),
}


@each_of("write", WRITES)
def test_writing_is_refused_in_eval_mode_too(write: str) -> None:
    with one_worker(Factors(), sgd) as part:
        weight = part.model.eval().items.weight
        with torch.no_grad(), pytest.raises(ModelError, match=naming("'items.weight'", "fleet.distributed_model")):
            WRITES[write](weight)


THEN: dict[str, Callable[[Any, Any], Any]] = {
    "read": lambda model, optimizer: model.items.weight.sum(),
    "train": lambda model, optimizer: model.train(),
    "step": lambda model, optimizer: train(model, optimizer, 0),
}


@each_of("then", THEN)
def test_writing_through_a_view_is_an_error_at_the_next_use(then: str) -> None:
    with one_worker(Factors(), sgd) as part:
        model = part.model.eval()
        with torch.no_grad():
            model.items.weight[2].zero_()
        with pytest.raises(ModelError, match=naming("load_state_dict")):
            THEN[then](model, part.optimizer)


def test_in_training_the_error_names_eval_and_the_plain_model() -> None:
    expected = naming("'items.weight'", "fleet.to_plain(model)", "model.eval()")
    with one_worker(Factors(), sgd) as part, pytest.raises(ModelError, match=expected):
        part.model.scores(torch.tensor([1]))


def test_without_a_size_it_is_an_error_in_eval_mode_too() -> None:
    model = torch.nn.ModuleDict({"any": fleet.nn.SparseEmbedding(DIM), "out": torch.nn.Linear(DIM, 1)})
    expected = naming("'any.weight'", "fleet.to_plain(model)")
    with one_worker(model, sgd) as part, pytest.raises(ModelError, match=expected):
        part.model.eval()["any"].weight.sum()


def hooked(kind: str) -> tuple[Factors, Any]:
    model = Factors()
    return model, getattr(model.items.weight, kind)(lambda *_: None)


@each_of("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_weight_is_refused_before_anything_moves(kind: str) -> None:
    model, handle = hooked(kind)
    with pytest.raises(ModelError, match=naming("'items.weight'", "sparse=False", "handle.remove()")):
        fleet.nn.convert(model)
    assert type(model.users) is torch.nn.Embedding
    handle.remove()
    fleet.nn.convert(model)
    assert isinstance(model.items, fleet.nn.SparseEmbedding)


@each_of("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_an_embedding_with_a_hook_that_was_not_named_stays_dense_and_calls_it(kind: str) -> None:
    called = []
    model = Factors()
    model.users.sparse = model.items.sparse = False
    getattr(model.items.weight, kind)(lambda tensor: called.append(tuple(tensor.shape)))
    fleet.reset()
    try:
        model, optimizer = fleet.prepare(model, sgd(model), sparse=NUM_USERS)
        assert isinstance(model.users, fleet.nn.SparseEmbedding)
        assert type(model.items) is torch.nn.Embedding
        train(model, optimizer, 0)
        assert called == [(NUM_ITEMS, DIM)]
    finally:
        fleet.reset()
