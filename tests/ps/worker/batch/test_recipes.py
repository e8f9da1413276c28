"""Ids that forward computes: recorded, foreseen from the third step on, and what cannot be foreseen says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import each_of
from support.jobs import Servers, one_worker

import torchfleet
from torchfleet.ps.worker.batch.foresight import CHANGING
from torchfleet.ps.worker.batch.recorder import IN_PLACE, PARAMETERS, RANDOM, ROWS, Refusal

FEATURES, DENSE, VOCABULARY, DIM = 5, 2, 50, 3


class Features(torch.nn.Module):
    """Tables of a block of numbers, of which `take` makes the ids of each; dense features stand behind them."""

    def __init__(self, take: Callable[..., list[torch.Tensor]], size: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows = torch.nn.ModuleList(torch.nn.Embedding(size, DIM, sparse=True) for _ in range(FEATURES))
        self.linear = torch.nn.ModuleList(torch.nn.Embedding(size, 1, sparse=True) for _ in range(FEATURES))
        self.tower = torch.nn.Linear(FEATURES * (DIM + 1) + DENSE, 1)
        self.register_buffer("offsets", torch.arange(FEATURES) * 10)
        self.take, self.calls = take, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found = []
        for tables in (self.linear, self.rows):
            ids = self.take(self, x)
            found += [table(own).reshape(len(x), -1) for table, own in zip(tables, ids, strict=True)]
        return self.tower(torch.cat([*found, x[:, FEATURES : FEATURES + DENSE].float()], dim=1))


def block(step: int, size: int = 8) -> torch.Tensor:
    """What a model for click rates is given: whole numbers and dense ones in one tensor of floats."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 10, (size, FEATURES))
    return torch.from_numpy(np.concatenate([ids, rng.random((size, DENSE))], axis=1).astype(np.float32))


def all_ids(x: torch.Tensor) -> torch.Tensor:
    return x[:, :FEATURES].long()


