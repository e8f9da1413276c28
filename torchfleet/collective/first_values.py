"""Memory and initial values for a model that was sharded before it had any.

    with torch.device("meta"):
        model = Net()                              # shapes, and no memory
    model = fleet.distributed_model(model)         # sharded; then this rank's own part is made, on its device

Modules draw their own values, with `reset_parameters` (or `_reset_parameters`) and with `_init_weights(module)` of the
innermost enclosing module that defines it, innermost modules first. Before each module, the random state is seeded with
rank 0's torch.initial_seed() and the module's name. So values depend neither on the sharding nor on the number of
ranks. The device holds one whole module at a time.

A model that already has values is kept in host memory and sharded without them; then every rank copies its own part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from torchfleet.base.errors import ModelError
from torchfleet.collective.tensors.local_tensors import local
from torchfleet.collective.tensors.shard_offsets import offset_of

Slot = tuple[dict[str, Any], str]  # a module's parameters or buffers, and a name among them


def is_without_memory(model: torch.nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def set_aside(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by all their names. The model keeps parameters of the same shapes without memory."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    bare: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta:
                continue
            if id(parameter) not in bare:
                made = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                vars(made).update(vars(parameter))
                bare[id(parameter)] = made
            module._parameters[name] = bare[id(parameter)]
    return {name: parameter for name, parameter in whole.items() if not parameter.is_meta}


class Filling:
    """Gives memory and values to a model's tensors: from `whole` if it has their name, else drawn by their modules.

    device  where the model computes, and where values are drawn
    home    where parameters stay: the device, or host memory if they are offloaded, page-locked for a GPU
    """

    def __init__(
        self, device: torch.device, home: torch.device, seed: int, whole: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._device, self._home, self._seed, self._whole = device, home, seed, whole
        self._pinned = home.type == "cpu" and device.type == "cuda"
        self._made: dict[torch.Tensor, torch.Tensor] = {}  # by the tensor without memory: tied tensors stay tied
        self._parts: dict[torch.Tensor, torch.Tensor] = {}  # allocated, and not filled yet

    @torch.no_grad()
    def fill(self, model: torch.nn.Module) -> None:
        self._allocate_parts(model)
        for name, module, initializers in _innermost_first(model):
            own = [slot for slot in _slots(module) if slot[0][slot[1]].is_meta]
            if own:
                self._fill_module(name, module, own, initializers)
        for module in model.modules():
            for tensors, key in _slots(module):
                self._move(tensors, key, key in module._parameters)
        model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # tells FSDP2 of its new parameters

    def _allocate_parts(self, model: torch.nn.Module) -> None:
        """Allocate all parts before whole modules: parts allocated between whole modules would fragment the heap."""
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta and hasattr(tensor, "placements"):
                home = self._home if isinstance(tensor, torch.nn.Parameter) else self._device
                self._parts[tensor] = torch.empty_like(tensor.detach(), device=home, pin_memory=self._pinned)

    def _fill_module(self, name: str, module: torch.nn.Module, own: list[Slot], initializers: list[Any]) -> None:
        prefix = name + "." if name else ""
        drawn: dict[str, torch.Tensor] = {}
        if any(tensors[key] not in self._made and prefix + key not in self._whole for tensors, key in own):
            drawn = self._draw(name, module, own, initializers)
        for tensors, key in own:
            bare = tensors[key]
            if bare not in self._made:
                given = self._whole.get(prefix + key)
                self._made[bare] = self._placed(bare, drawn[key] if given is None else given)
            tensors[key] = self._made[bare]

    def _draw(
        self, name: str, module: torch.nn.Module, own: list[Slot], initializers: list[Any]
    ) -> dict[str, torch.Tensor]:
        """Whole tensors of this module, with the initial values that it draws."""
        bare = [tensors[key] for tensors, key in own]
        for (tensors, key), tensor in zip(own, bare, strict=True):
            tensors[key] = _unset(tensor, self._device)
        counts = {key: tensors[key]._version for tensors, key in own}
        made = {key: tensors[key] for tensors, key in own}
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._device:
            torch.manual_seed(seed_of(self._seed, name))
            for initialize in initializers:
                initialize()
        for tensors, key in own:
            if _is_unset(tensors[key], made[key], counts[key]):
                raise ModelError(_without_values(name, module, key))
        drawn = {key: tensors[key] for tensors, key in own}
        for (tensors, key), tensor in zip(own, bare, strict=True):
            tensors[key] = tensor
        return drawn

    def _placed(self, bare: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of `whole`, on the device and with the sharding of `bare`."""
        is_parameter = isinstance(bare, torch.nn.Parameter)
        if not hasattr(bare, "placements"):
            home = self._home if is_parameter else self._device
            whole.data = whole.data.to(home, bare.dtype)
            vars(whole).update(vars(bare))
            return whole  # if it was given: the user's own object
        box = tuple(slice(at, at + size) for at, size in zip(offset_of(bare), local(bare).shape, strict=True))
        values = self._parts.pop(bare)
        local(values).copy_(whole.detach()[box])
        return torch.nn.Parameter(values, bare.requires_grad) if is_parameter else values

    def _move(self, tensors: dict[str, Any], key: str, is_parameter: bool) -> None:
        """Move a tensor that always had values and is not sharded."""
        tensor, home = tensors[key], self._home if is_parameter else self._device
        if tensor.device.type != home.type:
            if is_parameter:
                tensor.data = tensor.data.to(home)
            else:
                tensors[key] = tensor.to(home)


def seed_of(seed: int, name: str) -> int:
    """The seed of a module's initial values: it depends only on the job's seed and the module's name."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _slots(module: torch.nn.Module) -> list[Slot]:
    return [
        (tensors, key)
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items()
        if tensor is not None
    ]


def _innermost_first(
    module: torch.nn.Module, name: str = "", around: Callable[[torch.nn.Module], object] | None = None
) -> Iterator[tuple[str, torch.nn.Module, list[Callable[[], object]]]]:
    """(name, module, its initializers), in the order of construction: children before their parents."""
    around = getattr(module, "_init_weights", around)
    for own, child in module.named_children():
        yield from _innermost_first(child, f"{name}.{own}" if name else own, around)
    found: list[Callable[[], object]] = []
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        found.append(reset)
    if around is not None:
        found.append(lambda: around(module))
    yield name, module, found


def _unset(bare: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A whole tensor that shows whether an initializer has written to it."""
    whole = torch.empty(bare.shape, dtype=bare.dtype, device=device)
    if whole.is_floating_point():
        whole.fill_(torch.nan)
    return torch.nn.Parameter(whole, bare.requires_grad) if isinstance(bare, torch.nn.Parameter) else whole


def _is_unset(now: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    if now.is_floating_point():
        return bool(now.isnan().any())
    return now is before and now._version == version


def _without_values(name: str, module: torch.nn.Module, key: str) -> str:
    place = f"'{name}.{key}'" if name else f"'{key}'"
    return (
        f"{place} is on the meta device, and nothing gives it values: a {type(module).__name__} has no "
        f"reset_parameters() that sets '{key}'. Write one, or _init_weights(module) in the model, or make the tensor "
        "with device='cpu'."
    )


def share_seed(gather: Callable[[bytes], Iterable[bytes]]) -> int:
    """Rank 0's torch.initial_seed(). All ranks call it together."""
    return int(next(iter(gather(str(torch.initial_seed()).encode()))))
