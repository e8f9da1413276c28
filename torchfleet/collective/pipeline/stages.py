"""Partition of a model into the stages of a pipeline.

The user sets the stages, with `fleet.device_guard` while the model is constructed or with pipeline_configs["stages"]. A
Sequential without them is split so that the largest stage has as few parameters as possible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchfleet.base.device_guard import stage_of
from torchfleet.base.errors import StrategyError


def chain(model: torch.nn.Module, name: str = "") -> list[str]:
    """The names of the modules that run in order, if the model is a Sequential, possibly of Sequentials."""
    if not _is_sequential(model):
        return [name] if name else []
    prefix = name + "." if name else ""
    return [inner for own, child in model.named_children() for inner in chain(child, prefix + own)]


def _is_sequential(module: torch.nn.Module) -> bool:
    """Whether it behaves as Sequential and can be split: it has no hooks, which every stage would call."""
    return (
        isinstance(module, torch.nn.Sequential)
        and getattr(module.forward, "__func__", None) is torch.nn.Sequential.forward
        and not (module._forward_hooks or module._forward_pre_hooks)
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
    known = [name for name, _ in model.named_modules() if name]
    for name in given:
        if name not in known:
            raise StrategyError(
                f"pipeline_configs['stages']: the model has no module {name!r}; it has {', '.join(known[:20])}"
                + (" and more" if len(known) > 20 else "")
            )
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
            "give pipeline_configs['stages'], the names of the modules that begin them, or use fleet.device_guard"
        )
    if len(names) < num_stages:
        raise StrategyError(f"pipeline: {len(names)} modules in a row cannot be cut into {num_stages} stages")
    sizes = [sum(parameter.numel() for parameter in model.get_submodule(name).parameters()) for name in names]
    return [names[first] for first in _even_cut(sizes, num_stages)]


def _even_cut(sizes: Sequence[int], num_stages: int) -> list[int]:
    """Where the second, third, ... stage begins, so that the largest sum of a stage is as small as possible."""
    num = len(sizes)
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    # best[i]: the largest stage, and the negated cuts, of the first i sizes in the number of stages that the loop has
    # reached. Of equally good cuts the last one wins: modules without parameters stay with the module before them.
    best: list[tuple[int, list[int]]] = [(total, []) for total in before]
    for stage in range(1, num_stages):
        for i in range(num, stage, -1):  # backwards: best[j] is still that of one stage less
            best[i] = min((max(best[j][0], before[i] - before[j]), [*best[j][1], -j]) for j in range(stage, i))
    return [-cut for cut in best[num][1]]


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
