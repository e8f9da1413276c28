"""What a request for a profile gets, from workers that are played by files."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.messages import naming

from torchfleet.base.errors import FleetError
from torchfleet.base.tracing.process_part import ProcessName
from torchfleet.base.tracing.profile_folder import Part, ProfileRequest, new_request
from torchfleet.base.tracing.span_recorder import Recorder
from torchfleet.observe.profile.profile_run import ProfileRun

WORKER = ProcessName("worker", 0, 1, 0, 7)


class PlayedRun(ProfileRun):
    """A run of one worker. Its job ends while the parts are looked for: after those there are at the first look."""

    def __init__(self, root: Path, request: ProfileRequest, writes_part: bool) -> None:
        super().__init__(root, request, lambda: self.code, timeout=60.0)
        self.code: int | None = None
        self._writes_part = writes_part

    def __enter__(self) -> PlayedRun:
        super().__enter__()
        WORKER.say_here(self._folder)
        WORKER.say_ready(self._folder)
        return self

    def _found(self, ending: str, is_server: bool = False) -> list[Part]:
        found = super()._found(ending, is_server)
        if ending == "part.json" and not is_server and self.code is None:
            if self._writes_part:
                WORKER.leave_part(self._folder, Recorder())
            self.code = 0
        return found


def test_a_part_that_is_written_as_the_job_ends_counts(tmp_path: Path) -> None:
    with PlayedRun(tmp_path, new_request(5, 0, False), writes_part=True) as run:
        assert [part.process for part in run.parts()] == [WORKER.process]


def test_a_job_that_ends_without_all_parts_is_an_error(tmp_path: Path) -> None:
    run = PlayedRun(tmp_path, new_request(5, 0, False), writes_part=False)
    with run, pytest.raises(FleetError, match=naming(0, 1, 5)):
        run.parts()
