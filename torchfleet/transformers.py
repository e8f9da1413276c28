"""Hugging Face's Trainer under collective strategies: `fleet.transformers.FleetTrainer(model, args, strategy=...)`.

`load_pretrained` and `save_pretrained` read and write its checkpoints with models that are cut over ranks.

It needs transformers and accelerate: pip install 'torchfleet[transformers]'.
"""

from __future__ import annotations

from torchfleet.base.extras import required

for _package in ("transformers", "accelerate"):
    required(_package, "fleet.transformers", "transformers")

from torchfleet.apps.pretrained import load_pretrained, save_pretrained  # noqa: E402
from torchfleet.apps.transformers import FleetTrainer, FleetTrainerMixin  # noqa: E402

__all__ = ["FleetTrainer", "FleetTrainerMixin", "load_pretrained", "save_pretrained"]
