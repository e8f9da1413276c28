"""Data parallelism: every rank computes on its own batch; gradients are averaged while backward runs.

`fuse_all_reduce_ops`, `fuse_grad_size_in_MB` and `last_comm_group_size_MB` set how gradients are grouped into buckets.
One all-reduce exchanges a bucket as soon as all its gradients are computed (Li et al. 2020, PyTorch Distributed). The
first bucket is small, so that the exchange begins early; the last one is small, so that it ends soon after backward.
Gradients are views of the buckets. Ranks start with rank 0's buffers and then each keeps its own, as in Paddle.

The work is done by torch's DistributedDataParallel. Composes with all strategies except those that shard the model and
exchange gradients themselves (sharding stages 2 and 3, pipeline, tensor_parallel).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.buckets import buckets
from torchfleet.collective.strategy import Forward
from torchfleet.collective.tensors.local_tensors import is_local, local
from torchfleet.collective.tensors.outputs import tensors
from torchfleet.collective.world import World

_ALONE_MB = 1e-6  # a bucket of about a byte: every gradient is sent by itself
_BESIDE_ROWS_MB = 1.0  # a network next to sparse tables has a few megabytes
_BROADCAST_BYTES = 32 << 20
_FIRST_BYTES = 1 << 20  # of the first bucket: torch's own default
_MB = 1 << 20
_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters  # depend on the version of torch
_TAKES_SIZES = "bucket_cap_mb_list" in _OPTIONS


class WrappedModel(torch.nn.Module):
    """The model, called through the forwards that the strategies have wrapped around the model's own."""

    def __init__(self, module: torch.nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self.wrapped_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped_forward(*args, **kwargs)


class DataParallel(DistributedDataParallel):
    """DistributedDataParallel with a small first bucket, also where torch accepts only one bucket size."""

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        if not _TAKES_SIZES and self.bucket_bytes_cap > _FIRST_BYTES:
            self.bucket_bytes_cap_default = True
        super()._ddp_init_helper(*args, **kwargs)  # type: ignore[no-untyped-call]


def data_parallel(
    wrapped: WrappedModel, settings: DistributedStrategy, world: World, beside_rows: bool = False
) -> DistributedDataParallel:
    """Wrap the model in DistributedDataParallel. All ranks start from rank 0's parameters and buffers.

    Parameters marked `fleet_local` belong to each rank alone. `beside_rows`: the model looks up rows of tables. Its
    inputs are not moved, since ids are read in host memory; buckets are small, so that the first ones are sent while
    backward of the small network still runs.
    """
    own = [name for name, parameter in wrapped.named_parameters() if is_local(parameter)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(wrapped, own)  # type: ignore[no-untyped-call]
    broadcast_buffers(wrapped, world)
    options = _bucket_sizes(wrapped, settings, beside_rows)
    # Never sync buffers in forward. Where the first option exists, the second one warns.
    options["forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"] = False
    return DataParallel(
        wrapped,
        device_ids=[world.local_rank] if world.device.type == "cuda" and not beside_rows else None,
        find_unused_parameters=settings.find_unused_parameters,
        gradient_as_bucket_view=True,
        **options,
    )


class BackwardPasses:
    """Prepares the exchange of backward passes that no forward pass has prepared.

    DistributedDataParallel prepares it in forward, for one backward pass. Gradients of a second pass over the same
    graph, or of the graphs of several calls, would not be exchanged, and ranks would drift apart.
    """

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self._parallel = parallel
        self._is_prepared = False
        self._pass = -1  # the last backward pass, by the number that torch gives it

    def watch(self, outputs: Any) -> None:
        """Called after every forward pass with gradients."""
        exchanging = self._parallel.require_backward_grad_sync
        self._is_prepared = self._is_prepared or exchanging
        found = next((tensor for tensor in tensors(outputs) if tensor.grad_fn is not None), None)
        if found is not None:
            found.register_hook(partial(self._begin, exchanging))  # type: ignore[no-untyped-call]

    def _begin(self, exchanging: bool, gradient: torch.Tensor) -> None:
        number = torch._C._current_graph_task_id()
        # torch.autograd.grad and backward(inputs=...) reach no parameter. Several calls may have one backward pass.
        if number == self._pass or not Variable._execution_engine.is_checkpoint_valid():
            return
        self._pass = number
        if exchanging and not self._is_prepared:
            self._prepare()
        self._is_prepared = False

    def _prepare(self) -> None:
        reducer = self._parallel.reducer
        try:
            reducer._check_reducer_finalized()
        except RuntimeError:  # the last pass has not reached all parameters, and this one goes on with it
            return
        if self._parallel.find_unused_parameters:
            raise ModelError(
                "find_unused_parameters=True expects one backward pass after each call of the model, found another: "
                "which parameters it reaches is looked up in the call. Add the losses up and call backward() once, or "
                "leave find_unused_parameters out."
            )
        reducer._rebuild_buckets()
        reducer.prepare_for_backward([])


def _bucket_sizes(wrapped: WrappedModel, settings: DistributedStrategy, beside_rows: bool) -> dict[str, Any]:
    """The options of DistributedDataParallel for bucket sizes."""
    trained = [p for p in wrapped.parameters() if p.requires_grad and not is_local(p)]
    num_types = len({p.dtype for p in trained})
    if not settings.is_default("last_comm_group_size_MB"):
        _check_last_bucket(settings.last_comm_group_size_MB, num_types)
    if not settings.fuse_all_reduce_ops:
        return {"bucket_cap_mb": _ALONE_MB}
    is_open = beside_rows and settings.is_default("fuse_grad_size_in_MB")
    largest = _BESIDE_ROWS_MB if is_open else settings.fuse_grad_size_in_MB
    if not _TAKES_SIZES:
        return {"bucket_cap_mb": largest}
    if num_types != 1:  # a bucket has one dtype, and each dtype has these sizes
        return {"bucket_cap_mb_list": [_FIRST_BYTES / _MB, largest]}
    last = min(settings.last_comm_group_size_MB, largest)
    # Backward computes the gradients of the last parameters first.
    sizes = bucket_bytes([p.nbytes for p in reversed(trained)], int(largest * _MB), int(last * _MB))
    if settings.find_unused_parameters:  # torch then never learns the order of backward, and uses the model's
        sizes.reverse()
    # The last size is for gradients left over if backward takes another order; torch.compile uses the largest for all.
    return {"bucket_cap_mb_list": [*(size / _MB for size in sizes), largest]}


def _check_last_bucket(size: float, num_types: int) -> None:
    if not _TAKES_SIZES:
        raise StrategyError(
            f"last_comm_group_size_MB={size} needs a DistributedDataParallel with bucket_cap_mb_list, which torch "
            f"{torch.__version__} does not have: take a newer torch, or leave it out"
        )
    if num_types != 1:
        raise StrategyError(
            f"last_comm_group_size_MB={size} needs trained parameters of one type, and this model has {num_types}: "
            "each type has buckets of its own. Leave it out."
        )


def bucket_bytes(gradients: Sequence[int], largest: int, last: int) -> list[int]:
    """The sizes of the buckets for gradients of these sizes, in the order of exchange.

    A bucket is full when it reaches its size: _FIRST_BYTES for the first, `largest` for the others. The last bucket has
    the final gradients, as few as reach `last`. If less than _FIRST_BYTES is left over before the last bucket, it joins
    the preceding bucket: an exchange of few bytes takes as long as one of many.
    """
    num_before, num = len(gradients), 0
    while num_before and num < last:
        num_before -= 1
        num += gradients[num_before]
    made: list[int] = []
    filled = 0
    for size in gradients[:num_before]:
        filled += size
        if filled >= (largest if made else min(largest, _FIRST_BYTES)):
            made.append(filled)
            filled = 0
    if made and filled < _FIRST_BYTES:
        made[-1], filled = made[-1] + filled, 0
    return [*made, *([filled] if filled else []), num]


def broadcast(model: torch.nn.Module, world: World) -> None:
    """Copy rank 0's parameters and buffers to every rank, as DistributedDataParallel does on construction."""
    own = [parameter.detach() for parameter in model.parameters() if not is_local(parameter)]
    _where_they_lie([*own, *model.buffers()], world)


def broadcast_buffers(model: torch.nn.Module, world: World) -> None:
    """Copy rank 0's buffers to every rank."""
    _where_they_lie(list(model.buffers()), world)


def share_buffers(model: torch.nn.Module, world: World) -> None:
    """Copy buffers from the first of the ranks that hold the same layers to the others. All ranks call it together."""
    if world.replicas.group is not None:
        _broadcast([local(buffer) for buffer in model.buffers()], world.replicas.group)


def _where_they_lie(tensors: Sequence[torch.Tensor], world: World) -> None:
    """Broadcast tensors on the device they are on: those in host memory are not copied to the GPU."""
    assert dist.group.WORLD is not None
    _broadcast([tensor for tensor in tensors if tensor.device.type == "cpu"], world.control)
    _broadcast([tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")], dist.group.WORLD)


def _broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    for bucket in buckets(tensor.detach() for tensor in tensors):
        _broadcast_coalesced(group, bucket, _BROADCAST_BYTES, 0)
