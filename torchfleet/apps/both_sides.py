"""What TrainingArguments and a DistributedStrategy could both do, and what a Trainer's loop cannot do at all."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torchfleet.base.errors import StrategyError

_OWN_LOOPS = ("pipeline", "tensor_parallel")  # whose ranks work on the same samples, or call the model otherwise


def refuse_twice(args: Any, strategies: Collection[str]) -> None:
    """Raise StrategyError, with both names and the way out. `strategies`: those that are on."""
    for name in ("bf16", "fp16"):
        if getattr(args, name, False):
            raise StrategyError(
                f"TrainingArguments({name}=True) and FleetTrainer: mixed precision is the strategy's. Leave {name} "
                f"out, and give strategy=DistributedStrategy(amp=True){_dtype(name)}."
            )
    steps = args.gradient_accumulation_steps
    if steps > 1:
        raise StrategyError(
            f"TrainingArguments(gradient_accumulation_steps={steps}) and FleetTrainer: gradients are gathered by the "
            "strategy. Leave it at 1, and give strategy=DistributedStrategy(gradient_merge=True, "
            f"gradient_merge_configs={{'k_steps': {steps}}})."
        )
    if args.gradient_checkpointing and "recompute" in strategies:
        raise StrategyError(
            "TrainingArguments(gradient_checkpointing=True) and DistributedStrategy(recompute=True) are the same: "
            "leave one of them out"
        )
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise StrategyError(
                f"TrainingArguments({name}=...) and FleetTrainer: leave {name} out, and give "
                "strategy=DistributedStrategy(sharding=True, sharding_configs={'stage': 2})"
            )
    for name in _OWN_LOOPS:
        if name in strategies:
            raise StrategyError(
                f"DistributedStrategy({name}=True): the Trainer gives every rank samples of its own, and such ranks "
                f"share them. Write the loop yourself (docs/collective/{name}.md)."
            )


def _dtype(name: str) -> str:
    return " with amp_configs={'dtype': 'bfloat16'}" if name == "bf16" else ""
