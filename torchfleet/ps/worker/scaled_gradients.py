"""Gradients of a loss that torch.amp.GradScaler has scaled, for an optimizer that divides them by itself."""

from __future__ import annotations

import torch


def unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """Divide an optimizer's gradients in place by the scale, if a scaler has left one on it to be divided by.

    Returns whether they are finite, as the scaler has found. Without a scaler that is not known, and True.
    """
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is not None and bool(found_inf.item()):
        return False
    if scale is not None:
        inverse = scale.double().reciprocal().float()  # as the scaler itself computes it
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            gradient = parameter.grad
            if gradient is not None:
                numbers = gradient._values() if gradient.is_sparse else gradient
                numbers.mul_(inverse.to(numbers.device))
    return True
