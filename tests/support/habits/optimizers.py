"""Optimizers of torch and their options, param groups and state; schedulers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from support.habits.habit import LOCAL, Group, Port
from support.habits.scripts import Model, adagrad, batches, loss_of, sgd, train, trained, values
from torch.optim import lr_scheduler as schedules

ROWS = Group("Optimizers, rows and network", "One optimizer has all parameters of the model.")
NETWORK = Group("Optimizers, a network without tables", "The model has no embeddings; the servers have its network.")
GROUPS = Group("Param groups, rates and the optimizer's state")
SCHEDULERS = Group("Schedulers", "A step of the optimizer, then one of the scheduler, six times.")

TOUCHED = (
    "a row changes in the steps that look it up, as with SparseAdam; torch's dense table also moves the other rows, by "
    "their averages"
)
Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(ids.float() / 20).squeeze(1)


def on(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


OPTIM = torch.optim
NETWORK_TOO = "torch's SparseAdam takes no dense gradients; on the servers the network is stepped by Adam beside it"
BOTH: dict[str, tuple[Make, str | dict[str, str]]] = {
    "SGD": (on(OPTIM.SGD, lr=0.5), ""),
    "SGD(momentum=0.9)": (on(OPTIM.SGD, lr=0.1, momentum=0.9), TOUCHED),
    "SGD(momentum=0.9, nesterov=True)": (on(OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True), TOUCHED),
    "SGD(momentum=0.9, dampening=0.5)": (on(OPTIM.SGD, lr=0.1, momentum=0.9, dampening=0.5), TOUCHED),
    "SGD(weight_decay=0.01)": (on(OPTIM.SGD, lr=0.5, weight_decay=0.01), ""),
    "SGD(maximize=True)": (on(OPTIM.SGD, lr=0.01, maximize=True), ""),
    "SGD(foreach=True)": (on(OPTIM.SGD, lr=0.5, foreach=True), ""),
    "SGD(fused=True)": (on(OPTIM.SGD, lr=0.5, fused=True), ""),
    "SGD(differentiable=True)": (on(OPTIM.SGD, lr=0.5, differentiable=True), ""),
    "SGD(lr=tensor)": (lambda model: OPTIM.SGD(model.parameters(), lr=torch.tensor(0.5)), ""),
    "Adagrad": (on(OPTIM.Adagrad, lr=0.2), ""),
    "Adagrad(lr_decay=0.1)": (on(OPTIM.Adagrad, lr=0.2, lr_decay=0.1), ""),
    "Adagrad(initial_accumulator_value=0.1, eps=1e-3)": (
        on(OPTIM.Adagrad, lr=0.2, initial_accumulator_value=0.1, eps=1e-3),
        "",
    ),
    "Adagrad(weight_decay=0.01)": (on(OPTIM.Adagrad, lr=0.2, weight_decay=0.01), ""),
    "Adam": (on(OPTIM.Adam, lr=0.05), TOUCHED),
    "Adam(amsgrad=True)": (on(OPTIM.Adam, lr=0.05, amsgrad=True), TOUCHED),
    "Adam(weight_decay=0.01)": (on(OPTIM.Adam, lr=0.05, weight_decay=0.01), ""),
    "AdamW": (on(OPTIM.AdamW, lr=0.05), ""),
    "AdamW(weight_decay=0)": (on(OPTIM.AdamW, lr=0.05, weight_decay=0.0), TOUCHED),
    "RMSprop": (on(OPTIM.RMSprop, lr=0.01), TOUCHED),
    "RMSprop(centered=True, momentum=0.5)": (on(OPTIM.RMSprop, lr=0.01, centered=True, momentum=0.5), TOUCHED),
    "SparseAdam": (
        on(OPTIM.SparseAdam, lr=0.05),
        dict.fromkeys((LOCAL, "sync", "half_async", "async"), NETWORK_TOO),
    ),
}
ALONE: dict[str, Make] = {
    "SGD(momentum=0.9)": on(OPTIM.SGD, lr=0.1, momentum=0.9),
    "SGD(momentum=0.9, nesterov=True)": on(OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD(momentum=0.9, dampening=0.5)": on(OPTIM.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD(weight_decay=0.01)": on(OPTIM.SGD, lr=0.1, weight_decay=0.01),
    "SGD(maximize=True)": on(OPTIM.SGD, lr=0.01, maximize=True),
    "Adagrad(lr_decay=0.1)": on(OPTIM.Adagrad, lr=0.2, lr_decay=0.1),
    "Adagrad(weight_decay=0.01)": on(OPTIM.Adagrad, lr=0.2, weight_decay=0.01),
    "Adam": on(OPTIM.Adam, lr=0.05),
    "Adam(betas=(0.8, 0.9), eps=1e-6)": on(OPTIM.Adam, lr=0.05, betas=(0.8, 0.9), eps=1e-6),
    "Adam(weight_decay=0.01)": on(OPTIM.Adam, lr=0.05, weight_decay=0.01),
    "Adam(amsgrad=True)": on(OPTIM.Adam, lr=0.05, amsgrad=True),
    "Adam(maximize=True)": on(OPTIM.Adam, lr=0.01, maximize=True),
    "AdamW": on(OPTIM.AdamW, lr=0.05),
    "RMSprop": on(OPTIM.RMSprop, lr=0.01),
    "RMSprop(centered=True, momentum=0.5)": on(OPTIM.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "NAdam": on(OPTIM.NAdam, lr=0.05),
    "RAdam": on(OPTIM.RAdam, lr=0.05),
    "Adamax": on(OPTIM.Adamax, lr=0.05),
    "Adadelta": on(OPTIM.Adadelta),
    "ASGD": on(OPTIM.ASGD, lr=0.1),
    "Rprop": on(OPTIM.Rprop, lr=0.01),
    "Adafactor": on(OPTIM.Adafactor, lr=0.05),
}
NEEDED = ("SGD", "Adagrad")


def add_optimizer(group: Group, name: str, make_model: Callable[[], Any], make: Make, differs: Any = "") -> None:
    def script(port: Port) -> Any:
        model = make_model()
        return trained(port, model, make(model))

    group.add(name, script, differs, is_needed=name in NEEDED)


for name, (make, reason) in BOTH.items():
    add_optimizer(ROWS, name, Model, make, reason)
for name, make in ALONE.items():
    add_optimizer(NETWORK, name, Tower, make)


@ROWS.habit("Adam for the network, SparseAdam for rows that say sparse=True")
def two_adams(port: Port) -> Any:
    model: Any = Model(sparse=True)
    tables = [model.items.weight, model.words.weight]
    network = [*model.hidden.parameters(), *model.out.parameters()]
    one, other = torch.optim.Adam(network, lr=0.05), torch.optim.SparseAdam(tables, lr=0.05)
    model, one, other = port(model, one, other)
    return train(model, [one, other]), values(model)


def _lbfgs(port: Port, make_model: Callable[[], torch.nn.Module]) -> Any:
    model: Any = make_model()
    model, optimizer = port(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    batch, losses = batches(1)[0], []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    for _ in range(2):
        losses.append(float(optimizer.step(closure)))
    return losses, values(model)


@NETWORK.habit("LBFGS")
def lbfgs(port: Port) -> Any:
    return _lbfgs(port, Tower)


@ROWS.habit("LBFGS")
def lbfgs_of_rows(port: Port) -> Any:
    return _lbfgs(port, Model)


@GROUPS.habit("groups with rates of their own", is_needed=True)
def two_rates(port: Port) -> Any:
    model: Any = Model()
    network = [*model.hidden.parameters(), *model.out.parameters()]
    tables = [model.items.weight, model.words.weight]
    optimizer = torch.optim.SGD([{"params": tables, "lr": 0.8}, {"params": network}], lr=0.1)
    return trained(port, model, optimizer)


@GROUPS.habit("a group's rate is changed by hand")
def rate_by_hand(port: Port) -> Any:
    model: Any = Model()
    model, optimizer = port(model, sgd(model))

    def lower() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    return train(model, optimizer, after_step=lower), values(model), optimizer.param_groups[0]["lr"]


@GROUPS.habit("a group's momentum is changed by hand")
def momentum_by_hand(port: Port) -> Any:
    model: Any = Tower()
    model, optimizer = port(model, sgd(model, 0.1, momentum=0.9))
    losses = train(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.5
    return losses, train(model, optimizer), values(model)


@GROUPS.habit("add_param_group before the port")
def group_before(port: Port) -> Any:
    model: Any = Model()
    optimizer = torch.optim.SGD(model.hidden.parameters(), lr=0.5)
    optimizer.add_param_group({"params": [*model.out.parameters(), model.items.weight, model.words.weight], "lr": 0.2})
    return trained(port, model, optimizer)


@GROUPS.habit("add_param_group after the port")
def group_after(port: Port) -> Any:
    model: Any = Model()
    late = list(model.out.parameters())
    others = [p for p in model.parameters() if all(p is not one for one in late)]
    model, optimizer = port(model, torch.optim.SGD(others, lr=0.5))
    losses = train(model, optimizer)
    optimizer.add_param_group({"params": list(model.out.parameters()), "lr": 0.2})
    return losses, train(model, optimizer), values(model)


@GROUPS.habit("a part of the parameters is in no optimizer")
def part_left_out(port: Port) -> Any:
    model: Any = Model()
    kept = [*model.hidden.parameters(), model.items.weight]
    return trained(port, model, torch.optim.SGD(kept, lr=0.5))


@GROUPS.habit("a set of groups is given as named parameters")
def named_groups(port: Port) -> Any:
    model: Any = Model()
    return trained(port, model, torch.optim.SGD(list(model.named_parameters()), lr=0.5))


@GROUPS.habit("optimizer.param_groups has torch's keys")
def keys_of_groups(port: Port) -> Any:
    model: Any = Model()
    model, optimizer = port(model, adagrad(model))
    found = optimizer.param_groups
    return [(set(group) - {"params"}) >= {"lr", "eps", "lr_decay"} and len(group["params"]) for group in found]


@GROUPS.habit("optimizer.defaults and isinstance(optimizer, Optimizer)")
def kind_of_optimizer(port: Port) -> Any:
    model: Any = Model()
    model, optimizer = port(model, adagrad(model))
    return isinstance(optimizer, torch.optim.Optimizer), optimizer.defaults["lr"]


def _state(optimizer: Any) -> Any:
    """What state_dict has of each parameter, as numbers."""
    found = optimizer.state_dict()["state"]
    return {key: {name: torch.as_tensor(value) for name, value in one.items()} for key, one in found.items()}


@GROUPS.habit("optimizer.state_dict() has the state, a network with momentum")
def momentum_state(port: Port) -> Any:
    model: Any = Tower()
    model, optimizer = port(model, sgd(model, 0.1, momentum=0.9))
    return train(model, optimizer), _state(optimizer)


@GROUPS.habit("optimizer.state_dict() has the state, rows and network")
def state_of_rows(port: Port) -> Any:
    model: Any = Model()
    model, optimizer = port(model, adagrad(model))
    return train(model, optimizer), _state(optimizer)


@GROUPS.habit("optimizer.state_dict() is loaded, and training goes on, a network")
def state_comes_back(port: Port) -> Any:
    model: Any = Tower()
    model, optimizer = port(model, sgd(model, 0.1, momentum=0.9))
    losses = train(model, optimizer)
    kept = (values(model), copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return losses, train(model, optimizer), values(model)


@GROUPS.habit("a state of plain torch is loaded, and training goes on, rows and network")
def state_of_torch(port: Port) -> Any:
    model: Any = Model()
    optimizer: Any = adagrad(model)
    train(model, optimizer)
    kept = (values(model), copy.deepcopy(optimizer.state_dict()))
    model = Model()
    model, optimizer = port(model, adagrad(model))
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return train(model, optimizer), values(model)


@GROUPS.habit("optimizer.state_dict() is loaded, and training goes on, rows and network")
def state_of_rows_comes_back(port: Port) -> Any:
    model: Any = Model()
    model, optimizer = port(model, adagrad(model))
    losses = train(model, optimizer)
    kept = (values(model), copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return losses, train(model, optimizer), values(model)


def _sequential(optimizer: Any) -> Any:
    parts = [schedules.ConstantLR(optimizer, 0.5, 2), schedules.ExponentialLR(optimizer, 0.7)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


def _chained(optimizer: Any) -> Any:
    return schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, 2), schedules.ExponentialLR(optimizer, 0.7)], optimizer=optimizer
    )


MAKERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedules.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.3, total_iters=4),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 6, 2.0),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.8),
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
    "OneCycleLR(cycle_momentum=False)": lambda o: schedules.OneCycleLR(o, 0.4, 8, cycle_momentum=False),
    "CyclicLR(cycle_momentum=False)": lambda o: schedules.CyclicLR(o, 0.1, 0.8, 2, cycle_momentum=False),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
}


def add_scheduler(name: str, make: Callable[[Any], Any], when: str, **options: Any) -> None:
    def script(port: Port) -> Any:
        model: Any = Model() if not options else Tower()
        optimizer: Any = sgd(model, **options)
        if when == "before":
            scheduler = make(optimizer)
            model, optimizer, scheduler = port(model, optimizer, scheduler)
        else:
            model, optimizer = port(model, optimizer)
            scheduler = make(optimizer)
        found = []
        for _ in range(6):
            found += train(model, optimizer, batches(1))
            scheduler.step()
            found += [float(optimizer.param_groups[0]["lr"]), *map(float, scheduler.get_last_lr())]
        return found, values(model), sorted(scheduler.state_dict())

    SCHEDULERS.add(f"{name}, made {when} the port" if when else name, script, is_needed=name in ("StepLR", "LambdaLR"))


for name, maker in MAKERS.items():
    add_scheduler(name, maker, "after" if name in ("ExponentialLR", "LambdaLR") else "before")
add_scheduler("OneCycleLR beside momentum", lambda o: schedules.OneCycleLR(o, 0.5, 8), "before", lr=0.1, momentum=0.9)
add_scheduler("CyclicLR beside momentum", lambda o: schedules.CyclicLR(o, 0.1, 0.5, 2), "before", lr=0.1, momentum=0.9)


@SCHEDULERS.habit("ReduceLROnPlateau")
def plateau(port: Port) -> Any:
    model: Any = Model()
    optimizer: Any = sgd(model)
    scheduler: Any = schedules.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    model, optimizer, scheduler = port(model, optimizer, scheduler)
    found = []
    for _ in range(4):
        losses = train(model, optimizer, batches(2))
        scheduler.step(losses[-1])
        found += [*losses, float(optimizer.param_groups[0]["lr"])]
    return found, values(model)


@SCHEDULERS.habit("state_dict and load_state_dict of a scheduler")
def scheduler_comes_back(port: Port) -> Any:
    model: Any = Model()
    optimizer: Any = sgd(model)
    scheduler: Any = schedules.StepLR(optimizer, 2, 0.5)
    model, optimizer, scheduler = port(model, optimizer, scheduler)
    for _ in range(3):
        train(model, optimizer, batches(1))
        scheduler.step()
    other = schedules.StepLR(optimizer, 2, 0.5)
    other.load_state_dict(scheduler.state_dict())
    for _ in range(3):
        train(model, optimizer, batches(1))
        other.step()
    return other.state_dict(), float(optimizer.param_groups[0]["lr"]), values(model)
