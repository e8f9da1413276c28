"""A pass: the rows of all its batches are in the worker's caches before training, and written back after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchfleet.api.current_job import get_worker
from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.lookup.engine import Engine

Ids = Callable[[Any], Mapping[str, torch.Tensor]]


def begin_pass(dataset: Iterable[Any], ids: Ids | None = None) -> dict[str, int]:
    """Load the rows of all batches of `dataset` into the caches of this worker (SparseEmbedding(cache=...)).

    The dataset is iterated once here, and again by the training that follows. `ids`: a function from a batch to the
    ids that the model looks up in it, by the name of the table; by default, the ids that `prefetch` would foresee,
    which are known once a batch was trained. Rows that do not fit are loaded with their batch. Returns the number of
    rows in each cache: docs/gpu_cache.md.
    """
    engine = get_worker().engine
    if not engine.caches:
        raise FleetError(
            "fleet.begin_pass: no table has a cache for the rows of a pass. Use fleet.nn.SparseEmbedding(cache='2GB')."
        )
    for batch in dataset:
        found = engine.cached_ids(batch) if ids is None else _given(engine, ids(batch))
        if not found:
            raise FleetError(
                "fleet.begin_pass: the worker does not know which ids of a batch the model looks up. Train a batch "
                "before the pass, or say it: begin_pass(dataset, ids=lambda batch: {'table': batch['ids']})."
            )
        for name, slots in found.items():
            cache = engine.caches[name]
            cache.wait_for(cache.prepare(slots))
    return {name: cache.stats()["rows"] for name, cache in engine.caches.items()}


def end_pass() -> None:
    """Write all rows of this worker's caches to the servers. They stay in the caches."""
    get_worker().communicator.flush()


def _given(engine: Engine, ids: Mapping[str, torch.Tensor]) -> dict[str, list[tuple[torch.Tensor, int | None]]]:
    unknown = sorted(set(ids) - set(engine.caches))
    if unknown:
        raise FleetError(
            f"fleet.begin_pass(ids=...): expected tables with a cache ({', '.join(engine.caches)}), found "
            f"{', '.join(map(repr, unknown))}"
        )
    return {name: [(slot, engine.padding_of(name))] for name, slot in ids.items()}
