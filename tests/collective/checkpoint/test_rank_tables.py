"""What the ranks tell each other when they save tables together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.messages import names
from support.rank_threads import RankThread, on_threads

from torchfleet.base.errors import CheckpointError
from torchfleet.collective.checkpoint import table_saves
from torchfleet.ps.worker.lookup.plan import Plan


def test_an_error_of_rank_0_before_its_order_is_raised_on_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 0 fails before it has told the others what to write."""

    def failing(*_: Any) -> Any:
        raise MemoryError("no memory for 'top'")

    monkeypatch.setattr(table_saves, "_keeper", failing)

    def save(rank: RankThread) -> int:
        return table_saves.save_tables(str(tmp_path), Plan(), {}, rank)

    first, *others = on_threads(3, save)
    assert isinstance(first, MemoryError)
    for error in others:
        assert isinstance(error, CheckpointError)
        assert names(str(error), "rank 0", "MemoryError", "'top'")
    assert not list(tmp_path.iterdir())
