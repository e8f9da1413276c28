"""Several communicators used in turn, so that the exchange of one bucket of gradients overlaps that of the next.

A communicator is a process group of all ranks: with NCCL it has its own stream, with gloo its own connections and
threads. Bucket i of the job uses communicator i mod `nccl_comm_num`. With `sync_nccl_allreduce`=True, the compute
stream (with gloo, the process) waits for a communicator's previous bucket before the next one starts, so that at most
`nccl_comm_num` exchanges are in flight; with False they queue up. The result is that of one communicator.

Source: Paddle Fleet (multi-communicator training). Composes with all strategies except other ways to exchange gradients
(dgc, fp16_allreduce, use_hierarchical_allreduce, localsgd, sharding from stage 2 on, pipeline, tensor_parallel).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchfleet.collective.strategy import Strategy


class Communicators(Strategy):
    field = "nccl_comm_num"
    registers_hook = True

    def attach(self, parallel: DistributedDataParallel) -> None:
        if self.world.size == 1:
            return
        self._groups = [dist.new_group() for _ in range(self.settings.nccl_comm_num)]
        self._last: list[dist.Work | None] = [None] * len(self._groups)
        self._num_buckets = 0
        parallel.register_comm_hook(None, lambda _, bucket: self._exchange(bucket.buffer()))

    def _exchange(self, gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average over all ranks in place, with the next communicator in round-robin order."""
        turn = self._num_buckets % len(self._groups)
        self._num_buckets += 1
        last = self._last[turn]
        if last is not None and self.settings.sync_nccl_allreduce:
            last.wait()
        gradients.div_(self.world.size)
        work = dist.all_reduce(gradients, group=self._groups[turn], async_op=True)
        assert work is not None
        self._last[turn] = work
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future
