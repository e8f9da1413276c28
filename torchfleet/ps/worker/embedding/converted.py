"""torch's own embeddings once their rows are on the servers: the same objects, with another class."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.embedding.embedding_arguments import Ids
from torchfleet.ps.worker.embedding.embedding_bag import SparseEmbeddingBag
from torchfleet.ps.worker.row_state.row_weight import RowWeight

TorchEmbedding = torch.nn.Embedding | torch.nn.EmbeddingBag
_TORCH_CLASSES = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_OVERRIDES = ("__call__", "__deepcopy__", "__getstate__", "_load_from_state_dict", "_save_to_state_dict")


class _Settled:
    """An option of torch's that cannot be changed any more, because the servers have made the table: setting another
    value raises ModelError. `accepted`: values that may be set nevertheless, because they change nothing.
    """

    def __init__(self, reason: str, accepted: tuple[Any, ...] = ()) -> None:
        self._reason, self._accepted = reason, accepted

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self if module is None else module.__dict__[self._name]

    def __set__(self, module: Any, value: Any) -> None:
        found = module.__dict__[self._name]
        if value != found and value not in self._accepted:
            raise ModelError(
                f"'{module.path}': {self._name}={value!r} cannot be set, it is {found!r}: {self._reason}. Set it "
                "before fleet.distributed_model."
            )
        module.__dict__[self._name] = value


class _TorchOptions:
    """The attributes of torch's embeddings that depend on the table."""

    num_embeddings = _Settled("the servers have made the table with this size")
    embedding_dim = _Settled("the servers have made the table with this width")
    padding_idx = _Settled("the servers read this row as zeros")
    max_norm = _Settled("servers change rows by updates, not when they are read")
    sparse = _Settled("the rows are on the servers, where gradients are always sparse", accepted=(True,))


class ConvertedEmbedding(_TorchOptions, SparseEmbedding, torch.nn.Embedding):  # type: ignore[misc]
    """A torch.nn.Embedding whose rows are on the servers."""

    def forward(
        self, input: Ids, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().forward(input, offsets, per_sample_weights)

    def extra_repr(self) -> str:
        return f"{super(SparseEmbedding, self).extra_repr()}, name={self.name!r}"


class ConvertedEmbeddingBag(_TorchOptions, SparseEmbeddingBag, torch.nn.EmbeddingBag):  # type: ignore[misc]
    """A torch.nn.EmbeddingBag whose rows are on the servers."""

    @property
    def pooling(self) -> str:  # type: ignore[override]
        """torch's name for it is `mode`."""
        if self.mode not in ("sum", "mean", "max"):
            raise ModelError(f"'{self.path}': mode must be 'sum', 'mean' or 'max', found {self.mode!r}")
        return self.mode

    def forward(
        self, input: Ids, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().forward(input, offsets, per_sample_weights)

    def extra_repr(self) -> str:
        return f"{super(SparseEmbedding, self).extra_repr()}, name={self.name!r}"


def convert_in_place(module: TorchEmbedding, table: str) -> None:
    """Move the module to a table: its rows become the first values, and it gets a class that looks rows up.

    Everything else stays: the attributes of torch and of the user, hooks, a subclass with its methods.
    """
    fields = _fields(module, table)
    weight: Any = module.weight
    kind: Any = type(module)
    if not isinstance(weight, RowWeight):  # otherwise another embedding has taken its rows
        fields["table_rows"].first_values = weight.detach().cpu().numpy().copy()
        RowWeight.take_place_of(weight)
    module.__dict__.update(fields, names_before=frozenset(vars(module)))
    module.__class__ = _converted_class(kind)


def as_torch(module: SparseEmbedding, weight: torch.nn.Parameter, memo: dict[int, Any]) -> TorchEmbedding:
    """A copy of a converted embedding in its former class, with these rows and with dense gradients. `memo`: as in
    copy.deepcopy.
    """
    memo[id(module.weight)] = weight
    added = {*_fields(module, module.name or ""), "names_before"} - vars(module)["names_before"]
    added |= {"forward"} if module.is_copy else set()
    kind = next(kind for kind in type(module).__mro__ if _is_torch(kind) and not issubclass(kind, SparseEmbedding))
    made: Any = kind.__new__(kind)
    made.__dict__.update(
        copy.deepcopy({name: value for name, value in vars(module).items() if name not in added}, memo)
    )
    made.sparse = False
    return made  # type: ignore[no-any-return]


def clash(module: TorchEmbedding) -> str:
    """Why an embedding with attributes or methods of the user's cannot be converted; "" if it can."""
    parts = {**module._parameters, **module._buffers, **module._modules}
    if more := sorted(parts.keys() - {"weight"}):
        return f"'{more[0]}', which is part of it, would not be in its state"
    fields = _fields(module, "")
    taken = {*fields, *dir(SparseEmbedding)} - set(dir(torch.nn.Embedding)) - set(vars(_TorchOptions))
    kinds = [kind for kind in type(module).__mro__ if _is_torch(kind) and kind not in _TORCH_CLASSES]
    methods = {name for kind in kinds for name in vars(kind)} & {*taken, *_OVERRIDES}
    plain = {name: value for name, value in vars(module).items() if value is None or isinstance(value, (int, str))}
    values = {name for name in vars(module).keys() & fields if name not in plain or plain[name] != fields[name]}
    names = sorted(methods | values)
    return f"an embedding on servers has a '{names[0]}' with another meaning" if names else ""


def _is_torch(kind: type) -> bool:
    return issubclass(kind, _TORCH_CLASSES)


def _fields(module: Any, table: str) -> dict[str, Any]:
    """The attributes that a SparseEmbedding has in addition to torch's."""
    made = SparseEmbedding(
        module.embedding_dim, table or None, padding_idx=module.padding_idx, num_embeddings=module.num_embeddings
    )
    made.is_converted = True
    own = set(vars(made)) - set(vars(torch.nn.Module()))
    return {name: vars(made)[name] for name in own - ({"pooling"} if hasattr(module, "mode") else set())}


@functools.cache
def _converted_class(kind: Any) -> type[Any]:
    """The class of a converted embedding. For a user's subclass, it has that subclass among its bases."""
    base = ConvertedEmbeddingBag if issubclass(kind, torch.nn.EmbeddingBag) else ConvertedEmbedding
    if kind in _TORCH_CLASSES:
        return base
    return type(f"Converted{kind.__name__}", (base, kind), {"__module__": __name__, "__doc__": kind.__doc__})
