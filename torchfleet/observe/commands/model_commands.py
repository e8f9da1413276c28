"""The commands of `fleet` about saved models and about servers that run: inspect, stats, diff, compact, export."""

from __future__ import annotations

import argparse
import contextlib
import os

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.progress import Progress
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.collective_manifest import is_collective
from torchfleet.observe.commands.diff import diff
from torchfleet.observe.commands.export_network import add_network_options, export_network, exports_network
from torchfleet.observe.commands.inspect_collective import export_collective, inspect_collective
from torchfleet.observe.commands.inspect_saved import inspect_model
from torchfleet.observe.commands.nearest_command import add_index_options, export_index, exports_index
from torchfleet.ps.checkpoint.chain import statistics_of
from torchfleet.ps.checkpoint.compaction import compact
from torchfleet.ps.checkpoint.export import FORMATS, export_table
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.checkpoint.model_export import DESCRIPTION, PARAMETERS, export_model

_LIVE = ("tcp://", "ipc://")
_TOP = 10


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """All commands of this file."""
    for add in (_add_inspect, _add_stats, _add_diff, _add_compact, _add_export):
        add(commands)


def _inspect(options: argparse.Namespace) -> int:
    is_live = options.model.startswith(_LIVE)
    for name, is_wrong in (("--check", is_live and options.check), ("--keys", options.keys and not is_live)):
        if is_wrong:
            what = "a running server" if is_live else "a saved model"
            raise FleetError(f"{name} is not for {what}, and {options.model} is one")
    if not is_live and is_collective(options.model):
        if options.table or options.histograms or options.top:
            raise FleetError(
                f"--table, --histograms, --top are for tables, and {options.model} has none: it is collective"
            )
        inspect_collective(options.model, options.check, options.json)
        return 0
    # For a named table, both histograms and top keys are shown, unless the user asks for one of them.
    is_bare = bool(options.table) and not options.histograms and options.top is None
    histograms, top = options.histograms or is_bare, _TOP if is_bare else options.top or 0
    if is_live:
        from torchfleet.observe.commands.inspect_servers import inspect_servers

        endpoints = options.model.split(",")
        inspect_servers(endpoints, options.keys, options.table, histograms, top, options.json)
    else:
        inspect_model(options.model, options.check, options.table, histograms, top, options.json)
    return 0


def _stats(options: argparse.Namespace) -> int:
    from torchfleet.observe.commands.server_stats import show_stats

    show_stats(options.servers, options.key_dir, options.json)
    return 0


def _diff(options: argparse.Namespace) -> int:
    return int(diff(options.a, options.b, options.max_gb, options.json))


def _compact(options: argparse.Namespace) -> int:
    before = read_manifest(Storage(options.model))
    progress = Progress("fleet compact")
    made = compact(options.model, options.output, progress.show)
    progress.end("done")
    first, num_saves = made.links()[0], len(before.links())
    if made == before:
        print(f"{options.model} is one full save already: {first.save}")
    else:
        num_bytes = sum(part.bytes for part in first.parts)
        place = f"{first.save} in {options.output or options.model}"
        print(f"{num_saves} save{'s' * (num_saves > 1)} made into one: {place}, {num_bytes:,} bytes")
    return 0


def _what_to_export(options: argparse.Namespace) -> tuple[str, str]:
    """(table, or "" for all of the model; where to)."""
    is_named, has_place = bool(options.named_table), bool(options.table)
    if (is_named and not options.out) or bool(options.out) == has_place or has_place != bool(options.path):
        options.usage_error("give --table TABLE --out FILE, or TABLE PATH; for the whole model --out alone")
    return options.named_table or options.table, options.out or options.path


def _export(options: argparse.Namespace) -> int:
    if exports_network(options):
        return export_network(options)
    is_index = exports_index(options)
    table, path = _what_to_export(options)
    if is_index:
        return export_index(options, table, path)
    if is_collective(options.model):
        if table or options.format or options.with_state or options.with_statistics:
            raise FleetError(
                f"{options.model} is a collective model, which has no tables: fleet export {options.model} --out FILE"
            )
        export_collective(options.model, path)
        return 0
    if not table:
        return _export_whole(options, path)
    num = export_table(options.model, table, path, options.format or "", options.with_state, options.with_statistics)
    print(f"{num:,} rows of '{table}' in {path}")
    if options.with_statistics:
        names = statistics_of(read_manifest(Storage(options.model)), table)
        print(f"statistics: {', '.join(names) or 'none are kept'}")
    return 0


