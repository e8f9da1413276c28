"""Marks on the modules of a model, set by `fleet.device_guard`: the device or pipeline stage of a module.

A mark is a plain attribute of the module. Pipelines read the stage (collective/pipeline/stages.py), jobs with heter
workers read the device (ps/worker/heter/blocks.py).
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as torch_module

from torchfleet.base.errors import StrategyError

GPU, CPU = "gpu", "cpu"
_STAGE, _DEVICE = "_fleet_stage", "_fleet_device"
_FORMAT = re.compile(r"(gpu|cpu)|(gpu|cpu|stage):(\d{1,9})")
_guards: list[device_guard] = []  # the open guards, the innermost last
_handles: list[Any] = []  # handles of torch's hooks, while a guard is open

Marked = TypeVar("Marked", bound=torch.nn.Module)


class device_guard:
    """Put modules on a device, or into a stage of a pipeline.

    `with fleet.device_guard("gpu"):` marks the modules that are constructed, or assigned to another module, in it;
    `fleet.device_guard("gpu")(module)` marks one module and returns it. Of nested guards, the innermost counts.

    In a job with heter workers (docs/heter.md), these compute the modules marked "gpu". In other jobs with servers, a
    worker puts those modules on its GPU, if it has one. In a pipeline, "gpu:1", "cpu:1" and "stage:1" are all stage 1,
    "gpu" and "cpu" are stage 0, and a module outside of all guards belongs to the stage of the module before it.
    """

    def __init__(self, device: str) -> None:
        found = _FORMAT.fullmatch(device)
        if found is None:
            raise StrategyError(
                f"device_guard({device!r}): expected 'gpu' or 'cpu', or the stage of a pipeline, 'gpu:<stage>', "
                "'cpu:<stage>' or 'stage:<stage>', for example 'gpu:1'"
            )
        self._stage = int(found[3] or 0)
        kind = found[1] or found[2]
        self._device = kind if kind in (GPU, CPU) else None

    def __call__(self, module: Marked) -> Marked:
        """Mark the module, also if it was marked before, and return it."""
        if not isinstance(module, torch.nn.Module):
            raise StrategyError(
                f"device_guard marks torch.nn.Modules, found {type(module).__name__}: give it a module, or use it as a "
                "context, `with fleet.device_guard('gpu'):`"
            )
        vars(module)[_STAGE], vars(module)[_DEVICE] = self._stage, self._device
        return module

    def __enter__(self) -> None:
        _guards.append(self)
        if len(_guards) == 1:
            _handles.append(torch_module.register_module_module_registration_hook(_on_module))
            _handles.append(torch_module.register_module_parameter_registration_hook(_on_parameter))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _guards.pop()
        while not _guards and _handles:
            _handles.pop().remove()

    def mark(self, module: torch.nn.Module) -> None:
        """Mark the module, unless an inner guard has marked it."""
        if _STAGE not in vars(module):
            self(module)


def stage_of(module: torch.nn.Module) -> int | None:
    """The stage of the module itself; None without a guard."""
    return vars(module).get(_STAGE)


def device_of_guard(module: torch.nn.Module) -> str | None:
    """GPU or CPU, as marked on the module itself; None without such a guard."""
    return vars(module).get(_DEVICE)


def _on_module(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    if module is not None:
        _guards[-1].mark(module)


def _on_parameter(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
    """Mark a module that gets its first parameter and has no children: it is being constructed."""
    if not any(known is not None for known in module._parameters.values()) and not module._modules:
        _guards[-1].mark(module)
