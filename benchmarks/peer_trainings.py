"""The same training by torchfleet, by hand with DDP and FSDP2, by Accelerate, Lightning's Fabric and DeepSpeed.

Each function is what one writes with that library, from the model to the loop's body; `lines_of` counts it. Steps in
half precision are bfloat16, with parameters in float32 for the optimizer: under autocast, which has norms and powers in
float32, or with everything in bfloat16 (`pure`). The two differ in memory, so that each has its own rival.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

import torchfleet as fleet
from benchmarks.gpu_training import Batch, TrainingTask

Step = Callable[[Batch], torch.Tensor]
Contender = Callable[[TrainingTask, bool], Step]


class GPT2Task(TrainingTask):
    """The next word of random sequences, by Hugging Face's GPT-2."""

    def __init__(self, device: torch.device, batch: int, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__(device, batch)
        self.layers, self.width, self.vocabulary, self.length = layers, width, vocabulary, length

    def model(self) -> torch.nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        heads, ends = max(1, self.width // 64), {"bos_token_id": 0, "eos_token_id": 0}
        sizes = {"n_layer": self.layers, "n_embd": self.width, "n_head": heads, "n_positions": self.length}
        with self.device:
            made: torch.nn.Module = GPT2LMHeadModel(
                GPT2Config(vocab_size=self.vocabulary, use_cache=False, **ends, **sizes)
            )
        return made

    def batch(self, size: int) -> Batch:
        ids = torch.randint(0, self.vocabulary, (size, self.length), device=self.device)
        return {"input_ids": ids, "labels": ids}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(**batch).loss
        return found


def by_fleet(task: TrainingTask, is_amp: bool) -> Step:
    strategy = fleet.DistributedStrategy(amp=is_amp)
    if is_amp:
        strategy.amp_configs = {"dtype": "bfloat16"}
    fleet.init(is_collective=True, strategy=strategy)
    model: Any = fleet.distributed_model(task.model())
    optimizer: Any = fleet.distributed_optimizer(task.optimizer(model))

    def step(batch: Batch) -> torch.Tensor:
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_fleet_sharded(task: TrainingTask, is_amp: bool) -> Step:
    strategy = fleet.DistributedStrategy(amp=is_amp, sharding=True, sharding_configs={"stage": 3})
    if is_amp:
        strategy.amp_configs = {"dtype": "bfloat16"}
    fleet.init(is_collective=True, strategy=strategy)
    model: Any = fleet.distributed_model(task.model())
    optimizer: Any = fleet.distributed_optimizer(task.optimizer(model))

    def step(batch: Batch) -> torch.Tensor:
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_fleet_pure(task: TrainingTask, is_amp: bool) -> Step:
    strategy = fleet.DistributedStrategy(amp=is_amp, sharding=True, sharding_configs={"stage": 3})
    if is_amp:
        strategy.amp_configs = {"use_pure_bf16": True}
    fleet.init(is_collective=True, strategy=strategy)
    model: Any = fleet.distributed_model(task.model())
    optimizer: Any = fleet.distributed_optimizer(task.optimizer(model))

    def step(batch: Batch) -> torch.Tensor:
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_hand(task: TrainingTask, is_amp: bool) -> Step:
    model = task.model()
    optimizer = task.optimizer(model)

    def step(batch: Batch) -> torch.Tensor:
        with torch.autocast(task.device.type, torch.bfloat16, enabled=is_amp):
            loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_ddp(task: TrainingTask, is_amp: bool) -> Step:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if task.device.type == "cuda" else "gloo")
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = task.optimizer(model)

    def step(batch: Batch) -> torch.Tensor:
        with torch.autocast(task.device.type, torch.bfloat16, enabled=is_amp):
            loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_fsdp2(task: TrainingTask, is_amp: bool) -> Step:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if task.device.type == "cuda" else "gloo")
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = half if is_amp else MixedPrecisionPolicy()
    model = task.model()
    for norm in [module for module in model.modules() if isinstance(module, _BatchNorm)]:
        fully_shard(norm)  # in float32
    for block in blocks_of(model):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = task.optimizer(model)

    def step(batch: Batch) -> torch.Tensor:
        with torch.autocast(task.device.type, torch.bfloat16, enabled=is_amp):
            loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_fsdp2_pure(task: TrainingTask, is_amp: bool) -> Step:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if task.device.type == "cuda" else "gloo")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_amp else MixedPrecisionPolicy()
    model = task.model()
    for norm in [module for module in model.modules() if isinstance(module, _BatchNorm)]:
        fully_shard(norm)  # in float32
    for block in blocks_of(model):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = task.optimizer(model)

    def step(batch: Batch) -> torch.Tensor:
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_accelerate(task: TrainingTask, is_amp: bool) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16" if is_amp else "no", cpu=task.device.type == "cpu")
    module = task.model()
    model, optimizer = accelerator.prepare(module, task.optimizer(module))

    def step(batch: Batch) -> torch.Tensor:
        loss = task.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_lightning(task: TrainingTask, is_amp: bool) -> Step:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    precision: Any = "bf16-mixed" if is_amp else "32-true"
    number = dist.get_world_size()
    environment = [TorchElasticEnvironment()]
    fabric = Fabric(
        accelerator=task.device.type, strategy="ddp", devices=number, precision=precision, plugins=environment
    )
    fabric.launch()
    module = task.model()
    model, optimizer = fabric.setup(module, task.optimizer(module))

    def step(batch: Batch) -> torch.Tensor:
        loss = task.loss(model, batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_deepspeed(task: TrainingTask, is_amp: bool) -> Step:
    import deepspeed  # type: ignore[import-not-found]

    config = {"train_micro_batch_size_per_gpu": task.batch_size, "zero_optimization": {"stage": 3}, "bf16": {}}
    config["bf16"] = {"enabled": is_amp}
    module = task.model()
    model, _, _, _ = deepspeed.initialize(model=module, optimizer=task.optimizer(module), config=config)

    def step(batch: Batch) -> torch.Tensor:
        loss = task.loss(model, batch)
        model.backward(loss)
        model.step()
        return loss

    return step


# A family is measured in one start of the processes, in turns: the first is ours, the others its rivals.
FAMILIES: Mapping[str, Mapping[str, Contender]] = {
    "replicated": {
        "fleet": by_fleet,
        "hand": by_hand,
        "ddp": by_ddp,
        "accelerate": by_accelerate,
        "lightning": by_lightning,
    },
    "sharded": {"fleet_stage3": by_fleet_sharded, "fsdp2": by_fsdp2, "deepspeed": by_deepspeed},
    "pure": {"fleet_pure": by_fleet_pure, "fsdp2_pure": by_fsdp2_pure},
}
IN_FLOAT32 = ("replicated", "sharded")  # families that differ from each other without half precision
_LIBRARIES = ("accelerate", "lightning", "deepspeed")


def contenders(family: str, num_ranks: int) -> dict[str, Contender]:
    """Those of a family whose library is installed.

    A loop by hand without any exchange is a rival on one rank alone. Fabric does not let ranks share a GPU.
    """
    shares_gpu = torch.cuda.is_available() and dist.is_initialized() and dist.get_backend() == "gloo"
    left_out = {name for name, is_out in (("hand", num_ranks > 1), ("lightning", shares_gpu)) if is_out}
    return {
        name: made
        for name, made in FAMILIES[family].items()
        if name not in left_out and (name not in _LIBRARIES or importlib.util.find_spec(name) is not None)
    }


def lines_of(contender: Contender) -> int:
    """Lines of code in the body: no comments, no empty lines, no lines that continue another."""
    lines = [line.strip() for line in inspect.getsource(contender).splitlines()[1:]]
    return sum(bool(line) and not line.startswith(("#", ")", "]", "}")) for line in lines)


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules in the model's outermost lists, which one shards one by one."""
    if isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential)):
        return [child for child in model.children() if any(True for _ in child.parameters())]
    return [block for child in model.children() for block in blocks_of(child)]
