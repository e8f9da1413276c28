"""Optimizers whose parameters may be left out: the options then say how one table is trained."""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.base.errors import ModelError


class MayLackParameters:
    """A mixin, put before a subclass of torch.optim.Optimizer. Without `params` the optimizer has one param group,
    which is empty: its options are the rule of a table, SparseEmbedding(optimizer=...).
    """

    def __init__(self, params: Any = None, *args: Any, **options: Any) -> None:
        if isinstance(params, (int, float)):
            raise ModelError(
                f"fleet.optim.{type(self).__name__}: expected parameters first, found {params!r}. Give the rate by "
                f"name: {type(self).__name__}(lr={params!r})."
            )
        given = [torch.nn.Parameter(torch.empty(0))] if params is None else params  # torch refuses an empty list
        super().__init__(given, *args, **options)  # type: ignore[call-arg]  # the optimizer, mixed in behind it
        if params is None:
            assert isinstance(self, torch.optim.Optimizer)
            self.state.clear()
            self.param_groups[0]["params"] = []


def lacks_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it was made without parameters, for a table."""
    return not any(group["params"] for group in optimizer.param_groups)
