"""Planted bugs of meetings, of geo and of long requests. See planted.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.faults.planted import Patch, bug, patch_command

from torchfleet.ps.net.wire import Command
from torchfleet.ps.server import commands, long_work
from torchfleet.ps.server.meeting.barrier import Barriers
from torchfleet.ps.server.meeting.file_lists import FileLists
from torchfleet.ps.server.meeting.file_pass import Holder, Pass
from torchfleet.ps.server.meeting.gathering import Gatherings
from torchfleet.ps.server.meeting.mail import Mail
from torchfleet.ps.server.state.changes import Changes


@bug("barrier: opens one worker early", script="meetings")
def _(patch: Patch) -> None:
    num_there = Barriers._num_there
    patch(Barriers, "_num_there", lambda self, meeting: num_there(self, meeting) + (len(meeting.waiting) > 1))


@bug("barrier: a late copy counts for the next one of its name", script="meetings")
def _(patch: Patch) -> None:
    patch_command(patch, Command.BARRIER, replace(commands.COMMANDS[Command.BARRIER], once=False))


@bug("gather: replies are not kept for a repeat", script="meetings")
def _(patch: Patch) -> None:
    patch(Gatherings, "_keep", lambda self, name, request, _: self._rounds.pop((name, request.message.worker)))


@bug("gather: a late copy of an earlier round takes part in the next", script="meetings")
def _(patch: Patch) -> None:
    arrive = Gatherings.arrive

    def arrive_anew(self: Gatherings, body: Any, request: Any) -> Any:
        kept = self._kept.get(request.message.client)
        if kept is not None and body.round < kept[0]:
            body.round = kept[0] + 1
        return arrive(self, body, request)

    patch(Gatherings, "arrive", arrive_anew)


@bug("mail: a repeated parcel is kept twice", script="meetings")
def _(patch: Patch) -> None:
    send = Mail.send

    def send_again(self: Mail, sender: int, body: Any, parcel: Any) -> bool:
        self._topic(body.topic, sender).sent.clear()
        return send(self, sender, body, parcel)

    patch(Mail, "send", send_again)


@bug("mail: a parcel is forgotten before it has arrived", script="meetings")
def _(patch: Patch) -> None:
    take = Mail.take

    def take_and_forget(self: Mail, worker: int, body: Any) -> Any:
        taken = take(self, worker, body)
        if taken:
            body.received = taken[-1][0]
            take(self, worker, body)
        return taken

    patch(Mail, "take", take_and_forget)


@bug("files: a repeated wish gets another file", script="meetings")
def _(patch: Patch) -> None:
    following = Pass.next_file

    def next_file(self: Pass, client: int, wish: int) -> Any:
        self.holders[client].answered = (0, "", "")
        return following(self, client, wish)

    patch(Pass, "next_file", next_file)


@bug("files: a file that is said to be done twice counts twice", script="meetings")
def _(patch: Patch) -> None:
    ask = FileLists.ask

    def ask_and_count(self: FileLists, client: int, worker: int, body: Any, *more: Any) -> Any:
        current = self._passes.get((body.name, body.number))
        if not isinstance(current, int) and current is not None and client in current.holders:
            current.num_done += sum(path not in current.holders[client].files for path in body.done)
        return ask(self, client, worker, body, *more)

    patch(FileLists, "ask", ask_and_count)


@bug("files: a lease is not renewed by a word of its holder", script="meetings")
def _(patch: Patch) -> None:
    holder_of = Pass.holder

    def found(self: Pass, client: int, worker: int, lease: float, now: float) -> Holder:
        known = self.holders.get(client)
        heard = known.heard if known is not None else now
        holder = holder_of(self, client, worker, lease, now)
        holder.heard = heard
        return holder

    patch(Pass, "holder", found)


@bug("geo: a reply that was lost is not made again", script="geo")
def _(patch: Patch) -> None:
    since = Changes.since

    def since_last(self: Changes, worker: int, received: int, *more: Any) -> Any:
        return since(self, worker, self._numbers.get(worker, 0) if received else 0, *more)

    patch(Changes, "since", since_last)


@bug("clock: a late copy of an old request turns it back", script="policies")
def _(patch: Patch) -> None:
    def set_clock(state: Any, request: Any) -> Any:
        body = long_work.unpack(long_work.only(request), long_work.ClockBody)
        state.work.requests.pop(body.token, None)
        return long_work.set_clock(state, request)

    patch_command(patch, Command.CLOCK, replace(commands.COMMANDS[Command.CLOCK], run=set_clock))
