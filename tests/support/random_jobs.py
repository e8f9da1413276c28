"""Jobs of two ranks whose features are drawn from a seed, each beside the same steps in plain torch.

A job crosses four things that meet in a tensor: its precision, who shares it, the life of its gradient, and the
strategy that exchanges, cuts or moves it. The oracle has one process, whole batches, torch.autocast, a constant scale.

    PYTHONPATH=.:tests python -m support.random_jobs --draws 500 --seed 7
    PYTHONPATH=.:tests python -m support.random_jobs --only 1234

The first line tries 500 seeds from 7 on, and prints those that are wrong; the second one tries a single seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support import random_jobs  # by this name also where it is the script: ranks import it
from support.ranks import Ranks, nursery
from torch import nn

import torchfleet as fleet

TOGETHER = 25  # jobs of one start of the ranks
SIZE, ROWS, WORDS, WIDTH, STEPS, SCALE, MAX_NORM = 2, 4, 20, 16, 3, 1024.0, 0.5

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"amp": True},
    "bfloat16": {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
    "pure float16": {"amp": True, "amp_configs": {"use_pure_fp16": True}},
    "pure bfloat16": {"amp": True, "amp_configs": {"use_pure_bf16": True}},
}
# Who shares weights: the head has the embedding's; a block is called twice.
SHARING = ("none", "tied", "twice")
# How gradients come about: what happens between two steps.
LIVES = (
    "one pass",
    "by hand",
    "merge",
    "mean of merge",
    "zeros kept",
    "evaluation",
    "clipped",
    "loaded",
    "loaded amid",
    "twice",  # backward through one graph
    "two calls",  # then two backward passes
    "one loss",  # of two calls
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "data": {},
    **{f"stage {stage}": {"sharding": True, "sharding_configs": {"stage": stage}} for stage in (1, 2, 3)},
    "units": {"sharding": True, "sharding_configs": {"stage": 3, "segment_broadcast_MB": 0.001}},
    "unused": {"find_unused_parameters": True},
    "recomputed": {"recompute": True, "recompute_configs": {"checkpoints": ["blocks.*"]}},
    "half on the wire": {"fp16_allreduce": True},
    "communicators": {"nccl_comm_num": 2},
    "not fused": {"fuse_all_reduce_ops": False},
    "averages": {"localsgd": True, "localsgd_configs": {"k_steps": 1, "begin_step": 1}},
}


class Job(NamedTuple):
    """The features of a job."""

    precision: str
    sharing: str
    life: str
    strategy: str

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {**PRECISIONS[self.precision], **STRATEGIES[self.strategy]}
        if "float16" in self.precision.split():
            scaling = {"init_loss_scaling": SCALE, "use_dynamic_loss_scaling": False}
            fields["amp_configs"] = {**fields.get("amp_configs", {}), **scaling}
        if self.num_merged > 1:
            configs = {"k_steps": self.num_merged, "avg": self.life != "merge"}
            fields |= {"gradient_merge": True, "gradient_merge_configs": configs}
        return fields

    @property
    def num_merged(self) -> int:
        return 2 if "merge" in self.life or self.life == "loaded amid" else 1

    @property
    def num_passes(self) -> int:
        """How often a step calls `backward_of`."""
        return 2 if self.life == "by hand" else self.num_merged

    @property
    def numbers(self) -> list[int]:
        """The batches whose gradients a step has the sum of."""
        if self.life == "twice":
            return [0, 0]
        return [0, 1] if self.life in ("two calls", "one loss") else list(range(self.num_passes))

    @property
    def tolerance(self) -> float:
        """Of the change of the parameters, relative to its norm. A wrong factor is off by a third or more."""
        if self.precision == "float32":
            return 5e-3 if self.strategy == "half on the wire" else 1e-4
        return 5e-2


def drawn(seed: int) -> Job:
    """The job of a seed; the same in every process."""
    chosen = random.Random(seed)
    while True:
        job = Job(*(chosen.choice(list(values)) for values in (PRECISIONS, SHARING, LIVES, STRATEGIES)))
        # Ranks that train alone clip by norms of their own, which is another formula.
        # With find_unused_parameters a second backward pass is refused.
        if (job.strategy, job.life) not in [("averages", "clipped"), ("unused", "twice"), ("unused", "two calls")]:
            return job


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Network(nn.Module):
    """Predicts words from words; the residual stream has the precision in which the embedding returns its rows."""

    def __init__(self, sharing: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        blocks = [Block(), Block()]
        self.blocks = nn.ModuleList([blocks[0], blocks[0]] if sharing == "twice" else blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if sharing == "tied":
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def batch(step: int, number: int, rank: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randint(WORDS, (ROWS, 3), generator=made)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(1, 1).flatten())


def backward_of(job: Job, model: nn.Module, step: int, number: int, rank: int) -> None:
    loss = loss_of(model, batch(step, number, rank))
    if job.life == "twice":
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    elif job.life == "one loss":
        loss = loss + loss_of(model, batch(step, 1, rank))
    elif job.life == "two calls":
        other = loss_of(model, batch(step, 1, rank))
        other.backward()  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]


def watched(model: nn.Module) -> dict[str, str]:
    """The types of what layers return, by their names; filled when the model is called."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _, __, output, name=name: found.update({name: str(output.dtype)}))
    return found


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def oracle(job: Job) -> dict[str, Any]:
    """The parameters after all steps, by their names, and the types of what layers return."""
    model = Network(job.sharing)
    dtype = torch.float16 if job.precision.endswith("float16") and "b" not in job.precision else torch.bfloat16
    kept = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    if job.precision.startswith("pure"):
        for module in model.modules():
            if not isinstance(module, nn.LayerNorm):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(dtype)
    stepping, types = optimizer_of(kept.values()), watched(model)
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(kept[name].detach())
            kept[name].grad = torch.zeros_like(kept[name])
        for number, rank in ((number, rank) for number in job.numbers for rank in range(SIZE)):
            with torch.autocast("cpu", dtype, enabled=job.precision != "float32"):
                outputs = model(ids := batch(step, number, rank))
            loss = nn.functional.cross_entropy(outputs.float().flatten(0, 1), ids.roll(1, 1).flatten())
            (loss * SCALE).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                kept[name].grad.add_(parameter.grad.float(), alpha=1 / SCALE / SIZE)  # type: ignore[union-attr]
                parameter.grad = None
        if job.num_merged > 1 and job.life != "merge":
            for parameter in kept.values():
                parameter.grad /= job.num_merged
        if job.life == "clipped":
            nn.utils.clip_grad_norm_(kept.values(), MAX_NORM)
        stepping.step()
    return {"parameters": {name: value.detach() for name, value in kept.items()}, "types": types}


