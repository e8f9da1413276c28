"""What can go wrong, and how it is brought about. A new fault is a function and a line in FAULTS."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.chaos.fleets import ChaosError, Fleet, Member
from benchmarks.chaos.machines import Machines
from torchfleet.ps.server.replicas.between import replica_of

_STEPS = 5  # of every worker, by which a fault is over
_DISK = 8.0  # seconds that a disk is full
_LINK = 20.0


@dataclass
class Event:
    """One fault. `silent`: seconds that a worker at most spent between two steps, until all trained again."""

    what: str
    who: str
    begun: float
    silent: float = 0.0
    gone: set[tuple[int, str]] = field(default_factory=set)  # (shard, name in views) of replicas that were killed
    is_primary_killed: bool = False


Fault = Callable[[Fleet, random.Random], Event]


def primary_of(fleet: Fleet, shard: int) -> tuple[Member, str]:
    """Its process, and its name in the view; "" where there are no views."""
    replica, name = 0, ""
    if fleet.chosen.replicas == 2:
        view = fleet.view(shard)
        if view is None:
            raise ChaosError(f"shard {shard} has no primary")
        replica, name = replica_of(view.primary), view.primary
    member = fleet.member("server", shard, replica)
    if member is None:
        raise ChaosError(f"server {shard}.{replica} does not run")
    return member, name


def is_whole(fleet: Fleet, shard: int, gone: set[tuple[int, str]]) -> bool:
    """Whether a primary of it may be killed: it has a backup in step, or it runs and has a log."""
    if fleet.chosen.replicas == 1:
        return fleet.member("server", shard) is not None
    view = fleet.view(shard)
    return view is not None and bool(view.backup) and not {(shard, view.primary), (shard, view.backup)} & gone


def kill_primary(fleet: Fleet, shard: int) -> Event:
    member, name = primary_of(fleet, shard)
    event = Event("kill", f"primary {member.name}", time.monotonic(), is_primary_killed=True)
    member.process.kill()
    if name:
        event.gone.add((shard, name))
        fleet.wait(lambda: (view := fleet.view(shard)) and view.primary != name, f"new primary of shard {shard}")
    else:
        old = member.process.pid
        fleet.wait(
            lambda: (found := fleet.member("server", shard)) and found.process.pid != old, f"{member.name} again"
        )
    return _settled(fleet, event)


def _settled(fleet: Fleet, event: Event) -> Event:
    fleet.wait_for_steps(_STEPS)
    event.silent = fleet.board.silence(event.begun)
    return event


def _kill(fleet: Fleet, dice: random.Random) -> Event:
    """A primary, a backup, both at once if they have logs, or a worker."""
    kinds = [
        "primary",
        *(["backup"] if fleet.chosen.replicas == 2 else []),
        *(["both"] if fleet.chosen.replicas == 2 and fleet.chosen.durability else []),
        *([] if fleet.mode == "sync" else ["worker"]),
    ]
    kind, shard = dice.choice(kinds), dice.randrange(fleet.chosen.servers)
    if kind == "primary":
        return kill_primary(fleet, shard)
    if kind == "worker":
        return _kill_worker(fleet, dice.randrange(fleet.chosen.workers))
    if kind == "both":
        return _kill_both(fleet, shard)
    view = fleet.view(shard)
    if view is None:
        raise ChaosError(f"shard {shard} has no primary")
    member = fleet.member("server", shard, replica_of(view.backup))
    if member is None:
        raise ChaosError(f"the backup of shard {shard} does not run")
    event = Event("kill", f"backup {member.name}", time.monotonic(), gone={(shard, view.backup)})
    member.process.kill()
    return _settled(fleet, event)


def _kill_both(fleet: Fleet, shard: int) -> Event:
    """Both replicas of a server at once: one of them goes on from its log."""
    primary, name = primary_of(fleet, shard)
    view = fleet.view(shard)
    event = Event("kill", f"both replicas of server {shard}", time.monotonic(), is_primary_killed=True)
    backup = fleet.member("server", shard, replica_of(view.backup)) if view is not None and view.backup else None
    for member in (primary, backup):
        if member is not None:
            member.process.kill()
    event.gone |= {(shard, name), (shard, view.backup if view is not None else "")}
    fleet.wait(lambda: (now := fleet.view(shard)) and now.primary != name, f"new primary of shard {shard}")
    return _settled(fleet, event)


def _kill_worker(fleet: Fleet, index: int) -> Event:
    """In hybrid mode all workers start again."""
    member = fleet.member("worker", index)
    if member is None:
        raise ChaosError(f"worker {index} does not run")
    event, num = Event("kill", member.name, time.monotonic()), len(fleet.board.of(index))
    member.process.kill()
    fleet.wait(lambda: len(fleet.board.of(index)) > num, f"{member.name} again")
    return _settled(fleet, event)


def _stop(seconds: float) -> Fault:
    def stop(fleet: Fleet, dice: random.Random) -> Event:
        member, _ = primary_of(fleet, dice.randrange(fleet.chosen.servers))
        event = Event(f"stop {seconds:g} s", f"primary {member.name}", time.monotonic())
        member.process.send_signal(signal.SIGSTOP)
        _last(fleet, event, seconds, lambda: member.process.send_signal(signal.SIGCONT))
        return event

    return stop


def _cut(what: str, begin: Callable[[Machines, int], None], end: Callable[[Machines, int], None]) -> Fault:
    """Of a machine with a server, for a while."""

    def cut(fleet: Fleet, dice: random.Random) -> Event:
        assert fleet.machines is not None
        machine, network = 1 + dice.randrange(fleet.chosen.servers), fleet.machines
        event = Event(f"{what} {_LINK:g} s", f"machine {machine}", time.monotonic())
        begin(network, machine)
        _last(fleet, event, _LINK, lambda: end(network, machine))
        return event

    return cut


def _disk(fleet: Fleet, dice: random.Random) -> Event:
    assert fleet.disk is not None
    event = Event(f"disk full {_DISK:g} s", "logs of all servers", time.monotonic())
    fleet.disk.fill()
    _last(fleet, event, _DISK, fleet.disk.free)
    return event


def _last(fleet: Fleet, event: Event, seconds: float, end: Callable[[], None]) -> None:
    """Let a fault last, end it, and see how long workers were held up."""
    try:
        time.sleep(seconds)
    finally:
        end()
    _settled(fleet, event)


FAULTS: dict[str, Fault] = {
    "kill": _kill,
    "stop5": _stop(5.0),
    "stop40": _stop(40.0),
    "link": _cut("link down", Machines.pull_cable, Machines.plug_in),
    "oneway": _cut("one way lost", Machines.mute, Machines.unmute),
    "disk": _disk,
}
ON_LINKS = ("link", "oneway")
