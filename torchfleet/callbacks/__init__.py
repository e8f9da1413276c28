"""What is told of a training as it goes: an interface for your own, and callbacks for the tools of others.

fleet.add_callback(fleet.callbacks.WandbCallback(project="ctr"))
"""

from torchfleet.callbacks.callback import Callback
from torchfleet.callbacks.mlflow_callback import MlflowCallback
from torchfleet.callbacks.tensorboard_callback import TensorBoardCallback
from torchfleet.callbacks.wandb_callback import WandbCallback

__all__ = ["Callback", "MlflowCallback", "TensorBoardCallback", "WandbCallback"]
