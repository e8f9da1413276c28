"""`fleet export MODEL --table TABLE --index KIND --out FOLDER`, and `fleet nearest FOLDER`, which searches it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from torchfleet.base.errors import FleetError
from torchfleet.base.printable import say

_KINDS = ("exact", "faiss", "hnswlib")  # as in apps/nearest_items.py, which imports torch
_METRICS = ("cosine", "ip", "l2")


def add_index_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("an index of nearest items (on this machine)")
    group.add_argument(
        "--index",
        choices=_KINDS,
        help="make an index of the table's rows in the folder --out; fleet nearest searches it",
    )
    group.add_argument(
        "--metric", choices=_METRICS, help="with --index: cosine (default), ip (inner product) or l2 (distance)"
    )


def exports_index(options: argparse.Namespace) -> bool:
    """Whether the command is about an index. Raises FleetError if its options contradict each other."""
    if options.index is None:
        if options.metric is not None:
            raise FleetError("--metric is for --index: add --index exact, faiss or hnswlib")
        return False
    other = next((name for name in ("format", "with_state", "with_statistics") if getattr(options, name)), None)
    if other is not None:
        raise FleetError(f"--index and --{other} are two exports: give two commands")
    return True


def export_index(options: argparse.Namespace, table: str, folder: str) -> int:
    from torchfleet.apps.nearest_items import index_of_table

    if not table:
        raise FleetError("--index is of one table: fleet export MODEL --table TABLE --index exact --out FOLDER")
    num = index_of_table(options.model, table, folder, options.index, options.metric or "cosine")
    print(f"{options.index} index of {num:,} rows of '{table}' in {folder}")
    return 0


def add_commands(commands: Any) -> None:
    """As command.py describes."""
    nearest = commands.add_parser(
        "nearest",
        help="the items of an index that are nearest to an item, or to a vector",
        description="Search an index that `fleet export --index` made: for each item or vector, the ids that are "
        "nearest, with their scores (cosine, inner product, or minus the squared distance).",
    )
    nearest.add_argument("index", metavar="FOLDER", help="the folder of the index")
    asked = nearest.add_mutually_exclusive_group(required=True)
    asked.add_argument("--id", type=int, action="append", metavar="N", help="an item; can be given several times")
    asked.add_argument("--string", action="append", metavar="TEXT", help="an item whose id is this string's hash")
    asked.add_argument("--vector", type=_vector, action="append", metavar="X,Y,...", help="a vector")
    nearest.add_argument("--top", type=_count, default=10, metavar="N", help="how many (default: 10)")
    nearest.add_argument("--json", action="store_true", help="as one JSON object")
    nearest.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from torchfleet.apps.nearest_items import load_index

    index = load_index(options.index)
    asked = options.id or options.string or options.vector
    found = index.search(asked, options.top) if options.vector else index.neighbours(asked, options.top)
    rows = [
        {"query": query, "ids": ids, "scores": scores}
        for query, ids, scores in zip(asked, found.ids.tolist(), found.scores.tolist(), strict=True)
    ]
    if options.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        if len(rows) > 1:
            say(f"{row['query']}:")
        for number, score in zip(row["ids"], row["scores"], strict=True):
            if number != -1 or score > float("-inf"):
                say(f"{number:>20}  {score:.6f}")
    return 0


def _vector(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between, found {text!r}") from None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 10000, found {text!r}")
    return int(text)
