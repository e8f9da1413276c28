"""`fleet serve`: predictions of a saved model over HTTP."""

from __future__ import annotations

import argparse

import msgspec

from torchfleet.apps.serve.serving_processes import ServingProcesses
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.extras import check_installed
from torchfleet.observe.watch.watchers import port_or_any

_EXAMPLES = """examples:
  fleet serve model                                 the model of a folder, on http://127.0.0.1:8000
  fleet serve model --follow                        take over what a job saves there
  fleet serve s3://bucket/model --workers 4         four processes on one port
  fleet serve model --network model.py:WideDeep     a network that could not be saved with the model

  curl localhost:8000/v2/models/model               the inputs and outputs of the model
  curl localhost:8000/v2/models/model/infer -d \\
    '{"inputs": [{"name": "ids", "datatype": "INT64", "shape": [1, 2], "data": [17, 42]}]}'
  curl localhost:8000/metrics                       requests, latencies, batches, model_age_seconds

The model is a folder of fleet.save_inference_model or fleet.save_persistables. Any client of the Open Inference
Protocol v2 can ask, such as tritonclient. Strings are hashed as in training. All of it: docs/serving.md"""


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
    made.add_argument("--name", default="", help="the model's name in paths (default: the last part of MODEL)")
    made.add_argument("--follow", action="store_true", help="take over new saves of the job that trains the model")
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


def _serve(options: argparse.Namespace) -> int:
    for package in ("uvicorn", "httptools"):
        check_installed(package, "fleet serve", "serve")
    names = [field.name for field in msgspec.structs.fields(ServeSettings)]
    settings = ServeSettings(**{name: getattr(options, name) for name in names}).checked()
    return ServingProcesses(settings).run()
