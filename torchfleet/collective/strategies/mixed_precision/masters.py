"""Float32 copies of half-precision parameters, on which the optimizer of a pure half-precision model steps.

Under stage 1 of sharding a rank has copies of only the parameters that it steps on. The optimizer's groups contain the
other parameters themselves; other ranks step on those, and their gradients are freed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchfleet.base.errors import StrategyError
from torchfleet.collective.tensors.local_tensors import dealt, is_local, local, shards

_CHUNK_BYTES = 64 << 20  # gradients that exist in both precisions at the same time
_MARKS = ("fleet_piece", "fleet_local", "fleet_copies")
Pair = tuple[torch.nn.Parameter, torch.nn.Parameter]


class Masters:
    """Pairs of a model's parameter and its copy in the optimizer. `num_shares` ranks divide the copies among them."""

    def __init__(self, num_shares: int, share: int) -> None:
        self.num_shares, self._share = num_shares, share
        self._of: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._others: list[torch.nn.Parameter] = []  # parameters that another rank steps on

    def take_over(self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> None:
        """Replace this rank's half-precision parameters by copies with the same names."""
        if optimizer.state:
            raise StrategyError("amp with pure parameters: the optimizer has made steps already; make a new one")
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = dealt([parameter for parameter in every if not is_local(parameter)], [0] * self.num_shares)
        for group in optimizer.param_groups:
            group["params"] = [
                self._stepped_on(parameter, names, owners.get(parameter, self._share)) for parameter in group["params"]
            ]

    def _stepped_on(
        self, parameter: torch.nn.Parameter, names: dict[torch.Tensor, str], owner: int
    ) -> torch.nn.Parameter:
        if parameter.dtype == torch.float32:
            return parameter
        if owner != self._share:
            self._others.append(parameter)
            return parameter
        master = torch.nn.Parameter(parameter.detach().float(), parameter.requires_grad)
        names[master] = names[parameter]
        for mark in _MARKS:
            if hasattr(parameter, mark):
                setattr(master, mark, getattr(parameter, mark))
        self._of[parameter] = master
        return master

    def take_gradients(self) -> None:
        """Move the gradients to the copies, in float32; the model's parameters have none afterwards."""
        for parameter in self._others:
            parameter.grad = None
        for master in self._of.values():
            master.grad = None
        for parameter, master in self._of.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                master.grad, parameter.grad = parameter.grad.float(), None
        pairs = [(parameter, master) for parameter, master in self._of.items() if parameter.grad is not None]
        for chunk in _chunks(pairs):
            halves = [parameter.grad for parameter, _ in chunk if parameter.grad is not None]
            wide = [torch.empty_like(half, dtype=torch.float32) for half in halves]
            torch._foreach_copy_(shards(wide), shards(halves))
            for (parameter, master), gradient in zip(chunk, wide, strict=True):
                master.grad, parameter.grad = gradient, None

    def give_values(self) -> None:
        """Round the copies into the model's parameters, and free the copies' gradients."""
        if self._of:
            with torch.no_grad():
                torch._foreach_copy_(shards(self._of), shards(self._of.values()))
        for master in self._of.values():
            master.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the copies' gradients."""
        return shards(master.grad for master in self._of.values() if master.grad is not None)


def _chunks(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Chunks of pairs with about _CHUNK_BYTES of gradients each."""
    chunk: list[Pair] = []
    num_bytes = 0
    for pair in pairs:
        chunk.append(pair)
        num_bytes += local(pair[0]).nbytes
        if num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
