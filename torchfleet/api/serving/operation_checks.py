"""What the allowed operations of a saved network may be given: refused arguments, and sizes that torch does not check.

torch trusts some sizes: a fused LSTM reads its weights as if they had the sizes of the input, attention reads as many
keys as there are values, weight normalization as many factors as there are rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchfleet.api.serving.allowed_operations import ALLOWED
from torchfleet.base.errors import ModelError

DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
)
_MAX_SCALE = 1e4  # of a picture that is enlarged: kernels convert places in it to integers without a check
_MAX_WINDOW = 1 << 16  # stride, padding, ... of a convolution or pooling
_MAX_EXPONENT = 16  # of a size
_WINDOWS = ("conv", "max_pool", "avg_pool")
_RECURRENT = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # gates

Function = Callable[..., Any]


def operation(name: str) -> Function:
    """The function of an allowed operation, "aten.NAME.OVERLOAD" or "operator.NAME". Raises ModelError for others."""
    space, _, rest = name.partition(".")
    if space == "operator" and rest in _ARITHMETIC:
        return _ARITHMETIC[rest]
    packet, _, overload = rest.partition(".")
    if space == "aten" and overload in ALLOWED.get(packet, ()):
        found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if isinstance(found, torch._ops.OpOverload):
            return _CHECKED.get(packet, found)
    raise ModelError(
        f"the network has the operation {name!r:.80}, which is not one of those that a saved network may have: see "
        "allowed_operations.py"
    )


def schema_of(name: str) -> Any:
    """torch's schema of an operation "aten.NAME.OVERLOAD"; None for other names."""
    space, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)._schema if space == "aten" else None


