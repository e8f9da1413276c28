"""The network of a simulated job: the processor time of a message, and its arrival time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchfleet.base.errors import RoleError

# Seconds that ZeroMQ takes in the calling thread per message, per frame and per byte, on both sides.
# docs/simulate.md says how they were measured.
MESSAGE_SECONDS = 20e-6
FRAME_SECONDS = 4e-6
BYTE_SECONDS = 0.02e-9

_UNITS = {"Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_LINK = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>Mbit|Gbit)(,(?P<latency>\d+(\.\d+)?)(?P<scale>us|ms))?")


@dataclass(frozen=True)
class Link:
    """Every process has its own machine, with one link in each direction. The switch between them never blocks."""

    bytes_per_second: float = 10e9 / 8
    latency: float = 50e-6  # seconds from the first byte sent to the first byte received

    def seconds(self, num_bytes: int) -> float:
        """Return how long `num_bytes` occupy a link."""
        return num_bytes / self.bytes_per_second

    def ring_seconds(self, num_bytes: int, num_ranks: int, passes: int) -> float:
        """Return the time of a ring over `num_bytes` of each rank: one pass gathers or scatters, two passes
        all-reduce."""
        hops = passes * (num_ranks - 1)
        return hops * (self.latency + self.seconds(num_bytes) / num_ranks)

    def tree_seconds(self, num_bytes: int, num_ranks: int) -> float:
        """Return the time of a tree that sends `num_bytes` from one rank to all, or from all ranks to one."""
        return (num_ranks - 1).bit_length() * (self.latency + self.seconds(num_bytes))


class Port:
    """One direction of a machine's link: messages pass one after the other."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.free_at = 0.0

    def begin(self, time: float, num_bytes: int) -> float:
        """Return when the first byte of a message that is ready at `time` passes."""
        begun = max(time, self.free_at)
        self.free_at = begun + self._link.seconds(num_bytes)
        return begun

    def end(self, time: float, num_bytes: int) -> float:
        """Return when the last byte of a message whose first byte arrives at `time` has passed."""
        self.begin(time, num_bytes)
        return self.free_at


def parse_link(text: str) -> Link:
    """Parse `10Gbit` or `100Mbit`, optionally with a latency after a comma: `25Gbit,20us`."""
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
    """Return the seconds that one message costs the sending thread; the receiving thread pays the same."""
    return MESSAGE_SECONDS + num_frames * FRAME_SECONDS + num_bytes * BYTE_SECONDS
