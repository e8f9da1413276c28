"""The command line of `fleet`: looks into saved models, jobs and machines; compares, compacts and exports models."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from torchfleet import __version__
from torchfleet.base.command_line import Parser
from torchfleet.base.errors import FleetError
from torchfleet.base.printable import say
from torchfleet.observe.commands import (
    compile_command,
    dashboard_command,
    docs_command,
    doctor_command,
    model_commands,
    nearest_command,
    rollback_command,
    serve_command,
)
from torchfleet.observe.plan import plan_command
from torchfleet.observe.profile import profile_command

# Files with commands: each has `add_commands(commands)`, which gives every command its options and sets its `run`, a
# function that takes the options and returns the exit status.
_COMMANDS = (
    model_commands,
    nearest_command,
    serve_command,
    rollback_command,
    dashboard_command,
    profile_command,
    docs_command,
    compile_command,
    doctor_command,
    plan_command,
)
_EXAMPLES = """examples:
  fleet inspect model/                                    the chain of saves, tables, rows, bytes
  fleet inspect model/ --check                            read every file and compare its checksum
  fleet inspect model/ --table embedding                  histograms of its rows, and its top keys
  fleet inspect tcp://127.0.0.1:7000 --table embedding    the same of a server that is running
  fleet stats 127.0.0.1:7000,127.0.0.1:7001               what servers that are running hold and do
  fleet stats log/latest                                  the same, of the job that writes its logs there
  fleet diff model/ other/                                rows that only one has, and how far the others differ
  fleet compact model/                                    a full save and its deltas become one full save
  fleet export model/ embedding rows.parquet              a table in a file that other programs read
  fleet export model/ --table embedding --out s3://bucket/rows.parquet
  fleet export model/ --out plain/                        all of it in plain files: tables, parameters, model.json
  fleet export model/ --out model.safetensors             a collective model in one file
  fleet export model/ --triton repository/                the network as a model of Triton; --onnx, --torch_export
  fleet export model/ --table embedding --index exact --out items      an index of its rows, for fleet nearest
  fleet nearest items --id 42 --top 10                    the ten rows nearest to that of id 42
  fleet serve model/ --port 8000                          predictions over HTTP
  fleet rollback model/ --to 41                           go back to an older version of a model that is served
  fleet dashboard log                                     a web page of the newest run of fleetrun, and of those before
  fleet profile --steps 20 --server_num 2 --worker_num 2 train.py     a Chrome trace of 20 steps of all processes
  fleet profile --steps 20 log/                           the same of a job that is running
  fleet doctor                                            what of this machine will hurt a job
  fleet plan --rows 1e11 --workers 1000 --servers 256     memory, network, saves, failures and money of such a job
  fleet doctor b:7100 c:7100                              and of the links to machines with fleet doctor --serve
  fleet compile                                           compile the kernels before the first job on a machine
  fleet docs checkpoints                                  a page of the documents, here at the terminal

A model is the folder that fleet.save, fleet.save_persistables or fleet.save_inference_model wrote to; any path that
fsspec opens. The models of fleet.save in collective training can be inspected and exported.
`fleet COMMAND --help` tells more. All of it: fleet docs checkpoints; of jobs and machines: fleet docs watching"""


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    if not given:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    options = parser.parse_args(given)
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except FleetError as error:
        say(f"fleet: {error}", file=sys.stderr)
        return 2 if options.command == "diff" else 1
    except BrokenPipeError:  # `fleet inspect ... | head`: Python would fail again when it flushes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("fleet: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "fleet",
        description="Look into saved models and running servers; compare, compact and export models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fleet {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_commands(commands)
    return parser
