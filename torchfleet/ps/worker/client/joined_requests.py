"""Requests to one server for many small tables: all keys, and all rows, in one frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.ps.kernels.rows import all_finite
from torchfleet.ps.kernels.table_groups import put_pairs
from torchfleet.ps.net.joined_arrays import DOUBLES, ENTRY, FLOATS, KEYS, Array, JoinedArrays
from torchfleet.ps.net.wire import MAX_JOINED
from torchfleet.ps.worker.client.known_tables import KnownTable
from torchfleet.ps.worker.client.shard import Floats, Keys, as_keys

Gradients = Mapping[str, tuple[npt.ArrayLike, Floats] | Floats]


class JoinedRequests:
    """Requests for these tables, in this order; a method returns None if the request must be made table by table."""

    def __init__(self, tables: Sequence[KnownTable]) -> None:
        """`tables`: tables for which `suit` returns True."""
        self._tables = tables
        numbers = [table.number for table in tables]
        self._pull = np.zeros(len(tables), ENTRY)
        self._pull["number"], self._pull["code"], self._pull["columns"] = numbers, KEYS, 1
        self._push = np.zeros(1 + 2 * len(tables), ENTRY)
        pairs = self._push[1:]
        pairs["number"] = np.repeat(np.array(numbers, np.uint32), 2)
        pairs["code"][::2], pairs["code"][1::2] = KEYS, FLOATS
        pairs["columns"][::2], pairs["columns"][1::2] = 1, [1 if table.is_dense else table.dim for table in tables]
        self._push[0] = 0, DOUBLES, 0, len(tables)
        self._sparse = np.array([i for i, table in enumerate(tables) if not table.is_dense], np.int64)
        self._dims = np.array([table.dim for table in tables if not table.is_dense], np.int64)

    @staticmethod
    def suit(tables: Sequence[KnownTable]) -> bool:
        """Whether requests for these tables can be joined."""
        return all(table.is_plain for table in tables) and not all(table.is_dense for table in tables)

    def pull(self, keys: Mapping[str, npt.ArrayLike]) -> JoinedArrays | None:
        """The request for the rows of these keys."""
        parts = [as_keys(wanted) for wanted in keys.values()]
        counts = list(map(len, parts))
        has_blocks = len(self._sparse) < len(self._tables)
        if has_blocks or 8 * sum(counts) > MAX_JOINED or 4 * int(np.dot(counts, self._dims)) > MAX_JOINED:
            return None
        words: Keys = np.concatenate(parts)
        entries = self._pull.copy()
        entries["rows"] = counts
        starts = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        return JoinedArrays(entries, words, starts)

    def pulled(self, asked: JoinedArrays, reply: Sequence[Array]) -> tuple[list[Floats], list[list[float]]] | None:
        """The rows of each table, and its version, from the reply to `asked`."""
        num = len(self._tables)
        if not isinstance(reply, JoinedArrays) or len(reply) != num + 1:
            return None
        entries, counts = reply.entries[:num], asked.entries["rows"]
        is_right = (entries["rows"] == counts) & (entries["columns"] == self._dims) & (entries["code"] == FLOATS)
        if not is_right.all():
            return None
        floats, rows = reply.floats, []
        places = zip(reply.starts.tolist(), counts.tolist(), self._dims.tolist(), strict=False)
        for start, num_rows, dim in places:
            rows.append(floats[2 * start : 2 * start + num_rows * dim].reshape(num_rows, dim))
        versions: list[list[float]] = reply[-1].data.astype(np.float64).tolist()
        return rows, versions

    def push(
        self, grads: Gradients, heads: npt.NDArray[np.float64], settings: Sequence[int], are_finite: bool
    ) -> JoinedArrays | None:
        """The request to update the tables. `heads`: one line for each table."""
        keys, rows, counts, blocks = [], [], [], []
        for i, block in enumerate(grads.values()):
            if isinstance(block, tuple):
                keys.append(as_keys(block[0]))
                rows.append(np.ascontiguousarray(block[1], np.float32))
                counts.append(len(keys[-1]))
            else:
                blocks.append((i, np.ascontiguousarray(block, np.float32).reshape(-1)))
        num_bytes = 8 * sum(counts) + sum(own.nbytes for own in rows) + sum(block.nbytes for _, block in blocks)
        if num_bytes > MAX_JOINED or not self._fit(rows, counts, blocks):
            return None
        made = self._arranged(heads, settings, counts, blocks)
        flat = np.concatenate([own.reshape(-1) for own in rows])
        if not are_finite and not all(_is_finite(numbers) for numbers in (flat, *(block for _, block in blocks))):
            return None
        starts, places = made.starts, 1 + 2 * self._sparse
        where = made.words, starts[places], starts[places + 1]
        put_pairs(np.concatenate(keys), flat, np.array(counts, np.int64), self._dims, *where)
        for i, block in blocks:
            start = 2 * int(starts[2 + 2 * i])
            made.floats[start + len(block) : 2 * int(starts[3 + 2 * i])] = 0
            made.floats[start : start + len(block)] = block
        return made

    def _fit(self, rows: list[Floats], counts: list[int], blocks: list[tuple[int, Floats]]) -> bool:
        """Whether the gradients have the shapes that the tables expect."""
        if len(rows) != len(self._sparse) or len(rows) + len(blocks) != len(self._tables):
            return False
        are_rows = all(
            own.ndim == 2 and own.shape == (num, dim)
            for own, num, dim in zip(rows, counts, self._dims.tolist(), strict=True)
        )
        return are_rows and all(
            self._tables[i].is_dense and len(block) == self._tables[i].spec.size for i, block in blocks
        )

    def _arranged(
        self,
        heads: npt.NDArray[np.float64],
        settings: Sequence[int],
        counts: list[int],
        blocks: list[tuple[int, Floats]],
    ) -> JoinedArrays:
        """Memory for the request, with `heads` and `settings` already written to it."""
        entries = np.zeros(len(self._push) + bool(settings), ENTRY)  # not by concatenate, which drops the padding
        entries[: len(self._push)] = self._push
        places: Any = 1 + 2 * self._sparse
        entries["columns"][0] = heads.shape[1]
        entries["rows"][places] = entries["rows"][places + 1] = counts
        for i, block in blocks:
            entries["rows"][2 + 2 * i] = len(block)
        if settings:
            entries[-1] = 0, KEYS, 1, len(settings)
        made = JoinedArrays.room_for(entries)
        made.words[: heads.size] = heads.reshape(-1).view(np.uint64)
        if settings:
            made.words[int(made.starts[-2]) :] = settings
        return made


def _is_finite(numbers: Floats) -> bool:
    return bool(all_finite(numbers.view(np.uint32)))
