"""Large-scale classification from end to end, modelled on Paddle's PLSC.

    entry = Entry().set_class_num(1_000_000).set_model(backbone, emb_dim=512).set_dataset(train, test)
    entry.set_loss_type("arcface").set_train_batch_size(128).set_train_epochs(20).set_checkpoint_dir("checkpoints")
    entry.train()
    print(entry.test())

Run it in one process or with `fleetrun --nproc_per_node N`: classes and samples are sharded over the ranks. To write
your own loop, use fleet.nn.MarginSoftmax (docs/collective/classification.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, DistributedSampler, default_collate

import torchfleet as fleet
from torchfleet.api import process_role
from torchfleet.apps.classify_settings import Batches, Samples, Settings
from torchfleet.base.errors import FleetError
from torchfleet.collective.layers.margin_softmax import MarginSoftmax


class Trained(NamedTuple):
    """The result of the last epoch."""

    num_steps: int
    loss: float
    samples_per_s: float


class Classifier(torch.nn.Module):
    """A backbone that computes features, and a last layer sharded by classes. Without labels: (classes, scores)."""

    def __init__(self, backbone: torch.nn.Module, head: MarginSoftmax) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, inputs: Any, labels: torch.Tensor | None = None) -> Any:
        features = self.backbone(inputs)
        return self.head.predict(features) if labels is None else self.head(features, labels)


class Entry(Settings):
    """Settings (set_class_num, ...: classify_settings.py), then train(), test() and predict(), which all ranks call
    together.
    """

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None
        self._optimizer: Any = None
        self._scheduler: torch.optim.lr_scheduler.MultiStepLR | None = None
        self._first_epoch = 0

    def train(self) -> Trained:
        """Train the remaining epochs. The first rank prints the loss and the speed."""
        self._begin()
        if self.train_samples is None and self.reader is None:
            raise FleetError("call set_dataset or set_train_reader before train()")
        result = Trained(0, math.nan, 0.0)
        for epoch in range(self._first_epoch, self.num_epochs):
            result = self._train_epoch(epoch)
            self._first_epoch = epoch + 1
            if self.checkpoint_dir:
                fleet.save(self.checkpoint_dir, self._extra())
        if self.model_save_dir:
            fleet.save(self.model_save_dir, self._extra())
        return result

    def test(self) -> float:
        """The accuracy on the test dataset over all ranks."""
        self._begin()
        if self.test_samples is None:
            raise FleetError("call set_dataset(train, test) before test(): there are no samples to test with")
        right, total = 0, 0
        for inputs, labels in _rank_batches(self.test_samples, self.batch_size):
            classes, _ = self.predict(inputs)
            right += int((classes == labels.to(classes.device)).sum())
            total += len(labels)
        accuracy = fleet.metrics.acc(right, total)
        self._print(f"accuracy {accuracy:.4f}")
        return accuracy

    @torch.no_grad()
    def predict(self, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The class and score of each input of this rank's batch, which may be empty. All ranks call it together."""
        self._begin()
        self._model.eval()
        classes, scores = self._model(_to(inputs, self._device))
        return classes, scores

    def stop(self) -> None:
        """Leave the job. The process can then start another one."""
        fleet.stop_worker()
        self._model = self._optimizer = self._scheduler = None
        self._first_epoch = 0

    # Inside

    def _begin(self) -> None:
        """Create model and optimizer, and load them from a checkpoint if there is one."""
        if self._model is not None:
            return
        for name, value in (("set_class_num", self.class_num), ("set_emb_dim", self.emb_dim)):
            if not value:
                raise FleetError(f"call {name} first: nothing can be trained or predicted without")
        if self.backbone is None:
            raise FleetError("call set_model first: nothing makes features of the inputs")
        if not process_role.is_collective():
            fleet.init(is_collective=True)
        head = MarginSoftmax(self.class_num, self.emb_dim, seed=self.seed, **self.loss)
        self._model = fleet.distributed_model(Classifier(self.backbone, head), self.strategy)
        self._device = head.weight.device
        made = self.make_optimizer or self._sgd
        optimizer = made(self._model.parameters())
        self._optimizer = fleet.distributed_optimizer(optimizer)
        steps = list(self.lr_steps)
        self._scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, steps, self.lr_decay_factor)
        self._resume()

    def _sgd(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9, weight_decay=5e-4)

    def _resume(self) -> None:
        assert self._scheduler is not None
        if self.checkpoint_dir and fleet.saved_extra(self.checkpoint_dir) is not None:
            extra = fleet.load(self.checkpoint_dir)
            self._first_epoch = int(extra["epoch"])
            self._scheduler.last_epoch = int(extra["steps"])
            self._print(f"{self.checkpoint_dir}: goes on after epoch {self._first_epoch}")

    def _extra(self) -> dict[str, int]:
        assert self._scheduler is not None
        return {"epoch": self._first_epoch, "steps": self._scheduler.last_epoch}

    def _train_epoch(self, epoch: int) -> Trained:
        assert self._scheduler is not None
        self._model.train()
        num_steps, num_samples, started = 0, 0, time.monotonic()
        loss = torch.full((), math.nan)
        for inputs, labels in fleet.prefetch(self._batches(epoch)):
            loss = self._model(_to(inputs, self._device), labels.to(self._device))
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._scheduler.step()
            num_steps += 1
            num_samples += len(labels)
            if self.log_period and num_steps % self.log_period == 0:
                self._log(epoch, num_steps, float(loss.detach()), num_samples / (time.monotonic() - started))
        last = float(loss.detach())  # waits for the device, so that the measured time is complete
        seconds = time.monotonic() - started
        rate = float(fleet.metrics.sum(num_samples)) / max(seconds, 1e-9)
        self._print(f"epoch {epoch + 1} of {self.num_epochs}: loss {last:.4f}, {rate:.0f} samples/s in all")
        return Trained(num_steps, last, rate)

    def _batches(self, epoch: int) -> Batches:
        if self.reader is not None:
            return self.reader(epoch)
        assert self.train_samples is not None
        index, number = fleet.data_shard()
        sampler: DistributedSampler[Any] = DistributedSampler(
            self.train_samples, number, index, shuffle=True, seed=self.seed
        )
        sampler.set_epoch(epoch)
        return DataLoader(self.train_samples, self.batch_size, sampler=sampler)

    def _log(self, epoch: int, step: int, loss: float, rate: float) -> None:
        fleet.report(loss=loss)
        self._print(f"epoch {epoch + 1}, step {step}: loss {loss:.4f}, {rate:.0f} samples/s on this rank")

    @staticmethod
    def _print(line: str) -> None:
        if fleet.is_first_worker():
            print(line, flush=True)


def _rank_batches(samples: Samples, batch_size: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """This rank's share, in the same number of batches on all ranks; the last may be empty. No sample is used twice."""
    index, number = fleet.data_shard()
    num: int = len(samples)  # type: ignore[arg-type]
    own = range(index, num, number)
    for start in range(0, math.ceil(num / number), batch_size):
        places = own[start : start + batch_size]
        inputs, labels = default_collate([samples[place] for place in places or [0]])
        yield _first(inputs, len(places)), _first(torch.as_tensor(labels), len(places))


def _first(inputs: Any, num: int) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor[:num], inputs)


def _to(inputs: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), inputs)
