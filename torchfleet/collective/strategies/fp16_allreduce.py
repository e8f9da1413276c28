"""All-reduce of gradients in half precision, at half the bytes.

    mean = Σ_ranks float16(g) / N, back in the gradients' own type

The work is done by torch's own communication hook. Gradients beyond 65504 become infinite, and those below 6e-8 become
0; with amp in float16, loss scaling takes care of both. Source: Micikevicius et al. 2018, Mixed Precision Training.
Composes with all strategies except other ways to exchange gradients (dgc, use_hierarchical_allreduce, nccl_comm_num,
localsgd, sharding from stage 2 on, pipeline, tensor_parallel).
"""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from torchfleet.collective.strategy import Strategy


class Fp16AllReduce(Strategy):
    field = "fp16_allreduce"
    registers_hook = True

    def attach(self, parallel: DistributedDataParallel) -> None:
        if self.world.size > 1:  # one rank sends nothing
            parallel.register_comm_hook(parallel.process_group, fp16_compress_hook)
