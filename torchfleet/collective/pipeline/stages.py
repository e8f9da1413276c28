"""Partition of a model into the stages of a pipeline.

The user sets the stages, with `fleet.device_guard` while the model is constructed or with pipeline_configs["stages"]. A
Sequential without them is split so that the largest stage has as few parameters as possible, or, like any other model,
by what a dry step measures (measured_cut.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from torchfleet.base.device_guard import stage_of
from torchfleet.base.errors import StrategyError
from torchfleet.collective.module_names import matching
from torchfleet.collective.pipeline.stage_cuts import best_cut


def chain(model: torch.nn.Module, name: str = "") -> list[str]:
    """The names of the modules that run in order, if the model is a Sequential, possibly of Sequentials."""
    if not _is_sequential(model):
        return [name] if name else []
    prefix = name + "." if name else ""
    return [inner for own, child in model.named_children() for inner in chain(child, prefix + own)]


def _is_sequential(module: torch.nn.Module) -> bool:
    """Whether it behaves like a Sequential and can be split: it has no hooks, which every stage would call."""
    return (
        isinstance(module, torch.nn.Sequential)
        and getattr(module.forward, "__func__", None) is torch.nn.Sequential.forward
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def refuse_guards(model: torch.nn.Module) -> None:
    """Raise StrategyError if device_guard says where stages begin: a dry step is to find that."""
    guarded = _guarded_starts(model)
    if guarded:
        raise StrategyError(
            f"pipeline_configs['cut']='measured' and device_guard (at {guarded[0]!r}) both say where the stages of the "
            "pipeline begin: use one"
        )


def starts(model: torch.nn.Module, given: Sequence[str], num_stages: int) -> list[str]:
    """The names of the first modules of the second, third, ... of `num_stages` stages."""
    guarded = _guarded_starts(model)
    if given and guarded:
        raise StrategyError(
            "pipeline_configs['stages'] and device_guard both say where the stages of the pipeline begin: use one"
        )
    if not given and not guarded:
        return _even_starts(model, num_stages)
    found = _checked_names(model, given) if given else guarded
    where = "pipeline_configs['stages']" if given else "device_guard"
    if len(found) != num_stages - 1:
        raise StrategyError(
            f"{where} makes {len(found) + 1} stages ({', '.join(found)} begin the later ones), and the pipeline has "
            f"{num_stages}: hybrid_configs['pp_degree'] times pipeline_configs['vpp_degree']"
        )
    return found


def _checked_names(model: torch.nn.Module, given: Sequence[str]) -> list[str]:
    modules = {name: module for name, module in model.named_modules() if name}
    known = list(modules)
    given = [name for entry in given for name in matching(entry, modules, "pipeline_configs['stages']")]
    if sorted(given, key=known.index) != list(given) or len(set(given)) != len(given):
        raise StrategyError(
            f"pipeline_configs['stages']={list(given)}: give the modules once each, in the order the model has them"
        )
    return list(given)


def _guarded_starts(model: torch.nn.Module) -> list[str]:
    found: list[str] = []
    for name, module in model.named_modules():
        guarded = stage_of(module)
        stage = len(found) if guarded is None else guarded
        if not name or stage == len(found):
            continue
        if stage != len(found) + 1:
            raise StrategyError(
                f"device_guard puts module {name!r} into stage {stage} after modules of stage {len(found)}: stages "
                "must be numbered 0, 1, 2, … in the order in which the model has its modules"
            )
        found.append(name)
    return found


def _even_starts(model: torch.nn.Module, num_stages: int) -> list[str]:
    names = chain(model)
    if not names and num_stages > 1:
        raise StrategyError(
            f"pipeline: a {type(model).__name__} is no torch.nn.Sequential, and nothing says where its stages begin: "
            "give pipeline_configs['stages'], the names of the modules that begin them, use fleet.device_guard, or let "
            "a dry step find them: pipeline_configs['cut']='measured'"
        )
    if len(names) < num_stages:
        raise StrategyError(f"pipeline: {len(names)} modules in a row cannot be cut into {num_stages} stages")
    sizes = [sum(parameter.numel() for parameter in model.get_submodule(name).parameters()) for name in names]
    before = list(accumulate(sizes, initial=0))
    cuts = best_cut(len(names), num_stages, lambda _, first, end: before[end] - before[first])
    return [names[first] for first in cuts or ()]


_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


def blocks(model: torch.nn.Module, name: str = "") -> list[str]:
    """Modules of which stages can be made: the elements of lists, and outside of lists those that contain no list."""
    found: list[str] = []
    for own, child in model.named_children():
        path = f"{name}.{own}" if name else own
        is_whole = isinstance(model, _LISTS) and not isinstance(child, _LISTS)
        if is_whole or not any(isinstance(inside, _LISTS) for inside in child.modules()):
            found.append(path)
        else:
            found += blocks(child, path)
    return found


def in_call_order(names: Sequence[str], called: Sequence[str], known: Sequence[str]) -> list[str]:
    """Those of `names` that were called once, in the order of `known`, the model's modules. Only these begin stages."""
    places, last = {name: place for place, name in enumerate(known)}, -1
    found: list[str] = []
    for name in called:
        if name in names and called.count(name) == 1 and places[name] > last:
            found.append(name)
            last = places[name]
    return found


def stage_of_modules(model: torch.nn.Module, first: Sequence[str]) -> dict[str, int]:
    """The stage of every module, in the model's order of modules (its own tensors, not those of its children)."""
    stages: dict[str, int] = {}
    now = 0
    for name, _ in model.named_modules(remove_duplicate=False):
        now += name in first
        stages[name] = now
    return stages


def is_cut_in_chain(model: torch.nn.Module, first: Sequence[str]) -> bool:
    """Whether every stage of a Sequential begins with one of the modules it runs, so that tracing is not needed."""
    units = chain(model)
    return all(any(unit == name or unit.startswith(name + ".") for unit in units) for name in first)


def drop_modules(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Remove modules from a Sequential, and Sequentials that become empty."""
    for name in names:
        parent, _, own = name.rpartition(".")
        holder = model.get_submodule(parent)
        del holder._modules[own]
        if parent and not holder._modules:
            drop_modules(model, [parent])


def drop_tensors(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Remove the modules' own parameters and buffers; the modules stay."""
    for name in names:
        module = model.get_submodule(name)
        for tensors in (module._parameters, module._buffers):
            tensors.update(dict.fromkeys(tensors))
