"""Loading a saved model into a server's tables, before it serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.near_names import near_names
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import check_written
from torchfleet.ps.checkpoint.manifest import FILE, Manifest, Parameter, read_manifest
from torchfleet.ps.checkpoint.part_reader import has_same_type, load_dense, load_sparse
from torchfleet.ps.server.state.state import State
from torchfleet.ps.tables.table import BlockTable, RowTable, Table

Layouts = Mapping[str, Sequence[Parameter]]  # by dense table: the places of its parameters


def load_model(state: State, dirname: str, names: Sequence[str] | None, layouts: Layouts | None = None) -> None:
    """Load all tables and parameters of a saved model, or those in `names`.

    `layouts`: the places of parameters in the dense tables; by default as they were saved. Raises CheckpointError, for
    example for a name that was not saved. After an error all tables are empty, as if they had just been made.
    """
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    model = ChosenModel(storage, manifest, names, layouts or {})
    for link in manifest.links():
        check_written(storage, link.save, {part.file: part.bytes for part in link.parts})
    try:
        _restore(state, model, manifest)
    except BaseException as error:
        state.remake_tables()
        if isinstance(error, FleetError) or not isinstance(error, Exception):
            raise
        raise CheckpointError(f"{storage.place(FILE)} cannot be loaded: {type(error).__name__}: {error}") from error
    state.saves.model = storage.path
    state.work.schedule.note(state.tables.values(), int(manifest.time))
    if names is None and model.is_exact(state.tables.values()):  # the tables are what was saved: a delta can follow
        for table in state.tables.values():
            table.begin_save(is_committed=True)
        state.saves.chain.attempt = manifest.token


def _restore(state: State, model: ChosenModel, manifest: Manifest) -> None:
    if manifest.is_time_set:  # the job sets its own clock: by the wall clock its rows could be years old
        state.clock.set(int(manifest.time))
    for table in state.tables.values():
        table.restore(model)


class ChosenModel:
    """The part of a saved model to load: everything, or the named tables and parameters."""

    def __init__(self, storage: Storage, manifest: Manifest, names: Sequence[str] | None, layouts: Layouts) -> None:
        self._storage, self._manifest, self._names, self._layouts = storage, manifest, names, layouts
        self._saved = {table.name for table in manifest.tables}
        parameters = {parameter.name for table in manifest.tables for parameter in table.parameters}
        if isinstance(names, str):
            raise CheckpointError(f"var_names: expected a list of names, found the single {names!r}")
        unknown = sorted(set(names or ()) - self._saved - parameters)
        if unknown:
            known = [*sorted(self._saved), *sorted(parameters)]
            asked = "; ".join(f"{name!r}, near names {near_names(name, known)}" for name in unknown)
            raise CheckpointError(f"var_names: {storage.path} has no {asked}. `fleet inspect` lists all.")

    def load_rows(self, table: RowTable) -> None:
        """As SavedModel.load_rows."""
        name = table.spec.name
        if self._has(name) and (self._names is None or name in self._names):
            load_sparse(self._storage, self._manifest, table)

    def load_block(self, table: BlockTable) -> None:
        """As SavedModel.load_block. With a layout, the parameters may come from any saved table."""
        name = table.spec.name
        layout = self._layouts.get(name)
        if layout is not None or self._has(name):
            wanted = None if self._names is None or name in self._names else set(self._names)
            load_dense(self._storage, self._manifest, table, wanted, layout)

    def is_exact(self, tables: Iterable[Table]) -> bool:
        """Whether these tables keep every value as it was saved: rows may be of another type now."""
        return all(
            has_same_type(self._manifest.table(table.spec.name), table.spec)
            for table in tables
            if table.spec.name in self._saved
        )

    def _has(self, name: str) -> bool:
        """Whether a table of this name was saved. Raises CheckpointError if not and the whole model is to be loaded."""
        if name not in self._saved and self._names is None:
            raise CheckpointError(
                f"{self._storage.path} has no table '{name}' of this model; it has {', '.join(sorted(self._saved))}. "
                "Give init_server the names of what to load (var_names)."
            )
        return name in self._saved
