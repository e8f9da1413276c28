"""Files of samples with slots, a model of them that runs in plain torch too, and a worker behind fleet.* functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import jobs
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.api import current_job

NUM_WORDS, NUM_TAGS, NUM_ITEMS = 30, 20, 40
TABLES = {"words": NUM_WORDS, "tags": NUM_TAGS, "items": NUM_ITEMS}
SLOTS = [
    fleet.Slot("words"),
    fleet.Slot("x", dtype="float32", dim=3),
    fleet.Slot("left"),
    fleet.Slot("items", dim=2),
    fleet.Slot("right"),
    fleet.Slot("y", dtype="float32", dim=1),
]

Sample = dict[str, list[Any]]


@contextlib.contextmanager
def job(
    model: torch.nn.Module, make_optimizer: jobs.MakeOptimizer | None = None, **options: Any
) -> Iterator[jobs.Part]:
    """A worker in this thread, which the functions of fleet.* act on. `options`: those of jobs.one_worker."""
    with jobs.clean_facade(), jobs.one_worker(model, make_optimizer, **options) as part:
        part.job._worker = part.worker
        current_job.current.job = part.job
        yield part


class Slotted(torch.nn.Module):
    """Bags of one slot, averaged; of two slots in one table, summed; a row per id; and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.EmbeddingBag(NUM_WORDS, 4, mode="mean", sparse=True)
        self.tags = torch.nn.EmbeddingBag(NUM_TAGS, 2, mode="sum", sparse=True)
        self.items = torch.nn.Embedding(NUM_ITEMS, 3, sparse=True)
        self.hidden = torch.nn.Linear(4 + 2 * 2 + 2 * 3 + 3, 5)
        self.out = torch.nn.Linear(5, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        tags = pooled(self.tags, [batch["left"], batch["right"]])
        parts = [pooled(self.words, batch["words"]), tags.flatten(1), self.items(batch["items"]).flatten(1), batch["x"]]
        return self.out(torch.tanh(self.hidden(torch.cat(parts, dim=1)))).squeeze(1)


def pooled(bag: torch.nn.Module, slots: Any) -> torch.Tensor:
    """What a SparseEmbedding does with slots, by torch's own bag or by ours."""
    if not isinstance(bag, torch.nn.EmbeddingBag):
        return bag(slots)
    if isinstance(slots, list):
        return torch.stack([pooled(bag, slot) for slot in slots], dim=1)
    return bag(slots.values, slots.offsets) if isinstance(slots, fleet.Ragged) else bag(slots)


def loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.mse_loss(output, batch["y"].squeeze(1))


def make_samples(seed: int, num: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        {
            "words": rng.integers(0, NUM_WORDS, rng.integers(0, 5)).tolist(),
            "x": rng.normal(size=3).astype(np.float32).tolist(),
            "left": rng.integers(0, NUM_TAGS, rng.integers(0, 3)).tolist(),
            "items": rng.integers(0, NUM_ITEMS, 2).tolist(),
            "right": rng.integers(0, NUM_TAGS, rng.integers(0, 3)).tolist(),
            "y": rng.normal(size=1).astype(np.float32).tolist(),
        }
        for _ in range(num)
    ]


def write(path: Path, samples: Sequence[Sample]) -> str:
    """A file in the multi-slot format."""
    lines = [" ".join(f"{len(v)} {' '.join(map(repr, v))}".strip() for v in sample.values()) for sample in samples]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def ragged(lists: Sequence[Sequence[int]]) -> fleet.Ragged:
    """A slot by hand."""
    values = [value for values_of_sample in lists for value in values_of_sample]
    starts = np.cumsum([0, *(len(values_of_sample) for values_of_sample in lists)])[:-1]
    return fleet.Ragged(torch.tensor(values, dtype=torch.int64), torch.from_numpy(starts.astype(np.int64)))


def batch_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """What a dataset must make of some samples, worked out without it."""
    made: dict[str, Any] = {}
    for slot in SLOTS:
        values = [sample[slot.name] for sample in samples]
        dtype = torch.float32 if slot.dtype == "float32" else torch.int64
        made[slot.name] = ragged(values) if slot.dim is None else torch.tensor(values, dtype=dtype)
    return made


def batches_of(samples: Sequence[Sample], size: int) -> list[dict[str, Any]]:
    return [batch_of(samples[at : at + size]) for at in range(0, len(samples), size)]


def dataset(kind: str, files: Sequence[str], batch_size: int, use_var: Sequence[Any] = SLOTS, **options: Any) -> Any:
    """A QueueDataset ("queue") or an InMemoryDataset ("memory"), loaded."""
    made = fleet.QueueDataset() if kind == "queue" else fleet.InMemoryDataset()
    made.init(batch_size=batch_size, use_var=list(use_var), **options)
    made.set_filelist(list(files))
    if kind == "memory":
        made.load_into_memory()
    return made
