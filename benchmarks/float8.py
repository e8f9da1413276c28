"""Training with linear layers in float8 beside bfloat16, on one GPU: the same model, one job after the other.

python -m benchmarks.float8 --json                   less than a minute on an H200
python -m benchmarks.float8 --model wide --json      one model alone

`wide`: blocks of a norm and two linear layers of 4096 × 16384, 8192 rows; `wide_compiled`: the same by build_strategy.
`bert`: BERT-Large, 32 × 512; layers of 1024 × 1024 to 1024 × 4096, where the casts to float8 weigh more.
For each: milliseconds of a step (median of rounds) and their ratio (above 1: float8 is faster), the loss after the same
steps, and the most memory in a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu_training import Batch, BertTask, Limit, TrainingTask, free, in_turns, ours, peak_bytes
from benchmarks.timing import log, report

DTYPES = ("bfloat16", "float8")
FUSED = {"fuse_all_optimizer_ops": True}
COMPILED = {**FUSED, "fuse_elewise_add_act_ops": True}
NUM_STEPS = 10  # after which losses are compared


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))
        return x + added


class WideTask(TrainingTask):
    """Random numbers that are to be moved by one place, by blocks of wide linear layers."""

    def __init__(self, device: torch.device, batch: int, width: int = 4096, num: int = 4) -> None:
        super().__init__(device, batch)
        self._width, self._num = width, num

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        with self.device:
            return torch.nn.Sequential(*(Block(self._width) for _ in range(self._num)))

    def batch(self, size: int) -> Batch:
        x = torch.randn(size, self._width, device=self.device)
        return {"x": x, "y": x.roll(1, 1)}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


def tasks(device: torch.device) -> dict[str, tuple[TrainingTask, Mapping[str, bool]]]:
    """Models, and how they are built."""
    wide = WideTask(device, 8192)
    return {
        "wide": (wide, FUSED),
        "wide_compiled": (wide, COMPILED),
        "bert": (BertTask(device, 32, "large", 512), FUSED),
    }


def measured(task: TrainingTask, flags: Mapping[str, bool], rounds: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for dtype in DTYPES:  # a process has one job at a time
        torch._dynamo.reset()
        amp = {"amp": True, "amp_configs": {"dtype": dtype}}
        with ours(task, **amp, build_strategy=dict(flags)) as step:
            torch.manual_seed(1)
            batch = task.batch(task.batch_size)
            losses = [step(batch) for _ in range(NUM_STEPS)]
            found[f"{dtype}_loss"] = float(losses[-1])  # type: ignore[arg-type]
            found[f"{dtype}_gib"] = (peak_bytes(task, step, task.batch_size) or 0) / 2**30
            speeds = in_turns(task, {dtype: step}, rounds, 0.3, Limit(10))
        found[f"{dtype}_ms"] = 1e3 * task.batch_size / speeds[dtype]
        free()
    found["speed_up"] = found["bfloat16_ms"] / found["float8_ms"]
    return found


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.float8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = tuple(tasks(torch.device("cpu")))
    parser.add_argument("--model", action="append", choices=names, help="this one alone; may be given several times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no GPU: float8 needs one of compute capability 8.9 or higher")
    chosen.model = chosen.model or list(names)
    return chosen


def main() -> None:
    chosen = options()
    result: dict[str, Any] = {}
    for name, (task, flags) in tasks(torch.device("cuda")).items():
        if name in chosen.model:
            log(name)
            result |= {f"{name}.{key}": value for key, value in measured(task, flags, chosen.rounds).items()}
    report({**result, "torch": torch.__version__, "device": torch.cuda.get_device_name()}, chosen.json)


if __name__ == "__main__":
    main()
