"""MovieLens-100k from RecBole's wheel, in the order of time: later ratings are what models are tested on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

BATCH, STEPS = 128, 50
NUM_TRAIN, NUM_TEST = BATCH * STEPS, 2000


def folder() -> Path:
    """With `ml-100k` in it."""
    import recbole

    return Path(recbole.__file__).parent / "dataset_example"


@functools.cache
def ratings() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Users, films and occupations, three whole numbers from 0 a line; whether the rating was 4 or 5; how many there
    are of each."""
    users = _lines("ml-100k.user")
    jobs = {job: number for number, job in enumerate(sorted({line[3] for line in users}))}
    job_of = {line[0]: jobs[line[3]] for line in users}
    lines = sorted(_lines("ml-100k.inter"), key=lambda line: (float(line[3]), line[0], line[1]))
    lines = lines[: NUM_TRAIN + NUM_TEST]
    ids = torch.tensor([[int(line[0]), int(line[1]), job_of[line[0]]] for line in lines])
    liked = torch.tensor([float(float(line[2]) >= 4) for line in lines])
    return ids, liked, [944, 1683, len(jobs)]


def split() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], list[int]]:
    """(ids, liked) to train on, (ids, liked) to test, sizes."""
    ids, liked, sizes = ratings()
    return (ids[:NUM_TRAIN], liked[:NUM_TRAIN]), (ids[NUM_TRAIN:], liked[NUM_TRAIN:]), sizes


def _lines(name: str) -> list[Any]:
    text = (folder() / "ml-100k" / name).read_text()
    return [line.split("\t") for line in text.splitlines()[1:]]
