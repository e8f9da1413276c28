"""The value of `--follow`: the files of a job, or its servers."""

from __future__ import annotations

import os
from pathlib import Path

from torchfleet.base.errors import FleetError
from torchfleet.observe.commands.server_stats import endpoint_of, servers_of_run

FILES, SERVERS = "files", "servers="


def followed_servers(asked: str) -> list[str]:
    """The addresses of the servers to follow; an empty list to follow files alone. Raises FleetError.

    `asked`: "files"; "servers=HOST:PORT,HOST:PORT"; or the folder of logs of a job that is running.
    """
    if asked == FILES:
        return []
    if asked.startswith(SERVERS):
        return [endpoint_of(place) for place in asked.removeprefix(SERVERS).split(",")]
    if os.path.isdir(asked):
        return servers_of_run(Path(asked))
    raise FleetError(
        f"--follow: expected files, servers=HOST:PORT,... or the folder of logs of a job that is running (--log_dir); "
        f"found {asked!r:.200}"
    )
