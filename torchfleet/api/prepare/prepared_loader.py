"""A worker's share of a DataLoader, as fleet.prepare returns it: still a DataLoader, and of the same class."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchfleet.api import training_passes
from torchfleet.api.prepare.loader_place import Batches, LoaderPlace
from torchfleet.collective.tensors.outputs import map_tensors


class PreparedLoader(DataLoader[Any]):
    """This worker's batches, on the model's device, through fleet.prefetch. For a loader of a subclass it is of that
    subclass, too, with the loader's attributes and methods. What is set on it is seen by the code that makes batches.
    """

    # The attributes of a DataLoader are in __dict__, which belongs to the loader.
    __slots__ = ("_fleet_batches", "_fleet_device", "_fleet_place")
    _fleet_batches: Batches
    _fleet_device: torch.device
    _fleet_place: LoaderPlace

    is_prefetched = True

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self._fleet_place.batches()
        source = batches if self._fleet_device.type == "cpu" else _Moved(batches, self._fleet_device)
        return self._fleet_place.followed(training_passes.prefetch(source))

    def __len__(self) -> int:
        return len(self._fleet_batches)

    def state_dict(self) -> dict[str, Any]:
        """The place in the present pass: how many batches were given, and the random numbers of its order."""
        return self._fleet_place.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on at this place. It reads and drops the batches before it."""
        self._fleet_place.load_state_dict(state_dict)


class _Moved:
    """Batches on a device."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self._batches, self._device = batches, device

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield map_tensors(lambda tensor: tensor.to(self._device, non_blocking=True), batch)

    def __len__(self) -> int:
        return len(self._batches)


def prepared_loader(loader: DataLoader[Any], share: Batches, device: torch.device) -> PreparedLoader:
    """`share`: the batches of this worker, from `loader`, as shared_loader returns them."""
    kind: Any = type(loader)
    made: Any = object.__new__(_class_of(kind))
    object.__setattr__(made, "__dict__", vars(share if isinstance(share, DataLoader) else loader))
    object.__setattr__(made, "_fleet_batches", share)
    object.__setattr__(made, "_fleet_device", device)
    object.__setattr__(made, "_fleet_place", LoaderPlace(share))
    return made  # type: ignore[no-any-return]


@functools.cache
def _class_of(kind: Any) -> type[PreparedLoader]:
    if kind is DataLoader:
        return PreparedLoader
    body = {"__slots__": (), "__module__": __name__, "__doc__": kind.__doc__}
    return types.new_class(f"Prepared{kind.__name__}", (PreparedLoader, kind), exec_body=lambda made: made.update(body))
