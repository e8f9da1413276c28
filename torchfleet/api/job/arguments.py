"""Checks the arguments of fleet's functions before use. Errors name the type that was passed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from torchfleet.base.errors import FleetError, ModelError, RoleError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.strategy.transpiler_config import DistributeTranspilerConfig
from torchfleet.ps.worker.optim.without_parameters import lacks_parameters

Strategy = DistributedStrategy | DistributeTranspilerConfig


def check_role_maker(given: Any) -> None:
    if given is not None and (isinstance(given, type) or not callable(getattr(given, "read", None))):
        raise RoleError(
            "fleet.init(role_maker=...): role_maker: expected fleet.PaddleCloudRoleMaker() or "
            f"fleet.UserDefinedRoleMaker(...), found {given!r:.200}"
        )


def check_strategy(given: Any, user: str) -> DistributedStrategy | None:
    """The strategy that `user` was given, of either kind."""
    if isinstance(given, DistributeTranspilerConfig):
        return given.as_strategy(user)
    if given is not None and not isinstance(given, DistributedStrategy):
        raise StrategyError(
            f"{user}(strategy=...): expected a fleet.DistributedStrategy(a_sync=True, ...), found {given!r:.200}"
        )
    return given


def check_model(given: Any) -> None:
    if not isinstance(given, torch.nn.Module):
        raise ModelError(f"fleet.distributed_model: expected a torch.nn.Module, found {given!r:.200}{_hint(given)}")


def check_optimizer(given: Any) -> None:
    if not isinstance(given, torch.optim.Optimizer):
        raise ModelError(
            "fleet.distributed_optimizer: expected a torch.optim.Optimizer made of model.parameters(), found "
            f"{given!r:.200}{_hint(given)}"
        )
    if lacks_parameters(given):
        raise ModelError(
            f"fleet.distributed_optimizer: {type(given).__name__} was made without parameters, which is for "
            "SparseEmbedding(optimizer=...). Give it model.parameters()."
        )
    for number, group in enumerate(given.param_groups):
        rate = group.get("lr", 0.0)
        if isinstance(rate, (int, float, torch.Tensor)) and not 0 <= float(rate) < math.inf:
            raise ModelError(
                f"fleet.distributed_optimizer: {type(given).__name__} has lr={float(rate)} in param group {number}; "
                "expected a finite number >= 0"
            )


def check_scheduler(given: Any) -> None:
    if isinstance(given, type) or not callable(getattr(given, "step", None)):
        raise ModelError(
            "fleet.distributed_scheduler: expected a scheduler of torch.optim.lr_scheduler, found "
            f"{given!r:.200}{_hint(given)}"
        )


def check_loader(given: Any) -> None:
    if not isinstance(given, Iterable):
        raise FleetError(f"fleet.prefetch: expected a loader or another iterable of batches, found {given!r:.200}")


def metric(name: str, given: Any) -> float:
    """Convert a metric, a number or a tensor with one element, to a float."""
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for a tensor with several elements
        raise FleetError(f"fleet.report({name}=...): expected a number, found {given!r:.200}") from None


def _hint(given: Any) -> str:
    return ": a class, of which an object is needed" if isinstance(given, type) else ""
