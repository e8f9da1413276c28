"""`fleet inspect` for saved models with tables."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import msgspec
import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.base.monitor.progress import Progress
from torchfleet.base.printable import say
from torchfleet.base.saved_extra import script_extra
from torchfleet.base.storage import Storage
from torchfleet.observe.commands.drawing import print_summary, print_table, time_text
from torchfleet.observe.watch.figures import plural
from torchfleet.ps.checkpoint.chain import live_candidates, live_rows, statistics_of
from torchfleet.ps.checkpoint.manifest import Link, Manifest, Part, Table, read_manifest
from torchfleet.ps.checkpoint.narrow_arrays import widened
from torchfleet.ps.checkpoint.part_file import Arrays, check_arrays
from torchfleet.ps.checkpoint.part_reader import read_parts
from torchfleet.ps.checkpoint.repeated_keys import RepeatedKeys
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.summary import Summary


class SavedModel:
    """Describes, checks and summarizes a saved model."""

    def __init__(self, dirname: str) -> None:
        self._storage = Storage(dirname)
        self._manifest = read_manifest(self._storage)
        self._progress = Progress("fleet inspect")
        sparse = [table.name for table in self._manifest.tables if not table.is_dense]
        self.sparse_tables = sparse

    def describe(self) -> dict[str, Any]:
        """The contents of the manifest."""
        manifest = self._manifest
        return {
            "path": self._storage.path,
            "save": manifest.save,
            "kind": manifest.kind,
            "num_servers": manifest.num_servers,
            "time": manifest.time,
            "extra": script_extra(manifest.extra),
            "chain": [_describe_link(manifest, link) for link in manifest.links()],
            "tables": [_describe_table(manifest, table) for table in manifest.tables],
        }

    def check(self) -> int:
        """Read every file of the chain, and check its checksum and its contents. Returns the number of files.

        Raises CheckpointError if a table contains values that are not finite.
        """
        num = 0
        for link in self._manifest.links():
            found: defaultdict[tuple[str, str], RepeatedKeys]
            found = defaultdict(partial(RepeatedKeys, self._storage, link.save))
            for part, keys in read_parts(self._storage, link.save, link.parts, self._check_part):
                found[part.table, part.kind].add(part, keys)
                num += 1
                self._progress.show(f"{num:,} files read")
            for repeated in found.values():
                repeated.check()
        self._progress.end(_all_match(num))
        return num

    def _check_part(self, part: Part, arrays: Arrays) -> tuple[Part, Keys]:
        """The part and its keys. Raises TableError if its contents are not those of a part."""
        saved = self._manifest.table(part.table)
        check_arrays(saved, part, arrays)
        arrays = widened(arrays)
        for name in ("rows", "values"):
            if name in arrays and not np.isfinite(arrays[name]).all():
                num = int((~np.isfinite(arrays[name])).sum())
                raise TableError(
                    f"table '{part.table}' holds NaN or infinity: {num:,} numbers of {arrays[name].size:,}"
                )
        num_keys = len(arrays.get("keys", ()))
        if num_keys and 2 * len(np.unique(arrays["keys"])) < num_keys:
            raise TableError(f"table '{part.table}': most of {num_keys:,} keys are equal to others")
        return part, np.array(arrays.get("keys", ()), np.uint64)

    def summary(self, table: str, top: int) -> dict[str, Any]:
        """The summary of all rows of a sparse table; reads them from the files."""
        live = live_rows(self._storage, self._manifest, table)
        saved = self._manifest.table(table)
        made, num = Summary(saved.spec(), int(self._manifest.time), top), 0
        for keys, arrays in live:
            made.add(keys, arrays.pop("rows")[:, : saved.dim], arrays)
            num += len(keys)
            self._progress.show(f"{table}: {num:,} rows")
        candidates = sum(len(keys) for keys, _ in live_candidates(self._storage, self._manifest, table))
        return {**made.as_dict(), "candidates": candidates}


def inspect_model(dirname: str, check: bool, tables: list[str], histograms: bool, top: int, as_json: bool) -> None:
    """Print the chain and its tables; histograms and top keys of `tables`, or of all sparse ones."""
    model = SavedModel(dirname)
    found = model.describe()
    wanted = (tables or model.sparse_tables) if histograms or top else []
    summaries = {table: model.summary(table, top) for table in wanted}
    num_files = model.check() if check and as_json else 0
    if as_json:
        whole = {
            **found,
            **({"summaries": summaries} if wanted else {}),
            **({"whole_files": num_files} if check else {}),
        }
        print(msgspec.json.format(msgspec.json.encode(whole), indent=2).decode())
        return
    _print(found)
    for table, summary in summaries.items():
        print_summary(table, summary, histograms, top)
        if summary["candidates"]:
            say(f"\n{table}: {summary['candidates']:,} keys were seen and have no row yet")
    if check:
        print(_all_match(model.check()))


def _all_match(num_files: int) -> str:
    return f"{num_files:,} files read; all checksums match"


def _describe_link(manifest: Manifest, link: Link) -> dict[str, Any]:
    sparse = {table.name for table in manifest.tables if not table.is_dense}

    def num(kind: str) -> int:
        return sum(part.rows for part in link.parts if part.kind == kind and part.table in sparse)

    return {
        "number": link.number,
        "parent": link.parent,
        "kind": "delta" if link.parent else manifest.kind,
        "folder": link.save,
        "num_servers": link.num_servers,
        "rows": num("rows"),
        "gone": num("gone"),
        "candidates": num("candidates"),
        "bytes": sum(part.bytes for part in link.parts),
        "files": len(link.parts),
        "time": link.time,
    }


def _describe_table(manifest: Manifest, table: Table) -> dict[str, Any]:
    parts = [part for link in manifest.links() for part in link.parts if part.table == table.name]
    return {
        "name": table.name,
        "kind": table.kind,
        "dim": table.dim,
        "rows": table.rows,
        "bytes": sum(part.bytes for part in parts),
        "rule": table.rule,
        "step": table.step,
        "num_states": table.num_states,
        "num_row_states": table.num_row_states,
        "files": len(parts),
        "entry": table.entry,
        "shrink": table.shrink,
        "statistics": statistics_of(manifest, table.name),
        "saved_candidates": sum(part.rows for part in parts if part.kind == "candidates"),
        "sketch_bytes": sum(part.bytes for part in manifest.parts if (part.table, part.kind) == (table.name, "sketch")),
    }


def _print(found: dict[str, Any]) -> None:
    say(f"{found['path']}, {found['save']}: {found['kind']}, by {plural(found['num_servers'], 'server')}")
    if found["extra"]:
        say(f"extra: {msgspec.json.encode(found['extra']).decode()}")
    names = ["number", "parent", "kind", "folder", "num_servers", "rows", "gone", "candidates", "bytes", "files"]
    links = [[*(link[name] for name in names), time_text(link["time"])] for link in found["chain"]]
    print_table([*(name.replace("num_", "") for name in names), "time (UTC)"], links, ("kind", "folder"))
    names = ["name", "kind", "dim", "rows", "bytes", "rule", "step", "files"]
    is_full = found["kind"] == "full"
    lines = []
    for table in found["tables"]:
        rule = table["rule"]["name"] if table["num_states"] or table["num_row_states"] or is_full else "-"
        lines.append([{**table, "rule": rule}[name] for name in names])
    headings = ["table", "kind", "dim", "rows", "bytes", "optimizer", "steps", "files"]
    print_table(headings, lines, ("table", "kind", "optimizer"))
    lines = [
        [table["name"], _settings(table["entry"]), _settings(table["shrink"]), ", ".join(table["statistics"]) or "-"]
        for table in found["tables"]
        if table["entry"] or table["shrink"]
    ]
    if lines:
        headings = ["table", "rows are made when (entry)", "rows are dropped when (shrink)", "statistics"]
        print_table(headings, lines, headings)


def _settings(given: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "-"
