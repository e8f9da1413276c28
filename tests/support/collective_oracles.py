"""Jobs to test collective strategies with, and the strategies once more, as plain loops of their formulas."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.collective_job import CollectiveJob
from torchfleet.collective.strategy import Strategy

Batch = tuple[torch.Tensor, torch.Tensor]


def job_of(**fields: Any) -> CollectiveJob:
    """This rank's job with a strategy of these fields; there may be several, one after the other."""
    info = PaddleCloudRoleMaker(is_collective=True).read()
    return CollectiveJob(info, DistributedStrategy(**fields))


def strategy_of(job: CollectiveJob, kind: type[Strategy]) -> Any:
    return next(strategy for strategy in job.strategies if type(strategy) is kind)


def alone(**fields: Any) -> tuple[DistributedStrategy, Any]:
    """What a strategy is made of, where it needs neither ranks nor a model."""
    degrees = {"data": 1, "pipe": 1, "sharding": 1, "model": 1}
    axis = types.SimpleNamespace(rank=0, size=1, group=None)
    world = types.SimpleNamespace(rank=0, size=1, degrees=degrees, device=torch.device("cpu"), axis=lambda name: axis)
    return DistributedStrategy(**fields), world


def mlp(seed: int = 0, width: int = 300, dtype: torch.dtype = torch.float32, deep: bool = False) -> torch.nn.Module:
    """64 numbers to 4 classes; the weights of the layers but the last are more than dgc leaves whole."""
    torch.manual_seed(seed)
    middle = [torch.nn.Linear(width, width), torch.nn.Tanh()] if deep else []
    layers = [torch.nn.Linear(64, width), torch.nn.Tanh(), *middle, torch.nn.Linear(width, 4)]
    return torch.nn.Sequential(*layers).to(dtype)


def batches(num: int, rank: int, size: int, rows: int = 8, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """This rank's share of `num` batches of `size · rows` rows; the whole for rank -1."""
    made = torch.Generator().manual_seed(7)
    whole = [
        (torch.randn(size * rows, 64, generator=made, dtype=dtype), torch.randint(4, (size * rows,), generator=made))
        for _ in range(num)
    ]
    if rank < 0:
        return whole
    own = slice(rank * rows, (rank + 1) * rows)
    return [(x[own], y[own]) for x, y in whole]


def train(model: Callable[[torch.Tensor], torch.Tensor], optimizer: Any, data: Sequence[Batch]) -> list[float]:
    """The ordinary loop; the losses."""
    losses = []
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any], atol: float) -> None:
    """All tensors of `expected` are in `found`; the tolerance is absolute."""
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def gradients(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


# The formulas


def lars_step(p: Any, g: Any, v: Any, lr: float, momentum: float, coeff: float, decay: float, eps: float) -> Any:
    """(p, v) after one step of one parameter that is not excluded."""
    p_norm, g_norm = math.sqrt(float((p * p).sum())), math.sqrt(float((g * g).sum()))
    rate = lr * coeff * p_norm / (g_norm + decay * p_norm + eps) if p_norm > 0 and g_norm > 0 else lr
    v = momentum * v + rate * (g + decay * p)
    return p - v, v


def lamb_step(p: Any, g: Any, m: Any, v: Any, step: int, lr: float, betas: Any, eps: float, decay: float) -> Any:
    """(p, m, v) after step number `step`, from 1, of one parameter."""
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    r = m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)) ** 0.5 + eps) + decay * p
    p_norm, r_norm = math.sqrt(float((p * p).sum())), math.sqrt(float((r * r).sum()))
    return p - lr * (p_norm / r_norm if p_norm > 0 and r_norm > 0 else 1.0) * r, m, v


def dgc_training(
    model: torch.nn.Module,
    data: Sequence[Sequence[Batch]],
    sparsities: Sequence[float],
    lr: float,
    momentum: float,
    decay: float,
    clip: float,
) -> Iterator[float]:
    """Ranks one after the other; data[rank][step]. Yields after every step the number of values that were sent."""
    num_ranks = len(data)
    shared = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffer = {name: torch.zeros_like(parameter) for name, parameter in shared.items()}  # of those exchanged whole
    u: dict[tuple[str, int], torch.Tensor] = {}
    v: dict[tuple[str, int], torch.Tensor] = {}
    for step, sparsity in enumerate(sparsities):
        found = [gradients(model, data[rank][step]) for rank in range(num_ranks)]
        num_sent = 0
        for name, p in shared.items():
            if sparsity == 0 or p.numel() < 16384:
                mean = torch.stack([of_rank[name] for of_rank in found]).sum(0) / num_ranks + decay * p
                buffer[name] = momentum * buffer[name] + mean
                p.sub_(lr * buffer[name])
                continue
            total = torch.zeros(p.numel(), dtype=p.dtype)
            for rank in range(num_ranks):
                g = found[rank][name] + decay * p
                if clip:
                    g = g * min(1.0, clip / math.sqrt(num_ranks) / float(g.norm()))
                velocity = momentum * u.get((name, rank), buffer[name]) + g
                waiting = v.get((name, rank), torch.zeros_like(p)) + velocity
                count = max(1, math.ceil(round(p.numel() * (1 - sparsity), 6)))
                chosen = waiting.view(-1).abs().argsort(descending=True)[:count]
                total[chosen] += waiting.view(-1)[chosen]
                velocity.view(-1)[chosen] = 0
                waiting.view(-1)[chosen] = 0
                u[name, rank], v[name, rank] = velocity, waiting
                num_sent += count
            p.sub_(lr * (total / num_ranks).view(p.shape))
        yield num_sent


def local_sgd(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    data: Sequence[Sequence[Batch]],
    begin_step: int,
    interval: int,
) -> None:
    """Ranks one after the other, each with its own model and optimizer; data[rank][step]."""
    num_alone = 0
    for step in range(1, len(data[0]) + 1):
        found = [gradients(model, data[rank][step - 1]) for rank, model in enumerate(models)]
        for model, optimizer, own in zip(models, optimizers, found, strict=True):
            for name, parameter in model.named_parameters():
                mean = torch.stack([other[name] for other in found]).mean(0)
                parameter.grad = mean if step < begin_step else own[name]
            optimizer.step()
        num_alone += step >= begin_step
        if num_alone == interval:
            num_alone = 0
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([parameter.detach() for parameter in same]).mean(0)
                for parameter in same:
                    parameter.data.copy_(mean)
