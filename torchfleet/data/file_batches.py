"""An IterableDataset of batches from files, for torch.utils.data.DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.utils.data

from torchfleet.data.dataset import file_shard
from torchfleet.data.queue_dataset import QueueDataset
from torchfleet.data.reading.streams import check_files
from torchfleet.data.slots import Batch, Slot


class FileBatches(torch.utils.data.IterableDataset[Batch]):
    """Yields whole batches: use DataLoader(..., batch_size=None). With num_workers, each reads its share of files."""

    def __init__(
        self,
        files: Sequence[str],
        batch_size: int = 1,
        use_var: Sequence[Slot] = (),
        pipe_command: Any = None,
        data_format: Any = None,
        on_bad_line: str = "error",
        drop_last: bool = False,
    ) -> None:
        self._files = check_files(files)
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "use_var": list(use_var),
            "pipe_command": pipe_command,
            "data_format": data_format,
            "on_bad_line": on_bad_line,
            "drop_last": drop_last,
        }
        QueueDataset().init(**self._options)  # raises for wrong options now, not in a DataLoader's process

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        dataset = QueueDataset()
        dataset.init(**self._options)
        dataset.set_filelist(self._files if info is None else file_shard(self._files, info.id, info.num_workers))
        for batch in dataset:
            yield Batch(dict(batch), batch.num_samples)
