"""The kinds of tables. A new one is a class in a file of its own (tables/table.py has its methods), and a line here."""

from __future__ import annotations

from collections.abc import Iterator

from torchfleet.ps.tables.dense_table import DenseTable
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.rule import RULES, Rule
from torchfleet.ps.tables.settings.spec import KINDS, Initializer, TableKind, TableSpec
from torchfleet.ps.tables.settings.storage import IN_MEMORY, TierStorage
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.tables.table import Table
from torchfleet.ps.tables.tiered_table import TieredTable


def _sparse_samples() -> Iterator[TableSpec]:
    """Samples that cover all kernels: narrow packed rows under every rule, wide rows, decays, and policies."""
    for rule in _sample_rules():
        yield TableSpec("warm", dim=2, rule=rule, initializer=Initializer("normal", 0.0, 1.0))
        yield TableSpec("warm", dim=16, rule=rule)
    for is_decoupled in (False, True):
        yield TableSpec("warm", dim=2, rule=Rule(weight_decay=0.1, decoupled_decay=is_decoupled))
    for row_format in (RowFormat("bfloat16"), RowFormat("float16"), RowFormat("int8"), RowFormat("int8", "learned")):
        yield TableSpec("warm", dim=16, rule=Rule("rowwise_adagrad"), format=row_format)
    entry = AdmissionEntry(2, 0.999, 1, 1.0, 1, "count > 0", "show", "click", show_click_decay_rate=0.9)
    yield TableSpec("warm", dim=2, entry=entry, shrink=Shrink(delete_after_unseen_days=1, max_rows=100))


def _sample_rules() -> list[Rule]:
    """Settings that together use all kernels of all rules."""
    return [Rule(name, **settings) for name, row_rule in RULES.items() for settings in row_rule.samples]


def _array_samples() -> Iterator[TableSpec]:
    yield TableSpec("warm", "array", dim=2, size=1000)


KINDS["sparse"] = TableKind(SparseTable, has_size=False, samples=_sparse_samples, has_formats=True)
KINDS["array"] = TableKind(SparseTable, has_size=True, samples=_array_samples, has_formats=True)
KINDS["dense"] = TableKind(lambda spec, max_bytes, _: DenseTable(spec, max_bytes), has_size=True, is_dense=True)


def make_table(
    spec: TableSpec, max_bytes: int, clock: Clock | None = None, default_storage: TierStorage = IN_MEMORY
) -> Table:
    """An empty table for this description. Raises TableError if its memory cannot be reserved. `default_storage`: the
    storage of a `sparse` table whose description sets no storage.
    """
    clock = clock or Clock()
    storage = default_storage if spec.storage == IN_MEMORY else spec.storage
    if spec.kind == "sparse" and storage.memory:
        return TieredTable(spec, max_bytes, clock, storage)
    table: Table = KINDS[spec.kind].make(spec, max_bytes, clock)
    return table


def samples(name: str) -> list[TableSpec]:
    """Small tables that together use all kernels of a kind: the samples it declares, or one per rule."""
    kind = KINDS[name]
    if kind.samples is not None:
        return list(kind.samples())
    size = 1000 if kind.has_size else 0
    dim = 1 if kind.is_dense else 2
    return [TableSpec("warm", name, dim=dim, size=size, rule=rule) for rule in _sample_rules()]
