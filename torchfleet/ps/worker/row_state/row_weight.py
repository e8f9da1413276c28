"""The parameter of a sparse embedding: an empty stand-in for rows that live on the servers.

torch treats it as any other parameter: param groups, `.to(device)`, counting, optimizer hooks. Its `grad` is the
table's pending gradient. Computing with it would compute with nothing, so that is an error; except in eval mode, where
the weight of a table of a declared size is read as all of its rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from torchfleet.base.errors import ModelError

# Functions that use only the type, shape and device of a tensor, not its numbers. Attributes start with a dot.
_HARMLESS = frozenset(
    (
        *("__dir__", "__format__", "__len__", "__repr__", "__setstate__", "_has_compatible_shallow_copy_type"),
        *("_is_view", "_typed_storage", "data_ptr", "detach", "dim", "element_size", "get_device", "is_complex"),
        *(
            "is_conj",
            "is_contiguous",
            "is_floating_point",
            "is_inference",
            "is_neg",
            "is_pinned",
            "is_same_size",
            "is_set_to",
            "is_shared",
        ),
        *("is_signed", "ndimension", "nelement", "numel", "retain_grad", "share_memory_", "size"),
        *("storage_offset", "stride", "type", "untyped_storage"),
        *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
        *("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"),
    )
)
# Functions that return the same weight elsewhere, still empty and not usable in computation. detach() and .data return
# a plain empty tensor: loops that copy or average all parameters keep working, and get no gradient from it.
_ITSELF = frozenset(("bfloat16", "cpu", "cuda", "double", "float", "half", "pin_memory", "requires_grad_", "to"))
_NUMBERS = frozenset((".H", ".T", ".imag", ".mH", ".mT", ".real"))
_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))


class PendingGradients(Protocol):
    """Pending gradients of rows, by table."""

    def gradient(self, table: str) -> torch.Tensor | None: ...

    def put_gradient(self, table: str, gradient: torch.Tensor | None) -> None: ...


class RowWeight(torch.nn.Parameter):
    """Shape (0, dim). `path` and `table` are for messages; both empty before fleet.distributed_model."""

    path: str = ""
    table: str = ""
    # whether .grad shows its gradients: of several weights of one table only one does, in hybrid mode no weight does
    is_shown: bool = True
    # set by zero_grad(set_to_none=False): without pending gradients .grad is a gradient of no rows, and not None
    is_zeroed: bool = False
    pending: PendingGradients | None = None
    reader: Callable[[], torch.Tensor | None] | None = None  # all rows, or None where they cannot be read now

    @classmethod
    def empty(cls, dim: int) -> RowWeight:
        """A new weight."""
        weight: RowWeight = torch.Tensor._make_subclass(cls, torch.empty(0, dim), True)
        return weight

    @classmethod
    def take_place_of(cls, weight: torch.nn.Parameter) -> RowWeight:
        """Turn a weight into a RowWeight in place: other references to it (in an optimizer, a list) see the stand-in.

        The caller must have copied its numbers before.
        """
        weight.grad = None
        weight.data = torch.empty(0, weight.size(1), dtype=weight.dtype, device=weight.device)
        weight.__class__ = cls
        assert isinstance(weight, cls)
        return weight

    @property
    def grad(self) -> torch.Tensor | None:
        """Pending gradients of the table, one row for each row that took part: (rows, dim), or None.

        They are pushed as they are at the step, so in-place changes (clipping, unscaling) take effect.
        """
        found = self.pending.gradient(self.table) if self.pending is not None and self.is_shown else None
        if found is None and self.is_zeroed:
            with torch._C.DisableTorchFunctionSubclass():
                return torch.zeros_like(self)
        return found

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if self.pending is not None and (self.is_shown or gradient is None):
            self.pending.put_gradient(self.table, gradient)
        elif gradient is not None:
            raise ModelError(f"{self.name_in_model}: no gradient of its rows is in .grad, so none can be set")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, options = _name_of(func), kwargs or {}
        is_harmless = name in _HARMLESS or name in _ITSELF or (name.startswith(".") and name not in _NUMBERS)
        if not is_harmless and func is not torch.autograd.grad and not _keeps_shape(name, args):
            if _writes(name, args, options) or not (wholes := _wholes(args, options)):
                raise ModelError(_refusal(name, args, options))
            args, options = _with_wholes(args, wholes), _with_wholes(options, wholes)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **options)
            if name == ".data" and args[0].pending is not None:
                return _DataOfRows.of(args[0], found)
            return args[0]._like(found) if name in _ITSELF and found is not args[0] else found

    def __deepcopy__(self, memo: dict[int, Any]) -> RowWeight:
        """A copy that belongs to no table yet."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = torch.Tensor._make_subclass(type(self), self.data.clone(), self.requires_grad)
        copied: RowWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter; fleet.distributed_model converts it back."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch._utils._rebuild_parameter, (self.data, self.requires_grad, OrderedDict())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowWeight(table={self.table!r}, shape={tuple(self.shape)}, requires_grad={self.requires_grad})"

    def _like(self, moved: torch.Tensor) -> RowWeight:
        """The same weight on another device or in another type: still without numbers."""
        made: RowWeight = torch.Tensor._make_subclass(type(self), moved, False)
        made.path, made.table = self.path, self.table
        return made

    @property
    def name_in_model(self) -> str:
        """For messages. (`name` is an attribute of every tensor.)"""
        place = f"'{self.path}.weight'" if self.path else "the weight of a SparseEmbedding"
        return f"{place} (table '{self.table}')" if self.table else place


