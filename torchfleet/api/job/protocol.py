"""The protocol of all kinds of jobs: the methods that the functions of api/ call regardless of the kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchfleet.base.adoption import AdoptedOptimizer
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy

if TYPE_CHECKING:  # collective jobs load nothing of servers
    from torchfleet.data.model_features import ModelFeatures
    from torchfleet.ps.worker.embedding.embedding_choice import Sparse
    from torchfleet.ps.worker.model_saving import Kind


class Job(Protocol):
    """One process's part in a job: ParameterServerJob, or CollectiveJob in torchfleet/collective.

    A method that a kind of job does not support raises FleetError, which says what to call instead.
    """

    @property
    def info(self) -> RoleInfo: ...

    @property
    def mode(self) -> str:
        """sync, half_async, async, geo or hybrid; or collective."""
        ...

    @property
    def num_workers(self) -> int:
        """Workers or ranks of the job; of an elastic job with servers, the present ones."""
        ...

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, number): this process trains on the share `index` of `number` equal shares of the samples."""
        ...

    def use(self, strategy: DistributedStrategy | None, user: str) -> None:
        """Set the strategy that the function `user` received. It must not differ from an earlier one."""
        ...

    @property
    def model(self) -> torch.nn.Module | None:
        """The model of the job, once it was distributed."""
        ...

    @property
    def features(self) -> ModelFeatures:
        """The features of the model, which its saves have."""
        ...

    def distribute_model(self, model: torch.nn.Module, sparse: Sparse = None, dry_batch: Any = None) -> torch.nn.Module:
        """`sparse`: which embeddings go to the servers, besides those that are declared sparse. `dry_batch`: the
        arguments of the model, for strategies that run it once before they convert it.
        """
        ...

    def distribute_optimizer(self, optimizer: torch.optim.Optimizer) -> AdoptedOptimizer: ...

    def distribute_scheduler(self, scheduler: Any) -> Any: ...

    def barrier(self) -> None:
        """Wait for all other workers."""
        ...

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the loader's batches."""
        ...

    def plan_epochs(self, num: int, start: int) -> None:
        """Announce `num` passes over the data in total, counted from `start`."""
        ...

    def gather(self, name: str, data: bytes, comm_world: str = "worker") -> list[bytes]:
        """Gather the data of all processes in `comm_world`, in their order: worker, server, or all (workers first)."""
        ...

    def report(self, metrics: dict[str, float]) -> None:
        """Report numbers to the launcher's display."""
        ...

    def save_tables(self, dirname: str, kind: Kind, extra: Mapping[str, Any] | None) -> int:
        """Save the tables and the network in the format of servers; returns the number of the save."""
        ...

    def save(self, dirname: str, extra: Mapping[str, Any] | None, asynchronous: bool = False) -> int:
        """Save the state needed to continue training. Returns the number of the save."""
        ...

    def load(self, dirname: str) -> dict[str, Any]:
        """Continue from a save. Returns its `extra`."""
        ...

    def check_whole_state(self) -> None:
        """Raise FleetError if a save would leave out a part of the optimizer's state."""
        ...

    def begin_from(self, dirname: str) -> None:
        """Load a save, or check that the servers have loaded it when they began."""
        ...

    def optimizer_options(self) -> list[list[dict[str, Any]]]:
        """The options of all param groups, by optimizer: learning rates and others."""
        ...

    def set_optimizer_options(self, options: list[list[dict[str, Any]]]) -> None:
        """Set what `optimizer_options` has returned."""
        ...

    def is_asked_to_stop(self) -> bool:
        """Whether this process must save and exit because a scheduler asked the job to end."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps that this worker or rank has made."""
        ...

    @property
    def changed_settings(self) -> dict[str, Any]:
        """The settings of the strategy that differ from their defaults."""
        ...

    def complete_saves(self) -> list[str]:
        """Before `stop`: repeat the last saves if other workers have changed the model since. Returns their folders."""
        ...

    def stop(self) -> dict[str, Any]:
        """End this process's part in the job. Returns its last statistics, with a field `worker`."""
        ...

    @property
    def is_under_way(self) -> bool:
        """Whether starting another job now would lose work of this one."""
        ...

    def reset(self) -> None:
        """End this process's part in the job without waiting for other workers. Raises nothing."""
        ...
