"""Tensors of a model as the block of one dense table: the trained ones, and the ones that are only kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.checkpoint.byte_words import num_words, to_bytes, to_words
from torchfleet.ps.checkpoint.manifest import Parameter
from torchfleet.ps.tables.settings.spec import Rule, TableSpec, default_kind
from torchfleet.ps.worker.client.shard import Floats
from torchfleet.ps.worker.row_state.table_rows import without_rows


@dataclass(frozen=True)
class Written:
    """The numbers of a block before and after a script has written into its parameters."""

    new: Floats
    old: Floats

    def over(self, values: Floats) -> Floats:
        """Other values of the block, with those that the script has written."""
        return np.where(self.new != self.old, self.new, values.reshape(-1))

    @property
    def values(self) -> Floats:
        """What the script has written; NaN where it has written nothing."""
        return self.over(np.full_like(self.old, np.nan))

    @property
    def differences(self) -> Floats:
        return self.new - self.old


@dataclass
class DenseGroup:
    """The dense parameters of one param group: one table."""

    spec: TableSpec
    names: list[str]
    parameters: Sequence[torch.Tensor]
    group: dict[str, Any]
    # what the parameters held when they were last written by `write` or read by `take_written`; empty: not watched
    _known: Sequence[torch.Tensor] = field(default=(), repr=False)

    def layout(self) -> list[Parameter]:
        """The place of each parameter in the block."""
        ends = np.cumsum([0, *(parameter.numel() for parameter in self.parameters)])
        triples = zip(self.names, self.parameters, ends[:-1], strict=True)
        return [Parameter(name, list(tensor.shape), int(start)) for name, tensor, start in triples]

    def values(self) -> Floats:
        return _flat([parameter.detach() for parameter in self.parameters])

    def gradients(self, given: Mapping[int, torch.Tensor | None] | None = None) -> Floats:
        """The given gradients, by the parameter's id, or those in .grad. A parameter without a gradient
        counts as zero.
        """
        grads = []
        for parameter in self.parameters:
            grad = parameter.grad if given is None else given[id(parameter)]
            if grad is None:
                grad = torch.zeros_like(parameter)
            grads.append(grad.to_dense() if grad.is_sparse else grad)
        return _flat(grads)

    def write(self, values: Floats, unnoticed: bool = False) -> None:
        """`unnoticed`: hide the write from autograd, which would otherwise refuse a backward pass running in another
        thread.
        """
        block = torch.from_numpy(np.ascontiguousarray(values, np.float32).reshape(-1))
        targets, sizes = [], []
        for parameter in self.parameters:
            targets.append(parameter.data if unnoticed else parameter)
            sizes.append(parameter.numel())
        parts = list(map(torch.Tensor.view_as, torch.split(block, sizes), targets))
        with torch.no_grad():
            torch._foreach_copy_(targets, parts)
        if self._known and not _is_exporting():
            self._known = [part.to(target.device) for part, target in zip(parts, targets, strict=True)]

    def watch(self) -> None:
        """From now on, `take_written` finds what the script writes into the parameters."""
        self._known = [parameter.detach().clone() for parameter in self.parameters]

    def has_changed(self) -> bool:
        """Whether a value differs from what it was at the last `write` or `watch`."""
        return bool(self._known) and not _are_equal(self.parameters, self._known)

    def take_written(self) -> Written | None:
        """What the script has written into the parameters since the last `write`, `watch` or call of this; None if
        nothing. Raises ModelError for values that servers cannot hold, and names the parameter.

        Compares values: no counter of torch notices `p.data.clamp_()`, `p.data = q` and writes through numpy.
        """
        if not self._known or _is_exporting() or _are_equal(self.parameters, self._known):
            return None
        now = [parameter.detach() for parameter in self.parameters]
        for name, tensor, known in zip(self.names, now, self._known, strict=True):
            if kind_of(tensor) != kind_of(known):
                raise ModelError(
                    f"parameter '{name}' was {kind_of(known)}, and is {kind_of(tensor)} now: the servers step it, so "
                    "it keeps its type and shape during a job. Change the model before fleet.distributed_model."
                )
            if not bool(torch.isfinite(tensor).all()):
                raise ModelError(
                    f"parameter '{name}' holds NaN or infinity, which the script has written into it, and servers hold "
                    "finite values: write others."
                )
        taken = [tensor.clone() for tensor in now]  # before it is compared: other threads may write
        found = Written(_flat(taken), _flat(list(self._known)))
        self._known = taken
        return None if np.array_equal(found.new, found.old) else found  # the same on another device


class Kept(Sequence[torch.Tensor]):
    """Tensors of a model that are not trained, with their current values.

    A module may replace a buffer by another tensor at any time (`self.steps = self.steps + 1`), so they are looked up
    by name at each access.
    """

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        self._places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        self._names = names
        self._kinds = [kind_of(self._tensor(i)) for i in range(len(names))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        """Raises ModelError if the model has a different kind of tensor there than at the start."""
        if not isinstance(index, int):
            return [self[i] for i in range(*index.indices(len(self)))]
        tensor = self._tensor(range(len(self))[index])
        found = kind_of(tensor) if isinstance(tensor, torch.Tensor) else repr(tensor)
        if found != self._kinds[index]:
            raise ModelError(
                f"'{self._names[index]}' was {self._kinds[index]} when the tables were made, and is {found} now: a "
                "buffer keeps its type and shape during a job"
            )
        return tensor

    def _tensor(self, index: int) -> Any:
        module, name = self._places[index]
        return getattr(module, name)


class FixedGroup(DenseGroup):
    """Float32 parameters and buffers that are not trained: one table, which gets no pushes."""

    def values(self) -> Floats:
        for name, tensor in zip(self.names, self.parameters, strict=True):
            if not bool(torch.isfinite(tensor).all()):
                raise ModelError(
                    f"'{name}' holds NaN or infinity, and a table holds finite float32 values. Keep it as "
                    "float64, which may hold them, or register it as a plain attribute."
                )
        return super().values()


class BytesGroup(DenseGroup):
    """Untrained tensors of types other than float32: one table of their bytes, encoded by checkpoint/byte_words.py."""

    def layout(self) -> list[Parameter]:
        sizes = [num_words(tensor.nbytes) for tensor in self.parameters]
        starts = np.cumsum([0, *sizes]).tolist()
        return [
            Parameter(name, list(tensor.shape), start, type_of(tensor), size)
            for name, tensor, start, size in zip(self.names, self.parameters, starts, sizes, strict=False)
        ]

    def values(self) -> Floats:
        return np.concatenate([to_words(_bytes(tensor).numpy()) for tensor in self.parameters])

    def write(self, values: Floats, unnoticed: bool = False) -> None:
        flat = np.asarray(values).reshape(-1)
        for place, tensor in zip(self.layout(), self.parameters, strict=True):
            write_words(tensor, flat[place.start : place.start + place.size], place.name)


def write_words(tensor: torch.Tensor, words: Floats, name: str) -> None:
    """Set a tensor of any type from its words."""
    data = torch.from_numpy(to_bytes(words, tensor.nbytes, name).copy())
    with torch.no_grad():
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def type_of(tensor: torch.Tensor) -> str:
    """Its dtype as in manifests: int64, bfloat16, ..."""
    return str(tensor.dtype).removeprefix("torch.")


def kind_of(tensor: torch.Tensor) -> str:
    """Type and shape, for messages and comparisons."""
    return f"{type_of(tensor)} of shape {tuple(tensor.shape)}"


def _is_exporting() -> bool:
    """Whether torch.export, torch.func or the like calls the model with tensors that have no values of their own."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _are_equal(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether all values are equal. Waits for a device once. A step calls it: it makes one pass, in one function."""
    on_devices = []
    for tensor, other in zip(tensors, others, strict=True):
        now = tensor.detach()
        if now.dtype != other.dtype or now.shape != other.shape or now.device != other.device:
            return False
        if not now.is_cpu:
            on_devices.append((now != other).any())
        elif type(now) is torch.Tensor:
            if not np.array_equal(now.numpy(), other.numpy()):  # half the time of torch.equal
                return False
        elif not torch.equal(now, other):
            return False
    return not on_devices or not bool(torch.stack(on_devices).any())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _flat(parts: list[torch.Tensor]) -> Floats:
    rows, num, is_here = [], 0, True
    for part in parts:
        rows.append(part.detach().reshape(-1))
        num, is_here = num + part.numel(), is_here and part.is_cpu
    if not is_here:
        moved: Floats = torch.cat(rows).cpu().numpy()
        return moved
    # Into numpy's memory, which stays with the process: torch may return its own to the system at every step.
    flat = np.empty(num, np.float32)
    torch.cat(rows, out=torch.from_numpy(flat))
    return flat


