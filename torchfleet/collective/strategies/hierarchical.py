"""Hierarchical all-reduce: gradients are summed inside a node, then among nodes, then broadcast inside the node.

    reduce to the first rank of each group of `hierarchical_allreduce_inter_nranks` neighbours (1: those of a machine)
    all-reduce among these leaders
    broadcast inside each group

Only one rank of each node communicates with other nodes, which helps if the ranks of a node share one slow link. The
result is the mean over all ranks, equal to that of a flat all-reduce up to the order of sums. One rank per machine, or
one group of all ranks, is a flat all-reduce already. Buckets are processed in order during the backward pass: on GPUs
by a stream, on CPUs by a thread.

Source: Jia et al. 2018, Highly Scalable Deep Learning Training System with Mixed-Precision. Composes with all
strategies except other ways to exchange gradients (dgc, fp16_allreduce, nccl_comm_num, localsgd, sharding from stage 2
on, pipeline, tensor_parallel).
"""

from __future__ import annotations

import queue
import threading
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import World

Future = torch.futures.Future


class HierarchicalAllReduce(Strategy):
    field = "use_hierarchical_allreduce"
    registers_hook = True

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        given = settings.hierarchical_allreduce_inter_nranks
        self._node_size: int = given if given > 1 else world.local_size
        if not self._node_size:
            raise StrategyError(
                "use_hierarchical_allreduce=True: how many ranks this machine has is not known. Start with fleetrun, "
                "set LOCAL_WORLD_SIZE, or set hierarchical_allreduce_inter_nranks to it."
            )
        if world.size % self._node_size:
            found = (
                f"hierarchical_allreduce_inter_nranks={given}" if given > 1 else f"LOCAL_WORLD_SIZE={self._node_size}"
            )
            raise StrategyError(
                f"{found} does not divide the {world.size} ranks there are: use_hierarchical_allreduce needs equally "
                "many ranks on all machines; hierarchical_allreduce_inter_nranks says how many"
            )
        self._thread: _Thread | None = None

    def attach(self, parallel: DistributedDataParallel) -> None:
        if self._node_size in (1, self.world.size):
            return
        levels = Levels(self.world, self._node_size)
        exchange: _Stream | _Thread
        if self.world.device.type == "cuda":
            exchange = _Stream(levels)
        else:
            exchange = self._thread = _Thread(levels)
        parallel.register_comm_hook(None, lambda _, bucket: exchange.begin(bucket.buffer()))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.end()


class Levels:
    """The two levels of ranks, and the average over them."""

    def __init__(self, world: World, node_size: int) -> None:
        self._num_ranks = world.size
        self._leader = world.rank - world.rank % node_size
        self._is_leader = world.rank == self._leader
        self._node, self._leaders = world.groups(node_size), world.groups_across(node_size)

    def average(self, gradients: torch.Tensor) -> None:
        """Average over all ranks in place; on GPUs in the order of the current stream."""
        gradients.div_(self._num_ranks)
        dist.reduce(gradients, self._leader, group=self._node)
        if self._is_leader:
            dist.all_reduce(gradients, group=self._leaders)
        dist.broadcast(gradients, self._leader, group=self._node)


class _Stream:
    """Runs on a GPU stream beside the compute stream, which waits for a result when it needs it."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def begin(self, gradients: torch.Tensor) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future(devices=[gradients.device])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._levels.average(gradients)
            future.set_result(gradients)  # records the stream's position, which a wait on the future waits for
        return future


class _Pending(NamedTuple):
    gradients: torch.Tensor
    future: Future[torch.Tensor]


class _Thread:
    """Runs on a CPU thread that processes one bucket after the other; the order is the same on all ranks."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._waiting: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        # A daemon: waiting for a dead rank must not keep this process from exiting.
        threading.Thread(target=self._work, name="hierarchical_allreduce", daemon=True).start()

    def begin(self, gradients: torch.Tensor) -> Future[torch.Tensor]:
        pending = _Pending(gradients, Future())
        self._waiting.put(pending)
        return pending.future

    def end(self) -> None:
        """Let the thread end after the buckets that it has."""
        self._waiting.put(None)

    def _work(self) -> None:
        while (pending := self._waiting.get()) is not None:
            gradients, future = pending
            try:
                self._levels.average(gradients)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong
            else:
                future.set_result(gradients)
