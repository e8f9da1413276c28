"""One serving process: loads the model, then answers on the socket that its launcher holds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

import msgspec
import torch

from torchfleet.apps.serve.endpoints.access_log import AccessLog
from torchfleet.apps.serve.endpoints.grpc_app import GrpcApp
from torchfleet.apps.serve.endpoints.http_app import ServingApp
from torchfleet.apps.serve.inference import Inference
from torchfleet.apps.serve.served_model import ServedModel
from torchfleet.apps.serve.serving_metrics import ServingMetrics
from torchfleet.apps.serve.settings import FAILED, WorkerStart, token_of
from torchfleet.base.errors import FleetError
from torchfleet.base.extras import check_installed, required
from torchfleet.base.prepared_types import prepared
from torchfleet.base.printable import say
from torchfleet.ps.net.open_files import raise_limit

_LOOK = 0.1  # seconds between two checks whether to end


def main() -> int:
    start = msgspec.json.decode(sys.argv[1], type=prepared(WorkerStart))
    threading.Thread(target=_end_with_launcher, args=(start.alive,), name="launcher", daemon=True).start()
    try:
        _serve(start)
    except FleetError as error:
        say(f"fleet serve: {error}", file=sys.stderr)
        return FAILED
    return 0


def _serve(start: WorkerStart) -> None:
    raise_limit()  # of open files: each connection is one, and the limit is 1024 on most machines
    settings = start.settings
    torch.set_num_threads(settings.threads)
    uvicorn = required("uvicorn", "fleet serve", "serve")
    check_installed("httptools", "fleet serve", "serve")
    from torchfleet.apps.serve.endpoints.direct_http import DirectProtocol  # imports uvicorn, an extra

    DirectProtocol.request_seconds = settings.timeout_s
    model = ServedModel(settings)
    metrics = ServingMetrics(start.metrics, start.worker, settings.workers)
    log = AccessLog(settings.access_log, start.worker) if settings.access_log else None
    inference = Inference(model, settings, metrics)
    shared = inference, settings, token_of(settings), metrics, log
    config = uvicorn.Config(
        ServingApp(*shared),
        http=DirectProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(settings.timeout_s) + 1,
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
    )
    server = uvicorn.Server(config)
    threading.Thread(target=_tell_ready, args=(server, start.ready), name="ready", daemon=True).start()
    grpc = GrpcApp(*shared) if settings.grpc_port else None
    gc.collect()
    gc.freeze()  # loaded objects stay: collecting garbage among them took 100 ms, in the middle of requests
    _new_loop().run_until_complete(_both(server, grpc, inference, socket.socket(fileno=start.socket)))
    inference.close()
    model.close()


async def _both(server: Any, grpc: GrpcApp | None, inference: Inference, listening: socket.socket) -> None:
    """Serve HTTP, and gRPC beside it, until a signal ends this process. Both then answer requests that have begun."""

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)  # uvicorn raises the signal once more when HTTP has ended, but gRPC may not have
    if grpc is not None:
        await grpc.start()
    http = asyncio.ensure_future(server.serve(sockets=[listening]))
    watching = asyncio.ensure_future(inference.watch())
    while not server.should_exit and not http.done():
        await asyncio.sleep(_LOOK)
    inference.is_ending = True
    await asyncio.gather(http, *([grpc.stop()] if grpc is not None else []))
    watching.cancel()


def _new_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop if it is installed, otherwise of asyncio."""
    try:
        loop: asyncio.AbstractEventLoop = required("uvloop", "fleet serve", "serve").new_event_loop()
    except FleetError:
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def _tell_ready(server: object, ready: int) -> None:
    """Tell the launcher as soon as uvicorn listens."""
    moment = threading.Event()
    while not getattr(server, "started", False):
        moment.wait(0.01)
    with contextlib.suppress(OSError):
        os.write(ready, b"1")


def _end_with_launcher(alive: int) -> None:
    """End this process when its launcher is gone, even if that was killed."""
    with contextlib.suppress(OSError):
        os.read(alive, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main())
