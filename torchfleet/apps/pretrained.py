"""Loads Hugging Face checkpoints directly into models that are split over ranks, and saves such models.

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained("llama"))   # only shapes, no memory
    model = fleet.distributed_model(model)                               # split by tensor_parallel, sharded by sharding
    fleet.transformers.load_pretrained(model, "llama")
    ...
    fleet.transformers.save_pretrained(model, "tuned")

Every rank reads only the pieces of tensors that it holds from the safetensors files. A folder is local, or one that all
ranks can reach.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

import torchfleet as fleet
from torchfleet.api.current_job import any_job
from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.prepared_types import prepared
from torchfleet.collective.checkpoint.pieces import HeldPiece, named, piece_of, tied
from torchfleet.collective.checkpoint.planning import Report, error_text, exchange
from torchfleet.collective.checkpoint.saving import save
from torchfleet.collective.checkpoint.single_file import export
from torchfleet.collective.checkpoint.tensor_files import box
from torchfleet.collective.collective_job import CollectiveJob
from torchfleet.collective.collective_model import CollectiveModel

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PARTS = ".fleet"  # holds the ranks' pieces until they are joined into one file


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@torch.no_grad()
def load_pretrained(model: torch.nn.Module, dirname: str) -> None:
    """Load parameters and buffers from a folder that save_pretrained made. fleet.distributed_model returned `model`.

    Call it on every rank, before fleet.distributed_optimizer. Raises CheckpointError for a tensor that is missing or
    has another shape; tensors that the model does not have are ignored.
    """
    own = _distributed(model, "load_pretrained")
    if own.clear is not None:
        raise FleetError("load_pretrained: call it before fleet.distributed_optimizer, which may copy parameters")
    files = _files(Path(dirname))
    wanted = dict(_wanted(own.module, files, dirname))
    for file in dict.fromkeys(files[name] for name in wanted):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in [name for name in wanted if files[name] == file]:
                    _read(opened, name, wanted[name], file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None


def save_pretrained(model: torch.nn.Module, dirname: str) -> None:
    """Write the model for `from_pretrained`: its configuration, and one safetensors file. All ranks call it together.

    Each rank writes its own pieces; the first one then joins them, with two tensors at a time in memory. An error on
    one rank is raised on all.
    """
    own, job, folder = _distributed(model, "save_pretrained"), any_job(), Path(dirname)
    assert isinstance(job, CollectiveJob)
    for strategy in own.strategies:
        strategy.before_save()
    save(str(folder / _PARTS), own.module, None, (), job.world)
    report, failed = Report(), None
    try:
        if fleet.is_first_worker():
            _join(own.module, folder)
    except Exception as error:
        report, failed = Report(error=error_text(error)), error
    exchange(job.world, report, failed)


def _join(module: torch.nn.Module, folder: Path) -> None:
    """Join the ranks' pieces into one file, and write the configuration."""
    export(str(folder / _PARTS), str(folder / _FILE))
    shutil.rmtree(folder / _PARTS)
    config: Any = module.config
    config.architectures = [type(module).__name__.removeprefix("FSDP")]  # FSDP2 renames the classes of units
    config.save_pretrained(str(folder))


def _distributed(model: torch.nn.Module, user: str) -> CollectiveModel:
    if not isinstance(model, CollectiveModel):
        raise FleetError(
            f"{user}: expected what fleet.distributed_model returned in a collective job, found a "
            f"{type(model).__name__}. A model that is not distributed has methods of its own for this."
        )
    return model


def _files(folder: Path) -> dict[str, Path]:
    """For each tensor's name, the file that contains it."""
    index = folder / _INDEX
    try:
        if index.exists():
            names = msgspec.json.decode(index.read_bytes(), type=prepared(_Index)).weight_map
            outside = next((file for file in names.values() if Path(file).name != file), None)
            if outside is not None:
                raise CheckpointError(f"{index}: expected names of files in its folder, found {outside!r:.100}")
            return {name: folder / file for name, file in names.items()}
        with safe_open(folder / _FILE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), folder / _FILE)
    except (msgspec.MsgspecError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder}: expected {_FILE} or {_INDEX} of save_pretrained: {error}") from None


def _wanted(module: torch.nn.Module, files: Mapping[str, Path], dirname: str) -> Iterator[tuple[str, HeldPiece]]:
    """(name in the files, this rank's piece) of every tensor of the model. Files have a tied tensor under one of its
    names. Raises CheckpointError for a tensor that the files lack.
    """
    others: dict[str, list[str]] = {}
    for alias, first in tied(module).items():
        others.setdefault(first, []).append(alias)
    for name, tensor in named(module).items():
        found = next((one for one in (name, *others.get(name, ())) if one in files), None)
        if found is None:
            raise CheckpointError(f"{dirname} has no '{name}', which the model has")
        yield found, piece_of(tensor)


def _read(opened: Any, name: str, piece: HeldPiece, file: Path) -> None:
    there = opened.get_slice(name)
    shape = tuple(there.get_shape())
    if shape != piece.shape:
        raise CheckpointError(f"{file}: expected '{name}' of shape {piece.shape}, found {shape}")
    whole = opened.get_tensor(name) if not shape else there[box(piece.offset, piece.tensor.shape)]
    piece.tensor.copy_(whole)
