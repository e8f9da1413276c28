"""Lightning's Trainer in a job: `lightning.Trainer(strategy=fleet.lightning.FleetStrategy("async"))`.

Importing it registers the names "fleet_sync", "fleet_half_async", "fleet_async", "fleet_geo" and "fleet_hybrid", for
`Trainer(strategy="fleet_async")`. It needs Lightning: pip install 'torchfleet[lightning]'.
"""

from __future__ import annotations

from torchfleet.apps.lightning import FleetStrategy

__all__ = ["FleetStrategy"]
