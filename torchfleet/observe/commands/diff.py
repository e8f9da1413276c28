"""`fleet diff`: prints how two saved models differ."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from torchfleet.base.monitor.progress import Progress
from torchfleet.base.printable import say
from torchfleet.ps.checkpoint.comparison import Comparison, TableDifference, compare
from torchfleet.ps.checkpoint.matching import Difference


def diff(a: str, b: str, max_bytes: int | None, as_json: bool) -> bool:
    """Print how the models differ; returns whether they do."""
    progress = Progress("fleet diff")
    found = compare(a, b, max_bytes, progress.show)
    progress.end("done")
    if as_json:
        whole = {"equal": found.is_equal, "a": a, "b": b, **msgspec.to_builtins(found)}
        print(msgspec.json.format(msgspec.json.encode(whole), indent=2).decode())
    else:
        say(f"A: {a}\nB: {b}")
        for line in _lines(found):
            say(line)
    return not found.is_equal


def _lines(found: Comparison) -> Iterator[str]:
    for which, names in (("A", found.only_in_a), ("B", found.only_in_b)):
        for name in names:
            yield f"{name}: only in {which}"
    for name, table in found.tables.items():
        yield from _table_lines(name, table)
    for name, (in_a, in_b) in found.shapes.items():
        yield f"{name}: shape {in_a} in A, {in_b} in B"
    for name, types in found.types.items():
        yield f"{name}: {types[0]} in A, {types[1]} in B"
    for name, parameter in found.parameters.items():
        yield f"{name}: {parameter.equal:,} values equal, {parameter.changed:,} changed"
        yield from _numbers(parameter, "place")
    yield "the models are equal" if found.is_equal else "the models differ"


def _table_lines(name: str, table: TableDifference) -> Iterator[str]:
    for setting, (in_a, in_b) in table.settings.items():
        yield f"{name}: {setting} is {in_a} in A, {in_b} in B"
    if table.rows is not None:
        yield f"{name}: {_counts(table.rows)}"
        yield from _numbers(table.rows, "key")
    if table.candidates is not None and table.candidates != Difference():
        yield f"{name}: candidates: {_counts(table.candidates)}"
        yield from _numbers(table.candidates, "key")
    if not table.is_sketch_equal:
        yield f"{name}: the counters of the window differ"


def _counts(found: Difference) -> str:
    return (
        f"{found.equal:,} rows equal, {found.changed:,} changed, {found.only_in_a:,} only in A, "
        f"{found.only_in_b:,} only in B"
    )


def _numbers(found: Difference, place: str) -> Iterator[str]:
    if found.changed:
        where = f"{place} {found.largest_at}"
        yield f"    largest difference {found.largest:.6g} ({where}), mean absolute difference {found.mean:.6g}"
    for name, num in found.others.items():
        yield f"    {name} differs in {num:,}"