def check_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ModelError for an argument that an allowed operation may not have."""
    schema = schema_of(name)
    if schema is None:
        return
    names = [argument.name for argument in schema.arguments]
    if len(args) > len(names) or not {*kwargs} <= {*names[len(args) :]}:
        raise ModelError(f"the network gives {name} {len(args)} arguments and {', '.join(kwargs) or 'no others'}")
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    packet = name.split(".")[1]
    for argument, value in given.items():
        if not _is_allowed(packet, argument, value):
            raise ModelError(f"the network gives {name} {argument}={value!r:.60}, which a saved network may not give")
    if (
        packet == "instance_norm"
        and given.get("use_input_stats") is not False
        and given.get("running_mean") is not None
    ):
        raise ModelError("the network has an instance_norm that changes its running mean: save it in eval mode")


def _is_allowed(packet: str, argument: str, value: Any) -> bool:  # noqa: PLR0911  a table of rules
    if value is None:
        return packet != "batch_norm" or argument != "training"
    if argument in ("pin_memory", "train", "training"):
        return value is False
    if argument in ("generator", "sorter", "path"):
        return False
    if argument == "layout":
        return value is torch.strided
    if argument == "dropout_p":
        return type(value) in (int, float) and value == 0
    if argument == "num_classes":
        return type(value) is int and value > 0  # -1 makes a tensor of the size of the largest id
    if packet.startswith("upsample") and argument.startswith("scale"):
        return all(_is_scale(one) for one in (value if isinstance(value, list) else [value]))
    if argument == "pad" or (argument == "padding" and "_pad" in packet):
        return packet == "constant_pad_nd" or _is_padding(value)
    if packet.startswith(_WINDOWS) and argument in ("stride", "padding", "dilation", "kernel_size", "output_padding"):
        sizes = value if isinstance(value, list) else [value]
        return all(type(size) is str or (type(size) is int and 0 <= size <= _MAX_WINDOW) for size in sizes)
    return True


def _is_scale(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 1 / _MAX_SCALE <= value <= _MAX_SCALE)


def _is_padding(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int for size in value)


def _pad(tensor: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode != "constant" and any(size < 0 for size in pad):
        raise ModelError(f"the network pads by {list(pad)} with mode {mode}: expected numbers from 0 on")
    return torch.ops.aten.pad.default(tensor, pad, mode, value)


def _check(is_right: bool, what: str, *tensors: torch.Tensor) -> None:
    if not is_right:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ModelError(f"the sizes of the network's {what} do not fit each other: {shapes}")


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **rest: Any,
) -> Any:
    fits = min(query.dim(), key.dim()) >= 2 and key.shape[:-1] == value.shape[:-1]
    _check(fits and query.shape[-1] == key.shape[-1], "attention", query, key, value)
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, attn_mask, *args, **rest)


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> Any:
    fits = g.dim() == v.dim() and 0 <= dim < v.dim()
    fits = fits and all(size == (v.shape[i] if i == dim else 1) for i, size in enumerate(g.shape))
    _check(fits, "weight normalization", v, g)
    return torch.ops.aten._weight_norm.default(v, g, dim)


def _batch_norm_in_eval(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """_native_batch_norm_legit_no_training does not compare sizes; batch_norm does, and computes the same."""
    normed: torch.Tensor = torch.ops.aten.batch_norm.default(
        tensor, weight, bias, running_mean, running_var, False, momentum, eps, False
    )
    return normed, tensor.new_zeros(0), tensor.new_zeros(0)


def _recurrent(packet: str, num_gates: int) -> Function:
    """An RNN of several layers, whose weights are compared with the sizes of its input and state."""
    inner = getattr(torch.ops.aten, packet).input

    def run(
        tensor: torch.Tensor, hx: Any, params: Sequence[torch.Tensor], has_biases: bool, num_layers: int, *rest: Any
    ) -> Any:
        _, _, bidirectional, batch_first = rest
        states = [*hx] if isinstance(hx, (list, tuple)) else [hx]
        ways = 2 if bidirectional else 1
        is_whole = tensor.dim() == 3 and len(states) == (2 if packet == "lstm" else 1) and tensor.shape[2] > 0
        _check(is_whole and all(state.dim() == 3 for state in states), packet, tensor, *states)
        batch, hidden = tensor.shape[0 if batch_first else 1], states[0].shape[2]
        _check(all((*state.shape,) == (num_layers * ways, batch, hidden) for state in states), packet, tensor, *states)
        own: list[tuple[int, ...]] = []
        for layer in range(num_layers):
            num_inputs = tensor.shape[2] if layer == 0 else hidden * ways
            both = [(num_gates * hidden, num_inputs), (num_gates * hidden, hidden)]
            own += (both + [(num_gates * hidden,)] * 2 * bool(has_biases)) * ways
        _check([(*one.shape,) for one in params] == own, f"{packet}'s weights", *params)
        _check(len({one.dtype for one in (tensor, *states, *params)}) == 1, f"{packet}'s types", tensor)
        return inner(tensor, hx, params, has_biases, num_layers, *rest)

    return run


_CHECKED: Mapping[str, Function] = {
    "pad": _pad,
    "scaled_dot_product_attention": _attention,
    "_weight_norm": _weight_norm,
    "_native_batch_norm_legit_no_training": _batch_norm_in_eval,
    **{packet: _recurrent(packet, num_gates) for packet, num_gates in _RECURRENT.items()},
}


def _arithmetic(name: str) -> Function:
    """Arithmetic on sizes; anything else, such as a list times a number, is refused."""
    function: Function = getattr(operator, name)
    numbers = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)

    def run(*given: Any) -> Any:
        if not all(isinstance(one, numbers) for one in given) or (name == "pow" and not _is_small(given[-1])):
            raise ModelError(f"the network computes {name} of {given!r:.80}: expected sizes")
        found = function(*given)
        if type(found) is int and not -(1 << 63) <= found < 1 << 63:
            raise ModelError(f"the network computes a size of more than 64 bits, by {name}")
        return found

    return run


def _is_small(exponent: Any) -> bool:
    return type(exponent) in (int, float) and abs(exponent) <= _MAX_EXPONENT


def _item(parts: Any, place: Any) -> Any:
    """One of several results."""
    if not isinstance(parts, (list, tuple)) or type(place) is not int:
        raise ModelError(f"the network takes item {place!r:.40} of a {type(parts).__name__}: expected several results")
    return parts[place]


_ARITHMETIC: Mapping[str, Function] = {
    name: _arithmetic(name)
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge")
} | {"getitem": _item}
