"""torch.amp.GradScaler: rows are unscaled as dense gradients are, and a step that overflows is left out whole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from support import jobs
from support.cases import each_of
from support.jobs import Batch, Net, Part, assert_equal_values, loss_of, one_worker, worker_batches

TOLERANCE = 1e-6
STEPS = 8
# Falls when a gradient overflows and rises after two good steps, so that both happen again and again.
SCALER: dict[str, Any] = {
    "init_scale": 2.0**126,
    "growth_factor": 2.0**8,
    "backoff_factor": 2.0**-8,
    "growth_interval": 2,
}
OPTIONS = {"lr": 0.02, "eps": 1e-4}


def scaled_steps(
    model: torch.nn.Module, optimizers: Sequence[Any], batches: Sequence[Batch], clips: bool, settle: Any = None
) -> list[float]:
    """The loop of torch's documentation. Returns the scales."""
    scaler, scales = torch.amp.GradScaler("cpu", **SCALER), []
    for batch in batches:
        scaler.scale(1000 * loss_of(model, batch)).backward()
        for optimizer in optimizers:
            if clips:
                scaler.unscale_(optimizer)
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if settle is not None:
            settle()
        scales.append(scaler.get_scale())
    return scales


@each_of("clips", [False, True])
@each_of("mode", ["sync", "half_async", "async", "geo"])
def test_the_loop_with_a_scaler_is_that_of_torch(mode: str, clips: bool) -> None:
    """SGD, and dense embeddings in plain torch, which clips no sparse gradients."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    for module in (plain.items, plain.words, plain.tags):
        module.sparse = False
    batches = worker_batches(0, STEPS)
    expected = scaled_steps(plain, [jobs.sgd(plain, lr=1e-4)], batches, clips)
    assert min(expected) < SCALER["init_scale"]  # some steps were left out,
    assert sorted(expected) != expected[::-1]  # and some were made
    with one_worker(model, lambda m: jobs.sgd(m, lr=1e-4), mode=mode) as part:
        assert scaled_steps(part.model, [part.optimizer], batches, clips, part.flush) == expected
        found = {name: p.detach().clone() for name, p in part.model.named_parameters() if len(p)}
        rows = {name: part.rows(name, range(num)) for name, num in jobs.TABLES.items()}
    tables = {f"{name}.weight": name for name in jobs.TABLES}
    named = {tables.get(name, name): p.detach() for name, p in plain.named_parameters()}
    assert_equal_values({**found, **rows}, named, TOLERANCE)


BAD = {0: {2, 5}, 1: {4, 5}}  # by worker, the steps whose loss overflows


def batches_of(worker: int) -> list[Batch]:
    batches = worker_batches(worker, STEPS)
    for step in BAD[worker]:
        batches[step] = {**batches[step], "y": torch.full((8,), 1e37)}
    return batches


def test_a_worker_that_overflows_has_no_part_in_the_step_of_the_others() -> None:
    """With Adam, of whose state and count of steps nothing may change in a step that all workers leave out."""

    def train(part: Part) -> list[float]:
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0), []
        for batch in batches_of(part.index):
            scaler.scale(loss_of(part.model, batch)).backward()
            scaler.step(part.optimizer)
            scaler.update()
            part.optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    make = jobs.fleet_optimizer("adam", **OPTIONS)
    done = jobs.run(train, Net, make, num_workers=2, num_servers=2)
    for worker, scales in enumerate(done.results):
        assert scales == [1024.0 / 2 ** sum(bad <= step for bad in BAD[worker]) for step in range(STEPS)]
    torch.manual_seed(0)
    plain = Net()
    optimizers = jobs.plain_optimizers("adam", plain, **OPTIONS)
    for step, batches in enumerate(zip(batches_of(0), batches_of(1), strict=True)):
        good = [batch for worker, batch in enumerate(batches) if step not in BAD[worker]]
        if good:
            jobs.plain_step(plain, optimizers, jobs.combined(good))
    assert_equal_values(done.values(**jobs.TABLES), jobs.values_of(plain), TOLERANCE)
    assert done.servers.table("items").step == STEPS - 1


@each_of("is_looked_up", [False, True])
def test_gradients_set_to_zero_count_for_the_scaler(is_looked_up: bool) -> None:
    """After zero_grad(set_to_none=False) a step without a lookup has a gradient of zeros, in torch and here."""

    class Sometimes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.out = torch.nn.Embedding(10, 2, sparse=True), torch.nn.Linear(2, 1)
            self.looks_up = True

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.rows(ids) if self.looks_up else torch.ones(len(ids), 2)).sum()

    def make(model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(own.parameters(), lr=0.1) for own in (model.rows, model.out)]

    def train(model: Any, optimizers: Sequence[Any]) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            model.looks_up = is_looked_up or step == 0
            scaler.scale(model(torch.tensor([1, 2]))).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)

    torch.manual_seed(0)
    model = Sometimes()
    plain = copy.deepcopy(model)
    train(plain, make(plain))
    with one_worker(model, make) as part:
        train(part.model, part.optimizer)
        torch.testing.assert_close(dict(part.model.state_dict()), dict(plain.state_dict()))
