"""Weights & Biases: a run with the settings, the metrics by step, and the paths of saved models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchfleet.api.callbacks.callback import Callback, flat
from torchfleet.base.extras import required


class WandbCallback(Callback):
    """Logs a training to Weights & Biases. `options` are passed to wandb.init.

    An existing run is used unchanged and left open.
    """

    def __init__(self, project: str | None = None, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._options = {"project": project, **options}
        self._config = dict(config or {})
        self._run: Any = None
        self._is_own, self._step = False, 0

    def on_start(self, info: Mapping[str, Any]) -> None:
        wandb = required("wandb", "WandbCallback", "wandb")
        self._is_own = wandb.run is None
        self._run = wandb.init(**self._options) if self._is_own else wandb.run
        self._run.config.update({**self._config, "torchfleet": flat(info)}, allow_val_change=True)

    def on_report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = max(self._step, step)  # wandb drops values with an earlier step
        self._run.log(dict(metrics), step=self._step)

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
        named = {f"epoch/{name}": value for name, value in metrics.items()}
        self._run.log({"epoch": epoch, **named}, step=self._step)

    def on_save(self, dirname: str) -> None:
        self._run.summary["saved"] = dirname

    def on_end(self, stats: Mapping[str, Any]) -> None:
        for name, value in stats.get("worker", {}).items():
            if isinstance(value, (int, float)):
                self._run.summary[f"torchfleet/{name}"] = value
        if self._is_own:
            self._run.finish()
