"""The `fleet` command: look at a saved model, and export its tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchfleet.checkpoint.export import FORMATS, export_table
from torchfleet.checkpoint.manifest import read_manifest
from torchfleet.checkpoint.reading import read_part
from torchfleet.checkpoint.storage import Storage
from torchfleet.errors import FleetError


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "inspect":
            inspect(options.dirname, options.check)
        else:
            num = export_table(options.dirname, options.table, options.path, options.format, options.with_state)
            print(f"{num:,} rows of '{options.table}' in {options.path}")
    except FleetError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 1
    return 0


def inspect(dirname: str, check: bool) -> None:
    """The tables of a saved model; with `check`, every file is read and its checksum compared."""
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    print(f"{storage.path}, {manifest.save}: {manifest.kind}, by {manifest.num_servers} servers")
    shown = Table()
    for name in ("table", "kind", "dim", "rows", "bytes", "optimizer", "steps", "files"):
        shown.add_column(name, justify="left" if name in ("table", "kind", "optimizer") else "right")
    for table in manifest.tables:
        parts = manifest.parts_of(table.name)
        size = sum(part.bytes for part in parts)
        rule = table.rule["name"] if table.num_states or manifest.kind == "full" else "-"
        shown.add_row(
            escape(table.name),
            table.kind,
            str(table.dim),
            f"{table.rows:,}",
            f"{size:,}",
            rule,
            str(table.step),
            str(len(parts)),
        )
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # a pipe or a log: nothing has to be cut
    console.print(shown)
    if check:
        for part in manifest.parts:
            read_part(storage, manifest, part)
        print(f"{len(manifest.parts)} files are whole")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fleet", description="Look at saved models.", epilog="More: docs/checkpoints.md")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("inspect", help="tables, rows and files of a saved model")
    one.add_argument("dirname", help="the folder that fleet.save_persistables wrote to")
    one.add_argument("--check", action="store_true", help="read every file and compare its checksum")
    two = commands.add_parser("export", help="write a table to one file that other programs read")
    two.add_argument("dirname")
    two.add_argument("table")
    two.add_argument("path", help="the file to write")
    two.add_argument("--format", choices=FORMATS, default="parquet", help="text: lines of `key v1 v2 ...`")
    two.add_argument("--with_state", action="store_true", help="the optimizer's state behind the values")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
