"""A process of a job as `fleet profile` sees it: its identity, and the files with which it takes part."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from torchfleet.base.tracing.profile_folder import Offset, Part, machine_number, write
from torchfleet.base.tracing.span_recorder import Recorder


@dataclass(frozen=True)
class ProcessName:
    """The identity of a process in its job."""

    role: str  # "worker", "server" or "rank"
    index: int
    num_workers: int
    num_servers: int
    process: int  # its unique number, by which other processes identify it
    mode: str = ""

    def path(self, folder: Path, ending: str) -> Path:
        return folder / f"{self.role}.{self.index}.{ending}"

    def part(self, recorder: Recorder | None = None) -> Part:
        """The process's part of a profile; without a recorder, only its identity."""
        own = (self.role, self.index, self.num_workers, self.num_servers)
        made = Part(*own, socket.gethostname(), machine_number(), os.getpid(), self.process, self.mode)
        if recorder is not None:
            made.spans = recorder.take()
            made.offsets = [Offset(process, *found) for process, found in recorder.offsets.items()]
            made.num_dropped = recorder.num_dropped
        return made

    def say_here(self, folder: Path) -> None:
        write(self.path(folder, "here"), self.part())

    def say_ready(self, folder: Path) -> None:
        write(self.path(folder, "ready"), self.part())

    def leave_part(self, folder: Path, recorder: Recorder) -> None:
        write(self.path(folder, "part.json"), self.part(recorder))
