"""Which of torch's own embeddings go to the servers, their conversion, and the embeddings of a model by table."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch

from torchfleet.errors import ModelError
from torchfleet.worker.lookup.embedding import SparseEmbedding, SparseEmbeddingBag

TorchEmbedding = torch.nn.Embedding | torch.nn.EmbeddingBag
AUTO_BYTES = 1 << 20  # of weights: a dense table travels whole in every step, both ways
Sparse = str | int | None  # "auto", a number of rows, or None


@dataclasses.dataclass
class Choice:
    """Which embeddings of a model go to the servers, and why others stay where they are."""

    sparse: Sparse = None
    chosen: list[TorchEmbedding] = dataclasses.field(default_factory=list)
    dense: dict[str, str] = dataclasses.field(default_factory=dict)  # by path: its size, or the reason

    @property
    def num_rows(self) -> int:
        """Of all tables that are going to be made; embeddings with one weight share a table."""
        return sum({id(module.weight): module.num_embeddings for module in self.chosen}.values())


def choose(model: torch.nn.Module, sparse: Sparse) -> Choice:
    """Those with sparse=True. With a number, also all others with at least so many rows; with "auto", those whose
    weights are trained and have at least AUTO_BYTES. What servers cannot do for these stays dense, with the reason."""
    least = sparse if isinstance(sparse, int) and not isinstance(sparse, bool) else None
    if sparse not in (None, "auto") and (least is None or least < 1):
        raise ModelError(
            f'fleet.distributed_model(sparse=...): expected "auto", a number of rows from 1, or None, found {sparse!r}'
        )
    choice, owners = Choice(sparse), _owners(model)
    for path, module in _torch_embeddings(model):
        if module.sparse:
            choice.chosen.append(module)
            continue
        size = f"{module.num_embeddings:,} x {module.embedding_dim}"
        is_large = module.weight.nbytes >= AUTO_BYTES if least is None else module.num_embeddings >= least
        if sparse is None or not is_large:
            choice.dense[path] = size
        elif reason := _obstacle(module, path, owners[id(module.weight)], least is not None):
            choice.dense[path] = reason
        else:
            choice.chosen.append(module)
    return choice


def convert(model: torch.nn.Module, chosen: Collection[TorchEmbedding] | None = None) -> torch.nn.Module:
    """Replace torch's embeddings that were chosen, in place; without a choice, those with sparse=True.

    Every SparseEmbedding gets its path, and a name if it has none. Returns the model. After an error it is unchanged.
    """
    wanted = {id(module) for module in (choose(model, None).chosen if chosen is None else chosen)}
    if id(model) in wanted:
        raise ModelError("the model is itself a sparse embedding: put it into a module, so that it can be replaced")
    replaced: dict[int, SparseEmbedding] = {}  # by module: several may share one weight, each with its own padding
    tables: dict[int, str] = {}
    places = [named for named in model.named_modules(remove_duplicate=False) if id(named[1]) in wanted]
    for path, module in places:
        if id(module) not in replaced:
            table = tables.setdefault(id(module.weight), path)
            replaced[id(module)] = _converted(module, path, table)
    for path, module in places:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced[id(module)])
    for path, module in model.named_modules():
        if isinstance(module, SparseEmbedding):
            module.path = path
            module.name = path if module.name is None else module.name
    return model


def saved_as_tables(model: torch.nn.Module, tables: Collection[str]) -> list[TorchEmbedding]:
    """torch's embeddings that a saved model has as tables of these names, whether they say sparse=True or not."""
    found = dict(_torch_embeddings(model))
    weights = {id(module.weight) for path, module in found.items() if module.sparse or path in tables}
    return [module for module in found.values() if id(module.weight) in weights]


def _torch_embeddings(model: torch.nn.Module) -> Iterator[tuple[str, TorchEmbedding]]:
    for path, module in model.named_modules():
        if isinstance(module, TorchEmbedding):
            yield path, module


def _owners(model: torch.nn.Module) -> dict[int, list[str]]:
    """By parameter: the paths of the modules other than torch's embeddings that have it."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            others = found.setdefault(id(parameter), [])
            if not isinstance(module, TorchEmbedding):
                others.append(path)
    return found


def _obstacle(module: TorchEmbedding, path: str, owners: list[str], is_asked: bool) -> str:
    """Why an embedding that is large enough stays dense; "" if nothing is against it. `is_asked`: by its rows."""
    if owners:
        return f"tied to '{owners[0]}'"
    if not module.weight.requires_grad and not is_asked:
        return "frozen: no gradient travels"
    try:
        _check(module, path)
    except ModelError as error:
        return str(error).removeprefix(f"'{path}'").lstrip(": ").split(". ")[0]
    return ""


def sparse_embeddings(model: torch.nn.Module) -> dict[str, list[SparseEmbedding]]:
    """The model's embeddings by table; those that share a table must agree on it."""
    found: dict[str, list[SparseEmbedding]] = {}
    for module in model.modules():
        if isinstance(module, SparseEmbedding):
            assert module.name is not None
            found.setdefault(module.name, []).append(module)
    for name, modules in found.items():
        for field in ("dim", "initializer", "seed", "num_embeddings", "entry", "shrink", "weight_bounds"):
            values = {getattr(module, field) for module in modules}
            if len(values) > 1:
                raise ModelError(
                    f"table '{name}' is shared by embeddings with different {field}: {values}. Make them equal."
                )
    return found


def _check(module: TorchEmbedding, path: str) -> None:
    """Raise ModelError for what servers cannot do."""
    if type(module).forward not in (torch.nn.Embedding.forward, torch.nn.EmbeddingBag.forward):
        raise ModelError(
            f"'{path}': {type(module).__name__}.forward would be lost. Put an embedding of torch's into a module that "
            "does what it does."
        )
    if module.weight.dtype != torch.float32:
        raise ModelError(f"'{path}' is {module.weight.dtype}: servers hold float32. Use model.float().")
    padding = module.padding_idx if isinstance(module, torch.nn.Embedding) else None  # bags leave it out
    if padding is not None and module.weight[padding].any():
        raise ModelError(
            f"'{path}': the row of padding_idx={padding} is not zero, and servers read it as zeros. Set it to zeros, "
            "or leave padding_idx out."
        )
    for field, neutral in (("max_norm", None), ("scale_grad_by_freq", False)):
        if getattr(module, field) != neutral:
            raise ModelError(
                f"'{path}': {field}={getattr(module, field)} is not supported on servers; leave it {neutral}"
            )
    is_bag = isinstance(module, torch.nn.EmbeddingBag)
    if is_bag and (module.mode not in ("sum", "mean") or module.include_last_offset):
        raise ModelError(f"'{path}': EmbeddingBag supports mode 'sum' and 'mean' without include_last_offset")


def _converted(module: TorchEmbedding, path: str, table: str) -> SparseEmbedding:
    _check(module, path)
    kind = SparseEmbedding
    options: dict[str, Any] = {"name": table, "padding_idx": module.padding_idx}
    options["num_embeddings"] = module.num_embeddings
    if isinstance(module, torch.nn.EmbeddingBag):
        kind, options["pooling"] = SparseEmbeddingBag, module.mode
    converted = kind(module.embedding_dim, **options)
    converted.weight.requires_grad_(module.weight.requires_grad)
    converted.first_values = module.weight.detach().to("cpu", torch.float32).numpy().copy()
    return converted
