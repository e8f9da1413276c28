"""Hugging Face's Trainer under collective strategies: `fleet.transformers.FleetTrainer(model, args, strategy=...)`.

It needs transformers and accelerate: pip install 'torchfleet[transformers]'.
"""

from __future__ import annotations

try:
    from torchfleet.transformers.fleet_trainer import FleetTrainer, FleetTrainerMixin
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("transformers", "accelerate"):
        raise
    raise ModuleNotFoundError(
        f"fleet.transformers needs the package {error.name}: pip install 'torchfleet[transformers]'", name=error.name
    ) from None

__all__ = ["FleetTrainer", "FleetTrainerMixin"]
