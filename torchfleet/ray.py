"""Jobs on Ray from Python, including notebooks: `fleet.ray.run(train, server_num=2, worker_num=4)`.

Does what `fleetrun --cluster ray` does, without a command line. The options have the same names as those of fleetrun.
"""

from __future__ import annotations

from torchfleet.launch.clusters.on_ray.run import run

__all__ = ["run"]
