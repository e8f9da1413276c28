"""The saves of a server: the allowed folders, the save that a delta continues, and the last save."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchfleet.base.errors import CheckpointError


@dataclass
class Chain:
    """The saves that a delta may continue, by their tokens."""

    attempt: int = 0  # the last save made here; it is not known yet whether it was committed
    base: int = 0  # the save before it, which was committed

    def begin(self, token: int, parent: int, is_delta: bool) -> bool:
        """Begin a save that continues `parent`. Returns whether the last attempt was committed."""
        is_committed = parent != self.base or not parent
        if parent and parent == self.attempt:
            self.base = parent
        elif is_committed:
            if is_delta:
                raise CheckpointError(
                    "the tables of this server do not come from the last save there, so there is nothing that a delta "
                    "could continue: make a full save (mode=0)"
                )
            self.base = 0
        self.attempt = token
        return is_committed


@dataclass
class SavesMade:
    """The number of saves that this server took part in, and data of the last one."""

    num: int = 0
    last_time: float = 0.0  # seconds since 1970
    last_seconds: float = 0.0  # its duration
    last_rows: int = 0
    last_bytes: int = 0
    dirname: str = ""


@dataclass
class Saves:
    """A server's data about saved models."""

    roots: tuple[str, ...] = ()  # folders below which saves may be written; if empty, saves/save_roots.py says where
    model: str = ""  # the saved model that was loaded
    chain: Chain = field(default_factory=Chain)
    made: SavesMade = field(default_factory=SavesMade)
