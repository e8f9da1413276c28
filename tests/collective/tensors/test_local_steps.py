"""Steps on shards as plain tensors, held against steps on the same DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchfleet.collective.tensors.local_steps import LocalSteps

RULES: dict[str, Any] = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda params: optim.Adam(params, amsgrad=True),
    "adamw": lambda params: optim.AdamW(params, weight_decay=0.1),
    "adamw, foreach": lambda params: optim.AdamW(params, foreach=True),
    "adamw, fused": lambda params: optim.AdamW(params, fused=True),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: optim.RMSprop(params, momentum=0.9, centered=True),
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
}


class Own(optim.SGD):
    """A class of someone else, whose rule is not known."""


def made(rule: str) -> tuple[torch.nn.Module, optim.Optimizer]:
    """Three rows on two ranks, of which the second has one; of one row it has none. One parameter is not cut."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1), torch.nn.Linear(1, 2))
    fully_shard(model[0])
    fully_shard(model[1])
    groups = [{"params": list(part.parameters())} for part in (model[:2], model[2])]  # torch's lists are of one kind
    return model, optim_of(rule)(groups)


def optim_of(rule: str) -> Any:
    return Own if rule == "own" else RULES[rule]


def gradients(model: torch.nn.Module) -> None:
    model(torch.randn(5, 4)).square().sum().backward()


def flat(optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and state of a rank; DTensors are marked as such."""
    found = {}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for name, value in {"value": parameter, **optimizer.state[parameter]}.items():
            if isinstance(value, torch.Tensor):
                mark = " cut" if isinstance(value, DTensor) else ""
                own = value.to_local() if isinstance(value, DTensor) else value
                found[f"{number} {name}{mark}"] = own.detach().clone()
    return found


def steps_of(rule: str, is_local: bool) -> dict[str, torch.Tensor]:
    model, optimizer = made(rule)
    steps = LocalSteps(optimizer)
    torch.manual_seed(1 + dist.get_rank())
    for number in range(4):
        gradients(model)
        if number == 2:
            model[1].bias.grad = None  # of a layer that was not used
        if is_local:
            steps.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return flat(optimizer)


def both() -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for rule in RULES:
        expected, given = steps_of(rule, False), steps_of(rule, True)
        found[rule] = int(list(expected) == list(given) and all(torch.equal(expected[k], given[k]) for k in expected))
        found[f"{rule}, cut"] = sum(key.endswith("cut") for key in given)
    return found


def test_rules_give_the_same_bits_and_the_same_state(ranks: Ranks) -> None:
    for found in ranks.run(both, 2):
        assert {rule: found[rule] for rule in RULES} == dict.fromkeys(RULES, 1)
        assert found["sgd, cut"] == 4
        assert found["momentum, cut"] == 8
        assert found["adamw, cut"] == 12


def seen(rule: str) -> dict[str, Any]:
    """The kinds of parameters that an optimizer steps on, in a usual step and after its gradients have moved."""
    dist.init_process_group("gloo")
    model, optimizer = made(rule)
    steps, kinds, step = LocalSteps(optimizer), [], optimizer.step

    def noting() -> None:
        kinds.append({type(parameter).__name__ for group in optimizer.param_groups for parameter in group["params"]})
        if len(kinds) == 3:
            raise RuntimeError("no step")
        step()

    optimizer.step = noting  # type: ignore[method-assign,assignment]
    before = list(model.parameters())
    for number in range(3):
        gradients(model)
        if number == 1 and isinstance(weight := model[0].weight, DTensor):
            moved: Any = weight.grad
            weight.grad = moved.redistribute(placements=[Replicate()])
        try:
            steps.step()
        except RuntimeError:
            kinds.append(set())
        optimizer.zero_grad()
    after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_whole = all(mine is its for mine, its in zip(after, before, strict=True))
    return {"kinds": ", ".join("+".join(sorted(each)) for each in kinds), "is_whole": int(is_whole)}


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        ("adam", "Parameter, DTensor+Parameter, Parameter, "),
        ("own", "DTensor+Parameter, DTensor+Parameter, DTensor+Parameter, "),
    ],
)
def test_known_rules_step_on_plain_shards_and_groups_are_whole_afterwards(ranks: Ranks, rule: str, kinds: str) -> None:
    for found in ranks.run(seen, 2, rule=rule):
        assert found == {"kinds": kinds, "is_whole": 1}


def elsewhere() -> dict[str, Any]:
    """A step of a parameter whose shard is on another device than its mesh, as with sharding's `offload` on a GPU."""
    dist.init_process_group("gloo")
    on_mesh: Any = distribute_tensor(torch.zeros(4, 3), init_device_mesh("meta", (2,)), [Shard(0)])
    in_host: Any = DTensor(torch.zeros(2, 3), on_mesh._spec, requires_grad=False)
    parameter = torch.nn.Parameter(in_host)
    optimizer = optim.Adam([parameter])
    parameter.grad = torch.empty_like(parameter)
    LocalSteps(optimizer).step()
    moments: Any = optimizer.state[parameter]["exp_avg"]
    dist.barrier()  # nothing is exchanged above: a rank that left early would take the other's connections with it
    return {"kind": type(moments).__name__, "device": str(moments.to_local().device), "shape": tuple(moments.shape)}


def test_the_state_of_a_shard_stays_on_the_shards_device(ranks: Ranks) -> None:
    for found in ranks.run(elsewhere, 2):
        assert found == {"kind": "DTensor", "device": "cpu", "shape": (4, 3)}
