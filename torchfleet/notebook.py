"""Jobs from a notebook cell: `fleet.notebook.run(train, server_num=2, worker_num=2)`.

Does what `fleetrun` does on this machine, without a script: every process of the job runs the given function.
"""

from __future__ import annotations

from torchfleet.launch.cell_job import run

__all__ = ["run"]
