"""The place of a loader in its data, which a save keeps: a pass that was interrupted goes on where it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from torchfleet.api.prepare.loader_shard import order_of
from torchfleet.api.prepare.shared_order import AllStates
from torchfleet.base.errors import CheckpointError

_Randoms = dict[str, Any]  # random states, by where they are


class Batches(Protocol):
    """A loader, or a share of one."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


class LoaderPlace:
    """How many batches of the present pass were given, and the random states from which the pass has its order."""

    def __init__(self, loader: Batches) -> None:
        self._loader, self._order, self._globals = loader, order_of(loader), AllStates()
        sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
        found = (
            getattr(loader, "generator", None),
            getattr(sampler, "generator", None),
            getattr(self._order, "generator", None),
        )
        self._generators = list({id(one): one for one in found if one is not None}.values())
        self._given = 0
        self._begun: _Randoms = {}  # as the present pass began; empty: no pass is under way
        self._resumed: tuple[int, _Randoms, _Randoms] | None = None  # where the next pass goes on

    def batches(self) -> Batches:
        """The loader's batches from its place on."""
        return _Rest(self, self._loader)

    def followed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """`batches`, of one pass, as the training loop gets them. Batches that are only read ahead do not count."""
        for batch in batches:
            self._given += 1
            yield batch
        self._given, self._begun = 0, {}

    def begin(self) -> Iterator[Any]:
        """A pass over the loader, or the rest of one."""
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._given, self._begun = 0, self._randoms()
            return iter(self._loader)
        self._given, self._begun, now = resumed
        outside = self._globals.get()
        self._set_randoms(self._begun)
        rest = iter(self._loader)
        num = sum(1 for _ in islice(rest, self._given))
        if num < self._given:
            raise CheckpointError(
                f"a loader goes on after {self._given} batches of its pass, and it has {num}: expected the data and "
                "the batch size of the save"
            )
        self._set_randoms({**now, "globals": outside})
        return rest

    def state_dict(self) -> dict[str, Any]:
        """As of the last batch that the training loop got."""
        if self._resumed is not None:  # loaded, and not iterated since
            given, begun, _ = self._resumed
            return {"given": given, "begun": begun, "now": self._own_randoms()}
        return {"given": self._given, "begun": self._begun, "now": self._own_randoms()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given, begun, now = (state_dict[name] for name in ("given", "begun", "now"))
        self._given, self._begun = 0, {}
        self._set_randoms(now)
        self._resumed = (given, begun, now) if begun else None

    def _randoms(self) -> _Randoms:
        return {"globals": self._globals.get(), **self._own_randoms()}

    def _own_randoms(self) -> _Randoms:
        """Without the global states of torch, numpy and Python, which are not the loader's."""
        found = {f"generator {number}": one.get_state() for number, one in enumerate(self._generators)}
        if self._order is not None and self._order.state is not None:
            found["order"] = self._order.state
        return found

    def _set_randoms(self, randoms: _Randoms) -> None:
        for number, generator in enumerate(self._generators):
            generator.set_state(randoms[f"generator {number}"])
        if self._order is not None and self._order.state is not None:
            self._order.state = randoms["order"]
        if "globals" in randoms:
            self._globals.set(randoms["globals"])


class _Rest:
    def __init__(self, place: LoaderPlace, loader: Batches) -> None:
        self._place, self._loader = place, loader

    def __iter__(self) -> Iterator[Any]:
        return self._place.begin()

    def __len__(self) -> int:
        return len(self._loader)
