"""Bugs that can be switched on by name: what the schedules must find. Those of clients, sessions and sync steps.

A bug is a function that replaces something of torchfleet, by way of `patch`; leaving the context takes it out again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from torchfleet.ps.net.wire import Command, decode_reply, encode_reply
from torchfleet.ps.server import commands, server, sync_step
from torchfleet.ps.server.meeting.members import Members
from torchfleet.ps.server.state.sessions import Outcome, Sessions
from torchfleet.ps.worker.client.connection import Connection

Patch = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Bug:
    name: str
    install: Callable[[Patch], None]
    fleets: tuple[str, ...]  # in which it can show; none: in all
    script: str | None  # in which it shows soonest; None: in any
    is_unlucky: bool  # it shows in schedules with bad luck only, or nearly so


BUGS: dict[str, Bug] = {}


def bug(
    name: str, fleets: tuple[str, ...] = (), script: str | None = None, is_unlucky: bool = False
) -> Callable[[Callable[[Patch], None]], None]:
    """Plant one. `fleets`, `script`, `is_unlucky`: as in Bug."""

    def register(install: Callable[[Patch], None]) -> None:
        assert name not in BUGS, f"two bugs are called {name!r}"
        BUGS[name] = Bug(name, install, fleets, script, is_unlucky)

    return register


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Within this, the package has the bug."""
    with contextlib.ExitStack() as stack:
        BUGS[name].install(
            lambda owner, attribute, other: stack.enter_context(mock.patch.object(owner, attribute, other))
        )
        yield


@bug("client: a request is sent again with a new sequence number")
def _(patch: Patch) -> None:
    send_again = Connection._send_again

    def with_new_number(self: Connection, calls: Any, now: float) -> None:
        for call in calls:
            if call.sequence:
                call.sequence = call.message.sequence = self._next_sequence
                self._next_sequence += 1
        send_again(self, calls, now)

    patch(Connection, "_send_again", with_new_number)


@bug("client: the floor passes changes that are not answered", script="tokens")
def _(patch: Patch) -> None:
    patch(Connection, "_floor", lambda self: self._next_sequence)


@bug("client: a late reply is taken for the answer to another call")
def _(patch: Patch) -> None:
    take = Connection._take

    def take_for_oldest(self: Connection, frames: Any) -> None:
        reply = decode_reply(frames)
        same = [call.number for call in self._calls.values() if call.command == reply.command]
        if reply.call not in self._calls and same:
            reply.call = same[0]
        take(self, encode_reply(reply))

    patch(Connection, "_take", take_for_oldest)


@bug("client: is another one to the server after a reconnection")
def _(patch: Patch) -> None:
    send_again = Connection._send_again

    def send_as_another(self: Connection, calls: Any, now: float) -> None:
        for call in calls:
            call.message.client += 1
        send_again(self, calls, now)

    patch(Connection, "_send_again", send_as_another)


@bug("sessions: repeats are applied again")
def _(patch: Patch) -> None:
    patch(Sessions, "begin", lambda *_: Outcome.RUNNING)


@bug("sessions: a change raises the floor to its own number", script="tokens")
def _(patch: Patch) -> None:
    begin = Sessions.begin

    def begin_too_high(self: Sessions, client: int, sequence: int, floor: int, *more: Any) -> Any:
        return begin(self, client, sequence, sequence, *more)

    patch(Sessions, "begin", begin_too_high)


@bug("sessions: outcomes are not kept")
def _(patch: Patch) -> None:
    patch(Sessions, "settle", lambda *_: None)


@bug("sessions: a change that still waits is acknowledged to a repeat")
def _(patch: Patch) -> None:
    begin = Sessions.begin

    def begin_settled(self: Sessions, client: int, sequence: int, *more: Any) -> Any:
        is_running = self.is_running(client, sequence)
        found = begin(self, client, sequence, *more)
        return Outcome.APPLIED if is_running else found

    patch(Sessions, "begin", begin_settled)


@bug("sessions: a refused change is remembered as applied", script="tokens")
def _(patch: Patch) -> None:
    settle = Sessions.settle
    patch(Sessions, "settle", lambda self, client, sequence, _: settle(self, client, sequence, Outcome.APPLIED))


@bug("pull: a repeat counts again", script="tokens")
def _(patch: Patch) -> None:
    handler = commands.COMMANDS[Command.PULL]
    patch_command(patch, Command.PULL, replace(handler, again=handler.run))


def patch_command(patch: Patch, command: Command, handler: Any) -> None:
    patch(server, "COMMANDS", {**commands.COMMANDS, command: handler})


@bug("sync: a step is closed when one worker is missing", script="sync")
def _(patch: Patch) -> None:
    expected = Members.expected

    def all_but_one(self: Members, num_workers: int) -> set[int]:
        return set(sorted(expected(self, num_workers))[1:])

    mock_expected = mock.patch.object(Members, "expected", all_but_one)
    patch(commands, "keep_for_step", _within(mock_expected, sync_step.keep_for_step))


@bug("sync: gradients are summed in the order in which they came", script="sync")
def _(patch: Patch) -> None:
    mock_sorted = mock.patch.object(sync_step, "sorted", list, create=True)
    patch(sync_step, "_make_step", _within(mock_sorted, sync_step._make_step))


def _within(context: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with context:
            return function(*arguments)

    return call
