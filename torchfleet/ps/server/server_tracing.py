"""A server's part in traces and profiles: it records the requests of steps that are traced, and says so when asked."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, time

from torchfleet.base.monitor.notices import tell
from torchfleet.base.tracing.otlp import OtlpExport
from torchfleet.base.tracing.process_part import ProcessName
from torchfleet.base.tracing.profile_folder import LOOK, ProfileFolder, ProfileRequest
from torchfleet.base.tracing.span_recorder import Recorder
from torchfleet.ps.server.traced_requests import TracedRequests


class ServerTracing:
    """Look often: it costs a look at a clock."""

    def __init__(self, name: ProcessName, requests: TracedRequests, folder: ProfileFolder, every: int) -> None:
        self._name, self._requests, self._folder = name, requests, folder
        self._export = OtlpExport(name.role, name.index) if every else None
        self._profile: Path | None = None
        self._until = self._next = 0.0
        self._record(None)

    def look(self) -> None:
        """Begin with a profile that is asked for, or end one."""
        if self._profile is None:
            request = self._folder.look()
            if request is not None:
                self._begin_profile(request)
            return
        now = monotonic()
        if now < self._next:
            return
        self._next = now + LOOK / 10
        if (self._profile / "end").exists() or time() > self._until or not self._profile.is_dir():
            self._end_profile()

    def _begin_profile(self, request: ProfileRequest) -> None:
        folder = self._folder.of(request)
        try:
            self._name.say_here(folder)
        except OSError as error:
            self._tell(error)
            return
        self._profile, self._until = folder, request.until
        self._record(Recorder())

    def close(self) -> None:
        """The server ends."""
        if self._profile is not None:
            self._end_profile()
        self._requests.recorder = None
        if self._export is not None and (lost := self._export.close()):
            tell(f"torchfleet server {self._name.index}: {lost}")
        self._export = None

    def _end_profile(self) -> None:
        profile, self._profile = self._profile, None
        recorder = self._requests.recorder
        self._record(None)
        if profile is None or recorder is None or not profile.is_dir():
            return  # whoever asked may have given up
        try:
            self._name.leave_part(profile, recorder)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        tell(f"torchfleet server {self._name.index}: no part in the profile that is asked for: {error}. It goes on.")

    def _record(self, recorder: Recorder | None) -> None:
        own = None if self._export is None else self._export.recorder
        self._requests.recorder = recorder or own
