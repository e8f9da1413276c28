"""Prediction from a saved model in a single process, or with the tables on the servers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api import job_life
from torchfleet.base.errors import CheckpointError, FleetError, ModelError
from torchfleet.base.paddle_names import INFER, INFERRING, INFERRING_ENV, WithPaddleNames, with_paddle_arguments
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.collective_manifest import is_collective
from torchfleet.ps.checkpoint.manifest import Manifest, Parameter, read_manifest
from torchfleet.ps.checkpoint.part_reader import load_sparse, read_dense
from torchfleet.ps.checkpoint.saved_parameters import check_kind
from torchfleet.ps.tables.rows.memory import max_table_bytes
from torchfleet.ps.tables.settings.spec import Rule, TableSpec, default_kind
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.future import Pulled, Ready
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.embedding.conversion import convert, sparse_embeddings
from torchfleet.ps.worker.embedding.embedding_choice import saved_as_tables
from torchfleet.ps.worker.lookup.dense_group import saved_tensors, type_of, write_words
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.lookup.sources import ForPrediction


class LocalTables(ForPrediction):
    """Rows from tables in this process, for prediction. Ids without a row read as zeros."""

    def __init__(self, tables: Mapping[str, SparseTable]) -> None:
        self._tables = tables

    def pull(self, keys: Mapping[str, Keys], create: bool, foreseen: bool = False) -> Ready:
        rows = {name: self._tables[name].look_up(wanted, create=False) for name, wanted in keys.items()}
        return Ready(Pulled(rows, {name: [] for name in keys}))

    def walk(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        """Like RowSource.walk."""
        rows = self._tables[table]
        for keys, values, _ in rows.chunks():
            yield keys, values[:, : rows.spec.dim]

    def num_rows(self, table: str) -> int:
        return self._tables[table].num_rows

    def check_writable(self) -> None:
        raise ModelError("this model was loaded for prediction, and takes no other rows: load them into one to train")


def load_inference_model(dirname: str, model: torch.nn.Module) -> torch.nn.Module:
    """Load the saved parameters and tables into `model`, in eval mode, in this process. Needs no server.

    `dirname` is a folder of save_inference_model or save_persistables, written by any number of servers, or of a
    collective job's save, written by any number of ranks.
    """
    if is_collective(dirname):
        from torchfleet.collective.checkpoint.loading import load_parameters

        load_parameters(dirname, model)
        return model.eval()
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    tables_saved = {table.name for table in manifest.tables if not table.is_dense}
    convert(model, saved_as_tables(model, tables_saved))
    tables = {
        name: load_rows(storage, manifest, name, modules[0].dim, modules[0].num_embeddings or 0)
        for name, modules in sparse_embeddings(model).items()
    }
    _load_parameters(storage, manifest, model)
    modules = sparse_embeddings(model)
    local = LocalTables(tables)
    engine = Engine(local, modules)
    for embeddings in modules.values():
        for module in embeddings:
            module.bind(engine)
            module.table_rows.source = local
    engine.follow(model, records=False)  # the rows are local: an additional pull costs nothing
    return model.eval()


def load_rows(storage: Storage, manifest: Manifest, name: str, dim: int, size: int) -> SparseTable:
    """A read-only in-memory table with the rows of any kind of table. `size`: ids are below it; 0: any ids."""
    spec = TableSpec(name, default_kind(is_dense=False, has_size=bool(size)), dim, size, Rule(lr=0.0))
    kept = manifest.table(name).spec().format  # prediction takes no more memory for values than training did
    spec = msgspec.structs.replace(spec, format=msgspec.structs.replace(kept, wire=""))
    table = SparseTable(spec, max_table_bytes())
    load_sparse(storage, manifest, table, quiet=True)
    return table


def load_tensors(storage: Storage, manifest: Manifest) -> dict[str, torch.Tensor]:
    """All saved parameters and buffers, by name."""
    loaded = {}
    for name, (parameter, values) in _saved_parameters(storage, manifest).items():
        dtype = getattr(torch, parameter.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{storage.path}: parameter '{name}' has an unknown type, {parameter.dtype!r}")
        loaded[name] = torch.empty(parameter.shape, dtype=dtype)
        _write(loaded[name], values, name)
    return loaded


def _saved_parameters(storage: Storage, manifest: Manifest) -> dict[str, tuple[Parameter, npt.NDArray[np.float32]]]:
    saved: dict[str, tuple[Parameter, npt.NDArray[np.float32]]] = {}
    for table in manifest.tables:
        if table.is_dense:
            values = read_dense(storage, manifest, table)[0]
            for parameter in table.parameters:
                saved[parameter.name] = parameter, values[parameter.start : parameter.start + parameter.size]
    return saved


def _load_parameters(storage: Storage, manifest: Manifest, model: torch.nn.Module) -> None:
    """Load parameters and buffers by name. The save must contain every one of the model, with the same shape."""
    saved = _saved_parameters(storage, manifest)
    tensors = saved_tensors(model)
    wanted = [Parameter(name, list(tensor.shape), 0, type_of(tensor)) for name, tensor in tensors.items()]
    missing = sorted({parameter.name for parameter in wanted} - set(saved))
    if missing:
        raise CheckpointError(
            f"{storage.path} has no parameter {', '.join(missing)}; it has {', '.join(sorted(saved))}. Load it into "
            "the model that it was saved from."
        )
    for parameter in wanted:
        known, values = saved[parameter.name]
        check_kind(parameter, known)
        _write(tensors[parameter.name], values, parameter.name)


def _write(tensor: torch.Tensor, values: npt.NDArray[np.float32], name: str) -> None:
    if tensor.dtype != torch.float32:
        write_words(tensor, values, name)
        return
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(values.copy()).view(tensor.shape))


class DistributedInfer(WithPaddleNames):
    """Prediction with the tables on the servers. It only pulls, and creates no rows.

    Use it after training in the same job, or in a separate job that loads a saved model first:

        infer = fleet.DistributedInfer(model)
        infer.init_distributed_infer_env(dirname="model")    # servers serve here until the workers have stopped
        if fleet.is_worker():
            scores = infer.predict(batch)
            fleet.stop_worker()
    """

    _PADDLE_NAMES = INFER

    @with_paddle_arguments(INFERRING)
    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ModelError(f"fleet.DistributedInfer(model): expected a torch.nn.Module, found {model!r:.80}")
        self._model = model

    @with_paddle_arguments(INFERRING_ENV)
    def init_distributed_infer_env(self, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        """Prepare for prediction. On a server of a prediction job, this returns when all workers have stopped."""
        if dirname is not None and not isinstance(dirname, (str, os.PathLike)):
            raise FleetError(
                f"init_distributed_infer_env(dirname=...): expected a folder or URL, found {dirname!r:.80}. There is "
                "no executor in torchfleet."
            )
        job_life.begin_prediction(self._model, dirname, list(var_names) if var_names is not None else None)
        self._model.eval()

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, in eval mode and without gradients."""
        self._model.eval()
        with torch.no_grad():
            return self._model(*args, **kwargs)

    __call__ = predict
