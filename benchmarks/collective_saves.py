"""How long fleet.save holds training up: written at once, and beside training. In turns with it, the same state is
saved by torch.distributed.checkpoint (`dcp`).

python -m benchmarks.collective_saves --json            350 million parameters with Adam's state: 4.2 GB a save
python -m benchmarks.collective_saves --quick --json    smaller, to see that it works

held_up_*        seconds that a save takes from the loop: at once, beside training, and beside training the first time
written_*        seconds until a save beside training is written
dcp_ratio_*      DCP's time over ours for each of them: above 1, ours is faster
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet
from benchmarks.dcp_saves import DcpSaves
from benchmarks.timing import log, report
from torchfleet.base.removed_files import wait_until_freed

WIDTH = 4096  # of square layers: 16.8 million parameters each


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collective_saves", description=__doc__)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.layers, chosen.saves = 1, 2
    return chosen


class Training:
    def __init__(self, num_layers: int) -> None:
        fleet.init(is_collective=True)
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)]
        self._model: Any = fleet.distributed_model(torch.nn.Sequential(*layers))
        self._optimizer = fleet.distributed_optimizer(torch.optim.Adam(self._model.parameters(), lr=1e-4, fused=True))
        self.device = next(self._model.parameters()).device
        self._inputs = torch.randn(64, WIDTH, device=self.device)
        self.num_bytes = 3 * sum(parameter.nbytes for parameter in self._model.parameters())

    def state(self) -> dict[str, Any]:
        """In plain dictionaries: torch 2.11 stages no others."""
        return {"model": dict(self._model.state_dict()), "optimizer": dict(self._optimizer.state_dict())}

    def step(self) -> None:
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_seconds(num_bytes: int, device: torch.device) -> float:
    """The roof: one copy of as many bytes to host memory, pinned where they come from a GPU."""
    is_gpu = device.type == "cuda"
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    return min(seconds(lambda: _copy(source, target)) for _ in range(3))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    if source.is_cuda:
        torch.cuda.synchronize()


class Times:
    """Seconds of one library's saves: held up at once, held up beside training, and until the latter were written."""

    def __init__(self) -> None:
        self.at_once: list[float] = []
        self.beside: list[float] = []
        self.written: list[float] = []

    def last(self) -> str:
        return f"at once {self.at_once[-1]:.3f} s; beside {self.beside[-1]:.3f} s, written {self.written[-1]:.3f} s"

    def report(self) -> dict[str, float]:
        return {
            "held_up_at_once_s": statistics.median(self.at_once),
            "held_up_first_s": self.beside[0],  # which also makes, or pins, the memory
            "held_up_beside_training_s": statistics.median(self.beside[1:]),
            "written_s": statistics.median(self.written[1:]),
        }


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    training = Training(chosen.layers)
    steps = [seconds(training.step) for _ in range(5)]
    ours, theirs, during = Times(), Times(), list[float]()
    rival = DcpSaves(folder / "dcp", training.device.type == "cuda")
    for number in range(chosen.saves):
        during += save_ours(training, str(folder / "saved"), {"number": number}, ours)
        save_theirs(training, rival, theirs)
        log(f"save {number + 1}: {ours.last()}; DCP: {theirs.last()}")
    fleet.stop_worker()
    own, other = ours.report(), theirs.report()
    return {
        "device": torch.cuda.get_device_name() if training.device.type == "cuda" else "cpu",
        "bytes": training.num_bytes,
        "step_s": statistics.median(steps),
        "step_beside_a_save_s": statistics.median(during),
        "copy_s": copy_seconds(training.num_bytes, training.device),
        **own,
        **{f"dcp_{name}": value for name, value in other.items()},
        **{f"dcp_ratio_{name.removesuffix('_s')}": value / own[name] for name, value in other.items()},
    }


def save_ours(training: Training, place: str, extra: dict[str, int], times: Times) -> list[float]:
    """Returns the seconds of steps while a save is written."""
    times.at_once.append(seconds(lambda: fleet.save(place)))
    start = time.perf_counter()
    times.beside.append(seconds(partial(fleet.save, place, extra, asynchronous=True)))
    during = [seconds(training.step) for _ in range(3)]
    while fleet.saved_extra(place) != extra:  # it must not be the next save that waits
        time.sleep(0.01)
    times.written.append(time.perf_counter() - start)
    wait_until_freed()  # beside the rival's save it would take from that one's time
    return during


def save_theirs(training: Training, rival: DcpSaves, times: Times) -> None:
    times.at_once.append(seconds(lambda: rival.save(training.state())))
    start = time.perf_counter()
    written = rival.begin(training.state())
    times.beside.append(time.perf_counter() - start)
    for _ in range(3):
        training.step()
    written.result()
    times.written.append(time.perf_counter() - start)


def main() -> None:
    chosen = options()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        report(measure(chosen, Path(folder)), chosen.json)


if __name__ == "__main__":
    main()
