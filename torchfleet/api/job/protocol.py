"""What every kind of job can do: the methods that the functions of api/ call without asking which kind it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from torchfleet.base.adoption import AdoptedOptimizer
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.worker.lookup.embedding_choice import Sparse


class Job(Protocol):
    """One process's part in a job: ParameterServerJob, or CollectiveJob in torchfleet/collective.

    A method that a kind of job does not support raises FleetError with what to call instead.
    """

    @property
    def info(self) -> RoleInfo: ...

    @property
    def mode(self) -> str:
        """sync, half_async, async, geo or hybrid; or collective."""
        ...

    @property
    def num_workers(self) -> int:
        """Workers, or ranks, of the job; of an elastic one with servers, those that are there now."""
        ...

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, number): which of how many equal shares of the samples this process trains on."""
        ...

    def use(self, strategy: DistributedStrategy | None, user: str) -> None:
        """Take the strategy that function `user` was given. One that differs from an earlier one is an error."""
        ...

    def distribute_model(self, model: torch.nn.Module, sparse: Sparse = None) -> torch.nn.Module:
        """`sparse`: which embeddings go to the servers beside those that say so themselves."""
        ...

    def distribute_optimizer(self, optimizer: torch.optim.Optimizer) -> AdoptedOptimizer: ...

    def distribute_scheduler(self, scheduler: Any) -> Any: ...

    def barrier(self) -> None:
        """Wait for all other workers."""
        ...

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches."""
        ...

    def plan_epochs(self, num: int, start: int) -> None:
        """The script is going to make so many passes over its data in all, from number `start` on."""
        ...

    def gather(self, name: str, data: bytes, comm_world: str = "worker") -> list[bytes]:
        """What everyone in `comm_world` brought, in their order: worker, server, or all (workers first)."""
        ...

    def report(self, metrics: dict[str, float]) -> None:
        """Numbers for the launcher's display."""
        ...

    def save(self, dirname: str, extra: Mapping[str, Any] | None, asynchronous: bool = False) -> int:
        """Save what is needed to go on training; returns the number of the save."""
        ...

    def load(self, dirname: str) -> dict[str, Any]:
        """Go on from a save; returns its `extra`."""
        ...

    def is_asked_to_stop(self) -> bool:
        """Whether this process is to save and to end, because a scheduler has asked the job to."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps that this worker, or rank, has made."""
        ...

    @property
    def changed_settings(self) -> dict[str, Any]:
        """The settings of the strategy that are not the default."""
        ...

    def stop(self) -> dict[str, Any]:
        """This process has done its part. Returns its last statistics, with a field `worker`."""
        ...

    @property
    def is_under_way(self) -> bool:
        """Whether something would be lost if another job took the place of this one."""
        ...

    def reset(self) -> None:
        """End whatever this process has of the job, without waiting for other workers. Raises nothing."""
        ...
