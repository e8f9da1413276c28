"""The datasets of a fleet: those of torchfleet.data, with the job's other workers at hand."""

from __future__ import annotations

from torchfleet import fleet
from torchfleet.data.dataset import BatchIterator, WorkerGroup
from torchfleet.data.memory_dataset import InMemoryDataset as _InMemoryDataset
from torchfleet.data.queue_dataset import QueueDataset as _QueueDataset
from torchfleet.errors import DataError


class InMemoryDataset(_InMemoryDataset):
    """All samples loaded first, then shuffled, exchanged and gone through any number of times: docs/data.md."""

    def workers(self) -> WorkerGroup:
        return fleet.workers()


class QueueDataset(_QueueDataset):
    """Batches straight from files, while training goes on: docs/data.md."""

    def workers(self) -> WorkerGroup:
        return fleet.workers()

    def settle(self) -> None:
        fleet.settle()

    def iterate(self) -> BatchIterator:
        if self._dynamic is not None and fleet.mode() == "sync" and fleet.worker_num() > 1:
            raise DataError(
                "set_filelist(dynamic=True) gives workers different numbers of batches, and in sync mode every step "
                "needs all of them: use an asynchronous mode, or fleet.util.get_file_shard"
            )
        return super().iterate()
