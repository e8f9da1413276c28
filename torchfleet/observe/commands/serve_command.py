"""`fleet serve`: predictions of a saved model over HTTP."""

from __future__ import annotations

import argparse

import msgspec

from torchfleet.apps.serve.ray_scale import RayScale
from torchfleet.apps.serve.serving_processes import ServingProcesses
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.errors import FleetError
from torchfleet.base.extras import check_installed
from torchfleet.observe.commands.follow_option import FILES, followed_servers
from torchfleet.observe.watch.watchers import port_or_any

_EXAMPLES = """examples:
  fleet serve model                                 the model of a folder, on http://127.0.0.1:8000
  fleet serve model --follow                        take over what a job saves there
  fleet serve model --follow log                    and what the servers of the job with these logs learn
  fleet serve s3://bucket/model --workers 4         four processes on one port
  fleet serve model --shards a:7000,b:7000          rows on read-only servers: fleet docs serving_clusters
  fleet serve model --cluster ray --replicas 1:8    on Ray Serve, with as many replicas as requests need
  fleet serve model --network model.py:WideDeep     a network that could not be saved with the model

  curl localhost:8000/v2/models/model               the inputs and outputs of the model
  curl localhost:8000/v2/models/model/infer -d \\
    '{"inputs": [{"name": "ids", "datatype": "INT64", "shape": [1, 2], "data": [17, 42]}]}'
  curl localhost:8000/metrics                       requests, latencies, batches, model_age_seconds

The model is a folder of fleet.save_inference_model or fleet.save_persistables. Any client of the Open Inference
Protocol v2 can ask, such as tritonclient. Strings are hashed as in training. All of it: fleet docs serving"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = commands.add_parser(
        "serve",
        help="predictions of a saved model over HTTP",
        description="Serve the predictions of a saved model by the Open Inference Protocol v2, until Ctrl-C. "
        "Requests that arrive at the same time are computed as one batch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = {field.name: field.default for field in msgspec.structs.fields(ServeSettings)}
    made.add_argument("model", metavar="MODEL", help="a folder with a saved model, or a URL that fsspec opens")
    made.add_argument(
        "--host", default=default["host"], help="the address to listen on (127.0.0.1, this machine alone)"
    )
    made.add_argument("--port", type=port_or_any, default=default["port"], help="default: 8000; 0: any that is free")
    made.add_argument(
        "--grpc_port", type=int, default=default["grpc_port"], metavar="PORT", help="gRPC, too, on this port (none)"
    )
    made.add_argument("--name", default="", help="the model's name in paths (default: the last part of MODEL)")
    made.add_argument(
        "--follow",
        nargs="?",
        const=FILES,
        default="",
        metavar="files|servers=HOST:PORT,...|LOG_DIR",
        help="take over what the job that trains the model saves (files, the default), or what its servers learn, "
        "within a second: their addresses, or the folder of its logs",
    )
    made.add_argument("--workers", type=int, default=1, metavar="N", help="processes on the port (1)")
    made.add_argument("--threads", type=int, default=1, metavar="N", help="threads of a process, for the network (1)")
    made.add_argument(
        "--batch_wait_ms",
        type=float,
        default=default["batch_wait_ms"],
        metavar="MS",
        help="how long the first request of a batch waits for others (2); 0: only for those that are there",
    )
    made.add_argument(
        "--network",
        default="",
        metavar="FILE.py:FACTORY",
        help="the model's module, for models whose network could not be saved; the file is run",
    )
    _add_bounds(made, default)
    _add_access(made)
    _add_shards(made, default)
    _add_ray(made)
    made.set_defaults(run=_serve)


def _add_bounds(made: argparse.ArgumentParser, default: dict[str, object]) -> None:
    bounds = made.add_argument_group("bounds")
    for name, metavar, text in (
        ("max_batch", "N", "samples of a request, and of a batch (1024)"),
        ("max_queue", "N", "samples that may wait; more are answered with 503 at once (8192)"),
        ("max_body", "BYTES", "size of a request (16777216)"),
        ("max_connections", "N", "connections of a process (1024)"),
    ):
        bounds.add_argument(f"--{name}", type=int, default=default[name], metavar=metavar, help=text)
    bounds.add_argument(
        "--max_queue_s",
        type=float,
        default=default["max_queue_s"],
        metavar="S",
        help="seconds of work that may wait, at the speed of the last batches; more is answered with 503 at once (0.5)",
    )
    bounds.add_argument(
        "--timeout_s",
        type=float,
        default=default["timeout_s"],
        metavar="S",
        help="time for a request to come in, and time to answer it (10)",
    )


def _add_access(made: argparse.ArgumentParser) -> None:
    access = made.add_argument_group("access")
    access.add_argument("--tls_cert", default="", metavar="FILE", help="certificate, for https; with --tls_key")
    access.add_argument("--tls_key", default="", metavar="FILE", help="its private key")
    access.add_argument("--token_file", default="", metavar="FILE", help="a file with the bearer token to ask for")
    access.add_argument("--access_log", default="", metavar="FILE", help="a line of JSON per request; - for stdout")


def _add_shards(made: argparse.ArgumentParser, default: dict[str, object]) -> None:
    shards = made.add_argument_group("tables larger than this machine, on servers started with --read_only MODEL")
    shards.add_argument("--shards", default="", metavar="HOST:PORT[,...]", help="shard 0, shard 1, and so on")
    shards.add_argument("--backups", default="", metavar="HOST:PORT[,...]", help="a second server of each shard")
    shards.add_argument(
        "--row_cache", default=default["row_cache"], metavar="SIZE", help="memory for rows read last (256MB); 0: none"
    )
    shards.add_argument("--key_dir", default="", metavar="DIR", help="keys of these servers (default: FLEET_KEY_DIR)")


def _add_ray(made: argparse.ArgumentParser) -> None:
    ray = made.add_argument_group("on a cluster of Ray")
    ray.add_argument("--cluster", metavar="ray[=ADDRESS]", help="as a deployment of Ray Serve; ray=local: here, to try")
    ray.add_argument("--replicas", type=_replicas, metavar="N|MIN:MAX", help="processes, as requests need them (1)")
    ray.add_argument("--replica_cpus", type=float, metavar="N", help="cores of each (1)")
    ray.add_argument("--target_ongoing", type=int, metavar="N", help="requests in each that more are started at (32)")


def _serve(options: argparse.Namespace) -> int:
    for package in ("uvicorn", "httptools"):
        check_installed(package, "fleet serve", "serve")
    names = [field.name for field in msgspec.structs.fields(ServeSettings)]
    settings = ServeSettings(**{name: getattr(options, name) for name in names if hasattr(options, name)}).checked()
    if settings.grpc_port:
        for package in ("grpc", "open_inference.grpc"):
            check_installed(package, "fleet serve --grpc_port", "grpc")
    if settings.follow:
        settings = msgspec.structs.replace(settings, followed=tuple(followed_servers(settings.follow)))
    scale = _scale(options)
    if scale is not None and settings.grpc_port:
        raise FleetError("--grpc_port is for processes of this machine: Ray Serve has a gRPC proxy of its own")
    if scale is None:
        return ServingProcesses(settings).run()
    from torchfleet.apps.serve.ray_serving import serve_on_ray  # imports torch

    return serve_on_ray(settings, scale.checked(settings))


def _scale(options: argparse.Namespace) -> RayScale | None:
    """How to serve on Ray; None: on this machine alone. Raises FleetError."""
    given = {name: getattr(options, name) for name in ("replicas", "replica_cpus", "target_ongoing")}
    if options.cluster is None:
        other = next((name for name, value in given.items() if value is not None), None)
        if other is not None:
            raise FleetError(f"--{other} is about replicas on Ray: add --cluster ray")
        return None
    name, is_given, address = options.cluster.partition("=")
    if name != "ray" or bool(is_given) != bool(address):
        raise FleetError(
            f"--cluster expects ray or ray=ADDRESS, found {options.cluster!r}. Kubernetes: fleetrun k8s serve"
        )
    least, most = given["replicas"] or (1, 1)
    scale = RayScale(address or "auto", least, most)
    more = {"cpus": given["replica_cpus"], "target_ongoing": given["target_ongoing"]}
    return msgspec.structs.replace(scale, **{field: value for field, value in more.items() if value is not None})


def _replicas(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    try:
        return (int(least), int(most)) if colon else (int(least), int(least))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, or MIN:MAX; found {text!r}") from None
