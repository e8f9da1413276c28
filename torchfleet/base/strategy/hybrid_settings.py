"""Which collective strategies the network of hybrid mode may have beside sparse tables, and why others may not."""

from __future__ import annotations

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.collective_fields import CollectiveFields

_COMPILING = ("fuse_elewise_add_act_ops", "fuse_bn_act_ops", "fuse_bn_add_act_ops", "fuse_relu_depthwise_conv")
_WHOLE = "in hybrid mode every worker holds the whole network, so that the servers can keep it"


def check_hybrid(settings: CollectiveFields) -> None:
    """Raise StrategyError for what cannot be had beside sparse tables."""
    for name in ("pipeline", "tensor_parallel"):
        if getattr(settings, name):
            raise StrategyError(
                f"{name}=True and a_sync_configs['hybrid'] cannot be used together: {_WHOLE}. Leave one of them out."
            )
    if settings.sharding and settings.sharding_configs.stage > 1:
        raise StrategyError(
            f"sharding_configs['stage']={settings.sharding_configs.stage} and a_sync_configs['hybrid'] cannot be used "
            f"together: {_WHOLE}. Use sharding_configs={{'stage': 1}}, or leave sharding out."
        )
    for name in ("use_pure_fp16", "use_pure_bf16"):
        if settings.amp and settings.amp_configs[name]:
            raise StrategyError(
                f"amp_configs['{name}'] and a_sync_configs['hybrid'] cannot be used together: the servers keep the "
                f"parameters in float32. Leave '{name}' out: amp then computes in half precision on float32 parameters."
            )
    for name in _COMPILING:
        if getattr(settings.build_strategy, name):
            raise StrategyError(
                f"build_strategy.{name} and a_sync_configs['hybrid'] cannot be used together: it compiles the model as "
                "a whole, and lookups of rows cannot be compiled. Leave it out, or compile the dense part yourself."
            )
