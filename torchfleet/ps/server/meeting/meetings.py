"""The workers of a job as one server knows them: their barriers, gathers, rounds, parcels and lists of files."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchfleet.ps.server.meeting.barrier import Barriers
from torchfleet.ps.server.meeting.entrance import Entrance
from torchfleet.ps.server.meeting.file_lists import FileLists
from torchfleet.ps.server.meeting.gathering import Gatherings
from torchfleet.ps.server.meeting.mail import Mail
from torchfleet.ps.server.meeting.members import Members
from torchfleet.ps.server.meeting.presence import Presence
from torchfleet.ps.server.meeting.quorum import Quorum
from torchfleet.ps.server.meeting.rounds import Rounds
from torchfleet.ps.server.state.claims import Agreement


@dataclass
class Meetings:
    """Which workers are present, and which wait for each other. Initially no worker has joined."""

    members: Members = field(default_factory=Members)
    presence: Presence = field(default_factory=Presence)
    barriers: Barriers = field(init=False)
    gatherings: Gatherings = field(init=False)
    mail: Mail = field(default_factory=Mail)
    files: FileLists = field(default_factory=FileLists)
    rounds: Rounds = field(default_factory=Rounds)  # of hybrid mode, if the network is exchanged through the servers
    quorum: Quorum = field(default_factory=Quorum)  # rounds of a job with a quorum: they do not wait for all workers
    entrance: Entrance = field(default_factory=Entrance)  # of server 0: which workers take part in rounds
    place: tuple[int, int] | None = None  # this server's number, and the number of servers; None: unknown
    agreement: Agreement | None = None  # the settings of the job that the present workers agree on

    def __post_init__(self) -> None:
        self.barriers, self.gatherings = Barriers(self.members), Gatherings(self.members)
