"""Decides which keys get a row, and when: the policies of a table admit them, in a sync step only when the step ends.

The result of a sync step must not depend on which worker pulls first. New keys in its pulls wait, and are admitted
when the step ends, in the order of the worker numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from torchfleet.ps.tables.policies.admission import Admission
from torchfleet.ps.tables.policies.capacity import Capacity
from torchfleet.ps.tables.policies.decisions import Decisions
from torchfleet.ps.tables.rows.keymap import Keys, Rows
from torchfleet.ps.tables.rows.row_statistics import Columns


class WaitingKeys:
    """By worker: the keys without a row that appeared in the pulls of the current step."""

    def __init__(self) -> None:
        self.num = 0
        self._pulls: dict[int, list[Keys]] = {}

    def add(self, worker: int, keys: Keys) -> None:
        """Keep the distinct keys of one pull."""
        self._pulls.setdefault(worker, []).append(keys)
        self.num += len(keys)

    def __iter__(self) -> Iterator[Keys]:
        """The keys of each pull, in the order of the workers."""
        for _, pulls in sorted(self._pulls.items()):
            yield from pulls

    def take(self) -> list[Keys]:
        """The keys of each pull, in the order of the workers. Afterwards no key waits."""
        taken = list(self)
        self.restore({})
        return taken

    def forget(self, worker: int) -> None:
        """Drop the keys of a worker whose process ended; its next process pulls again."""
        self.num -= sum(len(keys) for keys in self._pulls.pop(worker, []))

    def export(self) -> dict[int, list[bytes]]:
        """All keys as plain values."""
        return {worker: [keys.tobytes() for keys in pulls] for worker, pulls in self._pulls.items()}

    def restore(self, kept: Mapping[int, Sequence[bytes]]) -> None:
        """Restore the result of `export`."""
        self._pulls = {worker: [np.frombuffer(keys, np.uint64) for keys in pulls] for worker, pulls in kept.items()}
        self.num = sum(map(len, self))


def admitted(
    keys: Keys, in_use: Rows, admission: Admission | None, capacity: Capacity | None, decisions: Decisions
) -> tuple[Keys, Columns]:
    """Make room for the keys that get a row, and return (these keys, their statistics). `keys` are distinct and have no
    rows. A capacity admits only as many keys as fit beside the rows in use; the counts of the other keys start again.
    """
    carried: Columns = {}
    if admission is not None:
        keys, counted = admission.admit(keys)
        carried = counted or {}
    if capacity is not None:
        if decisions.followed is not None:
            known, keys = keys, decisions.with_room(keys)
            carried = {name: column[np.isin(known, keys)] for name, column in carried.items()}
        elif len(keys) + len(in_use) > capacity.max_rows:
            room = max(0, capacity.max_rows - len(np.unique(in_use[in_use >= 0])))
            decisions.note("left_out", keys[room:])
            keys, carried = keys[:room], {name: column[:room] for name, column in carried.items()}
        capacity.make_room(len(keys), in_use)
    return keys, carried
