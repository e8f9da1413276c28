"""A table on the devices of several ranks: rows by key over the ranks, and exchanges by all-to-all.

A lookup sends each distinct id once to the rank that owns it, and gets its row back. An update sends the sum of a
rank's gradients of each row to the owner, which makes one update with the mean over the ranks, as the network's
gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchfleet.base.errors import ModelError
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.integers import mix, shift_right, signed
from torchfleet.ps.gpu.row_blocks import RowBlock
from torchfleet.ps.gpu.table_memory import ABSENT
from torchfleet.ps.kernels.hashing import _OWNER_SALT
from torchfleet.ps.tables.settings.spec import TableSpec


def owners(spec: TableSpec, keys: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """The rank that owns each key; the twin of tables/settings/owners.owners_of."""
    if spec.has_size:
        return keys % num_ranks
    high = shift_right(mix(keys ^ signed(int(_OWNER_SALT))), 32)
    return (high * num_ranks) >> 32


@dataclass
class Route:
    """The way of a lookup's distinct ids to their rows."""

    first: int  # the first of the numbers that the lookup's ids have until the step
    place: torch.Tensor  # by id: its place among the distinct ones, sorted by owner; their number for padding
    sent: list[int]  # distinct ids by owner
    received: list[int]  # ids that other ranks ask this one for, by rank
    slots: torch.Tensor  # of these received ids, in this rank's own table


class ShardedTable:
    """This rank's shard of a table, `own`, and the exchange with the other shards, as a LookupTable of
    ps/worker/lookup. All ranks make the same calls in the same order, each with any number of ids, also 0.

    Its slots are numbers of the ids that were looked up for training since the last update.
    """

    def __init__(self, own: DeviceTable, group: dist.ProcessGroup) -> None:
        """`group`: the ranks. With gloo, tensors of a GPU travel through host memory."""
        self.own, self._group, self.device = own, group, own.device
        self.num_ranks = dist.get_world_size(group)
        self._through_host = dist.get_backend(group) == "gloo" and own.device.type == "cuda"
        self._routes: list[Route] = []

    @property
    def spec(self) -> TableSpec:
        return self.own.spec

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def dim(self) -> int:
        return self.own.dim

    @property
    def num_rows(self) -> int:
        """Rows of this rank."""
        return self.own.num_rows

    def find_and_gather(
        self,
        keys: torch.Tensor,
        insert: bool = False,
        dtype: torch.dtype = torch.float32,
        padding: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots, values) of keys of any shape, flattened; -1 and zeros for padding, zeros for keys without a row.
        Waits for the device, which must know how much to send.
        """
        route = self._route(keys.reshape(-1), insert, padding)
        rows = self._exchange(self.own.gather(route.slots, dtype), route.received, route.sent)
        values = torch.nn.functional.pad(rows, (0, 0, 0, 1)).index_select(0, route.place)
        slots = torch.arange(route.first, route.first + len(route.place), dtype=torch.int32, device=self.device)
        if padding is not None:
            slots.masked_fill_(route.place == len(rows), ABSENT)
        if insert:
            self._routes.append(route)
        return slots, values

    def push(self, slots: torch.Tensor, grads: torch.Tensor, lr: float | torch.Tensor | None = None) -> None:
        """One update of all ranks by the mean of their gradients, which are summed for equal ids. Ends the validity of
        all slots.
        """
        routes, self._routes = self._routes, []
        is_real = slots >= 0
        numbers, grads = slots[is_real].long(), grads[is_real].float() / self.num_ranks
        found = []
        for route in routes:
            is_here = (numbers >= route.first) & (numbers < route.first + len(route.place))
            place = route.place[numbers[is_here] - route.first]
            num = sum(route.sent)
            sums = torch.ops.aten.embedding_dense_backward(grads[is_here], place, num + 1, -1, False)[:num]
            found.append((route.slots, self._exchange(sums, route.sent, route.received)))
        own = torch.cat([slots for slots, _ in found] or [slots[:0]])
        self.own.push(own, torch.cat([sums for _, sums in found] or [grads[:0]]), lr)

    def rows(self, num_rows: int = 1 << 18) -> Iterator[RowBlock]:
        """Raises ModelError: a rank has only its own shard of the rows."""
        raise ModelError(
            f"table '{self.name}' has its rows on {self.num_ranks} ranks: save it with fleet.save(dirname), or give "
            'its embedding state="none" to leave it out of state_dict()'
        )

    def _route(self, keys: torch.Tensor, insert: bool, padding: int | None) -> Route:
        is_real = None if padding is None else keys != padding
        distinct, inverse = torch.unique(keys if is_real is None else keys[is_real], return_inverse=True)
        by_owner, order = torch.sort(owners(self.spec, distinct, self.num_ranks), stable=True)
        counts = torch.bincount(by_owner, minlength=self.num_ranks)
        sent = counts.tolist()
        received = self._exchange(counts, [1] * self.num_ranks, [1] * self.num_ranks).tolist()
        asked = self._exchange(distinct[order], sent, received)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        place = rank[inverse]
        if is_real is not None:
            place = torch.full_like(keys, len(order)).masked_scatter_(is_real, place)
        first = sum(len(route.place) for route in self._routes)
        return Route(first, place, sent, received, self.own.find(asked, insert))

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send the first `sent[0]` rows to rank 0 and so on; returns what the ranks have sent, in their order."""
        given = (rows.cpu() if self._through_host else rows).contiguous()
        found = given.new_empty((sum(received), *given.shape[1:]))
        dist.all_to_all_single(found, given, received, sent, group=self._group)
        return found.to(rows.device)
