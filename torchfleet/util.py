"""fleet.util: small things that a script needs among its workers."""

from __future__ import annotations

from collections.abc import Sequence

from torchfleet import fleet


def get_file_shard(files: Sequence[str]) -> list[str]:
    """This worker's files: each file goes to exactly one worker, counts differ by at most one."""
    return fleet.split_files(files)
