"""custom_white_list and custom_black_list of amp: functions that compute in a different precision than autocast
chooses.

torch.autocast chooses per operation, in the dispatcher. A name in a list overrides that choice: the operation's inputs
are cast first, wherever it is called, also inside nn.MultiheadAttention. A name of a Python function (`interpolate`) is
intercepted where Python calls it. An operation that is part of a fused kernel (softmax in scaled_dot_product_attention)
has no precision of its own there: that is an error.

The overrides apply to torch.autocast in this process, until the job is gone or another job uses amp.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.near_names import near_names

# Paddle's names that differ from torch's.
PADDLE = {"matmul_v2": "matmul", "elementwise_add": "add", "elementwise_mul": "mul",
           "elementwise_sub": "sub", "elementwise_div": "div", "reduce_sum": "sum", "reduce_mean": "mean",
           "softmax_with_cross_entropy": "cross_entropy", "lookup_table_v2": "embedding"}  # fmt: skip

# Functions whose operations have different names.
_OPERATIONS = {"cross_entropy": ("cross_entropy_loss",), "nll_loss": ("nll_loss_nd",), "grid_sample": ("grid_sampler",),
               "unfold": ("unfold", "im2col"), "fold": ("col2im",), "affine_grid": ("affine_grid_generator",),
               "norm": ("norm", "linalg_vector_norm")}  # fmt: skip

# Operations that one fused kernel may compute, and the operations inside.
_RECURRENT = ("linear", "matmul", "mm", "addmm", "sigmoid", "tanh", "relu")
_WHOLE = {
    "scaled_dot_product_attention": ("softmax", "matmul", "bmm", "baddbmm"),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"), _RECURRENT),
}

_PLACES = (torch.nn.functional, torch, torch.Tensor)
_KINDS = (torch.float32, torch.float16, torch.bfloat16)


class OpLists:
    """The lists of a job, in force from now on. Enter `mode`, if there is one, around forward.

    Names are those of torch, torch.nn.functional and torch.Tensor ("softmax", "linear", "conv2d", "matmul").
    """

    def __init__(self, white: Sequence[str], black: Sequence[str], device: str, dtype: torch.dtype) -> None:
        white_names, black_names = _names("custom_white_list", white), _names("custom_black_list", black)
        both = sorted(white_names & black_names)
        if both:
            raise StrategyError(
                f"amp_configs: '{both[0]}' is in custom_white_list and in custom_black_list: leave it in one of them"
            )
        kinds = {**dict.fromkeys(white_names, dtype), **dict.fromkeys(black_names, torch.float32)}
        self.black = black_names
        functions = {name: kind for name, kind in kinds.items() if not _operations(name)}
        self.mode = _Functions(functions, device) if functions else None
        _installed.undo()
        self._choices = _Choices(kinds, device)
        weakref.finalize(self, self._choices.undo)


class _Choices:
    """The changes to torch's dispatcher, until `undo`."""

    def __init__(self, kinds: dict[str, torch.dtype], device: str) -> None:
        global _installed
        self._undo: list[Callable[[], object]] = []
        _installed = self
        if kinds:
            self._register(kinds, f"Autocast{device.upper()}", device)
            if torch.backends.mha.get_fastpath_enabled():  # one kernel for a whole layer, in inference
                torch.backends.mha.set_fastpath_enabled(False)
                self._undo.append(partial(torch.backends.mha.set_fastpath_enabled, True))

    def undo(self) -> None:
        """Restore torch's own choices."""
        while self._undo:
            self._undo.pop()()

    def _register(self, kinds: dict[str, torch.dtype], key: str, device: str) -> None:
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._undo.append(library._destroy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel.*")
            for name, kind in kinds.items():
                for operation in _operations(name):
                    library.impl(_registered_name(operation), _in_precision(operation, kind, device), key)
            for whole, inside in _WHOLE.items():
                named = [name for name in inside if name in kinds]
                if named and whole not in kinds:
                    for operation in _operations(whole):
                        library.impl(_registered_name(operation), _refusal(whole, named[0]), key)


_installed = _Choices({}, "cpu")  # the changes of the last job


def _operations(name: str) -> list[Any]:
    """The operation's variants that return new tensors; empty for a Python function."""
    packets = [getattr(torch.ops.aten, found, None) for found in _OPERATIONS.get(name, (name,))]
    every = [getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()]
    return [operation for operation in every if not operation._schema.is_mutable and _takes_tensors(operation)]


def _takes_tensors(operation: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in operation._schema.arguments)


def _registered_name(operation: Any) -> str:
    name, overload = operation._schema.name.removeprefix("aten::"), operation._schema.overload_name
    return f"{name}.{overload}" if overload else name


def _in_precision(operation: Any, dtype: torch.dtype, device: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return operation(*_cast(args, dtype), **_cast(kwargs, dtype))

    return call


def _refusal(whole: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise ModelError(
            f"amp_configs: '{name}' is in a custom list, and the model calls {whole}, which computes it inside one "
            f"kernel, in the precision of the whole. Put '{whole}' into that list too."
        )

    return call


class _Functions(TorchFunctionMode):
    """A context in which Python functions named in `kinds` get floating-point inputs of that dtype."""

    def __init__(self, kinds: dict[str, torch.dtype], device: str) -> None:
        super().__init__()
        self._kinds, self._device = kinds, device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        dtype, kwargs = self._kinds.get(getattr(func, "__name__", "")), kwargs or {}
        if dtype is None:
            return func(*args, **kwargs)
        with torch.autocast(self._device, enabled=False):
            return func(*_cast(args, dtype), **_cast(kwargs, dtype))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda tensor: tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.dtype in _KINDS else tensor,
        values,
    )


def _names(option: str, names: Sequence[str]) -> set[str]:
    return set(_checked(option, names))


def _checked(option: str, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if not isinstance(name, str):
            raise StrategyError(f"amp_configs['{option}'] expects names of functions, found {name!r}")
        own = PADDLE.get(name, name)
        if not any(callable(getattr(place, own, None)) for place in _PLACES):
            known = sorted({found for place in _PLACES for found in dir(place) if not found.startswith("_")})
            raise StrategyError(
                f"amp_configs['{option}']: no function '{name}' in torch, torch.nn.functional or torch.Tensor; "
                f"near names: {near_names(name, known)}"
            )
        yield own
