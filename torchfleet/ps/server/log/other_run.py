"""A server that goes on from the log of an earlier run: rows and clients stay, workers and their meetings do not."""

from __future__ import annotations

from torchfleet.ps.server.kept_pushes import apply_gathered
from torchfleet.ps.server.meeting.bound import Bound
from torchfleet.ps.server.meeting.file_lists import FileLists
from torchfleet.ps.server.meeting.mail import Mail
from torchfleet.ps.server.meeting.members import Members
from torchfleet.ps.server.meeting.presence import Presence
from torchfleet.ps.server.state.changes import Changes
from torchfleet.ps.server.state.state import State


def forget_workers(state: State) -> None:
    """As if the tables had been loaded from a saved model: the workers of this run begin with what is there."""
    apply_gathered(state)  # its pushes were acknowledged
    state.begin_meetings(Members(state.num_workers, state.members.min_workers, state.members.on_loss))
    state.presence, state.num_steps = Presence(), 0
    state.agreement = None
    state.mail, state.files, state.bound, state.changes = Mail(), FileLists(), Bound(), Changes()
    state.sync_step = {}
    state.long_work.clear()
    state.long_requests = {token: long for token, long in state.long_requests.items() if long.result is not None}
    state.is_stopping = False
    for table in state.tables.values():
        table.begin_run()
