"""Which half precision the settings of amp ask for."""

from __future__ import annotations

import torch

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.collective_fields import CONFIGS, AmpConfigs

_SCALING = ("init_loss_scaling", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio",
            "use_dynamic_loss_scaling")  # fmt: skip


def precision(configs: AmpConfigs) -> tuple[torch.dtype, bool]:
    """(the dtype of computation, whether parameters are kept in it). With products in float8: bfloat16."""
    pure = [name for name in ("use_pure_fp16", "use_pure_bf16") if configs[name]]
    if len(pure) > 1:
        raise StrategyError("amp_configs: use_pure_fp16 and use_pure_bf16 are both on: choose one of them")
    is_bfloat = configs.use_pure_bf16 or (configs.dtype != "float16" and not pure)
    if pure == ["use_pure_fp16"] and configs.dtype != "float16":
        raise StrategyError(
            f"amp_configs: use_pure_fp16 and dtype={configs.dtype!r} contradict each other: use use_pure_bf16"
        )
    changed = [name for name in _SCALING if configs[name] != CONFIGS["amp"][name].default]
    if is_bfloat and changed:
        raise StrategyError(
            f"amp_configs['{changed[0]}'] scales the loss of float16 training; bfloat16 and float8 need no scale: "
            "leave it out"
        )
    return (torch.bfloat16 if is_bfloat else torch.float16), bool(pure)
