"""Export of a saved collective model to one safetensors file, for other programs. No torch; holds two tensors at a
time."""

from __future__ import annotations

from collections.abc import Callable

from torchfleet.base.monitor.progress import Progress
from torchfleet.base.storage import Storage, split_place
from torchfleet.collective.checkpoint import collective_manifest as saved
from torchfleet.collective.checkpoint.collective_manifest import SavedTensor
from torchfleet.collective.checkpoint.tensor_files import Buffers, Bytes, Reader
from torchfleet.ps.checkpoint.part_file import entries_of, header
from torchfleet.ps.checkpoint.part_writer import write_made_file


def export(dirname: str, path: str) -> int:
    """Write parameters and buffers, in their own precision, to `path`; returns how many.

    `path` may be any that fsspec opens. The file appears when it is complete. A tied parameter is stored under one
    name; its other names are in the metadata, in the format that safetensors.torch.save_model writes and load_model
    reads.
    """
    storage = Storage(dirname)
    manifest = saved.read(storage)
    tensors = list(manifest.of_kind("model").values())
    entries = entries_of([(tensor.name, tensor.dtype, tensor.shape, tensor.bytes) for tensor in tensors])
    folder, name = split_place(path)
    progress, done, total = Progress("fleet export"), 0, sum(tensor.bytes for tensor in tensors)

    def show(num: int) -> None:
        nonlocal done
        done += num
        progress.show(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    with Reader(storage, manifest) as reader:
        reader.check(tensors)
        makers = [_maker(reader, tensor) for tensor in tensors]
        head = header(entries, {"format": "pt", **manifest.tied})
        write_made_file(Storage(folder), name, Buffers(head, makers, show), len(head) + total)
    progress.end(f"{total / 1e6:,.0f} MB in {path}")
    return len(tensors)


def _maker(reader: Reader, tensor: SavedTensor) -> Callable[[], Bytes]:
    return lambda: reader.whole(tensor)
