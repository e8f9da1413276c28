"""Strategies on ranks that share one GPU, each beside plain torch on that GPU: what is trained, and what it must equal.

Ranks on one GPU talk over gloo, which NCCL refuses; a rank alone has NCCL. FLEET_TEST_DEVICE=cpu tries the cases out
where there is no GPU.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.collective_oracles import Batch, batches, lamb_step, lars_step, local_sgd, mlp
from torch.nn import functional as F

import torchfleet as fleet

STEPS = 4
DEVICE = torch.device(os.environ.get("FLEET_TEST_DEVICE", "cuda"))
Model = torch.nn.Module


class Case(NamedTuple):
    """Fields of DistributedStrategy; which rule and precision plain torch has; how far from it, of the way gone."""

    fields: Mapping[str, Any]
    rule: str = "sgd"
    tolerance: float = 1e-4
    dtype: torch.dtype | None = None  # of autocast
    model: Callable[[], Model] = lambda: mlp(deep=True)


def chosen_blocks(**more: Any) -> dict[str, Any]:
    return {"recompute": True, "recompute_configs": {"checkpoints": ["0", "2"], **more}}


def normed() -> Model:
    made = mlp(deep=True)
    made[1] = torch.nn.BatchNorm1d(300)
    return made


BF16 = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
FP16 = {"amp": True, "amp_configs": {"init_loss_scaling": 1024.0}}
DGC = {"dgc": True, "dgc_configs": {"rampup_begin_step": 1, "rampup_step": 1, "sparsity": [0.99]}}
CASES: dict[str, Case] = {
    "data_parallel": Case({}),
    "adam": Case({}, "adam"),
    "amp_bfloat16": Case(BF16, tolerance=1e-2, dtype=torch.bfloat16),
    "amp_float16": Case(FP16, tolerance=5e-3, dtype=torch.float16),
    "pure_bfloat16": Case({"amp": True, "amp_configs": {"use_pure_bf16": True}}, "adam", 0.1, torch.bfloat16),
    "recompute": Case(chosen_blocks()),
    "offload": Case(chosen_blocks(enable_offload=True)),
    "slices": Case(chosen_blocks(enable_offload=True, slices=3)),
    "half_inputs": Case({**BF16, **chosen_blocks(half_inputs=True, slices=2)}, "sgd", 1e-2, torch.bfloat16),
    "lars": Case({"lars": True, "lars_configs": {"lars_coeff": 0.1}}, "lars"),
    "lamb": Case({"lamb": True}, "lamb"),
    "localsgd": Case({"localsgd": True, "localsgd_configs": {"k_steps": 2}}, "localsgd"),
    "fp16_allreduce": Case({"fp16_allreduce": True}, tolerance=5e-3),
    "communicators": Case({"nccl_comm_num": 2}),
    "gradient_merge": Case({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 1}}),
    "sync_batch_norm": Case({"sync_batch_norm": True}, "whole", 1e-3, model=normed),
    "hierarchical": Case({"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}),
    "fused_optimizer": Case({"build_strategy": {"fuse_all_optimizer_ops": True}}, "adam"),
    **{f"sharding_{stage}": Case({"sharding": True, "sharding_configs": {"stage": stage}}, "adam", 1e-3)
       for stage in (1, 2, 3)},
    **{f"sharding_{stage}_amp": Case({"sharding": True, "sharding_configs": {"stage": stage}, **BF16}, "adam", 0.1,
                                     torch.bfloat16) for stage in (1, 3)},
    "pipeline": Case({"pipeline": True, "pipeline_configs": {"accumulate_steps": 2}}, "one"),
    "pipeline_amp": Case({"pipeline": True, "pipeline_configs": {"accumulate_steps": 2}, **BF16}, "one", 0.05,
                         torch.bfloat16),
}  # fmt: skip


# A rank


@contextlib.contextmanager
def on_one_gpu() -> Iterator[None]:
    """All ranks take the first GPU. Alone, a rank makes its group itself, of NCCL."""
    if DEVICE.type == "cuda":
        os.environ.pop("FLEET_DEVICE", None)
        os.environ["LOCAL_RANK"] = "0"
    torch.backends.cuda.matmul.allow_tf32 = False
    is_shared = int(os.environ["WORLD_SIZE"]) > 1
    if is_shared:
        dist.init_process_group("gloo")
    yield
    if is_shared:
        dist.destroy_process_group()


def run_cases(names: Sequence[str]) -> dict[str, Any]:
    """For every case, how far from plain torch it ended, as a share of the way gone; or the error, as text."""
    found: dict[str, Any] = {}
    with on_one_gpu():
        for name in names:
            try:
                found[name] = distance(CASES[name])
            except Exception:
                fleet.reset()
                found[name] = traceback.format_exc()
    return found


def distance(case: Case) -> float:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trained = ours(case, rank, size)
    expected, way = plain(case, rank, size)
    assert trained, "this rank has no parameters"
    off = torch.stack([(value - expected[name]).norm() for name, value in trained.items()]).norm()
    return float(off / way)


def ours(case: Case, rank: int, size: int) -> dict[str, torch.Tensor]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**case.fields))
    model = fleet.distributed_model(case.model())
    optimizer = fleet.distributed_optimizer(made_optimizer(case.rule, model))
    data = shares(0, 1)[0] if case.rule == "one" else shares(rank, size)[rank]
    for x, y in data:
        model.train_batch(x, y, F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    fleet.stop_worker()
    return found


def whole(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).float().clone()


def made_optimizer(rule: str, model: Model) -> torch.optim.Optimizer:
    if rule in ("adam", "lamb"):
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def shares(rank: int, size: int) -> list[list[Batch]]:
    """Of every rank, on the device."""
    return [[(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(STEPS, rank, size)] for rank in range(size)]


# Plain torch, all ranks in one process


def plain(case: Case, rank: int, size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Parameters after the steps, and how far they went."""
    model = case.model().to(DEVICE)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    data = shares(0, 1 if case.rule == "one" else size)
    if case.rule == "localsgd":
        models = [case.model().to(DEVICE) for _ in range(size)]
        local_sgd(models, [made_optimizer("sgd", each) for each in models], data, 1, 2)
        model = models[rank]
    elif case.rule in ("lars", "lamb"):
        by_formula(case, model, data)
    else:
        optimizer = made_optimizer(case.rule, model)
        for step in range(STEPS):
            give_gradients(case, model, [of_rank[step] for of_rank in data])
            optimizer.step()
    found = {name: value.detach() for name, value in model.named_parameters()}
    way = torch.stack([(found[name] - value).norm() for name, value in before.items()]).norm()
    return found, way


