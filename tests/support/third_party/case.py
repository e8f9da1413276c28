"""A model of another library: its own loop, which a `Port` turns into a worker's, and what came of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

SPARSE = 300  # rows from which a table goes to the servers: tables of these data sets are small
SEED = 1

# Of a number. A loss that goes through batch norm, or is computed from a larger sum, has more rounding.
RELATIVE = 1e-6


@dataclass
class Outcome:
    """`losses` of all steps, of this worker. `score`: of the trained model, on samples that it was not trained on."""

    losses: list[float]
    score: float


@dataclass(frozen=True)
class Case:
    """`train`: the library's own loop. The rest says what is expected of two workers, and why not equality.

    `sync_band`: how far the mean loss of two workers may be off in sync mode; 0 for equal to `RELATIVE`, at each step.
    `score_band`: how far the score may be off in one process and in sync mode. `hybrid_band`: the score in hybrid mode.
    """

    name: str
    library: str
    train: Callable[[Port], Outcome]
    reason: str = ""
    relative: float = RELATIVE
    sync_band: float = 0.0
    score_band: float = 1e-5
    hybrid_band: float = 0.05
    has_summed_loss: bool = False


class Port:
    """What turns a script's objects into those of a mode. Without one, everything comes back as it is.

    `mode`: None for plain torch, else "sync" or "hybrid". A role comes from the environment, as for any script.
    """

    def __init__(self, mode: str | None) -> None:
        self.mode, self._is_new = mode, True

    @property
    def num_workers(self) -> int:
        """By which a script divides its batch size, so that all workers together have the batch of one process."""
        return self.share()[1]

    def __call__(self, *objects: Any, sparse: int | None = SPARSE) -> Any:
        """`fleet.prepare`."""
        if self.mode is None:
            return objects
        import torchfleet as fleet

        self._is_new = False
        settings = fleet.DistributedStrategy(sync_timeout=100, rpc_timeout=100)
        if self.mode == "hybrid":
            settings = fleet.DistributedStrategy(
                a_sync=True, a_sync_configs={"hybrid": True}, sync_timeout=100, rpc_timeout=100
            )
        return fleet.prepare(*objects, sparse=sparse, strategy=settings)

    def share(self) -> tuple[int, int]:
        """This worker's number and the number of workers."""
        if self.mode is None:
            return 0, 1
        import torchfleet as fleet

        if self._is_new:  # fleet.prepare takes the role that is known already
            fleet.init()
            self._is_new = False
        return fleet.data_shard()

    def finish(self) -> None:
        """All workers have trained: what is evaluated from here on is the same model everywhere."""
        if self.mode is not None:
            import torchfleet as fleet

            fleet.barrier_worker()


@contextlib.contextmanager
def recorded_losses() -> Iterator[list[float]]:
    """The value of every loss that is differentiated, whichever loop does it."""
    losses: list[float] = []
    backward = torch.Tensor.backward

    def recording(loss: torch.Tensor, *arguments: Any, **more: Any) -> None:
        losses.append(loss.item())
        backward(loss, *arguments, **more)

    with mock.patch.object(torch.Tensor, "backward", recording):
        yield losses


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels.numpy(), scores.detach().numpy()))


def adagrad(model: torch.nn.Module, lr: float = 0.05, eps: float = 1e-10) -> torch.optim.Optimizer:
    """Rows without a gradient keep their value, in torch's dense tables too."""
    return torch.optim.Adagrad(model.parameters(), lr=lr, eps=eps)
