"""Numbers that the processes of a job share with the one that measures it: a small file that all have mapped."""

from __future__ import annotations

import mmap
from pathlib import Path

_FIELDS = (
    "pid", "trains", "steps", "is_on", "loss", "auc",
    "statuses_s", "status_files_s", "metrics_ports_s", "trace_export_s",
)  # fmt: skip
_ORDERS = ("on", "stop")  # of the first row: whether the job is to be watched, whether it is to end
_ROW = max(len(_FIELDS), len(_ORDERS))


class Board:
    """Rows of numbers, one for each process, and one of orders. A number is written by one process only."""

    def __init__(self, path: Path, num_roles: int = 0) -> None:
        """`num_roles`: how many there are, to make the file; 0: the file exists."""
        if num_roles:
            path.write_bytes(bytes(8 * _ROW * (1 + num_roles)))
        with open(path, "r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self.num_roles = len(self._numbers) // _ROW - 1

    def order(self, name: str, value: float) -> None:
        self._numbers[_ORDERS.index(name)] = value

    def ordered(self, name: str) -> float:
        return self._numbers[_ORDERS.index(name)]

    def put(self, role: int, field: str, value: float) -> None:
        self._numbers[_ROW * (1 + role) + _FIELDS.index(field)] = value

    def of(self, field: str, first: int = 0) -> list[float]:
        """This number of all processes, from the first on: servers come first, workers behind them."""
        start = _ROW + _FIELDS.index(field)
        return [self._numbers[start + _ROW * role] for role in range(first, self.num_roles)]
