"""Checks an optimizer's options when it is made, by the rule that implements it on servers."""

from __future__ import annotations

import torch

from torchfleet.base.errors import FleetError, ModelError
from torchfleet.ps.worker.lookup.optimizer_rules import rule_of


def check_options(optimizer: torch.optim.Optimizer) -> None:
    """Raise ModelError, which names the option and its range, for options that its rule does not take."""
    for group in optimizer.param_groups:
        try:
            rule_of(optimizer, group)
        except (FleetError, TypeError, ValueError) as error:
            raise ModelError(f"fleet.optim.{type(optimizer).__name__}: {error}") from None
