"""Planted bugs that show when answers are lost, clocks differ or machines are busy. See planted.py."""

from __future__ import annotations

from typing import Any

from support.faults.planted import Patch, bug

from torchfleet.base.errors import FleetError
from torchfleet.ps.coordination import etcd_gateway
from torchfleet.ps.coordination.etcd_coordinator import EtcdCoordinator
from torchfleet.ps.server.replicas import primary
from torchfleet.ps.server.replicas.follower import Fate, Follower
from torchfleet.ps.server.replicas.pace import SILENCE
from torchfleet.ps.server.replicas.primary import Primary

REPLICAS = ("replicas",)


@bug("coordinator: an answer with an error ends the process that has the rows", REPLICAS)
def _(patch: Patch) -> None:
    checked = etcd_gateway._checked

    def end(status: int, *more: Any) -> Any:
        if status >= 500:
            raise FleetError(f"etcd answered with status {status}")
        return checked(status, *more)

    patch(etcd_gateway, "_checked", end)


@bug("backup: takes its own name in the view for being dropped", REPLICAS)
def _(patch: Patch) -> None:
    look = Follower._look_for_end

    def look_and_drop(self: Follower, *more: Any) -> Fate:
        fate = look(self, *more)
        return Fate.DROPPED if self._has_won else fate

    patch(Follower, "_look_for_end", look_and_drop)


@bug("backup: confirms entries after it has won the shard", REPLICAS, is_unlucky=True)
def _(patch: Patch) -> None:
    take = Follower.take

    def take_any(self: Follower, *more: Any) -> Any:
        has_won, self._has_won = self._has_won, False
        try:
            return take(self, *more)
        finally:
            self._has_won = has_won

    patch(Follower, "take", take_any)


@bug("backup: takes an unanswered claim for a success", REPLICAS)
def _(patch: Patch) -> None:
    replace = EtcdCoordinator.replace

    def replace_or_hope(self: EtcdCoordinator, *change: Any) -> bool:
        try:
            return replace(self, *change)
        except FleetError:
            return True

    patch(EtcdCoordinator, "replace", replace_or_hope)


@bug("primary: a change of the view that was not answered did not happen", REPLICAS, is_unlucky=True)
def _(patch: Patch) -> None:
    replace = Primary._replace

    def replace_and_forget(self: Primary, *change: Any) -> bool:
        done = replace(self, *change)
        self._is_unanswered = self._may_have_dropped = False
        return done

    patch(Primary, "_replace", replace_and_forget)


@bug("primary: its lease has no margin for clocks that differ", REPLICAS, is_unlucky=True)
def _(patch: Patch) -> None:
    patch(primary, "LEASE", SILENCE)
