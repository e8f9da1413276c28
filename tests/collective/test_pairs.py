"""The networks of examples/resnet and examples/bert, tiny, under pairs of strategies that may be combined: some of them
in `make test`, every one in `make test-long`.

Pairs that change nothing but who computes what must make the steps that plain torch makes in one process.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from support.ranks import Ranks, export_once
from support.sharded_models import start
from torch.nn import functional as F

from examples.bert.model import Bert, Output, Size
from examples.resnet.model import resnet_small
from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.build import ORDER, check

pytestmark = pytest.mark.xdist_group("traced")
prepare_ranks = export_once

ROWS, WORDS, LENGTH, STEPS, LR = 4, 23, 8, 2, 0.05
MOST = 30  # pairs of one start of the ranks
RECOMPUTED = {"bert": "encoder.layer.*", "resnet": "stage1"}
SECOND = {"bert": "encoder.layer.1", "resnet": "stage2"}

FIELDS: dict[str, dict[str, Any]] = {
    "sync_batch_norm": {},
    "tensor_parallel": {"tensor_parallel_configs": {"tensor_parallel_degree": 2}},
    "context_parallel": {},
    "recompute": {},
    "build_strategy": {"build_strategy": {"fuse_all_optimizer_ops": True}},
    "amp": {"amp_configs": {"dtype": "bfloat16"}},
    "pipeline": {},
    "fp16_allreduce": {},
    "use_hierarchical_allreduce": {"hierarchical_allreduce_inter_nranks": 2},
    "nccl_comm_num": {"nccl_comm_num": 2},
    "dgc": {},
    "lars": {},
    "lamb": {},
    **{f"sharding {stage}": {"sharding_configs": {"stage": stage}} for stage in (1, 2, 3)},
    "localsgd": {"localsgd_configs": {"k_steps": 2}},
    "adaptive_localsgd": {},
    "gradient_merge": {"gradient_merge_configs": {"k_steps": 2}},
}
TURNS = 6  # of which two are trained in `make test`
# What computes the same numbers, for a model without batch norms.
SAME = ("tensor_parallel", "context_parallel", "recompute", "build_strategy", "pipeline", "use_hierarchical_allreduce",
        "nccl_comm_num", "sharding 1", "sharding 2", "sharding 3")  # fmt: skip


def fields_of(pair: tuple[str, ...], kind: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in pair:
        fields |= {name.split()[0]: True, **FIELDS[name]}
    if "recompute" in pair:
        fields["recompute_configs"] = {"checkpoints": [RECOMPUTED[kind]]}
    if "pipeline" in pair:
        fields["pipeline_configs"] = {"accumulate_steps": 2, "stages": [SECOND[kind]]}
        fields["hybrid_configs"] = {"pp_degree": 2}
    return fields


def pairs_of(kind: str, every: bool) -> list[tuple[str, str]]:
    """Those that the table of docs/collective/README.md allows, of strategies that this network has the layers for.

    `every`: all of them. Else they go by TURNS to one network, to the other, and to none; a pair of the third turn
    that only one network can train is trained, too.
    """
    lacks = {"resnet": ("tensor_parallel", "context_parallel"), "bert": ("sync_batch_norm",)}
    found: list[tuple[str, str]] = []
    for number, pair in enumerate(combinations(FIELDS, 2)):
        turns = (
            {(kind == "resnet"), 2}
            if any(name in pair for names in lacks.values() for name in names)
            else {(kind == "resnet")}
        )
        is_due = every or number % TURNS in turns
        if not is_due or set(lacks[kind]) & set(pair) or pair[0].split()[0] == pair[1].split()[0]:
            continue
        if pair[0] == "build_strategy" and pair[1] in ("dgc", "lars", "lamb"):
            continue  # which have no kernels to fuse, and say so
        try:
            check(DistributedStrategy(**fields_of(pair, kind)))
        except StrategyError:
            continue
        found.append(pair)
    return found


def num_ranks(pair: tuple[str, str]) -> int:
    """As many as two ways to cut need."""
    cutting = [name for name in pair if name.split()[0] in ("tensor_parallel", "pipeline", "sharding")]
    return 4 if len(cutting) == 2 or "use_hierarchical_allreduce" in pair else 2


def made(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "resnet":
        return resnet_small(5, 1)
    return Bert(Size(2, 16, 2), WORDS, LENGTH, dropout=0.0)


def batch(kind: str, step: int, replica: int) -> tuple[Any, torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + replica)
    if kind == "resnet":
        return torch.randn(ROWS, 3, 8, 8, generator=drawn), torch.randint(5, (ROWS,), generator=drawn)
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=drawn)
    return ids, ids.roll(1, 1)


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output.logits if isinstance(output, Output) else output
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def optimizer_of(pair: tuple[str, ...], parameters: Any) -> torch.optim.Optimizer:
    if "lamb" in pair:
        return torch.optim.Adam(parameters, lr=LR)
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9 if {"dgc", "lars"} & set(pair) else 0.0)


def train(kind: str, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Parameters by pair, or what is wrong with it: all ranks find that alike, and go on with the next pair."""
    found: dict[str, Any] = {}
    for pair in pairs:
        print(" + ".join(pair), flush=True)  # the last line of a rank that hangs
        try:
            found[" + ".join(pair)] = train_pair(kind, pair)
        except Exception as error:
            found[" + ".join(pair)] = {"error": f"{type(error).__name__}: {error}"}
    return found


