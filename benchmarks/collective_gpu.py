"""Collective training on one GPU: memory and speed of recompute, amp and fusion, and what torchfleet itself costs.

python -m benchmarks.collective_gpu --json                     all parts, less than two minutes each on an H200
python -m benchmarks.collective_gpu --part recompute --json    BERT-Large in 32 GiB: largest batch and speed there
python -m benchmarks.collective_gpu --cpu --json               to see that it works, with tiny models

Parts: recompute (amp, with recompute, with offload), precision (float32, amp, pure; sharding on one rank), fusion
(torch.compile and CUDA graphs against eager), overhead (torchfleet against plain PyTorch).
benchmarks.optimizer_steps has the optimizers of strategies against torch's fused ones.
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
    Limit,
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

REFERENCE = {"recompute": (10.0, 0.74), "offload": (14.3, 0.65)}  # Paddle's batch and speed, as multiples of amp alone


class Sizes(NamedTuple):
    """What is large on a GPU, and what just runs on a CPU."""

    large: str = "large"
    base: str = "base"
    length: int = 512
    first: int = 16  # batch that the search begins with
    most: int = 20  # times the largest batch of amp alone: further is not searched
    slices: int = 4  # fewer fill the GPU better, more need less memory
    precision_batch: int = 32
    bert: tuple[tuple[int, int], ...] = ((64, 128), (64, 512))  # batch and length: bound by launches, and not
    resnet_batch: int = 256
    side: int = 224
    rounds: int = 5
    seconds: float = 100.0


ON_CPU = Sizes("tiny", "tiny", 16, 1, 2, 2, 2, ((2, 16),), 2, 32, 1, 1.0)


class Bench:
    def __init__(self, chosen: argparse.Namespace) -> None:
        self.device = torch.device("cpu" if chosen.cpu else "cuda")
        sizes = ON_CPU if chosen.cpu else Sizes()
        given = {"length": chosen.length, "rounds": chosen.rounds, "seconds": chosen.seconds}
        self.sizes = sizes._replace(**{name: value for name, value in given.items() if value is not None})
        self.cap = int(chosen.gib * 2**30)
        self.amp: dict[str, Any] = {} if chosen.cpu else {"amp": True}  # a CPU is slow in half precision

    @property
    def moment(self) -> float:
        """Seconds of one measurement."""
        return self.sizes.seconds / 80

    def tasks(self) -> dict[str, TrainingTask]:
        found: dict[str, TrainingTask] = {
            f"bert_base_{batch}x{length}": BertTask(self.device, batch, self.sizes.base, length)
            for batch, length in self.sizes.bert
        }
        return {**found, "resnet50": ResNetTask(self.device, self.sizes.resnet_batch, self.sizes.side)}

    # The parts

    def recompute(self) -> dict[str, Any]:
        """BERT-Large with `--gib` of memory: the largest batch, and samples per second with it."""
        layers: dict[str, Any] = {"checkpoints": ["encoder.layer.*"]}
        names = ["embeddings", "encoder.layer.*", "head"]
        tuned = {"checkpoints": names, "half_inputs": bool(self.amp), "slices": self.sizes.slices}
        variants: dict[str, dict[str, Any]] = {
            "amp": {},
            "recompute_exact": {"recompute": True, "recompute_configs": layers},
            "recompute": {"recompute": True, "recompute_configs": tuned},
            "offload": {"recompute": True, "recompute_configs": {**tuned, "enable_offload": True}},
        }
        found: dict[str, Any] = {}
        first = self.sizes.first
        self._limit(self.cap)
        try:
            for name, fields in variants.items():
                log(f"  {name}")
                found.update(self._largest(name, {**self.amp, **fields}, first, found.get("amp_batch")))
                first = max(4 * found["amp_batch"], found[f"{name}_batch"])  # each is to have more than that before
        finally:
            self._limit(None)
        for name in ("recompute_exact", *REFERENCE):
            found[f"{name}_batch_ratio"] = found[f"{name}_batch"] / found["amp_batch"]
            found[f"{name}_speed_ratio"] = found[f"{name}_samples_per_s"] / found["amp_samples_per_s"]
        for name, (batch, speed) in REFERENCE.items():
            found[f"{name}_reference_batch_ratio"], found[f"{name}_reference_speed_ratio"] = batch, speed
        return found

    def _largest(self, name: str, fields: dict[str, Any], first: int, amp_batch: int | None) -> dict[str, Any]:
        task = BertTask(self.device, 1, self.sizes.large, self.sizes.length)
        most = self.sizes.most if self.device.type == "cpu" else self.sizes.most * (amp_batch or 100)
        with ours(task, **fields) as step:
            peak_bytes(task, step, 1)  # the optimizer's state is there from now on
            limit = Limit(self.sizes.seconds / 5)
            batch = largest_batch(lambda size: peak_bytes(task, step, size), first, most, limit)
            if not batch:
                raise SystemExit(f"not even one sample fits into {self.cap / 2**30:.0f} GiB")
            speed = None
            while speed is None:  # several steps in a row may need a little more than one
                speed = self._speed(task, step, batch)
                batch = batch if speed is not None else batch - max(1, batch // 32)
        log(f"    batch {batch}, {speed:,.1f} samples/s")
        return {f"{name}_batch": batch, f"{name}_samples_per_s": speed}

    def _speed(self, task: TrainingTask, step: Callable[[Any], object], batch: int) -> float | None:
        free()
        try:
            return samples_per_s(task, step, task.batch(batch), 2 * self.moment)
        except torch.OutOfMemoryError:
            return None

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
                peak = peak_bytes(task, step, task.batch_size, steps=2)
                if peak is None:
                    log(f"  {name}: a batch of {task.batch_size} does not fit")
                    continue
                speed = samples_per_s(task, step, task.batch(task.batch_size), self.moment)
            found[f"{name}_gib"], found[f"{name}_samples_per_s"] = peak / 2**30, speed
            log(f"  {name}: {peak / 2**30:.2f} GiB, {speed:,.1f} samples/s")
        return found

    def fusion(self) -> dict[str, Any]:
        """The same job, compiled with CUDA graphs, compiled, and with every operation by itself."""
        found: dict[str, Any] = {}
        tasks, amp = self.tasks(), {**self.amp, "amp_configs": {"dtype": "bfloat16"}} if self.amp else {}
        limit = Limit(self.sizes.seconds)
        ways = {"graphs": "allow_cuda_graph_capture", "compiled": "fuse_elewise_add_act_ops"}
        for how, flag in ways.items():
            for name, task in tasks.items():
                if limit.is_over or (how == "graphs" and self.device.type == "cpu"):
                    log(f"  {name} {how}: left out")
                    continue
                log(f"  {name} {how}")
                torch._dynamo.reset()
                with ours(task, **amp, build_strategy={flag: True, "fuse_all_optimizer_ops": True}) as compiled:
                    contenders = {how: compiled, "eager": _eagerly(compiled)}
                    speeds = in_turns(task, contenders, self.sizes.rounds, self.moment / 2, limit)
                found.update({f"{name}_{key}_samples_per_s": speed for key, speed in speeds.items()})
                found[f"{name}_{how}_speed_up"] = speeds[how] / speeds["eager"]
        return found

    def overhead(self) -> dict[str, Any]:
        """amp through torchfleet against autocast and GradScaler by hand.

        On one GPU torchfleet uses no DDP, so the rival is what has none either; one with it is shown beside.
        """
        found: dict[str, Any] = {}
        tasks = self.tasks()
        for name, task in tasks.items():
            log(f"  {name}")
            with ours(task, **self.amp) as step:
                contenders = {"ours": step, "hand": by_hand(task, bool(self.amp), with_ddp=False)}
                if dist.is_initialized():
                    contenders["hand_ddp"] = by_hand(task, bool(self.amp), with_ddp=True)
                limit = Limit(self.sizes.seconds / len(tasks))
                speeds = in_turns(task, contenders, 2 * self.sizes.rounds - 1, self.moment, limit)
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
    parser.add_argument("--seconds", type=float, help="that a part may take, about; default 100")
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
