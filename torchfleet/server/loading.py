"""A saved model into a server's tables, before it serves."""

from __future__ import annotations

from collections.abc import Sequence

from torchfleet.checkpoint.manifest import read_manifest
from torchfleet.checkpoint.reading import load_dense, load_sparse
from torchfleet.checkpoint.storage import Storage
from torchfleet.errors import CheckpointError
from torchfleet.server.state import State
from torchfleet.tables.dense import DenseTable


def load_model(state: State, dirname: str, names: Sequence[str] | None) -> None:
    """All tables and parameters that the model has, or the named ones. A name that was not saved is an error."""
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
    for table in state.tables.values():
        name = table.spec.name
        if name not in saved:
            if names is None:
                raise CheckpointError(
                    f"{storage.path} has no table '{name}' of this model; it has {', '.join(sorted(saved))}. Give "
                    "init_server the names of what to load (var_names)."
                )
        elif isinstance(table, DenseTable):
            wanted = None if names is None or name in names else set(names)
            load_dense(storage, manifest, table, wanted)
        elif names is None or name in names:
            load_sparse(storage, manifest, table)
    state.model = storage.path
