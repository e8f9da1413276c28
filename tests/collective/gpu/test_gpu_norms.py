"""Clipping, LARS and LAMB on a GPU: as the formulas say, by kernels and by torch's functions, and without waiting."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collective_oracles import alone, lamb_step, lars_step
from support.ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torchfleet.collective.clipping import scale_down, total_norm
from torchfleet.collective.layers.margin_softmax import MarginSoftmax
from torchfleet.collective.strategies.layerwise import lamb, lars, multi_tensor

pytestmark = pytest.mark.gpu

LARS = {"lars_coeff": 0.02, "lars_weight_decay": 0.01, "epsilon": 1e-9, "exclude_from_weight_decay": ["bias"]}
LAMB = {"lamb_weight_decay": 0.1, "exclude_from_weight_decay": ["bias"]}
BETAS, EPS = (0.8, 0.95), 1e-6
SHAPES = {"large": (1000, 333), "bias": (1024,), "row": (7,), "zero": (300,), "whole": (128, 256), "last_bias": (3,)}


def values_of(num_steps: int) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """First values, and gradients of every step; on the host."""
    made = torch.Generator().manual_seed(0)
    first = {name: torch.randn(shape, generator=made) * (name != "zero") for name, shape in SHAPES.items()}
    return first, [
        {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()} for _ in range(num_steps)
    ]


def optimizer_of(rule: str, model: torch.nn.ParameterDict) -> torch.optim.Optimizer:
    names = {parameter: name for name, parameter in model.items()}
    if rule == "lars":
        inner: Any = torch.optim.SGD(model.values(), lr=0.5, momentum=0.9)
        strategy: Any = lars.Lars(*alone(lars=True, lars_configs=LARS))
        strategy.look_at(model)
        return strategy.optimizer(inner, names)
    inner = torch.optim.Adam(model.values(), lr=0.05, betas=BETAS, eps=EPS)
    strategy = lamb.Lamb(*alone(lamb=True, lamb_configs=LAMB))
    strategy.look_at(model)
    return strategy.optimizer(inner, names)


def formulas(rule: str, num_steps: int) -> dict[str, torch.Tensor]:
    """What the papers say, in float64."""
    first, gradients = values_of(num_steps)
    found = {}
    for name, value in first.items():
        p, state = value.double(), (0.0, 0.0)
        for step in range(num_steps):
            g = gradients[step][name].double()
            if rule == "lamb":
                decay = 0.0 if "bias" in name else 0.1
                p, *state = lamb_step(p, g, *state, step + 1, lr=0.05, betas=BETAS, eps=EPS, decay=decay)
            elif "bias" in name:
                state = (0.9 * state[0] + 0.5 * g, 0.0)
                p = p - state[0]
            else:
                p, speed = lars_step(p, g, state[0], 0.5, 0.9, 0.02, 0.01, 1e-9)
                state = (speed, 0.0)
        found[name] = p
    return found


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same on the GPU, where its address is no multiple of 16: as in a bucket of gradients."""
    return torch.empty(tensor.numel() + 1, device="cuda")[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("rule", ["lars", "lamb"])
@pytest.mark.parametrize("how", ["kernels", "kernels, unaligned", "lists"])
def test_steps_follow_the_formulas(rule: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "lists":
        monkeypatch.setattr(multi_tensor, "_has_triton", lambda: False)
    place: Callable[[torch.Tensor], torch.Tensor] = off_by_one if "unaligned" in how else torch.Tensor.cuda
    first, gradients = values_of(4)
    model = torch.nn.ParameterDict({name: value.cuda() for name, value in first.items()})
    optimizer = optimizer_of(rule, model)
    for each in gradients:
        for name, parameter in model.items():
            parameter.grad = place(each[name])
        optimizer.step()
    for name, expected in formulas(rule, 4).items():
        torch.testing.assert_close(model[name].detach().cpu().double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rule", ["lars", "lamb", "clip"])
def test_a_step_does_not_wait_for_the_gpu(rule: str) -> None:
    first, gradients = values_of(2)
    model = torch.nn.ParameterDict({name: value.cuda() for name, value in first.items()})
    optimizer = optimizer_of("lars" if rule == "clip" else rule, model)
    _, world = alone()
    world.device = torch.device("cuda")
    for step, each in enumerate(gradients):
        for name, parameter in model.items():
            parameter.grad = each[name].cuda()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # what is made once may be waited for
        try:
            if rule == "clip":
                norm = total_norm(model.values(), world, is_exchanged=True)
                scale_down(model.values(), norm, 0.1)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if rule == "clip":
        expected = torch.cat([gradient.flatten() for gradient in gradients[1].values()]).double().norm()
        torch.testing.assert_close(norm.cpu().double(), expected, rtol=1e-6, atol=0)
        clipped = torch.cat([parameter.grad.flatten() for parameter in model.values()]).norm()
        assert float(clipped) == pytest.approx(0.1, rel=1e-5)


def test_classes_over_ranks_wait_for_the_gpu_once() -> None:
    torch.manual_seed(0)
    layer, twin = MarginSoftmax(50, 16, device="cuda"), MarginSoftmax(50, 16)
    features, labels = torch.randn(12, 16), torch.randint(0, 50, (12,))
    on_gpu, on_cpu = features.cuda().requires_grad_(), features.clone().requires_grad_()
    labels_on_gpu = labels.cuda()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = layer(on_gpu, labels_on_gpu)
            loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in caught if "synchroniz" in str(warning.message)]) == 1
    twin(on_cpu, labels).backward()
    torch.testing.assert_close(on_gpu.grad.cpu(), on_cpu.grad, rtol=1e-4, atol=1e-6)


def train_cut(rule: str) -> dict[str, Any]:
    """Rows of the first dimension over the ranks; of some of them a rank has nothing."""
    os.environ["LOCAL_RANK"] = "0"  # which the mesh takes for the number of the GPU
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    first, gradients = values_of(3)

    def cut(tensor: torch.Tensor) -> DTensor:
        own = tensor.tensor_split([(len(tensor) + 1) // 2])[dist.get_rank()].cuda()
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())

    model = torch.nn.ParameterDict({name: torch.nn.Parameter(cut(value)) for name, value in first.items()})
    optimizer = optimizer_of(rule, model)
    for each in gradients:
        for name, parameter in model.items():
            parameter.grad = cut(each[name])
        optimizer.step()
    return {name: parameter.detach().to_local().cpu() for name, parameter in model.items()}


@pytest.mark.parametrize("rule", ["lars", "lamb"])
def test_two_ranks_on_one_gpu_take_the_norms_of_whole_tensors(ranks: Ranks, rule: str) -> None:
    first, second = ranks.run(train_cut, 2, rule=rule)
    for name, expected in formulas(rule, 3).items():
        found = torch.cat([first[name], second[name]]).double()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
