"""What a rank holds of a tensor that is cut over ranks."""

from __future__ import annotations

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is cut over ranks; any other tensor itself. It shares its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
