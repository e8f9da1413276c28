"""Saves by torch.distributed.checkpoint of the state that fleet.save writes: the rival of `collective_saves`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_saver


class DcpSaves:
    """Written into one folder, the last save over the one before. Needs the process group of a job.

    Asynchronous saves copy the state into host memory that is kept, and pinned where the state is on a GPU, and write
    it by a thread.
    """

    def __init__(self, folder: Path, is_gpu: bool) -> None:
        self._folder = folder
        self._group = dist.new_group(backend="gloo")  # that of the job may be NCCL's, which has no tensors on the CPU
        self._stager = _stager(is_gpu)

    def save(self, state: dict[str, Any]) -> None:
        state_dict_saver.save(state, storage_writer=self._writer(), process_group=self._group)

    def begin(self, state: dict[str, Any]) -> Any:
        """A future that is done when the save is written. Returns when training may go on."""
        found: Any = state_dict_saver.async_save(
            state, storage_writer=self._writer(), process_group=self._group, async_stager=self._stager
        )
        if hasattr(found, "staging_completion"):  # copies beside the caller; a step would change what is copied
            found.staging_completion.result()
            return found.upload_completion
        return found

    def _writer(self) -> Any:
        return filesystem.FileSystemWriter(self._folder, thread_count=2, overwrite=True)


def _stager(is_gpu: bool) -> Any:
    from torch.distributed.checkpoint import staging

    if hasattr(staging, "DefaultStager"):  # from torch 2.9 on
        chosen = staging.StagingOptions(use_pinned_memory=is_gpu, use_shared_memory=False, use_async_staging=is_gpu,
                                        use_non_blocking_copy=is_gpu)  # fmt: skip

        class Stager(staging.DefaultStager):
            """Keeps its memory: torch 2.11 closes a stager that it was given, and the one in it, after a save."""

            def __init__(self, options: Any) -> None:
                super().__init__(options)
                vars(self._state_dict_stager)["close"] = self.close

            def close(self) -> None:
                pass

        return Stager(chosen)
    return staging.BlockingAsyncStager(cache_staged_state_dict=True)
