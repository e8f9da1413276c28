"""Which of torch's own embeddings go to the servers, and why others stay dense."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.embedding.converted import TorchEmbedding, clash
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.row_state.row_weight import RowWeight

AUTO_BYTES = 1 << 20  # bytes of weights: a dense table is sent whole in every step, both ways
AUTO_LEAST_BYTES = 1 << 12  # a smaller weight costs nothing compared to the rest of a message
AUTO_UNTOUCHED = 0.5  # the share of rows that a batch must leave untouched
Sparse = str | int | None  # "auto", a number of rows, or None


class Auto(str):
    """sparse="auto", with the maximum number of rows that a batch looks up."""

    num_lookups: int

    def __new__(cls, num_lookups: int) -> Auto:
        made = super().__new__(cls, "auto")
        made.num_lookups = num_lookups
        return made

    def is_worth_moving(self, module: TorchEmbedding) -> bool:
        """Whether the weight is not tiny, and a batch would leave most rows untouched if its ids were drawn uniformly.
        Real ids repeat more often, and leave more rows untouched.
        """
        untouched = math.exp(-self.num_lookups / module.num_embeddings)
        return _num_bytes(module) >= AUTO_LEAST_BYTES and untouched >= AUTO_UNTOUCHED


@dataclass
class Choice:
    """Which embeddings of a model go to the servers, and why others stay dense."""

    sparse: Sparse = None
    chosen: list[TorchEmbedding] = field(default_factory=list)
    dense: dict[str, str] = field(default_factory=dict)  # by path: its size, or the reason
    tied: list[TorchEmbedding] = field(default_factory=list)  # embeddings with sparse=True that stay dense

    @property
    def num_rows(self) -> int:
        """Rows of all tables to create; embeddings with one weight share a table."""
        return sum({id(module.weight): module.num_embeddings for module in self.chosen}.values())


def choose(model: torch.nn.Module, sparse: Sparse) -> Choice:
    """Choose the embeddings with sparse=True. With a number, also all others with at least that many rows; with Auto,
    those that are trained and of which a batch leaves most rows untouched; with "auto", those that are trained and have
    at least AUTO_BYTES. Of these others, an embedding that servers do not support stays dense, with the reason. An
    embedding whose weight another module computes with always stays dense: a weight that is used whole is trained
    whole.
    """
    least = sparse if isinstance(sparse, int) and not isinstance(sparse, bool) else None
    if sparse not in (None, "auto") and (least is None or least < 1):
        raise ModelError(
            f'fleet.distributed_model(sparse=...): expected "auto", a number of rows from 1, or None, found {sparse!r}'
        )
    choice, wanted = Choice(sparse), []
    for path, module in _torch_embeddings(model):
        is_large = _num_bytes(module) >= AUTO_BYTES if least is None else module.num_embeddings >= least
        is_large = sparse.is_worth_moving(module) if isinstance(sparse, Auto) else is_large
        if not module.sparse and (sparse is None or not is_large):
            choice.dense[path] = f"{module.num_embeddings:,} x {module.embedding_dim}"
        elif not module.sparse and (reason := _obstacle(module, path, least is not None)):
            choice.dense[path] = reason
        else:
            wanted.append(module)
    return _without_tied(model, wanted, choice)


def saved_as_tables(model: torch.nn.Module, tables: Collection[str]) -> Choice:
    """Choose the torch embeddings that a saved model has as tables of these names, whether or not they have
    sparse=True.
    """
    found = dict(_torch_embeddings(model))
    weights = {id(module.weight) for path, module in found.items() if module.sparse or path in tables}
    return _without_tied(model, [module for module in found.values() if id(module.weight) in weights], Choice())


def check_convertible(module: TorchEmbedding, path: str) -> None:
    """Raise ModelError for an embedding that servers do not support."""
    if type(module).forward not in (torch.nn.Embedding.forward, torch.nn.EmbeddingBag.forward):
        raise ModelError(
            f"'{path}': {type(module).__name__}.forward would be lost. Put an embedding of torch's into a module that "
            "does what it does."
        )
    kind = torch.Tensor if _is_computed(module) else type(module.weight)
    if kind not in (torch.nn.Parameter, RowWeight):
        raise ModelError(
            f"'{path}.weight' is a {kind.__name__}, and rows on servers stand for a plain "
            "torch.nn.Parameter. Remove its parametrization, or leave it dense: sparse=False."
        )
    hooks = module.weight._backward_hooks or getattr(module.weight, "_post_accumulate_grad_hooks", None)
    if hooks and not isinstance(module.weight, RowWeight):
        raise ModelError(
            f"'{path}.weight' has a hook (register_hook or register_post_accumulate_grad_hook), which would never be "
            "called: gradients of rows go to the servers. Remove it (handle.remove()) and look at the weight's .grad "
            "after backward, or leave the embedding dense: sparse=False."
        )
    if reason := clash(module):
        raise ModelError(
            f"'{path}' ({type(module).__name__}): {reason}. Rename it, or put an embedding of torch's into a module "
            "that has it."
        )
    if module.weight.is_meta:
        raise ModelError(
            f"'{path}.weight' is on the meta device: it has no numbers that servers could begin with. Give the model "
            "memory and values first (model.to_empty(device='cpu'), then its initialization), or make it without "
            "device='meta'."
        )
    if module.weight.dtype != torch.float32:
        raise ModelError(f"'{path}' is {module.weight.dtype}: servers hold float32. Use model.float().")
    padding = module.padding_idx if isinstance(module, torch.nn.Embedding) else None  # bags leave it out
    if padding is not None and module.weight[padding].any():
        raise ModelError(
            f"'{path}': the row of padding_idx={padding} is not zero, and servers read it as zeros. Set it to zeros, "
            "or leave padding_idx out."
        )
    if module.max_norm is not None:
        raise ModelError(
            f"'{path}': max_norm={module.max_norm} changes rows whenever they are read, and servers change them only "
            "by updates. Leave it None; bound what updates make of a row, with fleet.nn.SparseEmbedding("
            "weight_bounds=...), or add a penalty to the loss."
        )
    if isinstance(module, torch.nn.EmbeddingBag) and module.mode == "max" and module.scale_grad_by_freq:
        raise ModelError(f"'{path}': scale_grad_by_freq=True goes with mode 'sum' and 'mean', as in torch")


def _without_tied(model: torch.nn.Module, wanted: list[TorchEmbedding], choice: Choice) -> Choice:
    """Choose those of `wanted` that no other layer is tied to; the others stay dense."""
    tied = _tied_elsewhere(model, {id(module) for module in wanted})
    paths = {id(module): path for path, module in _torch_embeddings(model)}
    for module in wanted:
        path = paths[id(module)]
        if path in tied:
            choice.dense[path] = f"tied to '{', '.join(tied[path])}', which is used whole"
            choice.tied += [module] if module.sparse else []
        else:
            choice.chosen.append(module)
    return choice


def _tied_elsewhere(model: torch.nn.Module, wanted: Collection[int]) -> dict[str, list[str]]:
    """By the path of an embedding whose id is in `wanted`: the weights of other modules that are the same tensor. Other
    embeddings in `wanted` do not count: they share one table.
    """
    holders: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) not in wanted:
            for name, parameter in module.named_parameters(recurse=False):
                holders.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in wanted and id(module.weight) in holders:
            found[path] = holders[id(module.weight)]
    return found


def _torch_embeddings(model: torch.nn.Module) -> Iterator[tuple[str, TorchEmbedding]]:
    for path, module in model.named_modules():
        if not isinstance(module, SparseEmbedding) and isinstance(module, TorchEmbedding):
            yield path, module


def _num_bytes(module: TorchEmbedding) -> int:
    """Of the rows, as servers hold them."""
    return 4 * module.num_embeddings * module.embedding_dim


def _is_computed(module: TorchEmbedding) -> bool:
    """Whether the weight has a parametrization. Then reading it computes it, which may change what it is computed from:
    with spectral_norm each reading in train mode is a step of its power iteration.
    """
    return torch.nn.utils.parametrize.is_parametrized(module, "weight")


def _obstacle(module: TorchEmbedding, path: str, is_asked: bool) -> str:
    """Why an embedding that is large enough stays dense; "" if nothing prevents it. `is_asked`: chosen by its number of
    rows.
    """
    if not _is_computed(module) and not module.weight.requires_grad and not is_asked:
        return "frozen: no gradient travels"
    try:
        check_convertible(module, path)
    except ModelError as error:
        return str(error).removeprefix(f"'{path}'").lstrip(": ").split(". ")[0]
    return ""
