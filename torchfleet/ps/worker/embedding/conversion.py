"""In-place conversion of torch's own embeddings, and the embeddings of a model by table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.embedding.converted import convert_in_place
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.embedding.embedding_choice import Choice, check_convertible, choose
from torchfleet.ps.worker.row_state.table_rows import TableRows


def convert(model: torch.nn.Module, choice: Choice | None = None) -> torch.nn.Module:
    """Convert the chosen torch embeddings in place; without a choice, those with sparse=True.

    Every SparseEmbedding gets its path, and a name if it has none. A converted embedding is still the same object and
    an instance of torch.nn.Embedding or EmbeddingBag, and also of SparseEmbedding. Its weight becomes a RowWeight in
    place, so other references to either (in an optimizer, a list) refer to the converted one from then on. Returns the
    model. After an error the model is unchanged.
    """
    choice = choice or choose(model, None)
    wanted = {id(module) for module in choice.chosen}
    if id(model) in wanted:
        raise ModelError("the model is itself a sparse embedding: put it into a module, so that its table has a name")
    places = [(path, module) for path, module in model.named_modules() if id(module) in wanted]
    for path, module in places:
        check_convertible(module, path)
    for module in choice.tied:
        module.sparse = False  # the other layer's gradient is dense
    tables: dict[int, str] = {}  # by weight, which several embeddings may share, each with its own padding
    for path, module in places:
        convert_in_place(module, tables.setdefault(id(module.weight), path))
    _name(model)
    return model


def sparse_embeddings(model: torch.nn.Module) -> dict[str, list[SparseEmbedding]]:
    """The model's embeddings by table; those that share a table must agree on it."""
    found: dict[str, list[SparseEmbedding]] = {}
    for module in model.modules():
        if isinstance(module, SparseEmbedding):
            assert module.name is not None
            found.setdefault(module.name, []).append(module)
    for name, modules in found.items():
        for field in (
            "dim",
            "kind",
            "initializer",
            "seed",
            "num_embeddings",
            "entry",
            "shrink",
            "weight_bounds",
            "row_format",
            "cache",
            "table_device",
        ):
            values = {getattr(module, field) for module in modules}
            if len(values) > 1:
                raise ModelError(
                    f"table '{name}' is shared by embeddings with different {field}: {values}. Make them equal."
                )
        _check_optimizers(name, modules)
    return found


def _check_optimizers(table: str, modules: Sequence[SparseEmbedding]) -> None:
    """Raise ModelError unless these embeddings of one table have equal optimizers, or none has one."""
    first = modules[0].optimizer
    for module in modules[1:]:
        if _settings_of(module.optimizer) != _settings_of(first):
            raise ModelError(
                f"table '{table}' is shared by embeddings with different optimizer: {_optimizer_text(first)} and "
                f"{_optimizer_text(module.optimizer)}. Make them equal."
            )


def _settings_of(optimizer: torch.optim.Optimizer | None) -> tuple[type, dict[str, Any]] | None:
    """The class and options of a table's optimizer, which has one param group. A scheduler adds names to the group."""
    if optimizer is None:
        return None
    return type(optimizer), {name: optimizer.param_groups[0][name] for name in optimizer.defaults}


def _optimizer_text(optimizer: torch.optim.Optimizer | None) -> str:
    settings = _settings_of(optimizer)
    if settings is None:
        return "none"
    return f"{settings[0].__name__}({', '.join(f'{name}={value!r}' for name, value in settings[1].items())})"


def check_on_servers(model: torch.nn.Module) -> None:
    """Raise ModelError for an embedding with a table on a device."""
    for path, module in model.named_modules():
        if isinstance(module, SparseEmbedding) and module.table_device is not None:
            raise ModelError(
                f"'{path}' has device={module.table_device!r}, a table in its own process, and this job has "
                "servers: use fleet.init(is_collective=True), or leave device out"
            )


def _name(model: torch.nn.Module) -> None:
    """Set the paths, names and shared rows of all embeddings."""
    shared: dict[str, TableRows] = {}
    for path, module in model.named_modules():
        if isinstance(module, SparseEmbedding):
            module.name = path if module.name is None else module.name
            module.table_rows = _shared_rows(module, shared)
    # reversed, so that a weight gets the path of its first module
    for path, module in reversed(list(model.named_modules())):
        if isinstance(module, SparseEmbedding):
            module.place(path)


def _shared_rows(module: SparseEmbedding, shared: dict[str, TableRows]) -> TableRows:
    """The TableRows that all embeddings of a table share: the first embedding's. From an earlier job only the initial
    values are kept.
    """
    assert module.name is not None
    if module.is_copy:
        raise ModelError(
            f"'{module.path}' is in a copy of a distributed model, and its rows are the other's: distribute a new "
            "model and load the state_dict() of the other into it, or take fleet.to_plain(model)"
        )
    rows = shared.setdefault(module.name, module.table_rows)
    if rows is not module.table_rows:
        rows.take_over(module.table_rows)
    rows.is_distributed, rows.engine, rows.source = True, None, None
    return rows
