"""Computes the blocks of a model for CPU workers: a forward pass keeps its graph until its backward pass.

The values of a block belong to the worker that calls it. A heter worker has a copy of them for each of its workers, and
no other state of their training: another heter worker computes the same from the same message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchfleet.base.errors import FleetError, ModelError, SessionLost, WireError
from torchfleet.ps.net.wire import Array, pack
from torchfleet.ps.worker.heter.blocks import Block
from torchfleet.ps.worker.heter.messages import (
    MAX_KEPT,
    MAX_TENSORS,
    Backward,
    BlockSpec,
    Forward,
    Forwarded,
    Gradients,
    TensorSpec,
)
from torchfleet.ps.worker.heter.tensors import DTYPES, from_array, from_arrays, spec_of, to_array

Outputs = tuple[str, list[str], list[torch.Tensor]]  # kind, keys of a dict, tensors


@dataclass
class KeptPass:
    """A forward pass that may get a backward pass: its outputs, and the tensors whose gradients are wanted."""

    outputs: list[torch.Tensor]
    wanted: list[torch.Tensor]


@dataclass
class WorkerValues:
    """What a heter worker holds for one CPU worker."""

    values: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)  # by block
    kept: dict[int, KeptPass] = field(default_factory=dict)  # by the number of the forward pass


class BlockRunner:
    """Runs blocks on a device. Belongs to one thread."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self._blocks, self._device = list(blocks), device
        for block in blocks:
            block.module.to(device)
        self.specs: list[BlockSpec] = [block.spec() for block in blocks]

    def forward(self, worker: WorkerValues, body: Forward, arrays: Sequence[Array]) -> list[Array]:
        """Compute a forward pass. Raises WireError for a message that does not fit the block, ModelError if the block
        itself fails, SessionLost if values are missing."""
        worker.kept = {number: kept for number, kept in worker.kept.items() if number in body.kept}
        if body.block >= len(self._blocks):
            raise WireError(f"expected one of {len(self._blocks)} blocks, found number {body.block}")
        block, num_inputs = self._blocks[body.block], len(body.inputs)
        inputs = from_arrays(body.inputs, arrays[:num_inputs], self._device)
        values = self._values(worker, body, arrays[num_inputs:])
        num_params = len(block.parameters())
        leaves = self._leaves([*inputs, *values[:num_params]], body.wanted)
        buffers = [value.clone() for value in values[num_params:]]  # the block may change them
        named = dict(zip(block.value_names, [*leaves[num_inputs:], *buffers], strict=True))
        # Copies: a block may write into its inputs (inplace=True), which torch refuses for leaves.
        given = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves[:num_inputs]]
        kind, keys, outputs = self._run(block, body, named, given)
        if body.wanted:
            if len(worker.kept) >= MAX_KEPT:
                raise WireError(f"{MAX_KEPT} forward passes wait for their backward pass already")
            worker.kept[body.number] = KeptPass(outputs, [leaves[place] for place in body.wanted])
        before = values[num_params:]
        changed = [i for i, buffer in enumerate(buffers) if not torch.equal(buffer, before[i])]
        specs = [spec_of(output, f"an output of '{block.name}'") for output in outputs]
        grads = [output.requires_grad for output in outputs]
        sent = [*outputs, *(buffers[i] for i in changed)]
        return [pack(Forwarded(specs, kind, keys, grads, changed)), *map(to_array, sent)]  # type: ignore[arg-type]

    def backward(self, worker: WorkerValues, body: Backward, arrays: Sequence[Array]) -> list[Array]:
        """Compute a backward pass. The graph is kept for further ones, until `Forward.kept` no longer lists it.

        Raises the errors of `forward`.
        """
        kept = worker.kept.get(body.number)
        if kept is None:
            raise SessionLost(f"forward pass {body.number} is not here")
        grads = from_arrays(body.grads, arrays, self._device)
        if len(body.given) != len(grads) or not all(place < len(kept.outputs) for place in body.given):
            raise WireError(f"expected gradients of {len(kept.outputs)} outputs, found {body.given!r:.100}")
        outputs = [kept.outputs[place] for place in body.given]
        for output, grad in zip(outputs, grads, strict=True):
            if output.shape != grad.shape or not output.requires_grad:
                raise WireError(f"a gradient of shape {tuple(grad.shape)} for an output of {tuple(output.shape)}")
        with _failing("the backward pass of a block"):
            found = torch.autograd.grad(outputs, kept.wanted, grads, retain_graph=True, allow_unused=True)
        there = [i for i, grad in enumerate(found) if grad is not None]
        sent = [grad for grad in found if grad is not None]
        specs = [TensorSpec(str(grad.dtype).removeprefix("torch."), tuple(grad.shape)) for grad in sent]
        return [pack(Gradients(there, specs)), *map(to_array, sent)]

    def _values(self, worker: WorkerValues, body: Forward, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """The values of the block for this call, including the values that the message brings."""
        specs = self.specs[body.block].values
        if len(body.changed) != len(arrays) or not all(place < len(specs) for place in body.changed):
            raise WireError(f"expected values of {len(specs)} parameters and buffers, found {len(arrays)} arrays")
        values = worker.values.setdefault(body.block, [None] * len(specs))
        for place, array in zip(body.changed, arrays, strict=True):
            values[place] = from_array(specs[place], array, self._device)
        found = [value for value in values if value is not None]
        if len(found) < len(specs):
            raise SessionLost("parameters of this block have not come")
        return found

    @staticmethod
    def _leaves(tensors: Sequence[torch.Tensor], wanted: Sequence[int]) -> list[torch.Tensor]:
        """The tensors, with those at the places `wanted` replaced by leaves of a new graph, sharing their memory."""
        if wanted and (wanted[-1] >= len(tensors) or list(wanted) != sorted(set(wanted))):
            raise WireError(f"expected places of {len(tensors)} tensors in ascending order, found {wanted!r:.100}")
        leaves = list(tensors)
        for place in wanted:
            if not tensors[place].is_floating_point():
                raise WireError(f"a gradient of {tensors[place].dtype} is wanted")
            leaves[place] = tensors[place].detach().requires_grad_()
        return leaves

    def _run(
        self, block: Block, body: Forward, named: dict[str, torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Outputs:
        modules = list(block.module.modules())
        if len(body.training) != len(modules) or len(body.keywords) > len(inputs):
            raise WireError(f"expected the state of {len(modules)} modules, found {len(body.training)}")
        for module, training in zip(modules, body.training, strict=True):
            module.training = training
        first = len(inputs) - len(body.keywords)
        keywords = dict(zip(body.keywords, inputs[first:], strict=True))
        with _failing(f"'{block.name}'"), self._as_called(body):
            found = torch.func.functional_call(block.module, named, tuple(inputs[:first]), keywords)
            return _flat(found, block.name)

    @contextlib.contextmanager
    def _as_called(self, body: Forward) -> Iterator[None]:
        """Set up what the CPU worker sent about its call: random seed, autocast, whether gradients are wanted."""
        if body.autocast and body.autocast not in DTYPES:
            raise WireError(f"expected a dtype for autocast, found {body.autocast!r:.40}")
        devices = [self._device] if self._device.type == "cuda" else []
        dtype = DTYPES.get(body.autocast)
        with (
            torch.random.fork_rng(devices),
            torch.autocast(self._device.type, dtype, enabled=dtype is not None),
            torch.set_grad_enabled(bool(body.wanted)),
        ):
            torch.manual_seed(body.seed)
            yield


def _flat(found: Any, name: str) -> Outputs:
    """What a block returned: a tensor, or a tuple, list or dict of tensors. Raises ModelError for anything else."""
    if isinstance(found, torch.Tensor):
        return "tensor", [], [found]
    kind = next((known.__name__ for known in (tuple, list, dict) if isinstance(found, known)), None)
    parts = list(found.values()) if isinstance(found, dict) else list(found) if kind else []
    keys = list(found) if isinstance(found, dict) else []
    is_plain = all(isinstance(part, torch.Tensor) for part in parts) and all(isinstance(key, str) for key in keys)
    if kind is None or not is_plain or len(parts) > MAX_TENSORS:
        raise ModelError(
            f"'{name}' returned {type(found).__name__}, and a heter worker sends a tensor, or a tuple, list or dict of "
            "tensors: return these, or move the layer out of device_guard('gpu')"
        )
    return kind, keys, parts


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Raise errors of the user's code as ModelError, with which the CPU worker's call fails."""
    try:
        yield
    except FleetError:
        raise
    except Exception as error:
        raise ModelError(f"{what} failed on the heter worker: {type(error).__name__}: {error}") from error
