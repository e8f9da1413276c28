"""`fleet serve MODEL --cluster ray`: the same application as a deployment of Ray Serve, with as many replicas as the
requests need."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import msgspec
import torch

from torchfleet.apps.serve.endpoints.http_app import Receive, Scope, Send, ServingApp
from torchfleet.apps.serve.inference import Inference
from torchfleet.apps.serve.ray_scale import ONGOING, RayScale
from torchfleet.apps.serve.served_model import ServedModel
from torchfleet.apps.serve.serving_metrics import ServingMetrics
from torchfleet.apps.serve.settings import ServeSettings, token_of
from torchfleet.base.errors import FleetError
from torchfleet.base.extras import required
from torchfleet.base.prepared_types import prepared
from torchfleet.base.printable import say

# Ray's settings for many small requests: no thread and no log line for each. Proxies forward the requests, because
# clients know only one address.
THROUGHPUT = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}


def serve_on_ray(settings: ServeSettings, scale: RayScale) -> int:
    """Deploy the model and wait until SIGINT or SIGTERM; then remove it. Returns the exit status."""
    os.environ.update(THROUGHPUT)  # before Ray is imported: for this process, and for a cluster that it starts
    ray = required("ray", "--cluster ray", "ray", ", on every node of the cluster")
    serve = required("ray.serve", "--cluster ray", "ray", ", on every node of the cluster")
    asked = threading.Event()
    _connect(ray, scale)
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which sets handlers of its own
        signal.signal(number, lambda *_: asked.set())
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        serve.run(application(serve, settings, scale), name=settings.name, route_prefix="/", blocking=False)
        say(f"fleet serve: {settings.name} at http://{settings.host}:{settings.port}/v2/models/{settings.name}, on Ray")
        asked.wait()
        serve.delete(settings.name)
        if scale.address == "local":
            serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def _connect(ray: Any, scale: RayScale) -> None:
    own = {"num_cpus": max(os.cpu_count() or 1, int(scale.max_replicas * scale.cpus) + 1)}
    try:
        ray.init(
            scale.address,
            runtime_env={"env_vars": THROUGHPUT},
            log_to_driver=False,
            logging_level="ERROR",
            **(own if scale.address == "local" else {}),
        )
    except Exception as error:  # Ray raises errors of many kinds
        raise FleetError(
            f"--cluster ray={scale.address}: no cluster of Ray is there ({error}). Start one with `ray start --head`, "
            "name another (ray=host:6379), or try it on this machine alone: ray=local"
        ) from None


def application(serve: Any, settings: ServeSettings, scale: RayScale) -> Any:
    """The deployment, bound to its settings. Every replica loads the model when it starts."""
    ingress = serve.ingress(ReplicaApp(msgspec.json.encode(settings)))
    scaling = {
        "min_replicas": scale.min_replicas,
        "max_replicas": scale.max_replicas,
        "target_ongoing_requests": scale.target_ongoing,
    }
    deployment = serve.deployment(
        name="model",
        autoscaling_config=scaling,
        max_ongoing_requests=ONGOING,
        ray_actor_options={"num_cpus": scale.cpus},
    )
    return deployment(ingress(_Replica)).bind()


class _Replica:
    """Ray makes one in each replica; its application answers the requests."""


class ReplicaApp:
    """The application of a replica. Ray sends the settings to a node, which loads the model at the replica's start."""

    def __init__(self, packed: bytes) -> None:
        """`packed`: ServeSettings as JSON."""
        self._packed = packed
        self._app: ServingApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        settings = msgspec.json.decode(self._packed, type=prepared(ServeSettings))
        torch.set_num_threads(settings.threads)
        try:
            model = ServedModel(settings)
            metrics = ServingMetrics(None, 0, 1)
            inference = Inference(model, settings, metrics)
            self._app = ServingApp(inference, settings, token_of(settings), metrics, None)
        except FleetError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        watching = asyncio.ensure_future(inference.watch())
        await receive()
        watching.cancel()
        inference.close()
        model.close()
        await send({"type": "lifespan.shutdown.complete"})