def trained(job: Job, folder: str) -> dict[str, Any]:
    """The same as `oracle`, by this rank of the job."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**job.fields))
    model = fleet.distributed_model(Network(job.sharing))
    stepping = fleet.distributed_optimizer(optimizer_of(model.parameters()))
    types, rank = watched(model.module), fleet.worker_index()

    def passes(step: int) -> Iterator[None]:
        """The passes of a step and what follows them: stops before each."""
        for number in range(job.num_passes):
            yield
            backward_of(job, model, step, number, rank)
            if job.life == "by hand" and number + 1 < job.num_passes:
                continue
            if job.life == "clipped":
                stepping.clip_grad_norm_(MAX_NORM)
            if job.life == "evaluation":
                with torch.no_grad():
                    model(batch(step, 7, rank))
            stepping.step()
            stepping.zero_grad(set_to_none=job.life != "zeros kept")

    for step in range(STEPS):
        if job.life.startswith("loaded") and step == 1:
            fleet.save(folder)
            for number, _ in enumerate(passes(step + 5)):  # a step that is taken back, or half of one
                if job.life == "loaded amid" and number == 1:
                    break
            fleet.load(folder)
        for _ in passes(step):
            pass
    parameters = {name: _whole(value) for name, value in model.named_parameters()}
    fleet.stop_worker()
    return {"parameters": parameters, "types": types}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
    return whole.detach().float().clone()


def difference(job: Job, found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What is wrong with `found`; "" if it is what the oracle has."""
    if found["types"] != expected["types"]:
        changed = {name: (kind, found["types"].get(name)) for name, kind in expected["types"].items()}
        return f"layers return { ({name: pair for name, pair in changed.items() if pair[0] != pair[1]}) }"
    begun = dict(Network(job.sharing).named_parameters())
    if set(found["parameters"]) != set(begun):
        return f"parameters are {sorted(found['parameters'])}"
    pairs = [(found["parameters"][name] - begun[name], expected["parameters"][name] - begun[name]) for name in begun]
    own, right = (torch.cat([pair[i].detach().flatten() for pair in pairs]) for i in (0, 1))
    rounding = 2.0**-8 * sum(float(p.detach().square().sum()) for p in begun.values()) ** 0.5
    slack = rounding if job.precision.startswith("pure") else 0.0  # its parameters are rounded
    error = float((own - right).norm())
    bound = job.tolerance * float(right.norm()) + slack
    return "" if error <= bound else f"parameters moved by {float(own.norm()):.4g}, off by {error:.4g} of {bound:.2g}"


def wrong(jobs: list[list[str]]) -> dict[str, Any]:
    """The jobs that are wrong on this rank, by their places in the list, and what is wrong. For support.ranks."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    for place, job in enumerate(Job(*features) for features in jobs):
        print(job, flush=True)  # the last line of a rank that hangs
        try:
            text = difference(job, trained(job, str(Path(shared[0]) / str(place))), oracle(job))
        except Exception:
            text = traceback.format_exc()
            fleet.reset()
        if text:
            found[str(place)] = f"{job}: {text}"
    return found


def check(ranks: Ranks, jobs: Sequence[Job]) -> list[str]:
    """What is wrong with the jobs: each is trained by two ranks, one after the other."""
    answers = ranks.run(random_jobs.wrong, SIZE, jobs=[list(job) for job in jobs])
    return [text for answer in answers for text in answer.values()]


def main() -> int:
    """Try many seeds, or a single one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    first, num = (options.seed, options.draws) if options.only is None else (options.only, 1)
    found: list[str] = []
    with nursery() as ranks:
        for start in range(first, first + num, TOGETHER):
            seeds = range(start, min(start + TOGETHER, first + num))
            wrongs = check(ranks, [drawn(seed) for seed in seeds])
            found += wrongs
            if wrongs:
                print(f"seeds {seeds.start} to {seeds.stop - 1}:", *wrongs, sep="\n", flush=True)
    print(f"{num} jobs, {len(found)} wrong answers of ranks")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
