"""A table on the devices of several ranks: rows by key over the ranks, and exchanges by all-to-all.

A lookup sends each distinct id once to the rank that owns it, and gets its row back. An update sends the sum of a
rank's gradients of each row to the owner, which makes one update with the mean over the ranks. One rank is the special
case without messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.integers import mix, shift_right, signed
from torchfleet.ps.kernels.hashing import _OWNER_SALT
from torchfleet.ps.tables.settings.spec import TableSpec


@dataclass
class Route:
    """Where the rows of some ids are: what `find` returns and `gather` and `push` take."""

    inverse: torch.Tensor  # of each id: its place among the distinct ones, which are sorted by owner
    sent: list[int]  # distinct ids by owner
    received: list[int]  # ids that other ranks asked this one for, by rank
    slots: torch.Tensor  # of those, in this rank's table

    def __len__(self) -> int:
        return len(self.inverse)


def owners(spec: TableSpec, keys: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """The rank that owns each key; the twin of tables/settings/owners.owners_of."""
    if spec.has_size:
        return keys % num_ranks
    high = shift_right(mix(keys ^ signed(int(_OWNER_SALT))), 32)
    return (high * num_ranks) >> 32


class ShardedTable:
    """This rank's part of the table, `own`, and the way to the others. All ranks make the same calls in the same order,
    with any number of ids, which may be none.
    """

    def __init__(self, own: DeviceTable, group: dist.ProcessGroup | None) -> None:
        """`group`: the ranks; its backend takes tensors of the table's device, or they travel through host memory."""
        self.own, self._group = own, group
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        is_gloo = group is not None and dist.get_backend(group) == "gloo"
        self._through_host = is_gloo and own.device.type == "cuda"

    @property
    def spec(self) -> TableSpec:
        return self.own.spec

    @property
    def dim(self) -> int:
        return self.own.dim

    def find(self, keys: torch.Tensor, insert: bool = False) -> Route:
        """The route to the rows of keys of any shape, flattened. Waits for the device."""
        distinct, inverse = torch.unique(keys.reshape(-1), return_inverse=True)
        by_owner, order = torch.sort(owners(self.spec, distinct, self.num_ranks), stable=True)
        counts = torch.bincount(by_owner, minlength=self.num_ranks)
        sent = counts.tolist()
        received = self._exchange(counts, [1] * self.num_ranks, [1] * self.num_ranks).tolist()
        asked = self._exchange(distinct[order], sent, received)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return Route(place[inverse], sent, received, self.own.find(asked, insert))

    def gather(self, route: Route, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(ids, dim): their values; zeros for ids without a row."""
        found = self._exchange(self.own.gather(route.slots, dtype), route.received, route.sent)
        return found.index_select(0, route.inverse)

    def find_and_gather(
        self, keys: torch.Tensor, insert: bool = False, dtype: torch.dtype = torch.float32
    ) -> tuple[Route, torch.Tensor]:
        """(route, values), as `find` and `gather`."""
        route = self.find(keys, insert)
        return route, self.gather(route, dtype)

    def push(self, route: Route, grads: torch.Tensor, lr: float | torch.Tensor | None = None) -> None:
        """One update of all ranks with the mean of their gradients; those of equal ids are summed."""
        num = sum(route.sent)
        sums = torch.ops.aten.embedding_dense_backward(grads.float(), route.inverse, max(1, num), -1, False)[:num]
        self.own.push(route.slots, self._exchange(sums / self.num_ranks, route.sent, route.received), lr)

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send the first `sent[0]` rows to rank 0 and so on; returns what the ranks have sent, in their order."""
        if self._group is None or self.num_ranks == 1:
            return rows
        given = (rows.cpu() if self._through_host else rows).contiguous()
        found = given.new_empty((sum(received), *given.shape[1:]))
        dist.all_to_all_single(found, given, received, sent, group=self._group)
        return found.to(rows.device)
