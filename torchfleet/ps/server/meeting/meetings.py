"""The workers of a job as one server knows them, and everything that they meet by."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchfleet.ps.server.meeting.barrier import Barriers
from torchfleet.ps.server.meeting.file_lists import FileLists
from torchfleet.ps.server.meeting.gathering import Gatherings
from torchfleet.ps.server.meeting.mail import Mail
from torchfleet.ps.server.meeting.members import Members
from torchfleet.ps.server.meeting.presence import Presence
from torchfleet.ps.server.state.claims import Agreement


@dataclass
class Meetings:
    """Who is there, and who waits for whom. A new one: no worker has come yet."""

    members: Members = field(default_factory=Members)
    presence: Presence = field(default_factory=Presence)
    barriers: Barriers = field(init=False)
    gatherings: Gatherings = field(init=False)
    mail: Mail = field(default_factory=Mail)
    files: FileLists = field(default_factory=FileLists)
    place: tuple[int, int] | None = None  # this server's number, and that of servers; None: it was not told
    agreement: Agreement | None = None  # what the workers that are here said of their job

    def __post_init__(self) -> None:
        self.barriers, self.gatherings = Barriers(self.members), Gatherings(self.members)
