"""A saved model into a server's tables, before it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchfleet.checkpoint.manifest import Parameter, read_manifest
from torchfleet.checkpoint.part_reader import load_dense, load_sparse
from torchfleet.errors import CheckpointError
from torchfleet.server.state.state import State
from torchfleet.storage import Storage
from torchfleet.tables.dense_table import DenseTable
from torchfleet.tables.sparse_table import SparseTable


def load_model(
    state: State,
    dirname: str,
    names: Sequence[str] | None,
    layouts: Mapping[str, Sequence[Parameter]] | None = None,
) -> None:
    """All tables and parameters that the model has, or the named ones. A name that was not saved is an error.

    `layouts`: where the model's dense tables have their parameters; without them, as they were saved.
    """
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    parameters = {parameter.name for table in manifest.tables for parameter in table.parameters}
    saved = {table.name for table in manifest.tables}
    if isinstance(names, str):
        raise CheckpointError(f"var_names: expected a list of names, found the single {names!r}")
    unknown = sorted(set(names or ()) - saved - parameters)
    if unknown:
        raise CheckpointError(
            f"{storage.path} has no {', '.join(unknown)}; it has the tables {', '.join(sorted(saved))} and the "
            f"parameters {', '.join(sorted(parameters))}"
        )
    if manifest.is_time_set:  # a job that says how late it is: by the wall clock its rows would be years old
        state.clock.set(int(manifest.time))
    for table in state.tables.values():
        name = table.spec.name
        layout = layouts.get(name) if layouts is not None else None
        if isinstance(table, DenseTable) and (layout is not None or name in saved):
            wanted = None if names is None or name in names else set(names)
            load_dense(storage, manifest, table, wanted, layout)
        elif name not in saved:
            if names is None:
                raise CheckpointError(
                    f"{storage.path} has no table '{name}' of this model; it has {', '.join(sorted(saved))}. Give "
                    "init_server the names of what to load (var_names)."
                )
        elif isinstance(table, SparseTable) and (names is None or name in names):
            load_sparse(storage, manifest, table)
    state.model = storage.path
    state.schedule.note(state.tables.values(), int(manifest.time))
    if names is None:  # all of it is here: the next save may be a delta
        for table in state.tables.values():
            if isinstance(table, SparseTable):
                table.begin_save(is_committed=True)
        state.chain.attempt = manifest.token