def _export_whole(options: argparse.Namespace, folder: str) -> int:
    progress = Progress("fleet export")
    form = options.format or FORMATS[0]
    made = export_model(options.model, folder, form, options.with_state, options.with_statistics, progress.show)
    progress.end(f"done, in {folder}")
    for table in made["tables"]:
        print(f"{table['rows']:,} rows of '{table['name']}' in {table['file']}")
    print(f"{len(made['parameters']):,} parameters and buffers in {PARAMETERS}; what is where in {DESCRIPTION}")
    return 0


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = commands.add_parser(
        "inspect",
        help="tables, rows and files of a saved model, or of running servers",
        description="Tables, rows and files of a saved model (from its manifest, at once), or of servers that are "
        "running. With --table, --histograms or --top rows are looked at: those of a model are read from its files, a "
        "server goes over its own between the requests of the job.",
    )
    made.add_argument(
        "model", help="a folder with a saved model; or tcp://host:port of a server, or of several with commas between"
    )
    made.add_argument("--check", action="store_true", help="read every file and compare its checksum")
    made.add_argument(
        "--table", action="append", default=[], help="look into this table's rows (can be given several times)"
    )
    made.add_argument(
        "--histograms", action="store_true", help="norms, scores, days unseen, age; of all tables or --table"
    )
    made.add_argument(
        "--top", type=_count, metavar="N", help="N keys of highest score (or last looked up, or largest norm)"
    )
    made.add_argument("--keys", metavar="DIR", help="folder of the keys that the servers ask for (fleetrun --keygen)")
    made.add_argument("--json", action="store_true", help="everything as one JSON object")
    made.set_defaults(run=_inspect)


def _add_stats(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = commands.add_parser(
        "stats",
        help="tables, rows, bytes, requests and staleness of running servers",
        description="What running servers hold and do: rows of sparse tables, elements of dense ones, bytes, updates, "
        "staleness, requests, and the workers that have joined.",
    )
    made.add_argument(
        "servers",
        metavar="HOST:PORT[,HOST:PORT]|LOG_DIR",
        help="the servers, with commas between; or the folder of logs of a job that is running, such as log/latest",
    )
    made.add_argument(
        "--key_dir", default=os.environ.get("FLEET_KEY_DIR"), help="folder of keys (default: FLEET_KEY_DIR)"
    )
    made.add_argument("--json", action="store_true", help="everything as one JSON object")
    made.set_defaults(run=_stats)


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = commands.add_parser(
        "diff",
        help="how two saved models differ",
        description="Per table: rows only in A, only in B, changed and equal, the largest difference of a value and "
        "its key, the mean absolute difference, and in how many rows optimizer state and statistics differ; dense "
        "parameters by name; settings that differ. All is compared bit by bit. Ends with status 0 if the models are "
        "equal, 1 if they differ, 2 if something went wrong.",
    )
    made.add_argument("a", metavar="A", help="a folder with a saved model")
    made.add_argument("b", metavar="B", help="another one; the numbers of servers may differ")
    made.add_argument(
        "--max_gb",
        type=_gigabytes,
        metavar="GB",
        help="hold at most so much of A's rows in memory (default: half of the machine's); if that is not enough, read "
        "both models several times",
    )
    made.add_argument("--json", action="store_true", help="everything as one JSON object")
    made.set_defaults(run=_diff)


def _add_compact(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = commands.add_parser(
        "compact",
        help="make a chain of saves into one full save",
        description="A full save and the deltas behind it become one full save that loads as they did, to the bit. A "
        "job that saves deltas there goes on doing so. If it is killed, the model is as it was.",
    )
    made.add_argument("model", help="the folder with the chain")
    made.add_argument("--output", metavar="DIR", help="write the full save there, and leave the chain as it is")
    made.set_defaults(run=_compact)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = commands.add_parser(
        "export",
        help="write a table, or a whole model, to files that other programs read",
        description="Rows of a sparse table. Parquet: columns key (int64) and values (list of float32). Text: lines "
        "of `key v1 v2 ...` with nine digits, so that every float32 comes back. CSV: the same with commas, below a "
        "line of names. safetensors: tensors keys (int64) and values (float32). With --out alone, the whole model: "
        "a folder with a file for every table, parameters.safetensors, and model.json, which names them; of a "
        "collective model one safetensors file. What is written may be on this machine, or at any URL that fsspec "
        "opens (s3://bucket/rows.parquet).",
    )
    made.add_argument("model", help="a folder with a saved model")
    made.add_argument("table", nargs="?", default="")
    made.add_argument("path", nargs="?", default="", help="the file to write; it appears when it is complete")
    made.add_argument("--table", dest="named_table", metavar="TABLE", default="", help="the table, if --out is given")
    made.add_argument("--out", metavar="PATH", default="", help="the file to write, or the folder for a whole model")
    made.add_argument(
        "--format",
        choices=FORMATS,
        help="of a table: by the ending of the file (.parquet, .txt, .csv, .safetensors; none: parquet); of a whole "
        "model: parquet",
    )
    made.add_argument("--with_state", action="store_true", help="the optimizer's state behind the values")
    made.add_argument(
        "--with_statistics",
        action="store_true",
        help="what the table keeps of seen, born, tick, show, click, slot, in this order: columns of these names, or "
        "numbers at the end of each line",
    )
    add_index_options(made)
    add_network_options(made)
    made.set_defaults(run=_export, usage_error=made.error)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 1000, found {text!r}")
    return int(text)


def _gigabytes(text: str) -> int:
    with contextlib.suppress(ValueError, OverflowError):
        num_bytes = int(float(text) * (1 << 30))
        if num_bytes > 0:
            return num_bytes
    raise argparse.ArgumentTypeError(f"expected a number of gigabytes above 0, found {text!r}")