class _DataOfRows(torch.Tensor):
    """`.data` of a weight whose rows are on servers: empty, so that a write into it would be lost."""

    owner: str

    @classmethod
    def of(cls, weight: RowWeight, empty: torch.Tensor) -> torch.Tensor:
        made: _DataOfRows = torch.Tensor._make_subclass(cls, empty, False)
        made.owner = weight.name_in_model
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, options = _name_of(func), kwargs or {}
        written = next((to for to in (*args[:1], options.get("out")) if isinstance(to, cls)), None)
        if written is not None and (_is_in_place(name) or "out" in options):
            raise ModelError(
                f"{written.owner}.data: {name} would write into an empty tensor, and be lost: its rows are on the "
                "servers. Leave this weight out. To hold rows in bounds: fleet.nn.SparseEmbedding(weight_bounds=...). "
                "To set them: load_state_dict, or before fleet.distributed_model."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **options)


class _ReadOnly(torch.autograd.Function):
    """The rows of a weight that is read whole. Nothing can be trained through it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, rows: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ModelError(
            f"{ctx.name} was read as a whole, in eval mode, and backward reached it: its rows are on the servers and "
            "learn from lookups alone. To predict, compute under torch.no_grad(). To train a weight that is used "
            "whole, leave the embedding dense: sparse=False."
        )


def _wholes(args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """By the id of each RowWeight among the arguments: all of its rows. Empty if one of them cannot be read."""
    found: dict[int, torch.Tensor] = {}
    for weight in _flat([args, options]):
        if isinstance(weight, RowWeight) and id(weight) not in found:
            rows = None if weight.reader is None else weight.reader()
            if rows is None:
                return {}
            if torch.is_grad_enabled() and weight.requires_grad:
                anchor = torch.zeros((), requires_grad=True)
                rows = _ReadOnly.apply(anchor, rows, weight.name_in_model)  # type: ignore[no-untyped-call]
            found[id(weight)] = rows
    return found


def _with_wholes(value: Any, wholes: Mapping[int, torch.Tensor]) -> Any:
    """The arguments with rows in the place of weights."""
    if isinstance(value, RowWeight):
        return wholes[id(value)]
    if isinstance(value, dict):
        return {name: _with_wholes(inner, wholes) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_wholes(inner, wholes) for inner in value)
    return value


def _writes(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether the call would change a RowWeight, or put hooks on it."""
    if name in _HOOKS or name.startswith("=") or any(isinstance(to, RowWeight) for to in _flat(options.get("out"))):
        return True
    is_in_place = name == "backward" or _is_in_place(name)
    # torch.nn.init passes its tensor by name
    return is_in_place and any(isinstance(to, RowWeight) for to in (*args[:1], *options.values()))


def _is_in_place(name: str) -> bool:
    return name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _name_of(func: Callable[..., Any]) -> str:
    """`square` for a function or method, `.device` for reading and `=data` for setting an attribute."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        attribute: Any = func.__self__  # type: ignore[attr-defined]
        return f"{'.' if name == '__get__' else '='}{attribute.__name__}"
    return name


def _keeps_shape(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the call sets data of the same, empty shape (a move, or a saved weight), or another attribute."""
    if name in ("=data", "copy_"):
        return isinstance(args[0], RowWeight) and tuple(args[0].shape) == tuple(args[1].shape)
    return name.startswith("=")


def _refusal(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    weight = next(found for found in _flat([args, options]) if isinstance(found, RowWeight))
    owner = f"{weight.path}." if weight.path else "embedding."
    if name in _HOOKS:
        return (
            f"{weight.name_in_model}: {name} would never be called, as gradients of rows go to the servers. Look at "
            "the weight's .grad after backward, from which they are pushed."
        )
    return (
        f"{weight.name_in_model} was used in {name.strip('.=')}, and it is empty: its rows are on the servers. To look "
        f"rows up, call the module. To predict with all of them: model.eval() first, if the table's size is declared, "
        f"or fleet.to_plain(model), which has the rows in plain parameters. To train a weight that is used whole: "
        f"leave the embedding dense (sparse=False), or tie it before fleet.distributed_model. For a term of the loss "
        f"on the rows of this batch: {owner}batch_rows() after the lookups. For weight decay: 'row_weight_decay' in "
        "its param group (and tell libraries that add such terms by themselves to leave them out; deepctr-torch: "
        "l2_reg_embedding=0, l2_reg_linear=0). First values: set them before fleet.distributed_model, or give an "
        "initializer."
    )


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _flat(inner)
    else:
        yield value
