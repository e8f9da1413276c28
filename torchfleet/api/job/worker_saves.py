"""The saves of a worker: what they contain, where they are, and which are repeated when the worker stops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torchfleet.api.job.job_setup import JobSetup
from torchfleet.api.job.last_saves import LastSave, LastSaves
from torchfleet.api.serving.description import ModelDescriber, saved_features
from torchfleet.base.monitor.notices import tell
from torchfleet.base.monitor.stop_request import stop_request
from torchfleet.base.saved_extra import script_extra
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Manifest
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.membership import Membership
from torchfleet.ps.worker.model_saving import Kind, save_model, tell_of_replacing
from torchfleet.ps.worker.modes.communicator import Communicator
from torchfleet.ps.worker.sent_buffers import SentBuffers

if TYPE_CHECKING:
    from torchfleet.api.hybrid.hybrid_worker import HybridWorker


class WorkerSaves:
    """Saves of the model as it is on the servers."""

    def __init__(
        self,
        setup: JobSetup,
        client: Client,
        membership: Membership | None,
        hybrid: HybridWorker | None,
        communicator: Callable[[], Communicator],
        buffers: SentBuffers | None = None,
    ) -> None:
        """`membership`: None if there are no other workers; `communicator` returns the current one; `buffers` sends
        those of the model between saves.
        """
        assert setup.strategy is not None
        assert setup.model is not None
        self._info, self._plan, self._timeout = setup.info, setup.plan, setup.strategy.sync_timeout
        self._client, self._membership, self._hybrid, self._communicator = client, membership, hybrid, communicator
        self._buffers = buffers
        self.describer = ModelDescriber(setup.model, setup.features)
        fixed = [group.spec.name for group in setup.plan.fixed]
        self._last_saves = LastSaves(client, setup.info, self._timeout, fixed)
        self._saved_to: set[str] = set()  # paths
        self.replaced: dict[str, int] = {}  # by path: the number of the save of an earlier job that is gone
        self._continued = ""  # the path of the newest save that deltas can continue

    def save(self, dirname: str, kind: Kind, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Save the model, including this worker's gradients."""
        communicator = self._communicator()
        communicator.flush()
        storage = Storage(dirname)
        features = self._features_to_save(storage)
        replaced = None
        # A restarted worker does not know what it saved before.
        if not self._info.restart and storage.path not in self._saved_to:
            replaced = tell_of_replacing(storage, kind, {server["model"] for server in self._client.stats()})
        if self._hybrid is not None:
            self._hybrid.put_network()
        if kind != "inference":
            communicator.put_states()
        updates, are_others_at_work = self._last_saves.state() if self._membership is not None else ([], False)
        described = self.describer.encoded(self._plan)
        with contextlib.nullcontext() if self._buffers is None else self._buffers.resting():
            saved = save_model(
                self._client, self._plan, dirname, self._timeout, kind, extra, features=features, described=described
            )
        self._saved_to.add(storage.path)
        if replaced is not None:
            self.replaced[storage.path] = replaced
        if kind != "inference":
            self._continued = storage.path
        if self._membership is not None:
            made = LastSave(dirname, kind, extra, updates)
            is_open = are_others_at_work or communicator.keeps_rest
            self._last_saves.note(communicator.num_steps, storage.path, made, is_open)
        return saved

    def _features_to_save(self, storage: Storage) -> list[dict[str, Any]]:
        """Raises ModelError if the save would lose features of the one that is there."""
        features = self.describer.features
        if storage.path not in self._saved_to:
            there = saved_features(storage)
            if self._info.restart:  # it does not know the features that it was given before
                features.load(there, storage.path)
            else:
                features.check_kept(there, storage.path)
        return features.saved()

    def complete(self) -> list[str]:
        """Before worker 0 stops: if it has saved since its last step, wait for the other workers, and repeat the newest
        save of each folder, if they have outdated it. Returns these folders. If a save fails, the others are still
        made, and the first error is raised then.

        Does nothing if the job was asked to end: the other workers then do not make their last step.
        """
        communicator = self._communicator()
        saves = self._last_saves.after(communicator.num_steps)
        if self._membership is None or not saves or stop_request.was_seen():
            return []
        communicator.rest()
        communicator.hand_over()
        if self._hybrid is not None and self._hybrid.meets_at_end:
            self._hybrid.meet_at_end()
        else:
            self._membership.finish(self._client)
            self._last_saves.wait_for_others()
        outdated = [save for save in saves if self._last_saves.is_outdated(save)]
        outdated.sort(key=self._can_repeat_delta, reverse=True)  # first: the servers continue only their newest save
        error: Exception | None = None
        for save in outdated:
            kind: Kind = "full" if save.kind == "delta" and not self._can_repeat_delta(save) else save.kind
            try:
                # States of workers (fleet.save_state) belong to the moment of that save, and not to the model of now.
                number = self.save(save.dirname, kind, script_extra(save.extra or {})).number
            except Exception as failed:
                tell(f"fleet.stop_worker: {save.dirname} lacks what other workers trained after the save: {failed}")
                error = error or failed
                continue
            print(f"fleet: {save.dirname} is saved again (save {number}): others trained after the save", flush=True)
        if error is not None:
            raise error
        return [save.dirname for save in outdated]

    def _can_repeat_delta(self, save: LastSave) -> bool:
        return save.kind == "delta" and Storage(save.dirname).path == self._continued
