"""MLflow: a run with the settings as parameters, the metrics by step, and the paths of saved models."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Any

from torchfleet.api.callbacks.callback import Callback, flat
from torchfleet.base.extras import required

_MOST_PARAMETER = 500  # characters, which every store of MLflow accepts


class MlflowCallback(Callback):
    """Logs a training to MLflow in its own run. Does not change the active run of the process.

    `tracking_uri`: a server, a database or a folder (default: MLflow's configuration). If training ends without
    fleet.stop_worker(), the run is marked as failed.
    """

    def __init__(
        self,
        experiment: str = "Default",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._experiment, self._name, self._uri, self._tags = experiment, run_name, tracking_uri, dict(tags or {})
        self._client: Any = None
        self.run_id = ""  # set when training begins

    def on_start(self, info: Mapping[str, Any]) -> None:
        mlflow = required("mlflow", "MlflowCallback", "mlflow")
        client = self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self._experiment)
        self.run_id = client.create_run(experiment, tags=self._tags, run_name=self._name).info.run_id
        atexit.register(self._fail)
        for name, value in flat(info).items():
            client.log_param(self.run_id, f"torchfleet.{name}", str(value)[:_MOST_PARAMETER])

    def on_report(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self.run_id, name, value, step=step)

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self.run_id, f"epoch.{name}", value, step=epoch)

    def on_save(self, dirname: str) -> None:
        self._client.set_tag(self.run_id, "torchfleet.saved", dirname)

    def on_end(self, stats: Mapping[str, Any]) -> None:
        atexit.unregister(self._fail)
        for name, value in stats.get("worker", {}).items():
            if isinstance(value, (int, float)):
                self._client.log_metric(self.run_id, f"torchfleet.{name}", value)
        self._client.set_terminated(self.run_id, "FINISHED" if stats else "KILLED")

    def _fail(self) -> None:
        """Mark the run as failed, at the exit of a process whose training did not finish."""
        self._client.set_terminated(self.run_id, "FAILED")
