"""Planted bugs of primaries, backups, coordinators, and clients of both. See planted.py."""

from __future__ import annotations

from typing import Any

from support.faults.planted import Patch, bug
from support.faults.simulated_etcd import SimulatedEtcd

from torchfleet.ps.coordination.view import View
from torchfleet.ps.net import replica_channels
from torchfleet.ps.net.replica_channels import ReplicaChannels, envelope_of
from torchfleet.ps.server.log.log_entry import Kind, decode_entry
from torchfleet.ps.server.replicas import follower, primary, silence
from torchfleet.ps.server.replicas.backup_sink import BackupSink
from torchfleet.ps.server.replicas.between import is_of_replicas
from torchfleet.ps.server.replicas.follower import Fate, Follower
from torchfleet.ps.server.replicas.pace import LEASE
from torchfleet.ps.server.replicas.primary import Primary
from torchfleet.ps.server.replicas.replica import Replica

REPLICAS = ("replicas",)
FILLED = 20  # messages: more than a backup is filled with at the start


@bug("primary: replies do not wait for the backup", REPLICAS)
def _(patch: Patch) -> None:
    patch(BackupSink, "confirmed", lambda self: 1 << 62)


@bug("primary: a backup is named before it has the whole state", REPLICAS)
def _(patch: Patch) -> None:
    def join_at_once(self: Primary) -> None:
        if self._sink is not None:
            self._sink.is_counted = True
            self._replace(self.view.joined_by(self._backup))

    patch(Primary, "_join", join_at_once)


@bug("primary: goes on alone without asking the coordinator", REPLICAS)
def _(patch: Patch) -> None:
    replace = Primary._replace

    def replace_alone(self: Primary, view: View) -> bool:
        if view.backup:
            return replace(self, view)
        self._use(view)
        return True

    patch(Primary, "_replace", replace_alone)


@bug("primary: answers after its lease has ended", REPLICAS)
def _(patch: Patch) -> None:
    patch(Primary, "is_sure", lambda self, now: not self.is_deposed)


@bug("primary: its lease counts from when the answer came", REPLICAS)
def _(patch: Patch) -> None:
    confirm = Primary.confirm

    def confirm_late(self: Primary, message: Any, now: float) -> None:
        confirm(self, message, now)
        if message.client == self._session:
            self._lease = max(self._lease, now + LEASE)

    patch(Primary, "confirm", confirm_late)


@bug("primary: does not look who is primary when it hears of a later term", REPLICAS)
def _(patch: Patch) -> None:
    patch(Primary, "check_view", lambda self: None)


@bug("primary: what a backup has not confirmed is not sent again", REPLICAS)
def _(patch: Patch) -> None:
    patch(primary, "BackupSink", type("Hasty", (BackupSink,), {"_flush": _flush_once}))


def _flush_once(self: Any) -> None:
    while self._num_sent < len(self._kept):
        if self._kept[self._num_sent][0] > getattr(self, "_highest", 0):
            if not self._channel.send(self._kept[self._num_sent][2]):
                return
            self._highest = self._kept[self._num_sent][0]
        self._num_sent += 1


@bug("primary: entries that are made while a backup is filled do not go there", REPLICAS)
def _(patch: Patch) -> None:
    append = BackupSink.append

    def append_if_counted(self: BackupSink, index: int, entry: Any) -> None:
        if self.is_counted or decode_entry(entry).kind == Kind.PIECE:
            append(self, index, entry)

    patch(BackupSink, "append", append_if_counted)


@bug("backup: confirms what has not come", REPLICAS)
def _(patch: Patch) -> None:
    confirm = follower.confirm

    def confirm_more(own: Any, term: int, number: int, stamped: int) -> Any:
        return confirm(own, term, number + (number > FILLED), stamped)

    patch(follower, "confirm", confirm_more)


@bug("backup: takes over without asking the coordinator", REPLICAS)
def _(patch: Patch) -> None:
    look = Follower._look_for_end

    def take_over(self: Follower, now: float) -> Fate:
        fate = look(self, now)
        if fate is Fate.WAITS and self.view is not None and self.view.backup:
            self.view = self.view.taken_over()
            return Fate.TAKES_OVER
        return fate

    patch(Follower, "_look_for_end", take_over)


@bug("backup: takes over although the view does not name it", REPLICAS)
def _(patch: Patch) -> None:
    look = Follower._look_for_end

    def take_over(self: Follower, now: float) -> Fate:
        view = self._coordinator.read(self._own.shard)
        if view is not None and not view.backup and view.primary == self._primary and self.replay.is_complete:
            after = View(view.term + 1, self._own.name)
            if self._coordinator.replace(self._own.shard, view, after):
                self.view = after
                return Fate.TAKES_OVER
        return look(self, now)

    patch(Follower, "_look_for_end", take_over)


@bug("backup: takes over while the lease of the primary runs", REPLICAS)
def _(patch: Patch) -> None:
    patch(follower, "SILENCE", 0.25)
    patch(silence, "_MARGIN", 0.0)  # else the limit is what messages that come every 0.2 s make of it


@bug("backup: answers clients", REPLICAS)
def _(patch: Patch) -> None:
    handle = Replica.handle

    def answer(self: Replica, peer: Any, frames: Any, role: Any) -> Any:
        envelope = envelope_of(frames)
        if self._primary is None and envelope is not None and not is_of_replicas(envelope.command):
            return self._server.handle(peer, frames, role)
        return handle(self, peer, frames, role)

    patch(Replica, "handle", answer)


@bug("backup: a message that comes twice is applied twice", REPLICAS)
def _(patch: Patch) -> None:
    take = Follower.take

    def take_any(self: Follower, message: Any) -> Any:
        if message.call == self._number and self._number:
            self._number -= 1
        return take(self, message)

    patch(Follower, "take", take_any)


@bug("coordinator: swaps without comparing", REPLICAS)
def _(patch: Patch) -> None:
    patch(SimulatedEtcd, "_is_equal", lambda self, compared: True)


@bug("coordinator: a term is given twice", REPLICAS)
def _(patch: Patch) -> None:
    patch(View, "taken_over", lambda self: View(self.term, self.backup))


@bug("client: goes back to a replica that was primary in an earlier term", REPLICAS)
def _(patch: Patch) -> None:
    is_for_client = ReplicaChannels._is_for_client

    def forget_term(self: ReplicaChannels, number: int, frames: Any) -> bool:
        envelope = replica_channels.envelope_of(frames)
        if envelope is not None and not replica_channels._is_refusal(frames):
            self.term = min(self.term, envelope.term)
        return is_for_client(self, number, frames)

    patch(ReplicaChannels, "_is_for_client", forget_term)
