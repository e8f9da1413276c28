"""Dynamic loss scaling (Micikevicius et al. 2018): small gradients survive float16 because the loss is scaled up.

    overflow:  bad += 1, good = 0;  at decr_every_n_nan_or_inf:  scale = max(1, scale · decr_ratio), bad = 0
    else:      good += 1, bad = 0;  at incr_every_n_steps:       scale = scale · incr_ratio,         good = 0

A step whose gradients overflowed is always skipped, whether or not the scale changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torchfleet.base.strategy.collective_fields import AmpConfigs
from torchfleet.collective.buckets import buckets


class LossScaling:
    """The scale, updated by whether the gradients of steps overflow."""

    def __init__(self, configs: AmpConfigs, device: torch.device) -> None:
        self._configs = configs
        self.value = configs.init_loss_scaling
        self._num_good = self._num_bad = 0
        self._overflow = torch.zeros((), device=device)
        self._factor = torch.ones((), device=device)

    def unscale(self, gradients: Sequence[torch.Tensor], scale: float) -> None:
        """Divide in place, and record whether any value is not finite."""
        self._factor.fill_(1.0 / scale)
        for bucket in buckets(gradients):
            torch._amp_foreach_non_finite_check_and_unscale_(bucket, self._overflow, self._factor)

    @property
    def overflow(self) -> torch.Tensor:
        """1 if a gradient since the last `update` was not finite, else 0; ranks may reduce it."""
        return self._overflow

    def update(self) -> bool:
        """Update the scale before a step; returns whether the step may be made."""
        is_finite = not bool(self._overflow.item())
        self._overflow.zero_()
        if not self._configs.use_dynamic_loss_scaling:
            return is_finite
        if is_finite:
            self._num_good, self._num_bad = self._num_good + 1, 0
            if self._num_good >= self._configs.incr_every_n_steps:
                raised = self.value * self._configs.incr_ratio
                self.value, self._num_good = raised if math.isfinite(raised) else self.value, 0
        else:
            self._num_good, self._num_bad = 0, self._num_bad + 1
            if self._num_bad >= self._configs.decr_every_n_nan_or_inf:
                self.value, self._num_bad = max(1.0, self.value * self._configs.decr_ratio), 0
        return is_finite

    def state(self) -> torch.Tensor:
        return torch.tensor([self.value, self._num_good, self._num_bad], dtype=torch.float64)

    def load_state(self, state: torch.Tensor) -> None:
        value, good, bad = state.tolist()
        self.value, self._num_good, self._num_bad = value, int(good), int(bad)
