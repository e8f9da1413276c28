"""`fleet inspect` and `fleet export` for saved collective models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from torchfleet.base.monitor.progress import Progress
from torchfleet.base.printable import say
from torchfleet.base.saved_extra import script_extra
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.collective_manifest import CollectiveManifest, SavedTensor, num_elements, read
from torchfleet.collective.checkpoint.single_file import export
from torchfleet.collective.checkpoint.tensor_files import Reader, check_files
from torchfleet.observe.commands.drawing import print_table, time_text
from torchfleet.observe.watch.figures import plural


def inspect_collective(dirname: str, check: bool, as_json: bool) -> None:
    """Print the contents of the manifest. With `check`, read every piece and compare its checksum."""
    storage = Storage(dirname)
    manifest = read(storage)
    found = _describe(storage, manifest)
    if as_json:
        whole = {**found, **({"whole_pieces": _check(storage, manifest)} if check else {})}
        print(msgspec.json.format(msgspec.json.encode(whole), indent=2).decode())
        return
    _print(found)
    if check:
        print(_all_match(_check(storage, manifest)))


def export_collective(dirname: str, path: str) -> None:
    print(f"{export(dirname, path):,} tensors in {path}")


def _check(storage: Storage, manifest: CollectiveManifest) -> int:
    progress = Progress("fleet inspect")
    with Reader(storage, manifest) as reader:
        num = check_files(reader, manifest, progress.show)
    progress.end(_all_match(num))
    return num


def _all_match(num_pieces: int) -> str:
    return f"{num_pieces:,} pieces read; all checksums match"


def _describe(storage: Storage, manifest: CollectiveManifest) -> dict[str, Any]:
    return {
        "path": storage.path,
        "save": manifest.save,
        "number": manifest.number,
        "kind": "collective",
        "num_ranks": manifest.num_ranks,
        "time": manifest.time,
        "strategy": manifest.strategy,
        "optimizer": manifest.optimizer,
        "groups": [{**group.options, "num_parameters": len(group.parameters)} for group in manifest.groups],
        "extra": script_extra(manifest.extra),
        "tied": manifest.tied,
        "files": len({piece.file for tensor in manifest.tensors for piece in tensor.pieces}),
        "bytes": dict(sum((Counter({tensor.kind: tensor.bytes}) for tensor in manifest.tensors), Counter())),
        "tensors": [_describe_tensor(tensor) for tensor in manifest.tensors if tensor.kind == "model"],
    }


def _describe_tensor(tensor: SavedTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "elements": num_elements(tensor.shape),
        "bytes": tensor.bytes,
        "pieces": len(tensor.pieces),
    }


def _print(found: dict[str, Any]) -> None:
    by = plural(found["num_ranks"], "rank")
    say(f"{found['path']}, {found['save']}: collective, by {by}, {time_text(found['time'])} UTC")
    for name in ("strategy", "extra", "tied"):
        if found[name]:
            say(f"{name}: {msgspec.json.encode(found[name]).decode()}")
    for number, group in enumerate(found["groups"]):
        options = ", ".join(f"{key}={value}" for key, value in group.items() if key != "num_parameters")
        say(f"{found['optimizer']}, group {number}: {group['num_parameters']:,} parameters, {options}")
    sizes = ", ".join(f"{kind} {size:,}" for kind, size in found["bytes"].items())
    print(f"{found['files']} files, bytes: {sizes}")
    names = ["name", "dtype", "shape", "elements", "bytes", "pieces"]
    lines = [
        [tensor[name] if name != "shape" else _shape(tensor[name]) for name in names] for tensor in found["tensors"]
    ]
    print_table(["tensor", *names[1:]], lines, ("tensor", "dtype", "shape"))


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape)) or "-"
