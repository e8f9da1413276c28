"""Batch norm over the samples of all ranks (sync_batch_norm), as if one rank had the whole batch.

    mean = Σ x / n        var = Σ (x - mean)² / n        sums and n over all ranks, which may have different numbers

On GPUs the layers become torch.nn.SyncBatchNorm, which does not support CPUs; there they become JointBatchNorm. Names
and states stay those of torch.nn.BatchNorm1d … 3d. In evaluation every rank normalizes by itself. Statistics are not
shared among ranks with the same samples (tensor_parallel) or with different layers (pipeline).

Source: Ioffe, Szegedy 2015, Batch Normalization, over ranks as in Zhang et al. 2018, Context Encoding for Semantic
Segmentation. Composes with every strategy; with recompute, layers inside a checkpoint update their running statistics
twice, as plain batch norm does.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from torchfleet.base.errors import ModelError
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import AXES, World

_KINDS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


class SyncBatchNorm(Strategy):
    field = "sync_batch_norm"
    can_convert_again = True

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and type(module) not in _KINDS:
                raise ModelError(
                    f"sync_batch_norm cannot replace {name or 'the model'}, a {type(module).__name__}: it knows "
                    f"{', '.join(kind.__name__ for kind in _KINDS)}. Use one of these, or leave sync_batch_norm out."
                )
        if self.world.degrees["data"] * self.world.degrees["sharding"] == 1:
            return model
        group = _ranks_with_other_samples(self.world)
        if self.world.device.type == "cuda":
            return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-any-return, no-untyped-call]
        return _converted(model, group)


def _ranks_with_other_samples(world: World) -> dist.ProcessGroup:
    """The ranks that hold the same layers as this one and train on other samples. All ranks call it together."""
    ranks = torch.arange(world.size).reshape([world.degrees[axis] for axis in AXES])
    size = world.degrees["data"] * world.degrees["sharding"]
    partition = ranks.permute([AXES.index(axis) for axis in ("pipe", "model", "data", "sharding")]).reshape(-1, size)
    group, _ = dist.new_subgroups_by_enumeration(partition.tolist())  # type: ignore[no-untyped-call]
    return group  # type: ignore[no-any-return]


def _converted(module: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
    if isinstance(module, _BatchNorm):
        return JointBatchNorm(module, group)
    for name, child in module.named_children():
        setattr(module, name, _converted(child, group))
    return module


class JointBatchNorm(_BatchNorm):
    """Batch norm over the ranks of a group, on any device; shares the parameters and running statistics of `plain`."""

    def __init__(self, plain: _BatchNorm, group: dist.ProcessGroup) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        self.weight, self.bias = plain.weight, plain.bias
        self.running_mean, self.running_var = plain.running_mean, plain.running_var
        self.num_batches_tracked = plain.num_batches_tracked
        self.training = plain.training
        self._group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> JointBatchNorm:
        made = type(self).__new__(type(self))
        memo.update({id(self): made, id(self._group): self._group})  # a copy has the same ranks
        made.__dict__.update(deepcopy(self.__dict__, memo))
        return made

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm expects samples × channels × ..., found {input.dim()} dimensions")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        mean, variance, count = _moments(values, self._group)
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach(), count)
        shape = (1, -1) + (1,) * (input.dim() - 2)
        scale = (variance + self.eps).rsqrt().to(values.dtype)
        if self.weight is not None:
            scale = scale * self.weight
        normal = (values - mean.to(values.dtype).view(shape)) * scale.view(shape)
        if self.bias is not None:
            normal = normal + self.bias.view(shape)
        return normal.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        """Update the running statistics, with the unbiased variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), momentum)


def _moments(values: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean and variance of every channel, and the number of values, over all ranks; one all-reduce, in float64.

    A rank squares deviations from its own mean, so that a mean far from 0 costs no precision.
    """
    dims = [dim for dim in range(values.dim()) if dim != 1]
    count = values.numel() // max(1, values.shape[1])
    if count:
        variance, mean = torch.var_mean(values, dims, correction=0)
        squares = count * (variance.double() + mean.double() ** 2)
        total = count * mean.double()
    else:
        total = squares = values.sum(dims).double()
    own = torch.cat([total, squares, total.new_full((1,), float(count))])
    sums = _SumOverRanks.apply(own, group)  # type: ignore[no-untyped-call]
    channels = values.shape[1]
    count_of_all = float(sums[-1].detach())
    if count_of_all < 2:
        raise ValueError(f"batch norm needs more than 1 value per channel over all ranks, found {count_of_all:.0f}")
    mean = sums[:channels] / count_of_all
    return mean, sums[channels:-1] / count_of_all - mean**2, count_of_all


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks; backward sums the gradients of all ranks too."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
