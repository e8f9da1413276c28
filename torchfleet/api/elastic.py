"""fleet.elastic: collective training in which a killed rank is replaced while the others keep their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from torchfleet.api.current_job import any_job
from torchfleet.api.job_life import reset
from torchfleet.api.saves import load, saved_extra
from torchfleet.base.errors import FleetError
from torchfleet.base.pages import page

if TYPE_CHECKING:
    from torchfleet.collective.elastic.memory_copies import Kept


def run(train: Callable[[], object]) -> None:
    """Call `train`; when a rank is killed, `fleetrun --max_restart N` starts it again, and the other ranks call `train`
    again in their processes, without importing anything anew.

    `train` calls fleet.init, makes the model and the optimizer, and loops over `steps`. Returns when it has ended on
    all ranks. An error that `train` raises while no rank is replaced is raised here. Without such a launcher `train`
    is called once.
    """
    from torchfleet.collective.elastic.attempts import run

    run(train, reset)


def steps(
    num_steps: int,
    dirname: str | None = None,
    copy_steps: int = 10,
    keep: Mapping[str, Kept] | None = None,
) -> Iterator[int]:
    """The remaining steps of `num_steps`: 0, 1, ... at first; after a rank was replaced, the steps from the last copy
    on. All ranks iterate together, after distributed_model and distributed_optimizer.

    After every `copy_steps` steps (0: never) each rank copies its parameters, optimizer state and random numbers into
    the memory of its launcher, and another machine keeps a second copy, if there are several. If the launcher does not
    replace ranks, no copies are kept, and rank 0 prints a notice. `keep`: objects, such as a scheduler, whose
    state_dict is copied too; it must be storable as JSON. `dirname`: the folder of saves that
    have {"step": number of steps made} in their `extra`; the last save is loaded if no copy is complete.
    """
    from torchfleet.collective.collective_job import CollectiveJob

    for name, value, least in (("num_steps", num_steps, 0), ("copy_steps", copy_steps, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise FleetError(f"fleet.elastic.steps: {name} must be a whole number of at least {least}, found {value!r}")
    job = any_job()
    if not isinstance(job, CollectiveJob):
        raise FleetError(
            "fleet.elastic.steps is for collective jobs, fleet.init(is_collective=True), and this one has parameter "
            f"servers: their rows have logs and replicas ({page('faults')})"
        )
    if dirname is not None:
        job.load_features(dirname)  # a copy does not have them
    saved = partial(_saved_step, dirname)
    return job.elastic_steps(num_steps, copy_steps, keep or {}, saved, partial(load, dirname or ""))


def _saved_step(dirname: str | None) -> int:
    """The number of steps of the last save; -1 if the folder has no save."""
    extra = None if dirname is None else saved_extra(dirname)
    if extra is None:
        return -1
    step = extra.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise FleetError(
            f"fleet.elastic.steps: the save in {dirname} has step={step!r} in its extra, expected the number of steps: "
            'fleet.save(dirname, extra={"step": step + 1})'
        )
    return step
