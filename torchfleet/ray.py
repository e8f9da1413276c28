"""Jobs on Ray from Python, in a notebook too: `fleet.ray.run(train, server_num=2, worker_num=4)`.

What `fleetrun --cluster ray` does, without a command line. Options are those of fleetrun, by the same names.
"""

from __future__ import annotations

from torchfleet.launch.clusters.on_ray.run import run

__all__ = ["run"]
