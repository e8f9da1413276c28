"""Tests whether this machine's Triton, driver and GPU do what the kernels need, once per device and process."""

from __future__ import annotations

import functools

import torch
import triton

from torchfleet.base.errors import TableError
from torchfleet.ps.gpu.kernels import triton_kernels
from torchfleet.ps.gpu.row_layout import RowLayout
from torchfleet.ps.gpu.table_memory import TAKEN, TableMemory, new_memory
from torchfleet.ps.tables.settings.spec import TableSpec

NUM_KEYS, NUM_IDS = 1000, 1 << 14


@functools.cache
def check_device(device: torch.device) -> None:
    """Raise TableError if keys that many programs insert at once do not get one row each."""
    try:
        found = _wrong_ids(device)
    except (RuntimeError, triton.errors.TritonError) as error:
        found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if found:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        raise TableError(
            f"tables in GPU memory do not work here: {found}. Found {name}, torch {torch.__version__} for CUDA "
            f"{torch.version.cuda}, Triton {triton.__version__}. They need 64-bit compare-and-swap in Triton 3.0 or "
            "later, and a driver for this CUDA. Install the wheels of one torch release, or leave out device= to have "
            "the rows on servers."
        )


def _wrong_ids(device: torch.device) -> str:
    """What is wrong with an insertion of keys that repeat; "" if nothing is."""
    layout = RowLayout.of(TableSpec("self test", dim=4))
    memory: TableMemory = new_memory(layout.width, 2 * NUM_KEYS, device)
    generator = torch.Generator().manual_seed(1)
    distinct = torch.randint(-(1 << 62), 1 << 62, (NUM_KEYS,), generator=generator)
    keys = distinct[torch.randint(0, NUM_KEYS, (NUM_IDS,), generator=generator)].to(device)
    slots = triton_kernels.find(memory, layout, keys, insert=True).long()
    num = len(torch.unique(keys))
    if int(memory.counters[TAKEN]) != num:
        return f"{num} keys got {int(memory.counters[TAKEN])} rows"
    if not bool((slots >= 0).all()) or not torch.equal(memory.row_keys[slots], keys):
        return "keys were found in the rows of others"
    again = triton_kernels.find(memory, layout, keys, insert=False).long()
    return "" if torch.equal(again, slots) else "keys that were inserted were not found again"
