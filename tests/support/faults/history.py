"""What clients asked, when, and what they were told: the record that is checked, and hashed."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from support.faults.virtual_world import World

from torchfleet.base.errors import FleetError

Result = TypeVar("Result")
UNKNOWN = float("inf")  # the end of what was never answered: it may take effect at any time, or never


@dataclass(slots=True)
class Op:
    """One request of a client: from `start` to `end` it was under way."""

    client: str
    kind: str
    about: Any
    start: float
    end: float = UNKNOWN
    result: Any = None
    number: int = 0

    @property
    def is_acknowledged(self) -> bool:
        return self.end < UNKNOWN

    def precedes(self, other: Op) -> bool:
        """Its answer was known before the other was asked."""
        return self.end < other.start


class Violation(AssertionError):
    """A promise that was not kept."""


@dataclass
class History:
    """All requests, in the order in which they began."""

    world: World
    ops: list[Op] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # faults as they happened, for the report of a failure
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def begin(self, client: str, kind: str, about: Any) -> Op:
        op = Op(client, kind, about, self.world.now, number=next(self._numbers))
        self.ops.append(op)
        return op

    def end(self, op: Op, result: Any = None) -> Any:
        op.end, op.result = self.world.now, result
        return result

    def ask(self, client: str, kind: str, about: Any, call: Callable[[], Result]) -> Result:
        """Make a request and wait for it. One that raises was refused, or its outcome is unknown."""
        op = self.begin(client, kind, about)
        try:
            return self.end(op, call())
        except FleetError as error:
            op.result = error
            raise

    def note(self, text: str) -> None:
        self.notes.append(f"{self.world.now:8.3f} {text}")

    def of(self, kind: str) -> list[Op]:
        return [op for op in self.ops if op.kind == kind]

    def digest(self) -> str:
        """A hash of everything that was asked, said and done."""
        mixed = hashlib.sha256()
        for op in self.ops:
            mixed.update(repr((op.client, op.kind, op.about, op.start, op.end, op.result)).encode())
        for note in self.notes:
            mixed.update(note.encode())
        mixed.update(repr((self.world.now, self.world.num_events)).encode())
        return mixed.hexdigest()


def expect(condition: bool, text: str | Callable[[], str]) -> None:
    if not condition:
        raise Violation(text if isinstance(text, str) else text())
