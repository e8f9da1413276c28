"""Where the workers of the pass loop meet: all must be at the same point, and none may be missing."""

from __future__ import annotations

from typing import Any

import msgspec

from torchfleet import fleet
from torchfleet.errors import FleetError

_NAME = "online"  # one name for all meetings: workers at different points find out, and do not wait for each other
LOOK = "part"  # the stage at which the next part is told
_AGAIN = "Start the job again: it goes on from the last complete pass."


class Word(msgspec.Struct, frozen=True, array_like=True):
    """What a worker brings."""

    stage: str
    part: str
    data: Any


def meet(stage: str, part: str, data: Any = None) -> list[Any]:
    """What every worker brought, in their order. Raises on all workers alike if one is missing or elsewhere."""
    brought = fleet.gather(_NAME, msgspec.msgpack.encode(Word(stage, part, data)))
    words = [msgspec.msgpack.decode(word, type=Word) for word in brought]
    at = f"part {part} is not complete" if stage != LOOK else f"no part after {part or 'the beginning'} can begin"
    if len(words) < fleet.worker_num():
        raise FleetError(
            f"{at}: {fleet.worker_num() - len(words)} of {fleet.worker_num()} workers have left; their logs say why. "
            f"{_AGAIN}"
        )
    if any((word.stage, word.part) != (stage, part) for word in words):
        places = ", ".join(f"{i} at '{word.stage}' of {word.part or 'none'}" for i, word in enumerate(words))
        raise FleetError(
            f"{at}: the workers are not at the same point ({places}). Was one of them started again? {_AGAIN}"
        )
    return [word.data for word in words]
