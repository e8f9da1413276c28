"""The dashboard as a watcher of a running job: it serves the record of the run while the job runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.snapshot import JobSnapshot
from torchfleet.observe.dashboard.access import token_of_this_process
from torchfleet.observe.dashboard.dashboard_server import Dashboard
from torchfleet.observe.dashboard.run_folders import RunFolders
from torchfleet.observe.watch.watchers import ANY_PORT


class DashboardWatcher:
    """Must come after the writer of the record in the list of watchers, so that it sends the last lines.

    If the port cannot be opened, the job does not start; a later attempt continues without the page.
    """

    def __init__(self, run_dir: Path, port: int, attempt: int, report: Callable[[str], None]) -> None:
        self._dashboard: Dashboard | None = None
        try:
            folders, own_port = RunFolders([run_dir]), None if port == ANY_PORT else port
            self._dashboard = Dashboard(folders, port=own_port, token=token_of_this_process())
        except FleetError as error:
            if not attempt:
                raise
            report(f"[fleetrun] {error} The job goes on without the page.")
        else:
            report(f"[fleetrun] dashboard: {self._dashboard.url}")

    def look(self, snapshot: JobSnapshot) -> None:
        """Does nothing: the dashboard reads the record."""

    def note(self, line: str, is_event: bool) -> None:
        """Does nothing: the dashboard reads the record."""

    def end(self, snapshot: JobSnapshot) -> None:
        """Does nothing: the dashboard reads the record."""

    def close(self) -> None:
        if self._dashboard is not None:
            self._dashboard.close()
