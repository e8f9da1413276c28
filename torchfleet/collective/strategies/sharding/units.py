"""Finds the modules of a model that are gathered together when its parameters are sharded over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from torchfleet.base.errors import ModelError

MAX_SHARE = 0.25  # of the model's parameters, gathered together at the default of segment_broadcast_MB
_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)


class Kind(NamedTuple):
    """What the parameters of a unit have in common."""

    kept: torch.dtype
    gathered: torch.dtype  # dtype to which values are rounded when they are gathered


def _as_kept(module: torch.nn.Module, kept: torch.dtype) -> torch.dtype:
    return kept


def _is_traced(model: torch.nn.Module) -> bool:
    """Whether the model is traced, so that its modules are never called themselves."""
    return bool(getattr(model, "fleet_traced", False))


class Units:
    """The modules in the ModuleLists and Sequentials of a model, neighbours grouped up to `max_bytes` of parameters.

    `max_share`: the largest share of the model's parameters that neighbours have together. A module of more than
    `max_bytes` is searched for units inside. A module is not a unit if one of its parameters is also used outside of
    it, or if it is never called itself; its parameters then belong to the enclosing module, ultimately to the model.
    `gathered` returns the dtype in which a module's own parameters are gathered.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        max_bytes: float,
        left_out: Sequence[torch.Tensor] = (),
        gathered: Callable[[torch.nn.Module, torch.dtype], torch.dtype] = _as_kept,
        max_share: float = 1.0,
    ) -> None:
        self._model, self._max_bytes = model, max_bytes
        self._gathered = _as_kept if _is_traced(model) else gathered
        self._uses, self._users = _uses(model), _users(model)
        self._left_out = set(left_out)
        self._group_bytes = min(max_bytes, max_share * self._own_bytes(model))
        self._taken = set(left_out)  # parameters that already belong to a unit, or never will

    def find(self) -> Iterator[list[torch.nn.Module]]:
        """The units, innermost first, the model itself last. All parameters of a unit are of one kind."""
        yield from (unit for unit, _ in self.find_with_kinds())

    def find_with_kinds(self) -> Iterator[tuple[list[torch.nn.Module], Kind | None]]:
        """The units with their kinds; None if all parameters of a unit belong to other units."""
        inside = [] if _is_traced(self._model) else self._inside(self._model)
        for unit in [*inside, [self._model]]:
            yield from self._one_kind_each(unit)

    def _inside(self, module: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
        for container in _outermost_containers(module):
            unit: list[torch.nn.Module] = []
            for child in container.children():
                own = self._own_bytes(child)
                can_be_one = own > 0 and _is_called(child) and not self._shares(child)
                if own > 0 and unit and (not can_be_one or own + sum(map(self._own_bytes, unit)) > self._group_bytes):
                    yield unit
                    unit = []
                if own > self._max_bytes or not can_be_one:
                    yield from self._inside(child)
                if can_be_one:
                    unit.append(child)
            if unit:
                yield unit

    def _shares(self, module: torch.nn.Module) -> bool:
        return any(self._uses[parameter] > number for parameter, number in _uses(module).items())

    def _own_bytes(self, module: torch.nn.Module) -> int:
        return sum(
            parameter.numel() * parameter.element_size()
            for parameter in module.parameters()
            if parameter not in self._left_out
        )

    def _one_kind_each(self, unit: list[torch.nn.Module]) -> Iterator[tuple[list[torch.nn.Module], Kind | None]]:
        """Separate modules of another kind than the enclosing one (norms in float32 in a half-precision model)."""
        kinds = {module: kind for member in unit for module in member.modules() if (kind := self._kind(module))}
        if len(set(kinds.values())) <= 1:
            yield self._take(unit), next(iter(kinds.values()), None)
            return
        for member in unit:
            inside = [module for module in member.modules() if module in kinds]
            sizes: Counter[Kind] = Counter()
            for module in inside:
                sizes[kinds[module]] += self._own_bytes(module)
            if not sizes:
                continue
            around = kinds.get(member) or sizes.most_common(1)[0][0]
            for kind in sizes:
                if kind != around:
                    yield self._take([module for module in inside if kinds[module] == kind]), kind
            yield self._take([member]), around

    def _kind(self, module: torch.nn.Module) -> Kind | None:
        """The kind of the module's own parameters that are in no unit yet."""
        free = [parameter for parameter in module.parameters(recurse=False) if parameter not in self._taken]
        kept = {parameter.dtype for parameter in free}
        if len(kept) > 1:
            raise ModelError(
                f"sharding: a {type(module).__name__} has parameters of types {', '.join(sorted(map(str, kept)))}; "
                "from stage 2 on those of one module must be of one type. Use sharding_configs={'stage': 1}."
            )
        if not kept:
            return None
        dtype = kept.pop()
        types = {self._gathered(user, dtype) for parameter in free for user in self._users[parameter]}
        # Half only if every user casts it: an embedding that is tied to a head would return half otherwise.
        return Kind(dtype, types.pop() if len(types) == 1 else dtype)

    def _take(self, unit: list[torch.nn.Module]) -> list[torch.nn.Module]:
        self._taken.update(parameter for module in unit for parameter in module.parameters())
        return unit


def _uses(module: torch.nn.Module) -> Counter[torch.Tensor]:
    """The number of modules that have each parameter; a module that occurs twice counts twice."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _users(model: torch.nn.Module) -> dict[torch.Tensor, list[torch.nn.Module]]:
    found: dict[torch.Tensor, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(parameter, []).append(module)
    return found


def _is_called(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _outermost_containers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if isinstance(module, _CONTAINERS):
        yield module
        return
    for child in module.children():
        yield from _outermost_containers(child)
