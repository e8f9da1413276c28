"""fleet.save_state and fleet.load_state: a save of the model, and with it all that a script needs to go on exactly."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import torch

from torchfleet.api.current_job import any_job, current
from torchfleet.api.job.not_begun import NO_WORKER
from torchfleet.api.saves import save, saved_extra, saved_state
from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.plain_values import pack, unpack
from torchfleet.base.prepared_types import prepared
from torchfleet.base.saved_extra import STATE
from torchfleet.collective.elastic.random_states import RandomStates, random_states, set_random_states


class Kept(Protocol):
    """An object of the script whose state goes with the model: a scheduler, a GradScaler, a prepared loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save_state(dirname: str, keep: Mapping[str, Kept] | None = None, extra: Mapping[str, Any] | None = None) -> int:
    """Save all that the script needs to go on as if it had not been interrupted: what `fleet.save` saves, and of every
    worker the options of its optimizers, its random numbers (Python's, numpy's, torch's), the loaders and schedulers of
    fleet.prepare, and `keep`. All workers call it together, between two steps. Returns the number of the save.

    `keep`: other objects by name whose state_dict has plain values, such as a GradScaler. It is one save, with one
    commit: the states are in its manifest. `dirname` and `extra`: as in fleet.save. See docs/checkpoints.md.
    """
    job = any_job(NO_WORKER)
    _check_fixed("save_state")
    own = {
        "random": msgspec.to_builtins(random_states(_device()), builtin_types=(bytes,)),
        "options": job.optimizer_options(),
        "kept": {name: one.state_dict() for name, one in _all_kept(keep).items()},
    }
    job.check_whole_state()
    job.barrier()
    found = job.gather("fleet.save_state", pack(own, "fleet.save_state: the state of this worker"))
    told = {STATE: [base64.b64encode(data).decode() for data in found]}
    failed, number = "", 0
    if job.info.is_collective:
        return save(dirname, {**(extra or {}), **told})
    if job.info.worker_index == 0:
        try:
            number = save(dirname, {**(extra or {}), **told})
        except BaseException as error:  # the others wait for it
            failed = f"{type(error).__name__}: {error}"
            raise
        finally:
            job.gather("fleet.save_state, done", msgspec.json.encode([failed, number]))
        return number
    failed, number = msgspec.json.decode(job.gather("fleet.save_state, done", b"")[0], type=tuple[str, int])
    if failed:
        raise CheckpointError(f"worker 0 could not save to {dirname}: {failed}")
    return number


def load_state(dirname: str, keep: Mapping[str, Kept] | None = None) -> dict[str, Any]:
    """Go on from a `save_state`, on as many workers; `keep` as there. All workers call it together, before the first
    step. Returns the `extra` of the save.

    A job with servers has loaded tables and network when it began: give `dirname` to fleet.prepare, or to init_server
    and init_worker. A collective job loads them here, on any number of ranks if `dirname` was saved by fleet.save.
    """
    job = any_job(NO_WORKER)
    _check_fixed("load_state")
    extra, told = saved_extra(dirname), saved_state(dirname)
    if told is None:
        raise CheckpointError(
            f"{dirname} has no state of workers: expected a save of fleet.save_state, found "
            f"{'one of fleet.save or fleet.save_persistables' if extra is not None else 'none'}. "
            "fleet.prepare(dirname=...) and fleet.load go on from those."
        )
    if len(told) != job.info.num_workers:
        raise CheckpointError(
            f"fleet.load_state: {dirname} was saved by {len(told)} workers, and this job has {job.info.num_workers}: "
            "random numbers and places in the data belong to a worker. Start as many, or leave load_state out: model, "
            "rows and optimizer go on on any number (fleet.prepare(dirname=...), fleet.load)."
        )
    own = _unpacked(told[job.info.worker_index], dirname)
    objects = _all_kept(keep)
    if sorted(objects) != sorted(own["kept"]):
        raise CheckpointError(
            f"fleet.load_state: {dirname} has the states of {', '.join(sorted(own['kept'])) or 'no objects'}, and this "
            f"script keeps {', '.join(sorted(objects)) or 'none'}: give the same `keep`, and fleet.prepare the same "
            "arguments, as at the save"
        )
    job.begin_from(dirname)
    for name, one in objects.items():
        one.load_state_dict(own["kept"][name])
    job.set_optimizer_options(own["options"])
    set_random_states(msgspec.convert(own["random"], prepared(RandomStates)), _device())
    return extra or {}


def _all_kept(keep: Mapping[str, Kept] | None) -> dict[str, Kept]:
    """The objects of fleet.prepare and those of the script, by name."""
    given: dict[str, Any] = {**current.prepared, **(keep or {})}
    for name, one in given.items():
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise FleetError(
                f"keep['{name}']: expected an object with state_dict() and load_state_dict(), found {one!r:.200}. A "
                "DataLoader gets them from fleet.prepare."
            )
    return given


def _check_fixed(user: str) -> None:
    if any_job(NO_WORKER).info.is_elastic:
        raise FleetError(
            f"fleet.{user}: the number of workers changes in this job (FLEET_MIN_WORKERS), and states belong to "
            "workers. Save with fleet.save, and keep the place in the data with set_filelist(files, dynamic=True)."
        )


def _device() -> torch.device:
    has_cuda = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")


def _unpacked(text: Any, dirname: str) -> dict[str, Any]:
    """A worker's state. Raises CheckpointError if these are not the bytes of one."""
    try:
        found = unpack(base64.b64decode(text, validate=True))
        if isinstance(found, dict) and {"random", "options", "kept"} <= set(found):
            return found
    except (binascii.Error, TypeError, ValueError, FleetError):
        pass
    raise CheckpointError(f"{dirname}: the state of a worker is damaged: save again with fleet.save_state")
