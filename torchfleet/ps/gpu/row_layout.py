"""The words of a row on a device, and what a new row begins with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchfleet.ps.gpu.first_values import first_values
from torchfleet.ps.gpu.integers import signed
from torchfleet.ps.tables.rows.row_form import value_stream
from torchfleet.ps.tables.rows.row_statistics import row_columns
from torchfleet.ps.tables.settings.rule import Rule
from torchfleet.ps.tables.settings.spec import Initializer, TableSpec

_SECTOR = 8  # words of 32 bytes, which a GPU reads at once


@dataclass(frozen=True)
class RowLayout:
    """[value: dim | state: num_words - dim | statistics: len(columns) | padding], `width` words in all."""

    dim: int
    num_words: int
    num_states: int  # per value
    columns: tuple[str, ...]
    width: int
    rule: Rule
    initializer: Initializer
    stream: int  # of first values, as a signed integer
    first_state: float
    size: int  # ids are below it; 0: any id

    @classmethod
    def of(cls, spec: TableSpec) -> RowLayout:
        columns = row_columns(spec)
        num = spec.num_words + len(columns)
        unit = _SECTOR if num > _SECTOR // 2 else _SECTOR // 2
        return cls(
            dim=spec.dim,
            num_words=spec.num_words,
            num_states=spec.num_states,
            columns=columns,
            width=-(-num // unit) * unit,
            rule=spec.rule,
            initializer=spec.initializer,
            stream=signed(int(value_stream(spec.seed, spec.name))),
            first_state=spec.rule.row_rule.initial_state(spec.rule),
            size=spec.size,
        )

    def first_words(self, keys: torch.Tensor) -> torch.Tensor:
        """(len(keys), width): first values and state; statistics and padding are zeros."""
        words = torch.zeros(len(keys), self.width, dtype=torch.float32, device=keys.device)
        words[:, : self.dim] = first_values(keys, self.stream, self.initializer, self.dim)
        words[:, self.dim : self.num_words] = self.first_state
        return words
