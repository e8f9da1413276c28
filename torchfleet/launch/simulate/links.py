"""The network of a simulated job: what a message costs its processes, and when it arrives."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchfleet.base.errors import RoleError

# What ZeroMQ takes of the thread that calls it, for a message, for each frame of it and for each byte; on both sides.
# docs/simulate.md says how they were measured.
MESSAGE_SECONDS = 20e-6
FRAME_SECONDS = 4e-6
BYTE_SECONDS = 0.02e-9

_UNITS = {"Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_LINK = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>Mbit|Gbit)(,(?P<latency>\d+(\.\d+)?)(?P<scale>us|ms))?")


@dataclass(frozen=True)
class Link:
    """Every process is a machine of its own, with one link in each direction; a switch between them never blocks."""

    bytes_per_second: float = 10e9 / 8
    latency: float = 50e-6  # seconds from the first byte sent to the first byte received

    def seconds(self, num_bytes: int) -> float:
        """How long this many bytes keep a link busy."""
        return num_bytes / self.bytes_per_second

    def ring_seconds(self, num_bytes: int, num_ranks: int, passes: int) -> float:
        """How long a ring takes over `num_bytes` of each rank: one pass gathers or scatters, two reduce for all."""
        hops = passes * (num_ranks - 1)
        return hops * (self.latency + self.seconds(num_bytes) / num_ranks)

    def tree_seconds(self, num_bytes: int, num_ranks: int) -> float:
        """How long a tree takes to bring `num_bytes` from one rank to all, or from all to one."""
        return (num_ranks - 1).bit_length() * (self.latency + self.seconds(num_bytes))


class Port:
    """One direction of a machine's link: messages pass one after the other."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.free_at = 0.0

    def begin(self, time: float, num_bytes: int) -> float:
        """When the first byte passes, for a message that is ready at `time`."""
        begun = max(time, self.free_at)
        self.free_at = begun + self._link.seconds(num_bytes)
        return begun

    def end(self, time: float, num_bytes: int) -> float:
        """When the last byte has passed, for a message whose first byte is here at `time`."""
        self.begin(time, num_bytes)
        return self.free_at


def parse_link(text: str) -> Link:
    """`10Gbit`, `100Mbit`, with a latency behind a comma: `25Gbit,20us`."""
    found = _LINK.fullmatch(text)
    if found is None or float(found["number"]) == 0 or (found["latency"] and float(found["latency"]) == 0):
        raise RoleError(
            f"--link {text}: expected a bandwidth in Mbit or Gbit, and if you like a latency in us or ms, both above "
            "0, such as 10Gbit or 25Gbit,20us"
        )
    latency = Link.latency
    if found["latency"]:
        latency = float(found["latency"]) * {"us": 1e-6, "ms": 1e-3}[found["scale"]]
    return Link(float(found["number"]) * _UNITS[found["unit"]], latency)


def message_seconds(num_frames: int, num_bytes: int) -> float:
    """What one message takes of the thread that sends it, and of the one that receives it."""
    return MESSAGE_SECONDS + num_frames * FRAME_SECONDS + num_bytes * BYTE_SECONDS
