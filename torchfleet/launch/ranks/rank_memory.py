"""Memory of the launcher for copies of its ranks' state: a rank that is killed leaves them for its successor.

The files are anonymous (memfd): no folder limits their size, and nothing is left when the launcher ends, even if it is
killed.
"""

from __future__ import annotations

import os

from torchfleet.collective.elastic.memory_files import NUM_FILES, VARIABLE


class RankMemory:
    """The memory files of the ranks of this machine. They take no memory until a rank writes to them."""

    def __init__(self, num_ranks: int) -> None:
        self._files = [
            [os.memfd_create(f"local rank {rank}, file {i}") for i in range(NUM_FILES)] for rank in range(num_ranks)
        ]

    def variables(self, local_rank: int) -> dict[str, str]:
        """The variable that tells a rank where its files are."""
        return {VARIABLE: ":".join(f"/proc/{os.getpid()}/fd/{number}" for number in self._files[local_rank])}
