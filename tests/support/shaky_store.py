"""A coordinator that can be away, lose its answers, or carry changes out later; for tests on virtual time."""

from __future__ import annotations

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.ps.coordination.view import Coordinator, View


class ShakyStore:
    """As Coordinator. A repeated change is carried out at most once: this store does not compare a change
    with one that it made before."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.is_away = False
        self.loses_next = False  # the next change is made, its answer is lost, and the store is away then
        self.delays_next = False  # the next change is made when `deliver` is called
        self._late: list[tuple[int, View | None, View]] = []

    def read(self, shard: int) -> View | None:
        self._check()
        return self._coordinator.read(shard)

    def replace(self, shard: int, before: View | None, after: View) -> bool:
        self._check()
        if self.delays_next:
            self._late.append((shard, before, after))
        elif self._coordinator.read(shard) != before:
            return False
        else:
            made = self._coordinator.replace(shard, before, after)
            if not self.loses_next:
                return made
        self.is_away, self.loses_next, self.delays_next = True, False, False
        raise CoordinatorUnreachable("the answer is lost")

    def renew(self) -> None:
        self._check()

    def deliver(self) -> None:
        """Make the changes that were delayed."""
        while self._late:
            self._coordinator.replace(*self._late.pop(0))

    def _check(self) -> None:
        if self.is_away:
            raise CoordinatorUnreachable("the store is away")
