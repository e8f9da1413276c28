"""Callbacks that follow a training: an interface for your own, and callbacks for experiment trackers.

fleet.add_callback(fleet.callbacks.WandbCallback(project="ctr"))
"""

from torchfleet.api.callbacks.callback import Callback
from torchfleet.api.callbacks.mlflow_callback import MlflowCallback
from torchfleet.api.callbacks.tensorboard_callback import TensorBoardCallback
from torchfleet.api.callbacks.wandb_callback import WandbCallback

__all__ = ["Callback", "MlflowCallback", "TensorBoardCallback", "WandbCallback"]
