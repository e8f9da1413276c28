"""Adaptive local SGD: local SGD whose interval shrinks as the loss falls.

    interval = ⌈ √(lr_0 · loss_t / (lr_t · loss_0)) · init_k_steps ⌉, between 1 and 16

computed at every averaging. loss_t is the mean over the ranks of each rank's last loss. loss_0 and lr_0 are the loss
and the learning rate of the job's first step with a learning rate above 0. The learning rate is that of the first param
group. The loss is the one that the model returns, or the argument of fleet.report(loss=...) before optimizer.step().
Everything else is as in localsgd.

Source: Wang, Joshi 2019, Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update
SGD. Composes as localsgd does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from torchfleet.base.errors import FleetError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategies.localsgd import LocalSGD
from torchfleet.collective.world import World

LONGEST = 16


class AdaptiveLocalSGD(LocalSGD):
    field = "adaptive_localsgd"
    wants_loss = True

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        self._loss: float | torch.Tensor | None = None  # this rank's last loss
        self._own_first: float | torch.Tensor | None = None  # this rank's share of loss_0
        self._first_loss = self._first_lr = math.nan

    def _first_interval(self) -> int:
        return self.settings.adaptive_localsgd_configs.init_k_steps

    @property
    def _begin_step(self) -> int:
        return self.settings.adaptive_localsgd_configs.begin_step

    def note_loss(self, loss: float | torch.Tensor) -> None:
        """Keep the loss of the last batch, a number or a tensor of one element, without waiting for the device."""
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else float(loss)

    def after_step(self) -> None:
        if self._own_first is None and math.isnan(self._first_loss) and self._loss is not None and self._lr() > 0:
            self._own_first, self._first_lr = self._loss, self._lr()
        super().after_step()

    def average(self) -> None:
        super().average()
        self._adapt()

    def _adapt(self) -> None:
        if self._loss is None:
            raise FleetError(
                "adaptive_localsgd needs the loss to find its interval, and none is known: call fleet.report(loss=...) "
                "before optimizer.step(), or let the model return the loss"
            )
        if self._lr() == 0 or math.isnan(self._first_lr):  # parameters do not move: averaging can wait
            return
        loss, first = self._means(self._loss, self._first_loss if self._own_first is None else self._own_first)
        self._first_loss, self._own_first = first, None
        self.interval = next_interval(self._first_interval(), self._first_lr, first, self._lr(), loss)

    def _lr(self) -> float:
        return float(self._groups[0]["lr"])

    def _means(self, *losses: float | torch.Tensor) -> list[float]:
        """The means over the ranks."""
        device = self.world.device
        both = torch.stack([torch.as_tensor(loss, dtype=torch.float64, device=device).reshape(()) for loss in losses])
        if self._axis.group is not None:
            dist.all_reduce(both.div_(self._axis.size), group=self._axis.group)
        return both.tolist()

    def state(self) -> dict[str, torch.Tensor]:
        own = {"interval": self.interval, "first_loss": self._first_loss, "first_lr": self._first_lr}
        return {**super().state(), **{name: torch.tensor(value, dtype=torch.float64) for name, value in own.items()}}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_state(state)
        self.interval = int(state.get("interval", self.interval))
        self._first_loss = float(state.get("first_loss", self._first_loss))
        self._first_lr = float(state.get("first_lr", self._first_lr))
        self._own_first = None

    def rank_state(self) -> dict[str, torch.Tensor]:
        """This rank's last loss and, before the first averaging, its share of the first one."""
        losses = {"loss": self._loss, "own_first": self._own_first}
        return {
            name: torch.as_tensor(loss, dtype=torch.float64).reshape(())
            for name, loss in losses.items()
            if loss is not None
        }

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._loss, self._own_first = state.get("loss", self._loss), state.get("own_first")


def next_interval(first_interval: int, first_lr: float, first_loss: float, lr: float, loss: float) -> int:
    """The formula. Raises FleetError unless `first_loss` is above 0 and `loss` is finite and not negative."""
    if not (first_loss > 0 and loss >= 0 and math.isfinite(loss)):
        raise FleetError(
            "adaptive_localsgd needs a first loss above 0 and a present loss that is finite and not negative, found "
            f"{first_loss:g} at first and {loss:g} now: use localsgd, or a loss that is positive"
        )
    found = math.ceil(math.sqrt(first_lr * loss / (lr * first_loss)) * first_interval)
    return min(max(found, 1), LONGEST)
