"""Collective training on one GPU: memory and speed of recompute, amp and fusion, and what torchfleet itself costs.

python -m benchmarks.collective_gpu --json                     all parts, about ten minutes on an H200
python -m benchmarks.collective_gpu --part recompute --json    BERT-Large in 32 GiB: largest batch and speed there
python -m benchmarks.collective_gpu --cpu --json               to see that it works, with tiny models

Parts: recompute (amp, with recompute, with offload), precision (float32, amp, pure; sharding on one rank), fusion
(torch.compile against eager), overhead (torchfleet against plain PyTorch).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.gpu_training import (
    BertTask,
    ResNetTask,
    TrainingTask,
    by_hand,
    free,
    in_turns,
    largest_batch,
    ours,
    peak_bytes,
    samples_per_s,
)
from benchmarks.timing import log, report

LAYERS = {"checkpoints": ["encoder.layer.*"]}
REFERENCE = {"recompute": (10.0, 0.74), "offload": (14.3, 0.65)}  # Paddle's batch and speed, as multiples of amp alone


class Sizes(NamedTuple):
    """What is large on a GPU, and what just runs on a CPU."""

    large: str = "large"
    base: str = "base"
    length: int = 512
    small: tuple[int, int] = (4, 8)  # batches that show how memory grows
    most: int = 4096
    precision_batch: int = 32
    base_batch: int = 64
    base_length: int = 128
    resnet_batch: int = 128
    side: int = 224
    seconds: float = 3.0
    rounds: int = 5


ON_CPU = Sizes("tiny", "tiny", 16, (1, 2), 4, 2, 2, 16, 2, 32, 0.01, 1)


class Bench:
    def __init__(self, chosen: argparse.Namespace) -> None:
        self.device = torch.device("cpu" if chosen.cpu else "cuda")
        sizes = ON_CPU if chosen.cpu else Sizes()
        given = {"length": chosen.length, "rounds": chosen.rounds, "seconds": chosen.seconds}
        self.sizes = sizes._replace(**{name: value for name, value in given.items() if value is not None})
        self.cap = int(chosen.gib * 2**30)
        self.amp: dict[str, Any] = {} if chosen.cpu else {"amp": True}  # a CPU is slow in half precision

    def resnet(self) -> TrainingTask:
        return ResNetTask(self.device, self.sizes.resnet_batch, self.sizes.side)

    def bert(self) -> TrainingTask:
        return BertTask(self.device, self.sizes.base_batch, self.sizes.base, self.sizes.base_length)

    # The parts

    def recompute(self) -> dict[str, Any]:
        """BERT-Large with `--gib` of memory: the largest batch, and samples per second with it."""
        variants: dict[str, dict[str, Any]] = {
            "amp": self.amp,
            "recompute": {**self.amp, "recompute": True, "recompute_configs": LAYERS},
            "offload": {**self.amp, "recompute": True, "recompute_configs": {**LAYERS, "enable_offload": True}},
        }
        found: dict[str, Any] = {}
        self._limit(self.cap)
        try:
            for name, fields in variants.items():
                log(f"  {name}")
                found.update(self._largest(name, fields))
        finally:
            self._limit(None)
        for name, (batch, speed) in REFERENCE.items():
            found[f"{name}_batch_ratio"] = found[f"{name}_batch"] / found["amp_batch"]
            found[f"{name}_speed_ratio"] = found[f"{name}_samples_per_s"] / found["amp_samples_per_s"]
            found[f"{name}_reference_batch_ratio"], found[f"{name}_reference_speed_ratio"] = batch, speed
        return found

    def _largest(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        task = BertTask(self.device, 1, self.sizes.large, self.sizes.length)
        with ours(task, **fields) as step:
            batch = largest_batch(
                lambda size: peak_bytes(task, step, size), self.cap, self.sizes.small, self.sizes.most
            )
            free()
            speed = samples_per_s(task, step, task.batch(batch), 2 * self.sizes.seconds)
        log(f"    batch {batch}, {speed:,.1f} samples/s")
        return {f"{name}_batch": batch, f"{name}_samples_per_s": speed}

    def _limit(self, num_bytes: int | None) -> None:
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(1.0 if num_bytes is None else min(1.0, num_bytes / total))

    def precision(self) -> dict[str, Any]:
        """BERT-Large at one batch: peak memory and speed. Sharding on one rank can only show that it costs nothing."""
        variants: dict[str, dict[str, Any]] = {
            "float32": {},
            "amp_float16": {"amp": True},
            "amp_bfloat16": {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
            "pure_float16": {"amp": True, "amp_configs": {"use_pure_fp16": True}},
            "pure_bfloat16": {"amp": True, "amp_configs": {"use_pure_bf16": True}},
            "amp_sharding_1": {**self.amp, "sharding": True, "sharding_configs": {"stage": 1}},
            "amp_sharding_3": {**self.amp, "sharding": True, "sharding_configs": {"stage": 3}},
        }
        found: dict[str, Any] = {}
        for name, fields in variants.items():
            task = BertTask(self.device, self.sizes.precision_batch, self.sizes.large, self.sizes.length)
            with ours(task, **fields) as step:
                peak = peak_bytes(task, step, task.batch_size)
                if peak is None:
                    log(f"  {name}: a batch of {task.batch_size} does not fit")
                    continue
                speed = samples_per_s(task, step, task.batch(task.batch_size), self.sizes.seconds)
            found[f"{name}_gib"], found[f"{name}_samples_per_s"] = peak / 2**30, speed
            log(f"  {name}: {peak / 2**30:.2f} GiB, {speed:,.1f} samples/s")
        return found

    def fusion(self) -> dict[str, Any]:
        """The same compiled job, now as compiled, now with every operation by itself."""
        found: dict[str, Any] = {}
        for name, task in {"resnet50": self.resnet(), "bert_base": self.bert()}.items():
            log(f"  {name}")
            torch._dynamo.reset()
            fields = {**self.amp, "build_strategy": {"fuse_elewise_add_act_ops": True, "fuse_bn_act_ops": True}}
            with ours(task, **fields) as compiled:
                contenders = {"compiled": compiled, "eager": _eagerly(compiled)}
                speeds = in_turns(task, contenders, self.sizes.rounds, self.sizes.seconds / 2)
            found.update({f"{name}_{how}_samples_per_s": speed for how, speed in speeds.items()})
            found[f"{name}_speed_up"] = speeds["compiled"] / speeds["eager"]
        return found

    def overhead(self) -> dict[str, Any]:
        """amp through torchfleet against autocast and GradScaler by hand.

        On one GPU torchfleet uses no DDP, so the rival is what has none either; one with it is shown beside.
        """
        found: dict[str, Any] = {}
        for name, task in {"resnet50": self.resnet(), "bert_base": self.bert()}.items():
            log(f"  {name}")
            with ours(task, **self.amp) as step:
                contenders = {"ours": step, "hand": by_hand(task, bool(self.amp), with_ddp=False)}
                if dist.is_initialized():
                    contenders["hand_ddp"] = by_hand(task, bool(self.amp), with_ddp=True)
                speeds = in_turns(task, contenders, 2 * self.sizes.rounds - 1, self.sizes.seconds / 2)
                del contenders
            found.update({f"{name}_{how}_samples_per_s": speed for how, speed in speeds.items()})
            found[f"{name}_overhead_percent"] = 100 * (speeds["hand"] / speeds["ours"] - 1)
        return found


def _eagerly(compiled: Callable[[Any], object]) -> Callable[[Any], object]:
    def step(batch: Any) -> object:
        with torch.compiler.set_stance("force_eager"):
            return compiled(batch)

    return step


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "recompute": Bench.recompute,
    "precision": Bench.precision,
    "fusion": Bench.fusion,
    "overhead": Bench.overhead,
}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collective_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="this one alone; may be given several times")
    parser.add_argument("--gib", type=float, default=32.0, help="memory that the part `recompute` may use")
    parser.add_argument("--length", type=int, help="words of a sequence of BERT-Large; default 512")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--seconds", type=float, help="of a measurement; default 3")
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args(arguments)
    if not chosen.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU: --cpu shows that the benchmark works")
    return chosen


def main() -> None:
    chosen = options()
    if chosen.cpu:
        os.environ["FLEET_DEVICE"] = "cpu"
    bench = Bench(chosen)
    result: dict[str, Any] = {}
    for name, part in PARTS.items():
        if chosen.part is None or name in chosen.part:
            log(f"{name}: {(part.__doc__ or '').strip().splitlines()[0]}")
            result.update({f"{name}.{key}": value for key, value in part(bench).items()})
            free()
    device = "cpu" if chosen.cpu else torch.cuda.get_device_name()
    settings = {**bench.sizes._asdict(), "gib": chosen.gib, "torch": torch.__version__, "device": device}
    report({**result, **settings}, chosen.json)


if __name__ == "__main__":
    main()