TAKES: dict[str, Callable[[Any, torch.Tensor], list[torch.Tensor]]] = {
    "slices": lambda model, x: [x[:, i : i + 1].long() for i in range(FEATURES)],
    "columns of a part": lambda model, x: list(all_ids(x).unbind(1)),
    "a buffer of offsets": lambda model, x: list((all_ids(x) + model.offsets).unbind(1)),
    "offsets written down": lambda model, x: list((all_ids(x) + x.new_tensor([0, 10, 20, 30, 40]).long()).unbind(1)),
    "a remainder": lambda model, x: [(x[:, i].long() * 7919 + i) % VOCABULARY for i in range(FEATURES)],
    "crossed": lambda model, x: [x[:, i].long() + 10 * (x[:, 0].long() // 3) for i in range(FEATURES)],
    "stacked": lambda model, x: list(torch.stack([x[:, i].long() for i in range(FEATURES)]).unbind(0)),
    "put together": lambda model, x: list(torch.cat([all_ids(x), all_ids(x)], dim=1)[:, FEATURES:].unbind(1)),
    "reshaped": lambda model, x: list(all_ids(x).reshape(-1).reshape(len(x), FEATURES).t().unbind(0)),
    "a view of a literal size": lambda model, x: list(all_ids(x).view(len(x), FEATURES, 1).unbind(1)),
    "bounded": lambda model, x: list(torch.where(all_ids(x) > 5, 5, all_ids(x)).clamp(min=1).unbind(1)),
    "positions": lambda model, x: [torch.arange(len(x)) + i for i in range(FEATURES)],
    "in double": lambda model, x: [x.double()[:, i].to(torch.int32) for i in range(FEATURES)],
    "without gradients": lambda model, x: list(torch.no_grad()(all_ids)(x).detach().unbind(1)),
}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: torch.nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for x in batches:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@each_of("take", TAKES)
def test_computed_ids_cost_one_pull_per_server_from_the_third_step_on_and_train_as_torch(take: str) -> None:
    """The last batch is smaller. 1e-6: sums of a few numbers below 1."""
    model = Features(TAKES[take])
    plain = copy.deepcopy(model)
    batches = [block(step) for step in range(5)] + [block(9, 3), block(10, 11)]
    servers = Servers(2)
    with one_worker(model, sgd, servers=servers) as part:
        losses = []
        for step, x in enumerate(batches):
            before = servers.counts("PULL")
            losses += train(part.model, part.optimizer, [x])
            if step >= 2:
                assert servers.counts("PULL") == [num + 1 for num in before], f"step {step}"
        assert part.stats()["unforeseen"] == []
        expected = train(plain, sgd(plain), batches)
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
        found = part.rows("rows.1", range(VOCABULARY))
        torch.testing.assert_close(found, plain.rows[1].weight.detach(), rtol=1e-5, atol=1e-6)


def test_computed_ids_are_pulled_while_the_batch_before_is_computed() -> None:
    servers = Servers()
    with one_worker(Features(TAKES["a buffer of offsets"]), sgd, servers=servers, mode="async") as part:
        for x in part.prefetch([block(step) for step in range(8)]):
            train(part.model, part.optimizer, [x])
        num = part.stats()["unforeseen_lookups"]
        assert num == 3 * 2 * FEATURES, "the first two steps, and the third, which was looked at before the second"


def test_a_buffer_is_read_as_it_is_when_the_batch_comes() -> None:
    model = Features(TAKES["a buffer of offsets"], size=60)
    servers = Servers()
    with one_worker(model, sgd, servers=servers) as part:
        train(part.model, part.optimizer, [block(step) for step in range(3)])
        model.offsets += 1
        before = servers.counts("PULL")[0]
        train(part.model, part.optimizer, [block(4)])
        assert servers.counts("PULL")[0] == before + 1


def reasons(part: Any) -> dict[str, str]:
    return {entry["table"]: entry["why"] for entry in part.stats()["unforeseen"]}


def changing(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [x[:, i].long() + model.calls for i in range(FEATURES)]


def in_place(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    ids = all_ids(x)
    ids[ids > 5] = 0
    return list(ids.unbind(1))


def of_rows(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    first = x[:, 0].long()
    return [first] + [model.rows[0](first).argmax(dim=1) for _ in range(FEATURES - 1)]


def of_parameters(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [(x[:, i] * model.tower.bias.abs()).long() for i in range(FEATURES)]


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], list[torch.Tensor]], Refusal]] = {
    "random": (
        lambda model, x: [torch.randint(0, VOCABULARY, (len(x),)) for _ in range(FEATURES)],
        RANDOM,
    ),
    "random, of numpy": (
        lambda model, x: [torch.from_numpy(np.random.randint(0, VOCABULARY, len(x))) for _ in range(FEATURES)],
        CHANGING,
    ),
    "changing": (changing, CHANGING),
    "in place": (in_place, IN_PLACE),
    "of rows": (of_rows, ROWS),
    "of parameters": (of_parameters, PARAMETERS),
}


@each_of("kind", REFUSED)
def test_what_cannot_be_foreseen_trains_as_torch_and_says_why(kind: str) -> None:
    """No random number is drawn that torch would not draw, and no row is made that is not looked up."""
    take, refusal = REFUSED[kind]
    model = Features(take)
    plain = copy.deepcopy(model)
    batches = [block(step) for step in range(12)]
    servers = Servers()
    with one_worker(model, sgd, servers=servers) as part:
        torch.manual_seed(5)
        np.random.seed(5)
        losses = train(part.model, part.optimizer, batches)
        state = torch.get_rng_state()
        entries = part.stats()["unforeseen"]
        assert reasons(part)["rows.2"] == refusal.why
        assert all(entry["module"] and entry["what_to_do"] for entry in entries)
    torch.manual_seed(5)
    np.random.seed(5)
    expected = train(plain, sgd(plain), batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(state, torch.get_rng_state())


class Branches(torch.nn.Module):
    """Which table is asked, and for what, depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torchfleet.nn.SparseEmbedding(2, name="left")
        self.right = torchfleet.nn.SparseEmbedding(2, name="right")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, 0].long() * 2
        return self.left(ids) if bool(x[0, 1] > 0) else self.right(ids + 1)


def test_a_branch_that_is_not_taken_is_asked_for_once_at_most_each_time_it_was_taken_before() -> None:
    servers, looked_up = Servers(), {"left": set[int](), "right": set[int]()}
    with one_worker(Branches(), servers=servers) as part:
        for step in range(24):
            is_left = step < 8 or step >= 16
            x = torch.stack([torch.arange(4.0) + 4 * step, torch.full((4,), 1.0 if is_left else -1.0)], dim=1)
            looked_up["left" if is_left else "right"] |= {int(i) * 2 + (not is_left) for i in x[:, 0]}
            before = servers.counts("PULL")[0]
            part.model(x).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            assert servers.counts("PULL")[0] <= before + 2
        assert servers.num_rows("left") <= len(looked_up["left"]) + 4
        assert servers.num_rows("right") <= len(looked_up["right"]) + 4


def test_a_guess_that_is_out_of_range_is_no_error() -> None:
    """The model looks at its input before it takes the ids: what was recorded does not."""

    def take(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        ids = all_ids(x) if x[0, 0] < 100 else all_ids(x) % 10
        return list(ids.unbind(1))

    with one_worker(Features(take), sgd) as part:
        train(part.model, part.optimizer, [block(step) for step in range(3)])
        train(part.model, part.optimizer, [block(4) + 100])
        train(part.model, part.optimizer, [block(5)])


def test_a_call_that_is_interrupted_does_not_stay_recorded() -> None:
    class Interrupted(Features):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            if self.calls == 1:
                raise KeyboardInterrupt
            return out

    with one_worker(Interrupted(TAKES["slices"]), sgd) as part:
        with pytest.raises(KeyboardInterrupt):
            part.model(block(0))
        train(part.model, part.optimizer, [block(step) for step in range(5)])
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        assert part.stats()["unforeseen"] == []


def test_a_lookup_outside_of_the_model_says_so() -> None:
    model = Features(TAKES["slices"])
    with one_worker(model, sgd) as part:
        for step in range(3):
            model.rows[0](block(step)[:, 0].long()).sum().backward()
            part.optimizer.step()
        assert "model" in reasons(part)["rows.0"]
