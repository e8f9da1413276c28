"""One rank's side of a collective job, which the functions of api/ call: steps, reports, saves, meetings, the end."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torchfleet.base.adoption import options_of, set_options
from torchfleet.base.backward_loss import LossWatch
from torchfleet.base.cuda_capture import is_capturing
from torchfleet.base.errors import FleetError
from torchfleet.base.fetch import numbers
from torchfleet.base.monitor.epochs import Epochs, length
from torchfleet.base.monitor.prometheus.metrics_port import open_metrics_port
from torchfleet.base.monitor.status import StatusFile
from torchfleet.base.monitor.stop_request import stop_request
from torchfleet.base.monitor.training_pace import TrainingPace
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.step_tracing import StepTracing
from torchfleet.base.storage import Storage
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.tracing.otlp import trace_every
from torchfleet.base.tracing.process_part import ProcessName
from torchfleet.base.tracing.profile_folder import folder_of
from torchfleet.collective.collective_model import CollectiveModel
from torchfleet.collective.collective_optimizer import CollectiveOptimizer
from torchfleet.collective.meeting.job_meetings import JobMeetings
from torchfleet.collective.model_and_optimizer import ModelAndOptimizer
from torchfleet.collective.world import begun

if TYPE_CHECKING:
    from torchfleet.collective.checkpoint.background_saves import BackgroundSaves
    from torchfleet.collective.checkpoint.save_writing import PlannedSave
    from torchfleet.collective.elastic.memory_copies import Kept
    from torchfleet.collective.world import Gathering
    from torchfleet.data.model_features import ModelFeatures
    from torchfleet.ps.worker.model_saving import Kind

_PATIENCE = 10.0  # seconds that an aborted job waits for its save


class CollectiveJob(ModelAndOptimizer):
    """Model, optimizer and strategies of a rank. The ranks meet once the strategy is known."""

    def __init__(self, info: RoleInfo, settings: DistributedStrategy | None) -> None:
        super().__init__(info)
        begun.info = info
        self._meetings = JobMeetings()
        self._saves: BackgroundSaves | None = None
        self._features: ModelFeatures | None = None
        self._reported: dict[str, float] = {}
        self._tracing: StepTracing | None = None
        self._is_over = False
        port = open_metrics_port("rank", info.worker_index)
        self._status = StatusFile(info.status_file, self._status_now, port)
        self._losses = LossWatch() if self._status.is_read else None
        self._loss: dict[str, torch.Tensor] = {}  # of the last step; copied to the host when it is written
        atexit.register(_write_last, weakref.ref(self), os.getpid())
        self._pace, self.epochs = TrainingPace(), Epochs(lambda: self.optimizer.num_steps if self.optimizer else 0)
        if settings is not None:
            self.use(settings, "fleet.init")
            self._begin()

    @property
    def features(self) -> ModelFeatures:
        """The features of the model, which its saves have."""
        from torchfleet.data.model_features import ModelFeatures  # imports what servers need, so only on demand

        if self._features is None:
            self._features = ModelFeatures()
        return self._features

    def _optimizer_made(self, model: CollectiveModel, optimizer: CollectiveOptimizer) -> None:
        """Count and trace steps, and let ranks whose loops are over know when this rank waits in a step."""
        info = self.info
        name = ProcessName("rank", info.worker_index, info.num_workers, 0, secrets.randbits(63), self.mode)
        self._tracing = StepTracing(name, model, [optimizer], folder_of(info.status_file), trace_every())
        optimizer.after_step = self._step_made
        model.on_begin, optimizer.on_call = self._meetings.attend(self.world, self.settings.sync_timeout)

    def _step_made(self) -> None:
        if self._losses is not None and (loss := self._losses.take()) is not None:
            self._loss = {"loss": loss}
        if is_capturing(self.world.device):  # a loss in a capture cannot be read
            return
        self._status.step_made()
        if self._tracing is not None:
            self._tracing.step_made()

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        with self.epochs.begin(partial(length, loader), "batches") as epoch:
            for item in self._meetings.batches(loader, self.world):
                yield item
                epoch.done += 1

    def plan_epochs(self, num: int, start: int) -> None:
        self.epochs.plan(num, start)

    def report(self, metrics: dict[str, float]) -> None:
        self._reported.update(metrics)
        if "loss" in metrics:
            self._note_loss(metrics["loss"])
        self._status.write()

    @property
    def num_steps(self) -> int:
        return self.optimizer.num_steps if self.optimizer else 0

    @property
    def changed_settings(self) -> dict[str, Any]:
        return self.settings.differences()

    def complete_saves(self) -> list[str]:
        return []  # all ranks save together

    def stop(self) -> dict[str, Any]:
        final = {"worker": {"steps": self.num_steps, "samples": self.model.num_samples if self.model else 0}}
        self._status.write(now=True)
        self._close_status()
        self._end_tracing()
        self._finish_save()
        self._meetings.meet("fleet.stop_worker()")
        self._meetings.leave()
        self._end_training("fleet.stop_worker()")
        begun.info = None
        if self._world is not None:
            self._world.close()
        return {"mode": self.mode, **final}

    @property
    def is_under_way(self) -> bool:
        return self.optimizer is not None

    def _end_tracing(self) -> None:
        if self._tracing is not None:
            self._tracing.close()
            self._tracing = None

    def reset(self) -> None:
        self._end_tracing()
        with contextlib.suppress(Exception):
            self._finish_save(_PATIENCE)
        self._meetings.leave(alone=True)
        self._end_training("fleet.reset()")
        begun.info = None
        self._close_status()
        if self._settings is not None:
            self._settings.unlock()
        if self._world is not None:
            self._world.close(alone=True)

    def _end_training(self, ended_by: str) -> None:
        """End the strategies; what the script has of the job can predict, and not train."""
        self.close_strategies()
        if self.model is not None:
            self.model.end(ended_by)
        if self.optimizer is not None:
            self.optimizer.end(ended_by)

    def write_last(self) -> None:
        """Write the last report at exit: most scripts of ranks end without fleet.stop_worker()."""
        if not self._is_over:
            self._status.write(now=True)

    def _close_status(self) -> None:
        self._is_over = True
        if self._losses is not None:
            self._losses.close()
        self._status.close()

    def _status_now(self) -> dict[str, Any]:
        steps = self.optimizer.num_steps if self.optimizer else 0
        samples = self.model.num_samples if self.model else 0
        progress = self.epochs.status()
        return {
            "role": "worker",
            "mode": self.mode,
            **self._pace.status(steps, samples, self._status.last_step),
            **({"progress": progress} if progress else {}),
            "metrics": {**numbers(self._loss), **self._reported},
        }

    def save(self, dirname: str, extra: Mapping[str, Any] | None, asynchronous: bool = False) -> int:
        from torchfleet.collective.checkpoint.background_saves import BackgroundSaves
        from torchfleet.collective.checkpoint.save_writing import write_save
        from torchfleet.collective.checkpoint.saving import plan_save

        model, optimizer = self._trained()
        self._finish_save()
        self._meetings.meet("fleet.save")
        for strategy in self.strategies:
            strategy.before_save()
        inner, strategies, world = optimizer.inner, self.strategies, self.world
        features = partial(self._features_to_save, dirname)
        planned, tensors = plan_save(dirname, model.module, inner, strategies, world, extra, self.names, features)
        with contextlib.ExitStack() as stack:
            stack.enter_context(planned.place or contextlib.nullcontext())  # if this fails, removes the remains
            first = self._save_rows(planned, asynchronous)
            stack.pop_all()
        if asynchronous:
            self._saves = self._saves or BackgroundSaves(world)
            self._saves.begin(planned, tensors, first)
        else:
            write_save(planned, tensors, world)
        return planned.number

    def _save_rows(self, planned: PlannedSave, asynchronous: bool) -> Callable[[Gathering], int] | None:
        """Save the tables on devices, which a save has before its manifest; or return what saves them beside
        training."""
        from torchfleet.collective.checkpoint.collective_manifest import tables_of

        if self.device_rows is None:
            return None
        tables = planned.storage.place(tables_of(planned.number))
        if asynchronous and self.device_rows.can_save_beside:
            return self.device_rows.saving_beside(tables)
        self.device_rows.save(tables)
        return None

    def save_tables(self, dirname: str, kind: Kind, extra: Mapping[str, Any] | None) -> int:
        """Save the tables on devices and the network's values in the format of servers; no state of the network."""
        self._trained()
        if self.device_rows is None:
            raise FleetError(
                "fleet.save_persistables saves tables, and this job is collective and has none: use fleet.save(dirname)"
            )
        self._meetings.meet("fleet.save_persistables")
        return self.device_rows.save(dirname, kind, extra, partial(self._features_to_save, dirname))

    def _features_to_save(self, dirname: str) -> list[dict[str, Any]]:
        """Raises ModelError if a save would lose features of the one that is there."""
        from torchfleet.collective.checkpoint.collective_manifest import features_of

        there = features_of(dirname)
        if not there and self._features is None:
            return []
        from torchfleet.data.model_features import features_in

        self.features.check_kept(features_in(there, dirname), Storage(dirname).path)
        return self.features.saved()

    def load_features(self, dirname: str) -> None:
        """Load the features of the save that the job goes on from. All ranks call it together. Raises ModelError if it
        was given others.
        """
        from torchfleet.collective.checkpoint.loading import saved_features

        found = saved_features(dirname, self.world)
        if found:
            from torchfleet.data.model_features import features_in

            self.features.load(features_in(found, dirname), dirname)

    def is_asked_to_stop(self) -> bool:
        """Whether any rank is asked to stop: all ranks stop after the same step."""
        return any(self.gather("fleet.stop_if_asked", b"1" if stop_request.has_come() else b""))

    def _finish_save(self, timeout: float | None = None) -> None:
        """Wait for a background save; raises its error, if any."""
        if self._saves is not None:
            self._saves.finish(timeout)

    def load(self, dirname: str) -> dict[str, Any]:
        from torchfleet.collective.checkpoint.collective_manifest import tables_of
        from torchfleet.collective.checkpoint.loading import load, saved_number

        model, optimizer = self._trained()
        self._finish_save()
        self._meetings.meet("fleet.load")
        if self.device_rows is not None:
            number = saved_number(dirname, self.world)
            if number is None:
                extra = self.device_rows.load(dirname, with_network=True)
                optimizer.begin_anew()
                self.load_features(dirname)
                return extra
            self.device_rows.load(Storage(dirname).place(tables_of(number)), with_network=False)
        extra = load(dirname, model.module, optimizer.inner, self.strategies, self.world, self.names)
        optimizer.begin_anew()
        self.load_features(dirname)
        return extra

    def check_whole_state(self) -> None:
        """Does nothing: a save has the state of any optimizer."""

    def begin_from(self, dirname: str) -> None:
        self.load(dirname)

    def optimizer_options(self) -> list[list[dict[str, Any]]]:
        return [options_of(self._trained()[1])]

    def set_optimizer_options(self, options: list[list[dict[str, Any]]]) -> None:
        set_options(self._trained()[1], options[0])

    def elastic_steps(
        self,
        num_steps: int,
        copy_steps: int,
        kept: Mapping[str, Kept],
        saved: Callable[[], int],
        load: Callable[[], Any],
    ) -> Iterator[int]:
        """The steps that are left. Before the first one, the newest complete copy or else the last save is loaded. The
        contract: fleet.elastic.steps."""
        from torchfleet.collective.elastic.elastic_steps import ElasticSteps, check_copies
        from torchfleet.collective.elastic.memory_copies import RankState

        model, optimizer = self._trained()
        state = RankState(model, optimizer, self.strategies, self.world, self.names, kept)
        if copy_steps:
            check_copies(state, has_rows=self.device_rows is not None)
        self._meetings.meet("fleet.elastic.steps")
        return iter(ElasticSteps(state, num_steps, copy_steps, saved, load))

    def _trained(self) -> tuple[CollectiveModel, CollectiveOptimizer]:
        if self.model is None or self.optimizer is None:
            raise FleetError("call fleet.distributed_model and fleet.distributed_optimizer before this")
        return self.model, self.optimizer

    # More of the methods that the functions of api/ call on every kind of job (torchfleet/api/job/protocol.py)

    @property
    def mode(self) -> str:
        return "collective"

    @property
    def num_workers(self) -> int:
        return self.info.num_workers

    @property
    def data_shard(self) -> tuple[int, int]:
        return self.world.data_shard

    def distribute_scheduler(self, scheduler: Any) -> Any:
        """Returns the scheduler unchanged: every step is a global one."""
        return scheduler

    def barrier(self) -> None:
        self._meetings.meet("fleet.barrier_worker()")
        self.world.barrier()

    def gather(self, name: str, data: bytes, comm_world: str = "worker") -> list[bytes]:
        """The data of every rank, in rank order. All ranks call it in the same order, so `name` is not needed."""
        if comm_world == "server":
            raise FleetError("comm_world='server': this job is collective and has no servers; use 'worker' or 'all'")
        self._meetings.meet(f"fleet.util or fleet.metrics ({name})")
        return self.world.gather(data)


def _write_last(job: weakref.ref[CollectiveJob], pid: int) -> None:
    """Write the last report at exit, in this process only: processes forked from it have nothing to report."""
    if os.getpid() == pid and (found := job()) is not None:
        found.write_last()
