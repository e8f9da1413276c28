"""The progress of online training. It is saved atomically with the model, so that both always agree."""

from __future__ import annotations

from typing import Any

import msgspec

import torchfleet as fleet
from torchfleet.apps.online.parts import Part
from torchfleet.base.errors import CheckpointError
from torchfleet.base.prepared_types import prepared

KEPT = 1000  # passes whose results are kept
_KEY = "online"


class PassReport(msgspec.Struct, frozen=True):
    """The result of a pass; the same on all workers."""

    part: str
    number: int  # passes so far, including earlier runs
    auc: float | None  # of the part before training on it; None without `evaluate`
    samples: int
    samples_per_s: float  # trained, by all workers together
    deltas: int  # since the last full save; 0: this was a full save
    rows: int  # of all sparse tables
    seconds: float  # from the beginning of the part until its save

    def line(self) -> str:
        saved = f"delta {self.deltas}" if self.deltas else "full"
        auc = f" | auc {self.auc:.4f}" if self.auc is not None else ""
        rate = f"{self.samples_per_s:,.0f} samples/s"
        return f"pass {self.part}{auc} | {rate} | saved {saved} | rows {self.rows:,} | {self.seconds:.1f} s"


class Result(msgspec.Struct, frozen=True, array_like=True):
    """A pass in the history that is stored with a model."""

    part: str
    auc: float | None
    samples: int
    rows: int


class PassProgress(msgspec.Struct):
    """Which parts the model has been trained on, and the position of the next. Stored in the manifest's `extra`."""

    position: Any = None
    part: str = ""
    day: str = ""
    passes: int = 0
    deltas: int = 0
    history: list[Result] = []  # of the last KEPT passes

    def takes_full_save(self, part: Part) -> bool:
        """Whether this is the first part of its day, or the first part ever."""
        return not self.passes or part.day != self.day

    def after(self, part: Part, result: Result, is_full: bool) -> PassProgress:
        deltas = 0 if is_full else self.deltas + 1
        history = [*self.history, result][-KEPT:]
        return PassProgress(part.position, part.name, part.day, self.passes + 1, deltas, history)


def model_to_load(model_dir: str) -> str | None:
    """`model_dir` if it contains a complete model, else None. Pass it to fleet.init_server and fleet.init_worker."""
    return model_dir if fleet.saved_extra(model_dir) is not None else None


def history(model_dir: str) -> list[Result]:
    """Part, AUC, samples and rows of the last 1000 passes of the model in `model_dir`."""
    return saved_progress(model_dir).history


def saved_progress(model_dir: str) -> PassProgress:
    """Return the progress after the last complete pass saved in `model_dir`, or a new one if no pass was saved."""
    extra = fleet.saved_extra(model_dir) or {}
    try:
        return msgspec.convert(extra.get(_KEY, {}), prepared(PassProgress))
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{model_dir}: what is kept there about the passes cannot be read: {error}") from None


def extra_of(progress: PassProgress) -> dict[str, Any]:
    """The progress as it is stored in the manifest's `extra`."""
    return {_KEY: msgspec.to_builtins(progress)}
