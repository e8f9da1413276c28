"""The barriers of the pass loop. All workers must arrive at the same stage of the same part."""

from __future__ import annotations

from typing import Any

import msgspec

import torchfleet as fleet
from torchfleet.api import process_role
from torchfleet.base.errors import FleetError
from torchfleet.base.prepared_types import prepared

_NAME = "online"  # one name for all barriers, so that workers at different stages do not wait for each other
NEXT_PART = "part"  # the stage at which worker 0 announces the next part
_AGAIN = "Start the job again: it goes on from the last complete pass."


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """The stage at which a worker arrives, and its data for the other workers."""

    stage: str
    part: str
    data: Any


def gather_at(stage: str, part: str, data: Any = None) -> list[Any]:
    """Gather the data of all workers, in their order, once all have arrived. Raises FleetError on all workers if a
    worker has left the job or is at another stage or part.
    """
    encoded = process_role.gather(_NAME, msgspec.msgpack.encode(WorkerReport(stage, part, data)))
    reports = [msgspec.msgpack.decode(report, type=prepared(WorkerReport)) for report in encoded]
    at = f"part {part} is not complete" if stage != NEXT_PART else f"no part after {part or 'the beginning'} can begin"
    if len(reports) < fleet.worker_num():
        raise FleetError(
            f"{at}: {fleet.worker_num() - len(reports)} of {fleet.worker_num()} workers have left; their logs say why. "
            f"{_AGAIN}"
        )
    if any((report.stage, report.part) != (stage, part) for report in reports):
        places = ", ".join(f"{i} at '{report.stage}' of {report.part or 'none'}" for i, report in enumerate(reports))
        raise FleetError(
            f"{at}: the workers are not at the same point ({places}). Was one of them started again? {_AGAIN}"
        )
    return [report.data for report in reports]