def give_gradients(case: Case, model: Model, parts: Sequence[Batch]) -> None:
    """The mean over ranks; for a norm over all samples, of the whole batch."""
    if case.rule == "whole":
        parts = [tuple(torch.cat(column) for column in zip(*parts, strict=True))]  # type: ignore[list-item]
    model.zero_grad()
    for x, y in parts:
        with torch.autocast(DEVICE.type, case.dtype or torch.bfloat16, enabled=case.dtype is not None):
            output = model(x)
        (F.cross_entropy(output.float(), y) / len(parts)).backward()


def by_formula(case: Case, model: Model, data: Sequence[Sequence[Batch]]) -> None:
    states: dict[str, Any] = {}
    for step in range(STEPS):
        give_gradients(case, model, [of_rank[step] for of_rank in data])
        for name, p in model.named_parameters():
            g, value = p.grad.double(), p.detach().double()  # type: ignore[union-attr]
            if case.rule == "lars":
                new, states[name] = lars_step(value, g, states.get(name, 0.0), 0.1, 0.9, 0.1, 0.0005, 0.0)
            else:
                m, v = states.get(name, (0.0, 0.0))
                new, m, v = lamb_step(value, g, m, v, step + 1, 0.01, (0.9, 0.999), 1e-8, 0.01)
                states[name] = m, v
            p.data.copy_(new)
