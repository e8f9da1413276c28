"""fleet.callbacks: what is told of training as it goes; see `fleet.add_callback`."""

from __future__ import annotations

from torchfleet.api.callbacks import Callback, MlflowCallback, TensorBoardCallback, WandbCallback

__all__ = ["Callback", "MlflowCallback", "TensorBoardCallback", "WandbCallback"]
