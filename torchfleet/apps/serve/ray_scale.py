"""How a model is served on a cluster of Ray: the number of replicas, and when it changes."""

from __future__ import annotations

import msgspec

from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.errors import FleetError

ONGOING = 256  # requests in a replica at one time; more wait in the proxy


class RayScale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas there are, and when another one is started."""

    address: str = "auto"  # host:port of a cluster; "auto": the one that Ray finds; "local": a new one here
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing: int = 32  # requests in a replica that the autoscaler aims at
    cpus: float = 1.0  # of a replica

    def checked(self, settings: ServeSettings) -> RayScale:
        """Raises FleetError for settings that contradict each other or are out of range."""
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise FleetError(
                f"--replicas {self.min_replicas}:{self.max_replicas}: expected N, or MIN:MAX with 1 <= MIN <= MAX"
            )
        if not 1 <= self.target_ongoing <= ONGOING or not 0 < self.cpus < float("inf"):
            raise FleetError(
                f"--target_ongoing {self.target_ongoing}, --replica_cpus {self.cpus:g}: expected 1 to {ONGOING}, and "
                "a number of cores above 0"
            )
        taken = {"--workers": settings.workers > 1, "--tls_cert": bool(settings.tls_cert)}
        taken |= {"--access_log": bool(settings.access_log), "--port 0": settings.port == 0}
        other = next((name for name, is_given in taken.items() if is_given), None)
        if other:
            raise FleetError(
                f"{other} and --cluster ray exclude each other: Ray starts the processes (--replicas), listens on one "
                "known port on every node and logs requests, without TLS, which a load balancer before it may add"
            )
        return self
