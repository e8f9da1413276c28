"""Saves one model again and again, each time with other numbers, and is killed in the middle of it; many times over.

python killed_saves.py FOLDER ROUNDS SEED. One JSON line per round: the number of the last save that had returned when
the kill came, and what the folder then holds.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import struct
import sys
import time
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from torchfleet.api import current_job
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.checkpoint.part_reader import read_part

IDS = torch.arange(300)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = fleet.nn.SparseEmbedding(8, name="words", initializer=fleet.nn.Constant(0.0))
        self.linear = torch.nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(50))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.words(ids))


def save_on(folder: str, number: int, report: int | None, num_saves: int) -> None:
    """Saves number, number + 1, ...; each is reported when it is complete."""
    fleet.init()
    model = fleet.distributed_model(Model())
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with contextlib.redirect_stdout(io.StringIO()):
        fleet.init_worker()
    client = current_job.get_worker().client
    for now in range(number, number + num_saves):
        client.assign("words", IDS.numpy(), np.full((300, 8), now, np.float32))
        client.set_dense("dense.0", np.full(9, now, np.float32))
        model.mean.fill_(now)
        fleet.save_persistables(folder)
        if report is not None:
            os.write(report, struct.pack("<q", now))
    with contextlib.redirect_stdout(io.StringIO()):
        fleet.stop_worker()


def held(folder: str) -> list[float]:
    """All different numbers in the model."""
    storage = Storage(folder)
    manifest = read_manifest(storage)
    found: set[float] = set()
    num = 0
    for part in manifest.parts:
        arrays = read_part(storage, manifest.save, part)
        values: Any = arrays.get("rows", arrays.get("values"))
        found.update(np.unique(values).tolist())
        num += part.rows
    assert num == 300 + 9 + 50, num
    return sorted(found)


def in_child(folder: str, number: int, num_saves: int) -> tuple[int, int]:
    """(process, end of the pipe with its reports)."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            save_on(folder, number, writing, num_saves)
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def main() -> None:
    folder, num_rounds, dice = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    save_on(f"{folder}-first", 1, None, 1)  # kernels are loaded here, once for all children
    number = 1
    for _ in range(num_rounds):
        child, reading = in_child(folder, number, 100_000)
        first = os.read(reading, 8)  # one is complete; empty if the child has died by itself
        assert len(first) == 8, "the process that saves has ended"
        time.sleep(dice.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        complete = struct.unpack("<q", (first + _rest(reading))[-8:])[0]
        print(json.dumps({"complete": complete, "held": held(folder)}), flush=True)
        number = complete + 2
    child, reading = in_child(folder, number, 1)
    os.waitpid(child, 0)
    assert _rest(reading) == struct.pack("<q", number)
    print(json.dumps({"last": number, "held": held(folder), "left": sorted(os.listdir(folder))}), flush=True)


def _rest(reading: int) -> bytes:
    data = b""
    while more := os.read(reading, 1 << 16):
        data += more
    os.close(reading)
    return data


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main()