def train_pair(kind: str, pair: tuple[str, str]) -> dict[str, Any]:
    job = start(**fields_of(pair, kind))
    model = job.distribute_model(made(kind))
    optimizer = job.distribute_optimizer(optimizer_of(pair, model.parameters()))
    for step in range(STEPS):
        loss = model.train_batch(*batch(kind, step, job.data_shard[0]), loss_of)
        optimizer.step()
        optimizer.zero_grad()
    assert loss is None or bool(loss.isfinite())
    parameters = {
        key: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().float().clone()
        for key, value in model.named_parameters()
    }
    return {"parameters": parameters, "replicas": job.data_shard[1]}


def plain(kind: str, replicas: int) -> dict[str, torch.Tensor]:
    model = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        for replica in range(replicas):
            inputs, target = batch(kind, step, replica)
            (loss_of(model(inputs), target) / replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["bert", "resnet"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"])
def test_pairs_train_the_examples(ranks: Ranks, every: bool, kind: str, size: int) -> None:
    pairs = [pair for pair in pairs_of(kind, every) if num_ranks(pair) == size]
    found = [dict[str, Any]() for _ in range(size)]
    for some in range(0, len(pairs), MOST):
        for own, more in zip(found, ranks.run(train, size, kind=kind, pairs=pairs[some : some + MOST]), strict=True):
            own.update(more)
    oracles = {replicas: plain(kind, replicas) for replicas in (1, 2, 4)}
    begun = dict(made(kind).named_parameters(remove_duplicate=False))
    names = set(dict(made(kind).named_parameters()))
    wrong = {name: result["error"] for name, result in found[0].items() if "error" in result}
    assert not wrong, "\n".join(f"{name}: {text[:300]}" for name, text in wrong.items())
    for pair in pairs:
        name = " + ".join(pair)
        every = [of_rank[name]["parameters"] for of_rank in found]
        assert {key for own in every for key in own} >= names, name
        for own in every:
            for key, value in own.items():
                assert bool(value.isfinite().all()), (name, key)
                if all(part in SAME for part in pair) and kind == "bert":
                    expected = oracles[found[0][name]["replicas"]][key]
                    torch.testing.assert_close(
                        value, expected, rtol=1e-4, atol=1e-5, msg=lambda text, at=(name, key): f"{at}: {text}"
                    )
            assert any(not torch.equal(value, begun[key]) for key, value in own.items()), f"{name} changed nothing"
        for key, value in every[0].items():
            same = [own[key] for own in every if key in own]
            assert "localsgd" in name or all(torch.equal(value, other) for other in same), (name, key)


def test_every_strategy_is_in_a_pair_and_most_are_in_several() -> None:
    assert {name.split()[0] for name in FIELDS} == set(ORDER)
    tried = Counter(name for kind in SECOND for pair in pairs_of(kind, every=False) for name in pair)
    assert min(tried[name] for name in FIELDS) >= 1, tried
    assert sum(tried[name] > 2 for name in FIELDS) > len(FIELDS) / 2, tried
