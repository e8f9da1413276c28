"""Stage 1 of sharding: every rank of a group keeps the optimizer state of its own share of the parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchfleet.base.errors import ModelError
from torchfleet.collective.buckets import buckets
from torchfleet.collective.closures import run_closure
from torchfleet.collective.tensors.local_tensors import dealt, local, shards
from torchfleet.collective.world import Axis

_UNDER_WAY = 2  # buffers in flight while the next is filled
_LARGE = 4  # a tensor of 1/4 of a bucket or more is sent alone: another message costs less than two copies


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps `inner` on this rank's own parameters, then receives the others from the ranks that stepped on them.

    The param groups are the inner optimizer's and stay whole, for schedulers and zero_grad; during a step they are
    reduced to the rank's own parameters. All ranks of the axis call `step` together. Parameters in `apart` belong to
    layers that are sharded over the ranks: a rank steps on all of those that it has. `models` maps copies that the
    optimizer steps on to the model's parameters, which are sent instead.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        axis: Axis,
        segment_bytes: int,
        apart: Collection[torch.Tensor] = (),
        models: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        if isinstance(inner, torch.optim.LBFGS):
            raise ModelError("sharding: LBFGS steps on all parameters as one vector, which cannot be dealt out")
        self.inner, self._axis, self._segment_bytes = inner, axis, segment_bytes
        self._apart, self._models = set(apart), models or {}
        self._owners: dict[torch.Tensor, int] = dict.fromkeys(self._apart, axis.rank)
        self._loads = [0] * axis.size
        self._deal()

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> Any:
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.inner.defaults = defaults

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank steps on the parameter and has its state."""
        self._deal()
        return self._owners[parameter] == self._axis.rank

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = run_closure(closure)
        self._deal()
        self._step_own()
        with torch.no_grad():
            self._broadcast_own()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state dict, with the state of this rank's own parameters."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def _deal(self) -> None:
        """Assign an owner to parameters that have none."""
        every = (parameter for group in self.inner.param_groups for parameter in group["params"])
        self._owners.update(dealt([parameter for parameter in every if parameter not in self._owners], self._loads))

    def _step_own(self) -> None:
        groups = list(self.inner.param_groups)
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [
                    parameter for parameter in group["params"] if self._owners[parameter] == self._axis.rank
                ]
            self.inner.param_groups[:] = [group for group in groups if group["params"]]
            self.inner.step()
        finally:
            self.inner.param_groups[:] = groups
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    def _broadcast_own(self) -> None:
        if self._models:
            torch._foreach_copy_(shards(self._models.values()), shards(self._models))
        shares: list[list[torch.Tensor]] = [[] for _ in range(self._axis.size)]
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._apart:
                    shares[self._owners[parameter]].append(local(self._models.get(parameter, parameter)))
        broadcast(enumerate(shares), self._axis, self._segment_bytes)


def broadcast(shares: Iterable[tuple[int, Sequence[torch.Tensor]]], axis: Axis, segment_bytes: int) -> None:
    """Copy tensors of some ranks to all others. `shares`: (source rank on the axis, its tensors), in sending order.

    Small tensors are sent in buckets of up to `segment_bytes`, which are copied on both sides; large ones are sent
    directly. All ranks pass the same shares.
    """
    if axis.size == 1:
        return
    under_way: deque[tuple[Any, torch.Tensor, list[torch.Tensor]]] = deque()
    assert axis.group is not None
    for source, tensors in shares:
        for bucket in _bundles(tensors, segment_bytes):
            flat = _flat(bucket, source == axis.rank)
            work = dist.broadcast(flat, dist.get_global_rank(axis.group, source), axis.group, async_op=True)
            under_way.append((work, flat, [] if source == axis.rank else bucket))
            if len(under_way) > _UNDER_WAY:
                _take(*under_way.popleft())
    while under_way:
        _take(*under_way.popleft())


def _bundles(tensors: Sequence[torch.Tensor], segment_bytes: int) -> Iterator[list[torch.Tensor]]:
    small = []
    for tensor in tensors:
        if tensor.nbytes * _LARGE >= segment_bytes and tensor.numel():
            yield [tensor]
        elif tensor.numel():
            small.append(tensor)
    yield from buckets(small, segment_bytes)


def _flat(tensors: list[torch.Tensor], is_source: bool) -> torch.Tensor:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)  # no copy, on either side
    if is_source:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


def _take(work: Any, flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    work.wait()
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return
    if tensors:
        parts = flat.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
        torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
