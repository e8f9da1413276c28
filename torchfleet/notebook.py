"""Fleets from a cell of a notebook: `fleet.notebook.run(train, server_num=2, worker_num=2)`.

What `fleetrun` does on this machine, without a script: the function of a cell runs in every process of the job.
"""

from __future__ import annotations

from torchfleet.launch.cell_job import run

__all__ = ["run"]
