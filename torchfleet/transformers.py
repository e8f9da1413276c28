"""Hugging Face's Trainer under collective strategies: `fleet.transformers.FleetTrainer(model, args, strategy=...)`.

It needs transformers and accelerate: pip install 'torchfleet[transformers]'.
"""

from __future__ import annotations

from torchfleet.base.extras import required

for _package in ("transformers", "accelerate"):
    required(_package, "fleet.transformers", "transformers")

from torchfleet.apps.transformers import FleetTrainer, FleetTrainerMixin  # noqa: E402

__all__ = ["FleetTrainer", "FleetTrainerMixin"]
