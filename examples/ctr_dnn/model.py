"""CTR-DNN: one embedding for 26 categories, put beside 13 numbers, three hidden layers, clicked or not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

import torchfleet as fleet

NUM_SLOTS, NUM_DENSE = 26, 13
SLOTS = [f"C{i}" for i in range(1, NUM_SLOTS + 1)]


class CTRDNN(torch.nn.Module):
    """Logits of two classes for a batch with the slots of fleet.CriteoFormat. `rows`: settings of its embedding."""

    def __init__(self, dim: int = 10, hidden: int = 400, scale: float = 0.01, **rows: Any) -> None:
        super().__init__()
        first = fleet.nn.Uniform(-scale, scale)
        self.embedding = fleet.nn.SparseEmbedding(dim, name="embedding", initializer=first, **rows)
        sizes = [NUM_SLOTS * dim + NUM_DENSE, hidden, hidden, hidden]
        layers: list[torch.nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [_linear(fan_in, fan_out), torch.nn.ReLU()]
        self.tower = torch.nn.Sequential(*layers, _linear(hidden, 2))

    def forward(self, batch: Any) -> torch.Tensor:
        embedded = self.embedding([batch[name] for name in SLOTS]).flatten(1)
        logits: torch.Tensor = self.tower(torch.cat([embedded, batch["dense_input"]], dim=1))
        return logits


def _linear(fan_in: int, fan_out: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(fan_in, fan_out)
    torch.nn.init.normal_(layer.weight, std=fan_in**-0.5)
    torch.nn.init.zeros_(layer.bias)
    return layer


def slots(ragged: bool = False) -> list[Any]:
    """What the readers fill: `ragged` for the text format, where an id may come any number of times."""
    ids = [fleet.Slot(name, dim=None if ragged else 1) for name in SLOTS]
    return [fleet.Slot("dense_input", dtype="float32", dim=NUM_DENSE), *ids, fleet.Slot("label", dim=1)]


def log_scale_of(dirname: str, given: bool | None) -> bool:
    """Whether the saved model was trained on numbers as log(1 + x): train.py writes it into its saves.

    `given`: what the command line says, if anything. Ends the script if both disagree, or if neither says it.
    """
    extra = fleet.saved_extra(dirname)
    if extra is None:
        raise SystemExit(f"there is no saved model in {dirname}")
    saved = extra.get("log_scale", given)
    if saved is None:
        raise SystemExit(
            f"the save in {dirname} does not say how numbers were scaled: give --log_scale or --no-log_scale"
        )
    if given is not None and given != saved:
        raise SystemExit(
            f"the model in {dirname} was trained with {_flag(saved)}, and the command line says {_flag(given)}: leave "
            "it out"
        )
    return bool(saved)


def _flag(log_scale: bool) -> str:
    return "--log_scale" if log_scale else "--no-log_scale"


def loss_of(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, batch["label"].view(-1))
