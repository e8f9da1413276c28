"""Refusals of clients that exceed a limit. They are counted, answered with an error, and written to the log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from torchfleet.base.errors import FleetError, WireError
from torchfleet.ps.net.wire import (
    ERROR,
    Command,
    Frame,
    Message,
    Reply,
    call_of,
    decode,
    decode_reply,
    encode_reply,
    error_arrays,
)
from torchfleet.ps.server.state.counters import Counters

PAUSE = 1.0  # least seconds between two lines of the log


class Named(Protocol):
    """The server that the replies name."""

    incarnation: int
    term: int


class Refusals:
    """As HandlerRefusals. A refusal reveals nothing of the server's state, so it need not wait for earlier replies."""

    def __init__(self, server: Named, counters: Counters) -> None:
        self._server, self._counters = server, counters
        self.num = 0
        self._told_at = -PAUSE
        self._num_untold = 0

    def of_request(self, frames: Sequence[Frame], error: FleetError) -> list[Frame]:
        """As HandlerRefusals.of_request."""
        message = Message(Command.PING, call=call_of(frames))
        with contextlib.suppress(WireError):
            message = decode(frames)
        self._counters.num_requests += 1
        self.note(f"{name_of(message)}: {error}")
        return self._encoded(message.command, message.worker, message.call, error)

    def of_reply(self, reply: Sequence[Frame], error: FleetError) -> list[Frame]:
        """As HandlerRefusals.of_reply."""
        answer = decode_reply(reply)
        self.note(f"a reply to worker {answer.worker}: {error}")
        return self._encoded(answer.command, answer.worker, answer.call, error)

    def note(self, text: str) -> None:
        """As HandlerRefusals.note. Writes at most one line per PAUSE; the next line counts the refusals left out."""
        self.num += 1
        now = time.monotonic()
        if now - self._told_at < PAUSE:
            self._num_untold += 1
            return
        more = f" ({self._num_untold:,} more refusals since the last line)" if self._num_untold else ""
        self._told_at, self._num_untold = now, 0
        print(f"torchfleet server: refused: {text}{more}", file=sys.stderr, flush=True)

    def _encoded(self, command: int, worker: int, call: int, error: FleetError) -> list[Frame]:
        self._counters.num_errors += 1
        reply = Reply(command, ERROR, worker, self._server.incarnation, call, term=self._server.term)
        reply.arrays = error_arrays(type(error).__name__, str(error))
        return encode_reply(reply)


def name_of(message: Message) -> str:
    """A name of the request for the log."""
    command = Command(message.command).name if message.command in tuple(Command) else f"command {message.command}"
    return f"{command} of worker {message.worker}, client {message.client}"
