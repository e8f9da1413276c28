"""Which modules of a model are gathered together when its parameters are cut over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from torchfleet.errors import ModelError

_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)


class Units:
    """The modules in the ModuleLists and Sequentials of a model, neighbours together up to `max_bytes` of parameters.

    A module larger than that is looked into for more. A module is no unit if a parameter of it is used outside of it
    too, or if it is never called itself; its parameters are then those of what is around it, in the end of the model.
    """

    def __init__(self, model: torch.nn.Module, max_bytes: float, left_out: Sequence[torch.Tensor] = ()) -> None:
        self._model, self._max_bytes = model, max_bytes
        self._uses = _uses(model)
        self._left_out = set(left_out)
        self._taken = set(left_out)  # parameters that belong to a unit already, or to none ever

    def find(self) -> Iterator[list[torch.nn.Module]]:
        """Innermost first, the model itself last. All parameters of a unit are of one type."""
        # The modules of a model that is traced are never called themselves.
        inside = [] if getattr(self._model, "fleet_traced", False) else self._inside(self._model)
        for unit in [*inside, [self._model]]:
            yield from self._one_type_each(unit)

    def _inside(self, module: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
        for container in _outermost_containers(module):
            unit: list[torch.nn.Module] = []
            for child in container.children():
                own = self._own_bytes(child)
                can_be_one = own > 0 and _is_called(child) and not self._shares(child)
                if own > 0 and unit and (not can_be_one or own + sum(map(self._own_bytes, unit)) > self._max_bytes):
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

    def _one_type_each(self, unit: list[torch.nn.Module]) -> Iterator[list[torch.nn.Module]]:
        """Modules of another type than what is around them (norms in float32 in a model of half precision) apart."""
        types = {module: kind for member in unit for module in member.modules() if (kind := self._type(module))}
        if len(set(types.values())) <= 1:
            yield self._take(unit)
            return
        for member in unit:
            inside = [module for module in member.modules() if module in types]
            sizes: Counter[torch.dtype] = Counter()
            for module in inside:
                sizes[types[module]] += self._own_bytes(module)
            if not sizes:
                continue
            around = types.get(member) or sizes.most_common(1)[0][0]
            for kind in sizes:
                if kind != around:
                    yield self._take([module for module in inside if types[module] == kind])
            yield self._take([member])

    def _type(self, module: torch.nn.Module) -> torch.dtype | None:
        """That of the module's very own parameters, as far as they are in no unit yet."""
        free = [parameter for parameter in module.parameters(recurse=False) if parameter not in self._taken]
        kinds = {parameter.dtype for parameter in free}
        if len(kinds) > 1:
            raise ModelError(
                f"sharding: a {type(module).__name__} has parameters of types {', '.join(sorted(map(str, kinds)))}; "
                "from stage 2 on those of one module must be of one type. Use sharding_configs={'stage': 1}."
            )
        return kinds.pop() if kinds else None

    def _take(self, unit: list[torch.nn.Module]) -> list[torch.nn.Module]:
        self._taken.update(parameter for module in unit for parameter in module.parameters())
        return unit


def _uses(module: torch.nn.Module) -> Counter[torch.Tensor]:
    """How many modules have each parameter; a module that stands at two places counts twice."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _is_called(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _outermost_containers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if isinstance(module, _CONTAINERS):
        yield module
        return
    for child in module.children():
        yield from _outermost_containers(child)
