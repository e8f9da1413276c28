"""A language model that is never whole anywhere: made without memory, cut, and filled part by part (stage 3, offload).

    python -m benchmarks.large_model --parameters 20e9 --json          one GPU, 128 GB of host memory, minutes
    python -m benchmarks.large_model --parameters 20e6 --dtype float32 --length 64      one CPU, seconds
    fleetrun --nproc_per_node 8 benchmarks/large_model.py --parameters 100e9        a machine of GPUs

Parameters are bfloat16 and, with their gradients, in host memory; blocks come to the device when they are needed, and
are computed twice (recompute). The optimizer is SGD without momentum, which has no state: of n parameters a rank of N
holds 2n/N bytes after the start and 4n/N bytes in a step. Figures are those of rank 0: the largest rise of host memory,
and of memory of the GPU, beside this rank's part; seconds to the end of the first step, and of a later one.
"""

from __future__ import annotations

import argparse
import math
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import torchfleet as fleet
from benchmarks.timing import log, report
from torchfleet.collective.tensors.local_tensors import local

_PERIOD = 0.02  # seconds between two looks at the memory of the machine


class Block(torch.nn.Module):
    """Attention to earlier words, then two wide layers: 12 · width² parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = max(1, width // 128)
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.query, self.key, self.value, self.mixed = (torch.nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        query, key, value = (
            project(normed).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class LanguageModel(torch.nn.Module):
    def __init__(self, num_blocks: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def make_model(parameters: float, dtype: str) -> LanguageModel:
    """At least `parameters`, in about 24 blocks; sizes are powers of two, which page-locked memory is rounded to."""
    width = 2 ** round(math.log2(math.sqrt(parameters / (12 * 24))))
    vocabulary = 4 * width
    num_blocks = max(1, math.ceil((parameters - 2 * vocabulary * width) / (12 * width**2)))
    with torch.device("meta"):
        return LanguageModel(num_blocks, width, vocabulary).to(getattr(torch, dtype))


class HostMemory:
    """The largest rise of host memory since it was made; of the whole machine with a GPU, whose driver locks pages."""

    def __init__(self, on_machine: bool) -> None:
        self._used: Callable[[], int] = _of_machine if on_machine else _of_process
        self._start, self._is_over, self.rise = self._used(), threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(_PERIOD):
            self.rise = max(self.rise, self._used() - self._start)

    def end(self) -> int:
        self._is_over.set()
        self._thread.join()
        return self.rise


def _of_process() -> int:
    return 1024 * _kilobytes("/proc/self/status", "VmRSS")


def _of_machine() -> int:
    return -1024 * _kilobytes("/proc/meminfo", "MemAvailable")


def _kilobytes(path: str, name: str) -> int:
    return int(next(line for line in Path(path).read_text().splitlines() if line.startswith(name + ":")).split()[1])


def main() -> None:
    options = parse()
    strategy = fleet.DistributedStrategy(
        sharding=True, sharding_configs={"stage": 3, "offload": True},
        recompute=True, recompute_configs={"checkpoints": ["blocks.*"]},
    )  # fmt: skip
    torch.manual_seed(0)
    fleet.init(is_collective=True, strategy=strategy)
    result = measure(options)
    if fleet.is_first_worker():
        report(result, options.json)
    fleet.stop_worker()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    is_cuda = torch.cuda.is_available() and torch.distributed.get_backend() == "nccl"
    device = torch.device("cuda" if is_cuda else "cpu")
    torch.zeros(1, device=device)  # what the driver takes is not the model's, nor is what imports take
    for name in ("torch.distributed.fsdp", "torch.utils.checkpoint", "torchfleet.collective.build"):
        import_module(name)
    started, host = time.perf_counter(), HostMemory(is_cuda)
    model = fleet.distributed_model(make_model(options.parameters, options.dtype))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=options.lr))
    made = time.perf_counter() - started
    part = sum(local(parameter).nbytes for parameter in model.parameters())
    at_start = host.end()
    log(f"made in {made:,.1f} s: {part / 1e9:,.2f} GB of parameters, {at_start / 1e9:,.2f} GB of host memory")
    in_steps, losses, seconds = HostMemory(is_cuda), [], []
    for step in range(options.steps):
        begun = time.perf_counter()
        losses.append(train_step(model, optimizer, options, device, step))
        seconds.append(time.perf_counter() - begun)
        log(f"step {step}: loss {losses[-1]:.4f}, {seconds[-1]:,.1f} s")
    of_steps = at_start + in_steps.end()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "part_gb": part / 1e9,
        "host_peak_at_start_gb": at_start / 1e9,
        "host_peak_at_start_over_part": at_start / part,
        "host_peak_in_steps_gb": of_steps / 1e9,
        "host_peak_in_steps_over_part_and_gradients": of_steps / (2 * part),
        "gpu_peak_gb": torch.cuda.max_memory_allocated() / 1e9 if is_cuda else 0.0,
        "gpu_peak_over_part": torch.cuda.max_memory_allocated() / part if is_cuda else 0.0,
        "seconds_to_model": made,
        "seconds_to_first_step": made + seconds[0],
        "seconds_per_step": min(seconds[1:] or seconds),
        "tokens_per_step": options.batch * options.length,
        "losses": losses,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
    }


def train_step(model: Any, optimizer: Any, options: argparse.Namespace, device: torch.device, step: int) -> float:
    """The same words every time: the loss falls."""
    vocabulary = model.module.head.out_features
    drawn = torch.Generator().manual_seed(fleet.data_shard()[0])
    ids = torch.randint(vocabulary, (options.batch, options.length + 1), generator=drawn).to(device)
    loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=20e9, help="the least number")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of parameters")
    parser.add_argument("--steps", type=int, default=3, help="training steps")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--length", type=int, default=2048, help="words of a sequence")
    parser.add_argument("--lr", type=float, default=0.1, help="of SGD")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
