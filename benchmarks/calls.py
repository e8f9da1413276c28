"""How many Python calls inside the package a request, a step and a save take in one process, and the files they touch.

python -m benchmarks.calls --json                     about ten seconds
python -m benchmarks.calls --package DIR --json       the torchfleet in another checkout, of any layout

Counted by sys.setprofile in the thread that calls: functions, comprehensions and generators whose code lies in the
package, and compiled kernels, each once. The clock stands still meanwhile: what a server does every so often, such as
its look for lost workers, is no part of a request. A save looks for the end of a write every millisecond, so the figure
of a save depends on the disk; each figure is the least of its rounds, and `*_calls_max` the most.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from benchmarks.timing import log, report

BATCH, IDS, DIM, NUM_KEYS = 16, 4, 8, 1000
WARM_UP = 6  # steps in which the worker learns which ids a batch asks for


class Calls:
    """Counts calls inside one package while it is entered. `depths`: package frames from the first counted call to the
    first one of a function with this name in this file, both included."""

    def __init__(self, package: str, ends: tuple[tuple[str, str], ...] = ()) -> None:
        self._package, self._ends = package, ends
        self.by_function: Counter[tuple[str, str]] = Counter()
        self.depths: dict[tuple[str, str], int] = {}
        self.client: Any = None

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)

    @property
    def num(self) -> int:
        return self.by_function.total()

    @property
    def num_files(self) -> int:
        return len({file for file, _ in self.by_function})

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._package):
            return
        self.by_function[code.co_filename, code.co_name] += 1
        if code.co_name == "pull_tables":
            self.client = frame.f_locals["self"]
        end = os.path.basename(code.co_filename), code.co_name
        if end in self._ends:
            self.depths.setdefault(end, self._depth(frame))

    def _depth(self, frame: FrameType | None) -> int:
        num = 0
        while frame is not None:
            num += frame.f_code.co_filename.startswith(self._package)
            frame = frame.f_back
        return num


class Model(torch.nn.Module):
    def __init__(self, fleet: Any) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(DIM, name="rows")
        self.top = torch.nn.Linear(DIM * IDS, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.rows(ids).flatten(1))
        return out


@contextlib.contextmanager
def stopped_clock() -> Iterator[None]:
    """time.monotonic() gives the same time until the end."""
    now, monotonic = time.monotonic(), time.monotonic
    time.monotonic = lambda: now
    try:
        yield
    finally:
        time.monotonic = monotonic


def count(rounds: int, fleet: Any, package: str) -> dict[str, list[Calls]]:
    """A sync job in this process: its forward passes, steps, pulls, pushes and saves, one Calls for each round."""
    found: dict[str, list[Calls]] = {name: [] for name in ("pull", "push", "forward", "step", "save")}

    def counted(name: str, work: Callable[[], Any]) -> Any:
        calls = Calls(package, (("server.py", "handle"), ("sparse_table.py", "pull")))
        with calls:
            result = work()
        found[name].append(calls)
        return result

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, NUM_KEYS, (BATCH, IDS), generator=generator)
    keys = np.unique(ids.numpy().reshape(-1)).astype(np.uint64)
    zeros = np.zeros((len(keys), DIM), np.float32)
    fleet.init()
    model = fleet.distributed_model(Model(fleet))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), fleet.DistributedStrategy())
    fleet.init_worker()
    with tempfile.TemporaryDirectory() as folder, stopped_clock():
        for _ in range(WARM_UP + rounds):
            out = counted("forward", lambda: model(ids))
            out.sum().backward()
            counted("step", optimizer.step)
            optimizer.zero_grad()
        client = found["forward"][-1].client
        for _ in range(1 + rounds):
            counted("pull", lambda: client.pull("rows", keys)).result()
            counted("push", lambda: client.push("rows", keys, zeros)).result()
        for _ in range(1 + rounds):
            counted("save", lambda: fleet.save_persistables(folder + "/model"))
    fleet.stop_worker()
    return {name: calls[-rounds:] for name, calls in found.items()}


def figures(found: dict[str, list[Calls]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, calls in found.items():
        least = min(calls, key=lambda one: one.num)
        result |= {f"{name}_calls": least.num, f"{name}_files": least.num_files}
        result[f"{name}_calls_max"] = max(one.num for one in calls)
        log(f"{name}: {[one.num for one in calls]} calls")
    depths = found["pull"][-1].depths
    result["api_to_handler"] = depths["server.py", "handle"]
    result["api_to_table"] = depths["sparse_table.py", "pull"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    parser.add_argument("--package", type=Path, help="the folder that holds the torchfleet to be counted")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--functions", choices=("pull", "push", "forward", "step", "save"), help="list their calls")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    if options.package is not None:
        sys.path.insert(0, str(options.package.resolve()))
    import torchfleet as fleet  # after the path is set

    package = os.path.dirname(fleet.__file__)
    found = count(options.rounds, fleet, package)
    listed = min(found[options.functions], key=lambda one: one.num).by_function if options.functions else Counter()
    for (file, function), num in listed.most_common():
        log(f"{num:6} {os.path.relpath(file, package)} {function}")
    settings = {"rounds": options.rounds, "batch": [BATCH, IDS], "dim": DIM, "mode": "sync", "servers": "in process"}
    report({**figures(found), "settings": settings}, options.json)


if __name__ == "__main__":
    main()
