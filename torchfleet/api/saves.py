"""Saves models to folders, for training or prediction, and loads them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torchfleet.api.current_job import any_job, current, get_job
from torchfleet.api.job.not_begun import NO_WORKER
from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.stop_request import end_with_save
from torchfleet.base.paddle_names import SAVING, SAVING_INFERENCE, with_paddle_arguments
from torchfleet.base.saved_extra import STATE, script_extra
from torchfleet.base.storage import Storage
from torchfleet.data.features import Feature
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.checkpoint.manifest_file import has_manifest

_MODES = {2: "fleet.save_inference_model(dirname), the model for prediction", 3: "fleet.shrink(), then mode=0"}


@with_paddle_arguments(SAVING)
def save_persistables(dirname: str, mode: int = 0, extra: Mapping[str, Any] | None = None) -> int:
    """Save tables, parameters and optimizer state, to continue training from: docs/checkpoints.md. Worker 0 only; in a
    collective job, whose tables are on devices, all ranks together.

    `dirname`: a folder or URL. All servers write there, so it must be the same place for all of them. `mode`: 0 for a
    full save, 1 for a delta, with the changes since the last save there. `extra`: values that can be stored as JSON;
    `saved_extra` returns them. Returns the number of the save.
    """
    _check_dirname("save_persistables", dirname)
    if isinstance(mode, bool) or mode not in (0, 1):
        advice = f"; instead of Paddle's mode {mode}: {_MODES[mode]}" if mode in _MODES else ""
        raise FleetError(f"save_persistables(mode={mode!r:.80}): 0 is a full save, 1 a delta{advice}")
    number = any_job(NO_WORKER).save_tables(dirname, "delta" if mode else "full", extra)
    current.callbacks.save(dirname)
    return number


def save(dirname: str, extra: Mapping[str, Any] | None = None, asynchronous: bool = False) -> int:
    """Save model, optimizer and strategies, to continue training from, and `extra`, which must be storable as JSON.

    `dirname`: a folder or URL that all processes reach. In collective training all ranks call it together; with
    parameter servers it is save_persistables, on worker 0 only. `asynchronous`, in collective training: return as soon
    as everything is copied, and write it during training. The next save, a load and stop_worker wait for the write and
    raise its error. Returns the number of the save.
    """
    number = any_job(NO_WORKER).save(dirname, extra, asynchronous)
    current.callbacks.save(dirname)
    return number


@with_paddle_arguments(SAVING_INFERENCE)
def save_inference_model(dirname: str, features: Sequence[Feature] = ()) -> None:
    """Save what prediction needs into `dirname`: tables and parameters without optimizer state. Worker 0 only.

    load_inference_model, DistributedInfer and `fleet serve` read it. `features` describes inputs of the model for
    `fleet serve`, by name: how it hashes strings for them, and what stands for those that a request does not give
    (docs/serving.md). They are added to those that fleet.distributed_model was given, and belong to the model from now
    on.
    """
    _check_dirname("save_inference_model", dirname)
    worker = get_job(NO_WORKER).first_worker("save_inference_model")
    worker.describer.describe(features)
    worker.save(dirname, "inference")
    current.callbacks.save(dirname)


def load(dirname: str) -> dict[str, Any]:
    """Collective training: continue from a `save` in `dirname`, on any number of ranks and with any strategies.

    All ranks call it together, after distributed_model and distributed_optimizer. Returns the `extra` of the save.
    """
    return script_extra(any_job().load(dirname))


def replace_features(features: Sequence[Feature]) -> None:
    """From the next save on, the model has these features, instead of those that were given or loaded before.

    For a vocabulary that grows, or edges that change; an empty list leaves none. Call it after init_worker(dirname), or
    after load in a collective job: on worker 0, or all ranks.
    """
    job = any_job(NO_WORKER)
    if job.info.is_collective:
        job.features.replace(features)
    else:
        get_job(NO_WORKER).first_worker("replace_features").describer.replace(features)


def saved_extra(dirname: str) -> dict[str, Any] | None:
    """The `extra` that was saved with the model in `dirname`; None if there is no complete model."""
    found = _extra(dirname)
    return None if found is None else script_extra(found)


def saved_state(dirname: str) -> list[Any] | None:
    """What fleet.save_state has added to the save in `dirname`, by worker; None if another call made it."""
    found = (_extra(dirname) or {}).get(STATE)
    return found if isinstance(found, list) else None


def _extra(dirname: str) -> dict[str, Any] | None:
    storage = Storage(dirname)
    if not has_manifest(storage):
        return None
    from torchfleet.collective.checkpoint import collective_manifest

    return dict(
        collective_manifest.read(storage).extra
        if collective_manifest.is_collective(dirname)
        else read_manifest(storage).extra
    )


def stop_if_asked(dirname: str, extra: Mapping[str, Any] | None = None) -> None:
    """If the job was asked to end, save to `dirname`, with `extra`, and exit this process with status 75.

    It saves as `save` does. The status means "start me again".

    Schedulers ask with SIGUSR1, some time before a limit: docs/cluster/slurm.md. Call it after a step. With parameter
    servers all workers may call it, and worker 0 acts; the scheduler ends the others. In collective training all ranks
    call it together, and end together.
    """
    job = any_job(NO_WORKER)
    if job.is_asked_to_stop():
        end_with_save(partial(save, dirname, extra), dirname)


def _check_dirname(user: str, dirname: Any) -> None:
    if not isinstance(dirname, (str, os.PathLike)):
        raise FleetError(
            f"{user}: expected a folder or URL first, found {dirname!r:.80}. There is no executor in torchfleet: "
            f"fleet.{user}(dirname)"
        )
