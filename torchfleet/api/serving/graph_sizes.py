"""The memory that a network needs, by its shapes alone: computed on torch's `meta` device, which allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchfleet.api.serving.network_graph import (
    ROWS,
    NetworkGraph,
    Step,
    constants_of,
    dtype_named,
    filled,
    steps_of,
)
from torchfleet.api.serving.operation_checks import schema_of
from torchfleet.base.errors import ModelError
from torchfleet.data.features import Feature

MAX_BYTES = 1 << 30  # of all results of a network together, for each sample
_NUMS = (1, 1024)  # samples of the batches that are looked at; ragged features have as many values


def check_sizes(graph: NetworkGraph, features: Sequence[Feature], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError if the shapes of a network's operations do not fit each other, or need too much memory."""
    known = {feature.name: feature for feature in features}
    lost = [source.feature for source in graph.inputs if source.feature not in known]
    lost += [name for name in graph.parameters if name not in parameters]
    if lost:
        raise ModelError(f"the network reads {', '.join(lost)}, which the saved model does not have")
    steps = [_OnMeta(step) for step in steps_of(graph)]
    given = [torch.empty_like(parameters[name], device="meta") for name in graph.parameters]
    given += [constant.to("meta") for constant in constants_of(graph)]
    for num in _NUMS:
        inputs = [_input_of(known[source.feature], source.part, num) for source in graph.inputs]
        values: list[Any] = [*inputs, *given, *[None] * len(graph.nodes)]
        _check(steps, values, num)


def rows_like(step: Step, values: Sequence[Any], device: str) -> torch.Tensor:
    """Zeros of the shape that a lookup returns."""
    if step.op == ROWS:
        ids, _, dim = (filled(arg, values) for arg in step.args[:3])
        return torch.zeros(*ids.shape, dim, device=device)
    slots, offsets, dim = (filled(step.args[i], values) for i in (0, 1, 4))
    num = len(slots[0] if offsets[0] is None else offsets[0])
    return torch.zeros(num, len(slots), dim, device=device)


class _OnMeta:
    """A step whose new tensors are made on the meta device."""

    def __init__(self, step: Step) -> None:
        self.step = step
        schema = None if step.function is None else schema_of(step.op)
        arguments = [] if schema is None else schema.arguments
        self._names = [argument.name for argument in arguments]
        self._makes = "device" in self._names and not any(str(one.type) == "Tensor" for one in arguments)

    def run(self, values: list[Any]) -> None:
        step = self.step
        if step.function is None:
            values[step.number] = rows_like(step, values, "meta")
            return
        args = [_on_meta(filled(arg, values)) for arg in step.args]
        kwargs = {name: _on_meta(filled(arg, values)) for name, arg in step.kwargs.items()}
        if self._makes and "device" not in self._names[: len(args)]:
            kwargs["device"] = torch.device("meta")
        if step.op in ("aten.index.Tensor", "aten.index_put.default"):
            args[1] = [part for index in args[1] for part in _as_indices(index)]
            if step.op == "aten.index_put.default":
                args[2] = args[2].expand(1) if args[2].dim() == 0 else args[2]
        function = torch.ops.aten.reshape.default if step.op == "aten.view.default" else step.function
        values[step.number] = function(*args, **kwargs)  # strides may be others than those of the real computation


def _as_indices(index: Any) -> list[Any]:
    """A mask as the indices that it stands for if all of it is true."""
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64, device="meta") for _ in range(index.dim())]


def _on_meta(arg: Any) -> Any:
    return torch.device("meta") if isinstance(arg, torch.device) else arg


def _check(steps: Sequence[_OnMeta], values: list[Any], num: int) -> None:
    limit, sizes = num * MAX_BYTES, dict[int, int]()
    for one in steps:
        try:
            one.run(values)
        except ModelError:
            raise
        except Exception as error:  # torch raises errors of many kinds
            why = " ".join(str(error).strip().splitlines()[:1])[:200]
            raise ModelError(f"the network's operation {one.step.op} cannot be computed: {why}") from None
        for tensor in _tensors(values[one.step.number]):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        if (found := sum(sizes.values())) > limit:
            raise ModelError(
                f"the network needs more than {limit >> 20} MiB for {num} samples (at its operation {one.step.op}: "
                f"{found >> 20} MiB): expected at most {MAX_BYTES >> 20} MiB for each sample"
            )


def _tensors(found: Any) -> list[torch.Tensor]:
    parts = found if isinstance(found, (list, tuple)) else [found]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _input_of(feature: Feature, part: str, num: int) -> torch.Tensor:
    dtype = torch.int64 if part == "offsets" else dtype_named(feature.dtype)
    shape = [] if part == "offsets" or feature.shape is None else feature.shape
    return torch.empty(num, *shape, dtype=dtype, device="meta")
