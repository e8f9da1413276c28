"""Local SGD against ranks simulated one after the other, and its adaptive interval against the formula."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.cases import each_of
from support.collective_oracles import alone, assert_close, batches, job_of, local_sgd, mlp, strategy_of, train, values
from support.messages import naming
from support.ranks import Ranks
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.errors import FleetError, StrategyError
from torchfleet.collective.strategies.adaptive_localsgd import AdaptiveLocalSGD, next_interval
from torchfleet.collective.strategies.localsgd import LocalSGD

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
STEPS = 7


def train_on_ranks(merge: int = 1, **fields: Any) -> dict[str, Any]:
    job = job_of(**fields)
    rank, size = job.world.rank, job.world.size
    model = job.distribute_model(mlp(seed=rank))
    optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), **OPTIONS))
    data = batches(STEPS, rank, size)
    train(model, optimizer, [(x[i::merge], y[i::merge]) for x, y in data for i in range(merge)])
    return values(model)


def oracle(size: int, begin_step: int, k_steps: int) -> list[dict[str, torch.Tensor]]:
    models = [mlp() for _ in range(size)]
    optimizers = [torch.optim.SGD(model.parameters(), **OPTIONS) for model in models]
    local_sgd(models, optimizers, [batches(STEPS, rank, size) for rank in range(size)], begin_step, k_steps)
    return [values(model) for model in models]


def configs(begin_step: int, k_steps: int) -> dict[str, Any]:
    return {"localsgd": True, "localsgd_configs": {"begin_step": begin_step, "k_steps": k_steps}}


def train_every_step() -> dict[str, Any]:
    plain = train_on_ranks()
    for begin in (1, 3):
        assert_close(train_on_ranks(**configs(begin, 1)), plain, atol=1e-6)  # the sums are in another order
    return plain


def test_averaging_after_every_step_equals_data_parallelism(ranks: Ranks) -> None:
    first, second = ranks.run(train_every_step, 2)
    assert_close(first, second, atol=0)


@pytest.mark.parametrize(("size", "begin_step", "k_steps"), [(2, 1, 7), (2, 3, 2), (3, 1, 4)])
def test_ranks_train_alone_in_between(ranks: Ranks, size: int, begin_step: int, k_steps: int) -> None:
    found = ranks.run(train_on_ranks, size, **configs(begin_step, k_steps), fuse_grad_size_in_MB=1)
    expected = oracle(size, begin_step, k_steps)
    for result, other in zip(found, expected, strict=True):
        assert_close(result, other, atol=1e-6)
    apart = (STEPS - begin_step + 1) % k_steps
    assert torch.equal(found[0]["0.weight"], found[1]["0.weight"]) == (apart == 0)


def test_merged_batches_count_as_one_step(ranks: Ranks) -> None:
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    for found, expected in zip(
        ranks.run(train_on_ranks, 2, merge=2, **configs(3, 2), **merge), oracle(2, 3, 2), strict=True
    ):
        assert_close(found, expected, atol=1e-6)


@pytest.mark.parametrize("field", ["localsgd", "adaptive_localsgd"])
def test_only_sgd_will_do(field: str) -> None:
    strategy = (LocalSGD if field == "localsgd" else AdaptiveLocalSGD)(*alone(**{field: True}))
    with pytest.raises(StrategyError, match=naming(f"{field}=True", "torch.optim.SGD", "Adam")):
        strategy.optimizer(torch.optim.Adam(mlp().parameters()), {})


def counting(strategy: LocalSGD, inner: torch.optim.Optimizer | None = None) -> list[int]:
    """Steps, from 1, after which a strategy without ranks averaged, of 12."""
    strategy.optimizer(inner or torch.optim.SGD(mlp().parameters(), lr=0.1), {})
    averaged, average = [], strategy.average
    strategy.average = lambda: (averaged.append(step), average())  # type: ignore[assignment, method-assign]
    for step in range(1, 13):
        assert strategy.exchanges() == (step < strategy.configs["begin_step"])
        strategy.after_step()
    return averaged


def test_the_interval_is_counted_from_the_begin_step() -> None:
    assert counting(LocalSGD(*alone(**configs(1, 4)))) == [4, 8, 12]
    assert counting(LocalSGD(*alone(**configs(6, 3)))) == [8, 11]
    assert counting(LocalSGD(*alone(**configs(13, 1)))) == []


def test_counters_are_saved() -> None:
    strategy, again = LocalSGD(*alone(**configs(1, 8))), LocalSGD(*alone(**configs(1, 8)))
    counting(strategy)
    again.load_state(strategy.state())
    assert counting(again) == [4, 12]


# The adaptive interval


@given(
    st.integers(1, 16),
    st.floats(1e-4, 1),
    st.floats(0.1, 10),
    st.floats(1e-4, 1),
    st.floats(0, 10),
)
def test_the_interval_follows_the_formula_and_its_cap(
    first: int, first_lr: float, first_loss: float, lr: float, loss: float
) -> None:
    exact = math.sqrt(first_lr * loss / (lr * first_loss)) * first
    found = next_interval(first, first_lr, first_loss, lr, loss)
    assert 1 <= found <= 16
    if 1 < exact < 15.999:
        assert exact - 1e-6 <= found < exact + 1 + 1e-6


@each_of(("loss", "lr", "expected"), [(2.0, 0.1, 4), (0.5, 0.1, 2), (0.4, 0.1, 2), (1e-9, 0.1, 1), (2.0, 0.001, 16)])
def test_intervals_by_hand(loss: float, lr: float, expected: int) -> None:
    assert next_interval(4, 0.1, 2.0, lr, loss) == expected


@pytest.mark.parametrize("loss", [-1.0, math.nan, math.inf])
def test_a_loss_that_is_no_positive_number_is_an_error(loss: float) -> None:
    with pytest.raises(FleetError, match=naming("loss", 0)):
        next_interval(1, 0.1, 1.0, 0.1, loss)


def train_adaptive(told: bool) -> dict[str, Any]:
    """The loss is 4 at first on rank 0 and 12 on rank 1, and a quarter of it from the third step on."""
    job = job_of(adaptive_localsgd=True, adaptive_localsgd_configs={"init_k_steps": 2, "begin_step": 2})

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, value: float) -> torch.Tensor:
            return self.weight * 0 + value if not told else self.weight.expand(2)

    model = job.distribute_model(Model())
    optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    strategy = strategy_of(job, AdaptiveLocalSGD)
    intervals = []
    for step in range(6):
        loss = model((4.0 + 8.0 * job.world.rank) * (1.0 if step < 2 else 0.25)).sum()
        if told:
            job.report({"loss": (4.0 + 8.0 * job.world.rank) * (1.0 if step < 2 else 0.25)})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 if step < 3 else 0.025
        intervals.append(strategy.interval)
    return {"intervals": intervals, **{name: value.item() for name, value in strategy.state().items()}}


@pytest.mark.parametrize("told", [False, True])
def test_the_interval_is_adapted_to_the_mean_loss_of_the_ranks(ranks: Ranks, told: bool) -> None:
    for found in ranks.run(train_adaptive, 2, told=told):
        # averaged after step 3 (2 alone): √(1/4)·2 = 1; step 4: 1 still; step 5: lr is a quarter, √(4/4)·2 = 2
        assert found["intervals"] == [2, 2, 1, 1, 2, 2]
        assert found["first_loss"] == 8.0
        assert found["first_lr"] == 0.1
        assert found["num_steps"] == 6


def test_without_a_loss_there_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(FleetError, match=r"fleet\.report\(loss="):
        counting(AdaptiveLocalSGD(*alone(adaptive_localsgd=True)))


def test_a_rate_of_zero_is_no_first_rate() -> None:
    strategy = AdaptiveLocalSGD(*alone(adaptive_localsgd=True))
    inner = torch.optim.SGD(mlp().parameters(), lr=0.0)
    strategy.optimizer(inner, {})
    for lr, loss in ((0.0, 9.0), (0.1, 4.0), (0.1, 16.0)):
        inner.param_groups[0]["lr"] = lr
        strategy.note_loss(torch.tensor(loss))
        strategy.after_step()
    assert (strategy.interval, strategy.state()["first_loss"], strategy.state()["first_lr"]) == (2, 4.0, 0.1)


def test_an_adapted_interval_is_saved() -> None:
    strategy, again = (AdaptiveLocalSGD(*alone(adaptive_localsgd=True)) for _ in range(2))
    inner = torch.optim.SGD(mlp().parameters(), lr=0.1)
    strategy.optimizer(inner, {})
    for loss in (1.0, 9.0):
        strategy.note_loss(loss)
        strategy.after_step()
    assert strategy.interval == 3
    again.load_state(strategy.state())
    again.optimizer(inner, {})
    assert again.interval == 3
    for loss in (2.0, 3.0, 25.0):
        again.note_loss(loss)
        again.after_step()
    assert again.interval == 5


def test_the_loss_of_a_model_that_is_trained_falls_and_the_interval_with_it(ranks: Ranks) -> None:
    for found in ranks.run(train_to_the_end, 2):
        assert found["intervals"][0] == 8
        assert found["intervals"][-1] < 4
        assert found["losses"][-1] < found["losses"][0] / 4


def train_to_the_end() -> dict[str, Any]:
    job = job_of(adaptive_localsgd=True, adaptive_localsgd_configs={"init_k_steps": 8})
    model = job.distribute_model(mlp(width=16))
    optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    (x, y), *_ = batches(1, job.world.rank, job.world.size)
    losses, intervals = [], []
    for _ in range(40):
        loss = F.cross_entropy(model(x), y)
        job.report({"loss": loss.item()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        intervals.append(strategy_of(job, AdaptiveLocalSGD).interval)
    return {"losses": losses, "intervals": intervals}


def momenta_before_and_after_a_save() -> dict[str, Any]:
    """Many layers of one shape: taken in another order on another rank, they would be mixed up without an error."""
    job = job_of(**configs(1, 100))
    kept = [torch.zeros(job.world.rank + 1) for _ in range(50 * job.world.rank)]  # other addresses on other ranks
    model = job.distribute_model(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))))
    del kept
    optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), **OPTIONS))
    train(model, optimizer, batches(3, job.world.rank, job.world.size))
    before = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    if job.world.rank == 1:  # as after steps that amp has skipped
        del optimizer.state[model.module[0].bias]
        before[1].zero_()
    strategy_of(job, LocalSGD).before_save()
    after = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    return {
        "before": torch.cat([momentum.flatten() for momentum in before]),
        "after": torch.cat([momentum.flatten() for momentum in after]),
    }


def test_a_save_averages_momentum(ranks: Ranks) -> None:
    first, second = ranks.run(momenta_before_and_after_a_save, 2)
    mean = (first["before"] + second["before"]) / 2
    for found in (first, second):
        torch.testing.assert_close(found["after"], mean, rtol=0, atol=1e-7)


# Clipping: each rank by its own norm, with nothing exchanged

BOUND, FEATURES = 1.0, torch.tensor([[1.0, 1.0, 1.0, 1.0]])  # the gradient of the loss below has the norm 2 · factor


def clip_on_ranks(factors: list[list[float]], amp: bool) -> dict[str, Any]:
    """Train with losses of these factors, a list for each rank, and average after the last step."""
    num = len(factors[0])
    precision = {"amp": True, "amp_configs": {"init_loss_scaling": 1024.0}} if amp else {}
    job = job_of(**configs(1, num), **precision)
    model = job.distribute_model(torch.nn.Linear(4, 1, bias=False))
    torch.nn.init.zeros_(model.module.weight)
    optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    norms, moved = [], []
    for factor in factors[job.world.rank]:
        before = model.module.weight.detach().clone()
        (factor * model(FEATURES)).sum().backward()
        norms.append(float(optimizer.clip_grad_norm_(BOUND)))
        optimizer.step()
        optimizer.zero_grad()
        moved.append(float((model.module.weight.detach() - before).norm()))
    return {"weight": model.module.weight.detach(), "norms": norms, "moved": moved}


def clip_in_turn(factors: list[list[float]], overflow: float) -> torch.Tensor:
    """The same with plain torch, rank after rank; steps with factors from `overflow` on are left out."""
    models = [torch.nn.Linear(4, 1, bias=False) for _ in factors]
    for model, of_rank in zip(models, factors, strict=True):
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for factor in (each for each in of_rank if each < overflow):
            optimizer.zero_grad()
            (factor * model(FEATURES)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)
            optimizer.step()
    return torch.stack([model.weight.detach() for model in models]).mean(0)


def test_each_rank_clips_by_its_own_norm(ranks: Ranks) -> None:
    factors = [[1.0, 0.25], [10.0, 1.0]]
    found = ranks.run(clip_on_ranks, 2, factors=factors, amp=False)
    assert [each["norms"] for each in found] == [[2.0, 0.5], [20.0, 2.0]]
    assert [each["moved"][0] for each in found] == pytest.approx([1.0, 1.0], abs=1e-5)
    for each in found:
        torch.testing.assert_close(each["weight"], clip_in_turn(factors, math.inf), rtol=0, atol=1e-5)


def test_a_rank_that_overflows_alone_clips_without_the_others(ranks: Ranks) -> None:
    """In float16 rank 1 skips its second step. With an exchange in the clipping the ranks would mix up two of them."""
    factors = [[1.0, 2.0, 0.25], [4.0, 2.0**20, 1.0]]  # powers of two: exact in float16
    found = ranks.run(clip_on_ranks, 2, factors=factors, amp=True)
    assert found[0]["norms"] == [2.0, 4.0, 0.5]
    assert found[1]["norms"][::2] == [8.0, 2.0]
    assert not math.isfinite(found[1]["norms"][1])
    assert found[1]["moved"][1] == 0.0
    for each in found:
        torch.testing.assert_close(each["weight"], clip_in_turn(factors, 2.0**20), rtol=0, atol=1e-5)


def train_from(folder: str, first: int, last: int, is_saved: bool) -> dict[str, Any]:
    """Steps `first` to `last` of an adaptive job, which is saved or loaded before them; every rank has its own loss."""
    configs = {"init_k_steps": 6}
    fleet.init(
        is_collective=True,
        strategy=fleet.DistributedStrategy(adaptive_localsgd=True, adaptive_localsgd_configs=configs),
    )
    torch.manual_seed(0)
    model, rank = fleet.distributed_model(torch.nn.Linear(4, 1)), fleet.worker_index()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    if is_saved:
        fleet.load(folder)
    for step in range(first, last):
        if step == 3 and not is_saved:
            fleet.save(folder)
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(x) - x.sum(1, keepdim=True) - rank).square().mean()
        loss.backward()
        fleet.report(loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
    made = values(model)
    fleet.stop_worker()
    return made


def straight_and_resumed(folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    parts = {"straight": train_from(folder, 0, 20, is_saved=False), "resumed": train_from(folder, 3, 20, is_saved=True)}
    return {f"{part} {name}": value for part, found in parts.items() for name, value in found.items()}


def test_an_adaptive_job_saved_before_its_first_averaging_goes_on_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(straight_and_resumed, 2, folder=str(tmp_path / "saved")):
        for name in ("weight", "bias"):
            assert torch.equal(found[f"resumed {name}"], found[f"straight {name}"])


def statistics_of_a_save(folder: str) -> dict[str, Any]:
    """The running mean before a save and in it, while gradients are still averaged in every step."""
    strategy = fleet.DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4, "begin_step": 100})
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.full((4, 3), 1.0 + fleet.worker_index())).sum().backward()
    optimizer.step()
    before = model.module[0].running_mean.clone()
    fleet.save(folder)
    model.module[0].running_mean.zero_()
    fleet.load(folder)
    return {"before": before, "after": model.module[0].running_mean.clone()}


def test_a_save_averages_running_statistics_before_ranks_train_alone(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(statistics_of_a_save, 2, folder=str(tmp_path / "saved"))
    assert not torch.equal(first["before"], second["before"])
    for found in (first, second):
        torch.testing.assert_close(found["after"], (first["before"] + second["before"]) / 2)
