"""The whole state of a model with sharded tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchfleet.base.errors import ModelError
from torchfleet.collective.tensors.local_tensors import is_local


def whole_state(model: torch.nn.Module) -> dict[str, Any]:
    """`model.state_dict()` with every tensor whole, on every rank. All ranks call it together."""
    local = next((name for name, parameter in model.named_parameters() if is_local(parameter)), None)
    if local is not None:
        raise ModelError(
            f"'{local}' is cut over all ranks by its layer, and is whole on none: save the model with fleet.save"
        )
    state = model.state_dict()
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}
