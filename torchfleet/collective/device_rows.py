"""Tables on devices in a collective job: which embeddings have one, and their updates within the optimizer's step.

The weight of such an embedding is empty, belongs to each rank alone and has no gradient, so that strategies and the
user's optimizer skip it. Rows are updated right after the optimizer has stepped the network, with the rule and the
learning rate of the param group that the embedding is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchfleet.base.errors import ModelError
from torchfleet.collective.world import Gathering, World

if TYPE_CHECKING:  # most collective jobs have no tables, and do not need their kernels
    from torchfleet.ps.gpu.table_saves import TableSaves
    from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
    from torchfleet.ps.worker.lookup.device_lookups import DeviceLookups, LookupTable
    from torchfleet.ps.worker.lookup.plan import Plan
    from torchfleet.ps.worker.model_saving import Kind

DEVICES = ("cuda", "cpu")  # values of fleet.distributed_model(sparse=...)


def on_devices(model: torch.nn.Module, sparse: str | int | None, world: World) -> DeviceRows | None:
    """Prepare the model's embeddings with tables on devices; None if it has none. `sparse`: a device for those of
    torch's embeddings that have sparse=True or weights of 1 MiB or more.
    """
    if sparse is not None and sparse not in DEVICES:
        raise ModelError(
            f"fleet.distributed_model(sparse={sparse!r}): a collective job has no servers. sparse='cuda' puts the "
            "large embeddings into tables in GPU memory."
        )
    if sparse is None and not any(getattr(module, "table_device", None) for module in model.modules()):
        return None
    from torchfleet.ps.worker.embedding.conversion import convert
    from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
    from torchfleet.ps.worker.embedding.embedding_choice import choose

    choice = choose(model, None if sparse is None else "auto")
    if sparse is None:
        choice.chosen.clear()  # torch's own embeddings are trained by all ranks, as without tables
    convert(model, choice)
    for module in model.modules():
        if isinstance(module, SparseEmbedding):
            module.table_device = module.table_device or (None if sparse is None else str(sparse))
            if module.table_device is None:
                raise ModelError(
                    f"'{module.path}' has its rows on servers, and a collective job has none: give it device='cuda'"
                )
            module.weight.fleet_local = True  # type: ignore[attr-defined]
            module.row_weight.is_shown = False
    return DeviceRows(model, world)


class DeviceRows:
    """The tables of a model, once there is an optimizer."""

    def __init__(self, model: torch.nn.Module, world: World) -> None:
        self._model, self._world = model, world
        self._plan: Plan | None = None
        self._saved_plan: Plan | None = None  # with the network, whose values are saved beside the tables
        self._lookups: DeviceLookups | None = None
        self._saves: dict[str, TableSaves] = {}

    def save(
        self,
        dirname: str,
        kind: Kind = "full",
        extra: Mapping[str, Any] | None = None,
        features: Callable[[], list[dict[str, Any]]] = list,
    ) -> int:
        """Save the tables of all ranks, and the network's values, in the format of servers. Returns the number of the
        save. All ranks call it together. `features`: as for plan_save.
        """
        from torchfleet.collective.checkpoint.table_saves import save_tables

        assert self._saved_plan is not None
        return save_tables(dirname, self._saved_plan, self._saves, self._world, kind, extra, features)

    @property
    def can_save_beside(self) -> bool:
        """Whether tables can be saved while they are trained: on GPUs, whose streams keep rows whole."""
        return all(saves.table.device.type == "cuda" for saves in self._saves.values())

    def saving_beside(self, dirname: str) -> Callable[[Gathering], int]:
        """Return a function that does `save` in a thread beside training; the thread passes its own connections among
        the ranks. The training thread calls this: rows are copied on its CUDA stream.
        """
        from torchfleet.collective.checkpoint.table_saves import save_tables

        assert self._saved_plan is not None
        plan, saves, stream = self._saved_plan, self._saves, torch.cuda.current_stream()

        def save(ranks: Gathering) -> int:
            with torch.cuda.stream(stream):
                return save_tables(dirname, plan, saves, ranks)

        return save

    def load(self, dirname: str, with_network: bool) -> dict[str, Any]:
        """Load the tables from a folder that `save` or servers wrote; `with_network`: also the network's values.
        Returns the `extra` of the save.
        """
        from torchfleet.collective.checkpoint.table_saves import load_together

        assert self._saved_plan is not None
        return load_together(dirname, self._saved_plan if with_network else None, self._saves, self._world)

    def make_tables(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the tables, with the rules of this optimizer's param groups."""
        from torchfleet.collective.checkpoint.table_saves import check_alone
        from torchfleet.ps.gpu.device_table import DeviceTable
        from torchfleet.ps.gpu.sharded_table import ShardedTable
        from torchfleet.ps.gpu.table_saves import TableSaves
        from torchfleet.ps.worker.lookup.device_lookups import DeviceLookups, RowsOnDevice
        from torchfleet.ps.worker.lookup.joined_tables import joined
        from torchfleet.ps.worker.lookup.plan import make_plan
        from torchfleet.ps.worker.modes.hybrid import rows_of

        check_alone(self._world.degrees)
        self._saved_plan = make_plan(self._model, optimizer, 1, steps_here=True)
        self._plan = rows_of(self._saved_plan)
        tables: dict[str, LookupTable] = {}
        rank, num_ranks = self._world.rank, self._world.size
        for name, group in self._plan.sparse.items():
            first = group.modules[0]
            assert first.table_device is not None
            device = self._world.device if first.table_device == self._world.device.type else first.table_device
            own = DeviceTable(group.spec.for_shard(rank, num_ranks), device, first.capacity, _is_deterministic())
            _begin_with(own, first)
            self._saves[name] = TableSaves(own)
            tables[name] = own if num_ranks == 1 else ShardedTable(own, _group())
        rows = {name: RowsOnDevice(table) for name, table in tables.items()}
        self._lookups = DeviceLookups(rows, joined(rows, {name: id(g.group) for name, g in self._plan.sparse.items()}))
        for group in self._plan.sparse.values():
            for module in group.modules:
                module.bind(self._lookups)
                module.table_rows.source = self._lookups

    def check_states(self, call: str) -> None:
        """Raise ModelError if the rule of a table keeps state of rows, which is on the devices."""
        groups = {} if self._plan is None else self._plan.sparse
        found = [name for name, group in groups.items() if group.spec.num_words > group.spec.dim]
        if found:
            raise ModelError(
                f"{call}: the optimizer's state of table '{found[0]}' is beside its rows on the devices, and would be "
                "left out. fleet.save(dirname) and fleet.save_state save all of it, and fleet.load and "
                "fleet.load_state go on from that."
            )

    def is_finite(self) -> bool:
        """Whether the gradients of this step's rows are finite. Waits for the device."""
        assert self._lookups is not None
        return all(rows.is_finite() for rows in self._lookups.rows.values())

    def step(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Update the rows by their gradients since the last step, times `factor`."""
        assert self._plan is not None
        assert self._lookups is not None
        self._plan.check_options(optimizer)
        self._lookups.step({name: group.group["lr"] for name, group in self._plan.sparse.items()}, factor)

    def drop(self) -> None:
        """Forget the gradients of rows since the last step."""
        if self._lookups is not None:
            for rows in self._lookups.rows.values():
                rows.drop()

    def describe(self) -> str:
        """A line per table."""
        assert self._plan is not None
        return "\n".join(f"  table {' '.join(line[:4])} on {self._world.device}" for line in self._plan.describe())


def _group() -> dist.ProcessGroup:
    """All ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _begin_with(table: object, module: SparseEmbedding) -> None:
    """Give a table the values of the torch embedding that it replaces, or of a loaded state."""
    from torchfleet.ps.gpu.device_table import DeviceTable
    from torchfleet.ps.gpu.sharded_table import owners

    first = module.table_rows
    if first.first_values is None:
        return
    assert isinstance(table, DeviceTable)
    values = torch.from_numpy(first.first_values)
    keys = torch.arange(len(values)) if first.first_keys is None else torch.from_numpy(first.first_keys)
    is_own = owners(table.spec, keys, table.spec.num_shards) == table.spec.shard
    keys, values = keys[is_own], values[is_own]
    table.reserve(len(keys))
    table.put(keys.to(table.device), values)
