"""The settings of torchfleet.apps.Entry, checked on assignment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset

from torchfleet.base.errors import FleetError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy

Samples = Dataset[tuple[Any, int]]  # (input, label) each
Batches = Iterable[tuple[Any, torch.Tensor]]
Reader = Callable[[int], Batches]  # from an epoch to this rank's batches
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
Own = TypeVar("Own", bound="Settings")
_LOSS_TYPES = ("arcface", "cosface", "softmax")


class Settings:
    """Setters that return the object, so that calls can be chained."""

    def __init__(self) -> None:
        self.class_num = self.emb_dim = 0
        self.backbone: torch.nn.Module | None = None
        self.train_samples: Samples | None = None
        self.test_samples: Samples | None = None
        self.reader: Reader | None = None
        self.batch_size, self.num_epochs, self.log_period, self.seed = 128, 1, 100, 0
        self.loss: dict[str, Any] = {"loss_type": "arcface"}
        self.learning_rate, self.lr_decay_factor = 0.1, 0.1
        self.make_optimizer: MakeOptimizer | None = None
        self.lr_steps: tuple[int, ...] = ()
        self.checkpoint_dir = self.model_save_dir = ""
        self.strategy: DistributedStrategy | None = None

    def set_class_num(self: Own, num: int) -> Own:
        self.class_num = _whole("set_class_num", num, 1)
        return self

    def set_model(self: Own, backbone: torch.nn.Module, emb_dim: int | None = None) -> Own:
        """The model that computes features (n, emb_dim) from a batch of inputs."""
        if not isinstance(backbone, torch.nn.Module):
            raise FleetError(f"set_model expects a torch.nn.Module, found {type(backbone).__name__}")
        self.backbone = backbone
        return self if emb_dim is None else self.set_emb_dim(emb_dim)

    def set_emb_dim(self: Own, dim: int) -> Own:
        self.emb_dim = _whole("set_emb_dim", dim, 1)
        return self

    def set_dataset(self: Own, train: Samples, test: Samples | None = None) -> Own:
        """Datasets of (input, label). Every rank gets the whole dataset and takes its share."""
        for name, dataset in (("train", train), ("test", test)):
            if dataset is not None and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
                raise FleetError(
                    f"set_dataset: {name} expects a torch Dataset with a length, found {type(dataset).__name__}"
                )
        self.train_samples, self.test_samples = train, test
        return self

    def set_train_reader(self: Own, reader: Reader) -> Own:
        """Use instead of a dataset: `reader(epoch)` returns batches (inputs, labels) of fleet.data_shard()'s share."""
        self.reader = _callable("set_train_reader", reader)
        return self

    def set_train_batch_size(self: Own, num: int) -> Own:
        """The number of samples per rank and step."""
        self.batch_size = _whole("set_train_batch_size", num, 1)
        return self

    def set_train_epochs(self: Own, num: int) -> Own:
        self.num_epochs = _whole("set_train_epochs", num, 1)
        return self

    def set_loss_type(self: Own, loss_type: str, **margins: float) -> Own:
        """arcface, cosface or softmax; scale, m1, m2, m3 as in fleet.nn.MarginSoftmax."""
        if loss_type not in _LOSS_TYPES:
            raise FleetError(f"set_loss_type must be one of {', '.join(_LOSS_TYPES)}, found {loss_type!r}")
        unknown = sorted(set(margins) - {"scale", "m1", "m2", "m3"})
        if unknown:
            raise FleetError(f"set_loss_type has no {unknown[0]!r}; it has scale, m1, m2, m3")
        self.loss = {"loss_type": loss_type, **margins}
        return self

    def set_learning_rate(self: Own, rate: float) -> Own:
        """The learning rate of the default optimizer, SGD with momentum 0.9 and weight decay 0.0005."""
        self.learning_rate = _positive("set_learning_rate", rate)
        return self

    def set_optimizer(self: Own, make: MakeOptimizer) -> Own:
        """A function from parameters to an optimizer: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)."""
        self.make_optimizer = _callable("set_optimizer", make)
        return self

    def set_lr_steps(self: Own, steps: Sequence[int]) -> Own:
        """Steps after which the learning rate is multiplied by the factor of set_lr_decay_factor (0.1)."""
        self.lr_steps = tuple(_whole("set_lr_steps", step, 1) for step in steps)
        return self

    def set_lr_decay_factor(self: Own, factor: float) -> Own:
        self.lr_decay_factor = _positive("set_lr_decay_factor", factor)
        return self

    def set_checkpoint_dir(self: Own, dirname: str) -> Own:
        """The folder where every epoch is saved. Training, testing and prediction continue from a save there."""
        self.checkpoint_dir = _text("set_checkpoint_dir", dirname)
        return self

    def set_model_save_dir(self: Own, dirname: str) -> Own:
        """The folder where the trained model is saved."""
        self.model_save_dir = _text("set_model_save_dir", dirname)
        return self

    def set_strategy(self: Own, strategy: DistributedStrategy) -> Own:
        if not isinstance(strategy, DistributedStrategy):
            raise FleetError(f"set_strategy expects a fleet.DistributedStrategy, found {type(strategy).__name__}")
        self.strategy = strategy
        return self

    def set_log_period(self: Own, num: int) -> Own:
        """Steps between two lines about the loss; 0: no lines."""
        self.log_period = _whole("set_log_period", num, 0)
        return self

    def set_seed(self: Own, seed: int) -> Own:
        """The seed of the classes' initial weights and of the order of samples."""
        self.seed = _whole("set_seed", seed, 0)
        return self

    set_backbone, set_batch_size, set_num_epochs = set_model, set_train_batch_size, set_train_epochs


def _whole(name: str, value: Any, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise FleetError(f"{name} expects a whole number of at least {at_least}, found {value!r}")
    return value


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise FleetError(f"{name} expects a positive number, found {value!r}")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise FleetError(f"{name} expects the name of a folder, found {value!r}")
    return value


def _callable(name: str, value: Any) -> Any:
    if not callable(value):
        raise FleetError(f"{name} expects a function, found {type(value).__name__}")
    return value
