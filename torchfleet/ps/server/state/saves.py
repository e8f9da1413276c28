"""The saves of a server: where they may go, which one a delta continues, and the last one that was made."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchfleet.base.errors import CheckpointError


@dataclass
class Chain:
    """The saves that a delta may continue, by their tokens."""

    attempt: int = 0  # the last one that was made here; whether it came to be the model is not known yet
    base: int = 0  # the one before, which is

    def begin(self, token: int, parent: int, is_delta: bool) -> bool:
        """A save that continues `parent`; returns whether the last attempt is on disk for good."""
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
    """How many saves the server has made its part of, and the last one."""

    num: int = 0
    last_time: float = 0.0  # seconds since 1970
    last_seconds: float = 0.0  # that it took
    last_rows: int = 0
    last_bytes: int = 0
    dirname: str = ""


@dataclass
class Saves:
    """What a server knows of saved models."""

    roots: tuple[str, ...] = ()  # folders below which saves may be written; none: save_roots.py says where
    model: str = ""  # the saved model that was loaded
    chain: Chain = field(default_factory=Chain)
    made: SavesMade = field(default_factory=SavesMade)
