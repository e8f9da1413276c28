"""Checkpoints of a Trainer: Lightning's file, and beside it fleet's folder with the rows and the optimizer's state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet
from torchfleet.api import process_role
from torchfleet.base.adoption import options_of, set_options
from torchfleet.base.errors import FleetError
from torchfleet.collective.tensors.whole_state import whole_state
from torchfleet.ps.worker.row_state.embedding_state import EmbeddingState

_SUFFIX = ".fleet"  # of the folder beside a checkpoint file


class CheckpointFolders:
    """`name.ckpt` has Lightning's contents and the rows of tables with a declared size: a plain module can load it.

    `name.ckpt.fleet` has tables, network and optimizer, as written by fleet.save. `fit(ckpt_path=...)` continues from
    it, with any number of servers and workers. Only the folder has tables without a declared size.
    """

    checkpoint_io: Any
    is_global_zero: bool
    lightning_module: Any
    model: Any
    optimizers: list[Any]
    _folder: str | None = None  # beside the last loaded checkpoint
    _is_collective: bool

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> Any:
        """Load Lightning's file. A job that begins later starts from the folder beside it, if there is one."""
        folder = f"{os.fspath(checkpoint_path)}{_SUFFIX}"
        is_there = not process_role.is_under_way() and fleet.saved_extra(folder) is not None
        self._folder = folder if is_there else None
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def folder_to_load(self) -> str | None:
        """The folder from which the job starts; None if no checkpoint was loaded, or if it has no folder beside it."""
        return self._folder

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state on the first worker; empty on other workers, which write no file. Ranks call it together,
        and all get the whole state.
        """
        if self._is_collective:
            return whole_state(self.lightning_module)
        if not self.is_global_zero:
            return {}
        with _without_any_ids(self.lightning_module):
            return dict(self.lightning_module.state_dict())

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save the folder before the file: if the file exists, the folder is complete."""
        folder = f"{os.fspath(filepath)}{_SUFFIX}"
        if self._is_collective:
            fleet.save(folder)
        elif self.is_global_zero and "optimizer_states" in checkpoint:
            fleet.save_persistables(folder)
        elif self.is_global_zero:
            fleet.save_inference_model(folder)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)
            self.checkpoint_io.remove_checkpoint(Path(f"{os.fspath(filepath)}{_SUFFIX}"))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Before the job begins, sets its initial values. Later, all workers call it, and the first updates the
        servers.
        """
        module, state = self.lightning_module, checkpoint["state_dict"]
        any_ids = [name for name, one in module.named_modules() if _has_any_id(one)]
        if self._folder is None and any_ids:
            raise FleetError(
                f"the rows of '{any_ids[0]}', a table for any id, are in the folder {_SUFFIX} beside a checkpoint, "
                "which servers load when they start: give ckpt_path to the first call of a job"
            )
        with _without_any_ids(module):
            module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state on the first worker, without that of tables for any id, which the folder has. On other
        workers, which write no file, only its options.
        """
        if self._is_collective:
            return dict(optimizer.inner.state_dict())
        if not self.is_global_zero:
            return {"state": {}, "param_groups": options_of(optimizer)}
        with _without_any_ids(self.lightning_module):
            return dict(optimizer.state_dict())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load options of the param groups, such as the learning rate, and the state if the servers have not loaded the
        folder. All workers call it.
        """
        if self._is_collective and self._folder is None:
            print(
                f"FleetStrategy: there is no folder {_SUFFIX} beside the checkpoint: the optimizer's state begins anew",
                flush=True,
            )
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if self._is_collective:
                continue
            if self._folder is None:
                optimizer.load_state_dict(state)
            else:
                groups = state["param_groups"]
                set_options(optimizer, [{name: group[name] for name in group if name != "params"} for group in groups])


def _has_any_id(module: torch.nn.Module) -> bool:
    return isinstance(module, EmbeddingState) and module.num_embeddings is None and module.state is None


@contextlib.contextmanager
def _without_any_ids(module: torch.nn.Module) -> Iterator[None]:
    """Within this context, tables without a declared size omit their rows from the state, since the folder has them."""
    found = [one for one in module.modules() if _has_any_id(one)]
    for one in found:
        one.state = "none"  # type: ignore[assignment]
    try:
        yield
    finally:
        for one in found:
            one.state = None  # type: ignore[assignment]