def block_spec(name: str, size: int, num_servers: int, rule: Rule | None = None) -> TableSpec:
    """A dense table of `size` numbers."""
    kind = default_kind(is_dense=True, has_size=True)
    return TableSpec(name, kind, size=size, rule=rule or Rule(), num_shards=num_servers)


def check_buffers(model: torch.nn.Module) -> None:
    """Raise ModelError for buffers that cannot be kept, whichever parameters are trained."""
    state = _state(model)
    _refuse_extra_state(state)
    buffers = dict(model.named_buffers())
    _check_kept({name: value for name, value in buffers.items() if value.dtype == torch.float32 or name in state})


def fixed_groups(model: torch.nn.Module, trained: set[int], num_servers: int) -> list[DenseGroup]:
    """One table for the untrained float32 parameters and buffers, one for those of other types."""
    found = {id(tensor): (name, tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    kept = dict(named for number, named in found.items() if number not in trained and named[1].numel())
    groups: list[DenseGroup] = []
    floats = [name for name, tensor in kept.items() if tensor.dtype == torch.float32]
    # Non-persistent buffers, such as those computed from others, are not part of a model's state.
    state = _state(model)
    others = [name for name, tensor in kept.items() if tensor.dtype != torch.float32 and name in state]
    _check_kept({name: kept[name] for name in (*floats, *others)})
    if floats:
        spec = block_spec("dense.fixed", sum(kept[n].numel() for n in floats), num_servers)
        groups.append(FixedGroup(spec, floats, Kept(model, floats), {"lr": 0.0}))
    if others:
        size = sum(num_words(kept[name].nbytes) for name in others)
        spec = block_spec("dense.bytes", size, num_servers)
        groups.append(BytesGroup(spec, others, Kept(model, others), {"lr": 0.0}))
    return groups


def saved_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a save contains: all of a state_dict, and float32 buffers that it omits."""
    found, kept = {**dict(model.named_parameters()), **dict(model.named_buffers())}, _state(model)
    return {n: tensor for n, tensor in found.items() if tensor.numel() and (tensor.dtype == torch.float32 or n in kept)}


def _check_kept(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "a meta tensor" if tensor.is_meta else str(tensor.layout)
            raise ModelError(
                f"'{name}' is {kind}, and only plain tensors can be saved and sent to all workers: keep its parts "
                "(indices and values, say) as buffers of their own, or make it non-persistent"
            )


def _state(model: torch.nn.Module) -> dict[str, Any]:
    with without_rows():
        return model.state_dict()


def _refuse_extra_state(state: Mapping[str, Any]) -> None:
    """Raise an error for get_extra_state: it is neither parameter nor buffer, and would be lost silently."""
    for name, value in state.items():
        if name.endswith("_extra_state") and isinstance(value, torch.Tensor):
            raise ModelError(
                f"'{name}' comes from get_extra_state, and only parameters and buffers are saved: hold the tensor "
                "with register_buffer"
            )
