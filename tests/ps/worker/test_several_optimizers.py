"""SparseAdam for the embeddings and Adam for the rest, as torch's documentation has it: each optimizer for its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import jobs
from support.jobs import Net, Part, assert_equal_values, one_worker, worker_batches
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import ModelError, StrategyError

TOLERANCE = 1e-6
STEPS = 6
OPTIONS = {"lr": 0.02, "eps": 1e-4}


def adams(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """SparseAdam comes second, with a schedule that the other one does not have."""
    return jobs.plain_optimizers("adam", model, **OPTIONS)


def loop(model: torch.nn.Module, optimizers: list[Any], batches: list[jobs.Batch], settle: Any = None) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.7)
    for number, batch in enumerate(batches):
        jobs.loss_of(model, batch).backward()
        for optimizer in optimizers:
            if number % 3 or optimizer is optimizers[0]:  # every third time only one of them
                optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        if settle is not None:
            settle()


@pytest.mark.parametrize(("mode", "num_workers"), [("sync", 1), ("sync", 2), ("half_async", 1), ("async", 1)])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of a schedule before the first step
def test_each_makes_its_own_steps_as_in_torch(mode: str, num_workers: int) -> None:
    def train(part: Part) -> None:
        loop(part.model, part.optimizer, worker_batches(part.index, STEPS), part.flush)

    done = jobs.run(train, Net, adams, mode=mode, num_workers=num_workers, num_servers=2)
    torch.manual_seed(0)
    plain = Net()
    batches = [
        jobs.combined(step) for step in zip(*(worker_batches(i, STEPS) for i in range(num_workers)), strict=True)
    ]
    loop(plain, adams(plain), batches)
    assert_equal_values(done.values(**jobs.TABLES), jobs.values_of(plain), TOLERANCE)
    assert done.parts[0].worker.communicator.num_steps == STEPS
    steps = {name: done.servers.table(name).step for name in ("dense.0", "items")}
    assert steps == {"dense.0": STEPS, "items": STEPS - STEPS // 3}


def test_a_list_gives_a_list_and_one_after_the_other_is_the_same() -> None:
    found = []
    for is_list in (True, False):
        torch.manual_seed(0)
        with jobs.clean_facade():
            fleet.init()
            model = fleet.distributed_model(Net())
            if is_list:
                optimizers = fleet.distributed_optimizer(adams(model))
            else:
                optimizers = [fleet.distributed_optimizer(one) for one in adams(model)]
            fleet.init_worker()
            for batch in worker_batches(0, 3):
                jobs.plain_step(model, optimizers, batch)
            state = [one.state_dict() for one in optimizers]
            optimizers[1].load_state_dict(state[1])
            found.append([p.detach().clone() for p in model.parameters()] + [model.items(torch.arange(1, 5)).detach()])
            with pytest.raises(ModelError, match="tables"):
                fleet.distributed_optimizer(torch.optim.SGD([model.out.weight], lr=0.1))
            fleet.stop_worker()
    assert [len(one["param_groups"][0]["params"]) for one in state] == [4, 3]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_parameter_in_two_optimizers_or_an_embedding_in_none_is_named() -> None:
    with pytest.raises(ModelError, match=naming("'out.bias'")):
        one_worker(Net(), lambda m: [jobs.sgd(m), torch.optim.Adam([m.out.bias])]).__enter__()
    with pytest.raises(ModelError, match=naming("'tags.weight'")):
        one_worker(Net(), lambda m: [jobs.sgd(m), torch.optim.SparseAdam([m.tags.weight])]).__enter__()
    with pytest.raises(ModelError, match=naming("'words'")):
        one_worker(
            Net(), lambda m: [torch.optim.Adam([m.out.bias]), torch.optim.SparseAdam([m.items.weight])]
        ).__enter__()


@pytest.mark.parametrize(
    ("mode", "configs"), [("geo", {}), ("hybrid", {}), ("async", {"gather": 2}), ("async", {"max_staleness": 4})]
)
def test_modes_that_count_pushes_take_one_optimizer(mode: str, configs: dict[str, Any]) -> None:
    def make(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters, lr=0.1) for parameters in jobs.split_parameters(model)]

    with pytest.raises(StrategyError, match="row_rule"):
        one_worker(Net(), make, mode=mode, **configs).__enter__()
