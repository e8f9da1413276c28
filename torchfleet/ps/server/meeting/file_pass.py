"""One pass over a list of files: which are waiting, which worker holds which, and what each client was told last."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torchfleet.base.errors import DataError

WAIT, END = "wait", "end"
MAX_CLIENTS = 8  # of one worker, known in one pass; a restarted worker has another client

Answer = tuple[int, str, str]  # a client's `take`, "file" or WAIT, the path
_NOTHING: Answer = (0, "", "")


@dataclass
class Holder:
    """A worker's process that takes files."""

    worker: int
    heard: float
    lease: float
    files: set[str] = field(default_factory=set)
    answered: Answer = _NOTHING


@dataclass
class KnownClient:
    """What the server remembers of a client, also while it holds no file."""

    worker: int
    wish: int = 0  # its last `take`; a lower one is a late copy
    answered: Answer = _NOTHING  # the last answer of its holder, once that was given up
    is_former: bool = False  # its worker has been restarted since


@dataclass
class Pass:
    files: frozenset[str]
    waiting: deque[str]
    holders: dict[int, Holder] = field(default_factory=dict)  # by client
    num_done: int = 0
    clients: dict[int, KnownClient] = field(default_factory=dict)
    hold: object = None  # charges the list's memory to its client's budget
    _by_worker: dict[int, list[int]] = field(default_factory=dict)  # clients, in the order in which they came

    @property
    def is_over(self) -> bool:
        return self.num_done == len(self.files)

    def check(self, client: int, worker: int) -> None:
        """Raise DataError if this is the client of another worker: no process has two numbers."""
        if client in self.clients and self.clients[client].worker != worker:
            raise DataError(f"a client of worker {self.clients[client].worker} asks for files as worker {worker}")

    def is_former(self, client: int) -> bool:
        """Whether this is a client of a worker that has been restarted since."""
        return client in self.clients and self.clients[client].is_former

    def holder(self, client: int, worker: int, lease: float, now: float) -> Holder:
        """Note a sign of life of a client, and return its holder. Gives up the other holders of the same worker: it was
        restarted."""
        for other, holder in list(self.holders.items()):
            if holder.worker == worker and other != client:
                self.give_up(other)
                self.clients[other].is_former = True
        if client not in self.holders:
            known = self._meet(client, worker)
            self.holders[client] = Holder(worker, now, lease, answered=known.answered)
        self.holders[client].heard = now
        return self.holders[client]

    def next_file(self, client: int, wish: int) -> tuple[str, str]:
        """The answer to a client that asks for a file. A repeat gets the same one."""
        holder, known = self.holders[client], self.clients[client]
        if wish < known.wish:
            return WAIT, ""  # a late copy: the client ignores the answer
        if wish == holder.answered[0]:
            self._hold_again(holder)
            return holder.answered[1:]
        known.wish = wish
        if self.is_over:
            return END, ""
        holder.answered = wish, WAIT, ""
        if self.waiting:
            holder.answered = wish, "file", self.waiting.popleft()
            holder.files.add(holder.answered[2])
        return holder.answered[1:]

    def give_up(self, client: int) -> None:
        """Return the client's files to the front of the queue."""
        holder = self.holders.pop(client)
        self.clients[client].answered = holder.answered
        self.waiting.extendleft(sorted(holder.files, reverse=True))

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        holders = {c: [h.worker, h.heard, h.lease, sorted(h.files), h.answered] for c, h in self.holders.items()}
        clients = [
            [client, known.worker, known.wish, known.answered, known.is_former]
            for own in self._by_worker.values()
            for client, known in ((client, self.clients[client]) for client in own)
        ]
        return {
            "files": sorted(self.files), "waiting": list(self.waiting), "holders": holders, "num_done": self.num_done,
            "clients": clients,
        }  # fmt: skip

    @classmethod
    def restored(cls, kept: dict[str, Any]) -> Pass:
        """Restore the state from the result of `export`."""
        made = cls(frozenset(kept["files"]), deque(kept["waiting"]), num_done=kept["num_done"])
        for client, worker, wish, answered, is_former in kept["clients"]:
            made._by_worker.setdefault(worker, []).append(client)
            made.clients[client] = KnownClient(worker, wish, _answer(answered), is_former)
        made.holders = {
            client: Holder(worker, heard, lease, set(files), _answer(answered))
            for client, (worker, heard, lease, files, answered) in kept["holders"].items()
        }
        return made

    def _meet(self, client: int, worker: int) -> KnownClient:
        """The KnownClient of a client, made if it is new. Forgets the oldest clients of its worker beyond MAX_CLIENTS:
        only late copies of their requests could come."""
        if client not in self.clients:
            self.clients[client] = KnownClient(worker)
            own = self._by_worker.setdefault(worker, [])
            own.append(client)
            while len(own) > MAX_CLIENTS:
                del self.clients[own.pop(0)]
        return self.clients[client]

    def _hold_again(self, holder: Holder) -> None:
        """Prepare the answer to a repeated request. The client may have received the first answer, so it never gets
        another file, which it would hold to the end without knowing. If the lease has ended since, the file is taken
        out of the queue again; if another worker has it, the client is told to wait.
        """
        wish, what, path = holder.answered
        if what != "file" or path in holder.files:
            return
        if path in self.waiting:
            self.waiting.remove(path)
            holder.files.add(path)
        else:
            holder.answered = wish, WAIT, ""


def _answer(kept: list[Any]) -> Answer:
    return kept[0], kept[1], kept[2]
