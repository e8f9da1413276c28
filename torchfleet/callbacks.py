"""fleet.callbacks: callbacks that follow a training; see `fleet.add_callback`."""

from __future__ import annotations

from torchfleet.api.callbacks import Callback, MlflowCallback, TensorBoardCallback, WandbCallback
from torchfleet.base.lazy_names import nearest

__all__ = ["Callback", "MlflowCallback", "TensorBoardCallback", "WandbCallback"]
__getattr__ = nearest(__name__, __all__)
