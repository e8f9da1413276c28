"""The core of collective training: neutral settings equal plain DistributedDataParallel, amp and gradient_merge their
oracles, and the facade says what does not go together."""

from __future__ import annotations

import copy
import math
import types
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import each_of
from support.collective_oracles import job_of
from support.grids import first_of
from support.messages import lines_naming, names, naming
from support.ranks import Ranks
from support.sharded_models import full
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import torchfleet as fleet
from torchfleet.base.errors import FleetError, ModelError, StrategyError
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.collective.build import build
from torchfleet.collective.collective_job import CollectiveJob
from torchfleet.collective.strategies.mixed_precision.amp import Amp
from torchfleet.collective.world import degrees

STEPS, BATCH = 6, 8


def make_model(seed: int = 0, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(32, 4)
    )


def batches(num: int, rank: int, size: int, rows: int = BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of `num` batches of `size · rows` rows; the whole for rank -1."""
    made = torch.Generator().manual_seed(7)
    whole = [
        (torch.randn(size * rows, 10, generator=made), torch.randint(4, (size * rows,), generator=made))
        for _ in range(num)
    ]
    if rank < 0:
        return whole
    return [(x[rank * rows : (rank + 1) * rows], y[rank * rows : (rank + 1) * rows]) for x, y in whole]


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().float().clone() for name, value in model.state_dict().items()}


def train_fleet(optimizer: str = "momentum", num: int = STEPS, **fields: Any) -> dict[str, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    rank, size = fleet.worker_index(), fleet.worker_num()
    model = fleet.distributed_model(make_model(seed=rank))  # rank 0's values must reach everybody
    stepping = fleet.distributed_optimizer(optimizer_of(optimizer, model))
    losses = []
    for x, y in batches(num, rank, size):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        stepping.step()
        stepping.zero_grad()
        losses.append(float(loss))
    fleet.stop_worker()
    return {"losses": losses, **parameters(model)}


def train_ddp(optimizer: str = "momentum") -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model(seed=rank))
    stepping = optimizer_of(optimizer, model)
    losses = []
    for x, y in batches(STEPS, rank, size):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        stepping.step()
        stepping.zero_grad()
        losses.append(float(loss))
    return {"losses": losses, **parameters(model.module)}


def train_alone(optimizer: str = "momentum", num: int = STEPS, size: int = 2, merge: int = 1) -> dict[str, Any]:
    """One process of plain torch on whole batches, `merge` of them put together."""
    model = make_model()
    stepping = optimizer_of(optimizer, model)
    whole = batches(num, -1, size)
    for start in range(0, num - num % merge, merge):
        x, y = (torch.cat(tensors) for tensors in zip(*whole[start : start + merge], strict=True))
        F.cross_entropy(model(x), y).backward()
        stepping.step()
        stepping.zero_grad()
    return parameters(model)


def assert_equal(found: dict[str, Any], expected: dict[str, Any], atol: float = 0.0) -> None:
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:
            assert found[name] == pytest.approx(value, abs=atol)


NEUTRAL: list[dict[str, Any]] = [
    {},
    {"fuse_grad_size_in_MB": 1},
    {"fuse_all_reduce_ops": False},
    {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 1}},
    {"find_unused_parameters": True},
]


@pytest.mark.parametrize("optimizer", first_of(["adam", "momentum"]))
def test_neutral_settings_equal_plain_ddp_bit_for_bit(ranks: Ranks, optimizer: str) -> None:
    expected = ranks.run(train_ddp, 2, optimizer=optimizer)
    for fields in NEUTRAL:
        for found, plain in zip(ranks.run(train_fleet, 2, optimizer=optimizer, **fields), expected, strict=True):
            assert_equal(found, plain)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_data_parallel_equals_one_process_on_the_whole_batch(ranks: Ranks, size: int) -> None:
    """1e-6: a mean of means adds in another order than a mean."""
    for found in ranks.run(train_fleet, size):
        assert_equal(found, train_alone(size=size), atol=1e-6)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_gradient_merge_equals_a_batch_k_times_as_large(ranks: Ranks, k: int, optimizer: str) -> None:
    fields = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k}}
    found = ranks.run(train_fleet, 2, optimizer=optimizer, num=7, **fields)
    # Adam divides by √v, which for gradients near zero multiplies what rounding left
    assert_equal(found[0], train_alone(optimizer, num=7, merge=k), atol=1e-6 if optimizer == "momentum" else 1e-5)
    assert_equal(found[1], {name: value for name, value in found[0].items() if name != "losses"})


def test_gradient_merge_without_avg_sums(ranks: Ranks) -> None:
    fields = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": False}}
    found = ranks.run(train_fleet, 2, num=2, **fields)
    model = make_model()
    stepping = optimizer_of("momentum", model)
    for x, y in batches(2, -1, 2):
        F.cross_entropy(model(x), y).backward()
    stepping.step()
    assert_equal(found[0], parameters(model), atol=1e-6)


def count_messages(**fields: Any) -> dict[str, Any]:
    """How often gradients are exchanged in 6 steps."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    model = fleet.distributed_model(make_model())
    stepping = fleet.distributed_optimizer(optimizer_of("momentum", model))
    calls = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, and these would be text
        calls.append(bucket.buffer().numel())
        return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda done: done.value()[0])

    model._parallel.register_comm_hook(None, hook)
    for x, y in batches(6, fleet.worker_index(), 2):
        F.cross_entropy(model(x), y).backward()
        stepping.step()
        stepping.zero_grad()
    return {"calls": calls}


def test_gradients_are_fused_and_merged_before_they_travel(ranks: Ranks) -> None:
    num = sum(parameter.numel() for parameter in make_model().parameters())
    assert ranks.run(count_messages, 2)[0]["calls"] == [num] * 6
    merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}}
    assert ranks.run(count_messages, 2, **merged)[0]["calls"] == [num] * 2
    alone = ranks.run(count_messages, 2, fuse_all_reduce_ops=False)[0]["calls"]
    assert sorted(alone[-4:]) == sorted(parameter.numel() for parameter in make_model().parameters())


# amp


def train_amp(**configs: Any) -> dict[str, Any]:
    return train_fleet(amp=True, amp_configs=configs)


def train_autocast(dtype: str, scale: float) -> dict[str, Any]:
    """The same by hand: autocast, a constant scale, plain DDP."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(seed=rank))
    stepping = optimizer_of("momentum", model)
    for x, y in batches(STEPS, rank, 2):
        with torch.autocast("cpu", getattr(torch, dtype)):
            output = model(x)
        (F.cross_entropy(output.float(), y) * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        stepping.step()
        stepping.zero_grad()
    return parameters(model.module)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_amp_equals_autocast_and_scaling_by_hand(ranks: Ranks, dtype: str) -> None:
    """1e-6 and not bit-equal: the gradient of the outputs is scaled here, by hand the loss is."""
    expected = ranks.run(train_autocast, 2, dtype=dtype, scale=32768.0 if dtype == "float16" else 1.0)
    for found, plain in zip(ranks.run(train_amp, 2, dtype=dtype), expected, strict=True):
        assert_equal(found, plain, atol=1e-6)


class Returns(torch.nn.Module):
    """Returns its loss and what the loss was made from, in several shapes."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.body, self.shape = make_model(), shape

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.body(x)
        loss = F.cross_entropy(logits.float(), y)
        if self.shape == "object":
            return types.SimpleNamespace(loss=loss, logits=logits)
        return {"dict": {"loss": loss, "logits": logits}, "tuple": (loss, [logits]), "tensor": loss}[self.shape]


def gradients_of_returns(shape: str, scale: float, passes: int) -> dict[str, Any]:
    configs = {"init_loss_scaling": scale, "use_dynamic_loss_scaling": False}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(amp=True, amp_configs=configs))
    model = fleet.distributed_model(Returns(shape))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(passes, 0, 1):
        output = model(x, y)
        loss = {"object": lambda o: o.loss, "dict": lambda o: o["loss"], "tuple": lambda o: o[0], "tensor": lambda o: o}
        loss[shape](output).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", ["object", "dict", "tuple", "tensor"])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_after_backward_are_of_their_true_size(ranks: Ranks, shape: str, passes: int) -> None:
    """A loss inside the outputs must not be scaled twice; powers of two round nothing away, 2^8 loses nothing here."""
    (plain,) = ranks.run(gradients_of_returns, 1, shape=shape, scale=1.0, passes=passes)
    (scaled,) = ranks.run(gradients_of_returns, 1, shape=shape, scale=256.0, passes=passes)
    assert_equal(scaled, plain, atol=1e-4)
    assert max(float(gradient.abs().max()) for gradient in scaled.values()) > 1e-2


def scale_history(overflows: list[bool], **configs: Any) -> dict[str, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(amp=True, amp_configs=configs))
    model = fleet.distributed_model(make_model())
    stepping = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    (amp,) = model.strategies
    scales, moved = [], []
    for overflow in overflows:
        before = model.module[0].weight.detach().clone()
        x = torch.full((2, 10), float("inf") if overflow and fleet.worker_index() == 0 else 1.0)
        model(x).float().sum().backward()
        stepping.step()
        stepping.zero_grad()
        scales.append(amp.scaling.value)
        moved.append(not torch.equal(before, model.module[0].weight))
    return {"scales": scales, "moved": moved}


def test_the_scale_follows_its_configuration_and_overflows_are_skipped(ranks: Ranks) -> None:
    configs = {"init_loss_scaling": 64.0, "incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2,
               "incr_ratio": 4.0, "decr_ratio": 0.25}  # fmt: skip
    overflows = [False, False, False, True, False, True, True, True, True, False, False, False]
    expected = [64, 64, 256, 256, 256, 256, 64, 64, 16, 16, 16, 64]
    for found in ranks.run(scale_history, 2, overflows=overflows, **configs):
        assert found["scales"] == expected
        assert found["moved"] == [not overflow for overflow in overflows]
    constant = {"init_loss_scaling": 64.0, "use_dynamic_loss_scaling": False}
    assert ranks.run(scale_history, 1, overflows=overflows, **constant)[0]["scales"] == [64] * len(overflows)


def dtypes_of_outputs(white: list[str], black: list[str]) -> dict[str, Any]:
    configs = {"custom_white_list": white, "custom_black_list": black}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(amp=True, amp_configs=configs))
    seen: dict[str, str] = {}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            seen["linear"] = str(hidden.dtype)
            soft = F.softmax(hidden, dim=1)
            seen["softmax"] = str(soft.dtype)
            seen["mse_loss"] = str(F.mse_loss(soft, soft).dtype)
            return soft

    fleet.distributed_model(Net())(torch.ones(2, 4))
    return seen


def test_op_lists_change_the_precision_of_functions(ranks: Ranks) -> None:
    half, full = "torch.float16", "torch.float32"  # on the CPU, softmax takes what it is given
    plain = {"linear": half, "softmax": half, "mse_loss": full}
    assert ranks.run(dtypes_of_outputs, 1, white=[], black=[])[0] == plain
    changed = {"linear": half, "softmax": full, "mse_loss": half}
    assert ranks.run(dtypes_of_outputs, 1, white=["mse_loss"], black=["softmax"])[0] == changed
    assert ranks.run(dtypes_of_outputs, 1, white=[], black=["linear"])[0]["linear"] == full


@pytest.mark.parametrize(
    ("configs", "text"),
    [
        (
            {"custom_white_list": ["softmax"], "custom_black_list": ["softmax"]},
            "'softmax' custom_white_list custom_black_list",
        ),
        ({"custom_black_list": ["sofmax"]}, "'sofmax'"),
        ({"use_pure_fp16": True, "use_pure_bf16": True}, "use_pure_fp16 use_pure_bf16"),
        ({"dtype": "bfloat16", "init_loss_scaling": 2.0}, "init_loss_scaling bfloat16"),
    ],
)
def test_contradictions_of_amp_are_named(configs: dict[str, Any], text: str) -> None:
    class Place:
        device = torch.device("cpu")

    with pytest.raises(StrategyError, match=naming(*text.split())):
        Amp(fleet.DistributedStrategy(amp=True, amp_configs=configs), Place())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["use_pure_fp16", "use_pure_bf16"])
def test_pure_half_precision_steps_in_float32(ranks: Ranks, name: str) -> None:
    """Half a percent of the largest value: bfloat16 has eight bits, and six steps add up."""
    expected = train_alone()
    for found in ranks.run(train_amp, 2, **{name: True}):
        assert_equal(found, expected, atol=0.02)


# What does not go together


def test_pairs_that_do_not_go_together_name_both() -> None:
    from torchfleet.collective.build import INCOMPATIBLE, check

    values = {"nccl_comm_num": 2}
    for field, other in INCOMPATIBLE:
        strategy = fleet.DistributedStrategy(**{name: values.get(name, True) for name in (field, other)})
        with pytest.raises(StrategyError, match=naming(field, other)):
            check(strategy)


def test_configs_without_their_switch_are_an_error() -> None:
    from torchfleet.collective.build import check

    with pytest.raises(StrategyError, match="dgc_configs"):
        check(fleet.DistributedStrategy(dgc_configs={"sparsity": [0.9]}))
    with pytest.raises(StrategyError, match="a_sync"):
        check(fleet.DistributedStrategy(a_sync=True))


@each_of(
    ("fields", "size", "expected"),
    [
        ({}, 4, (4, 1, 1, 1)),
        ({"sharding": True}, 4, (1, 1, 4, 1)),
        ({"sharding": True, "sharding_configs": {"sharding_degree": 2, "hybrid_dp": True}}, 4, (2, 1, 2, 1)),
        ({"pipeline": True}, 4, (1, 4, 1, 1)),
        ({"pipeline": True, "hybrid_configs": {"pp_degree": 2}}, 4, (2, 2, 1, 1)),
        ({"tensor_parallel": True, "hybrid_configs": {"mp_degree": 2}}, 4, (2, 1, 1, 2)),
        ({"tensor_parallel": True, "tensor_parallel_configs": {"tensor_parallel_degree": 4}}, 4, (1, 1, 1, 4)),
        (
            {
                "pipeline": True,
                "tensor_parallel": True,
                "hybrid_configs": {"dp_degree": 2, "mp_degree": 2, "pp_degree": 2},
            },
            8,
            (2, 2, 1, 2),
        ),
    ],
)
def test_ranks_form_a_grid(fields: dict[str, Any], size: int, expected: tuple[int, ...]) -> None:
    assert tuple(degrees(fleet.DistributedStrategy(**fields), size).values()) == expected


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hybrid_configs": {"dp_degree": 3}}, "dp 3 4"),
        ({"hybrid_configs": {"mp_degree": 2}}, "mp_degree tensor_parallel"),
        ({"sharding": True, "sharding_configs": {"sharding_degree": 2}}, "hybrid_dp"),
        ({"sharding": True, "sharding_configs": {"sharding_degree": 3, "hybrid_dp": True}}, "sharding 3"),
    ],
)
def test_degrees_that_do_not_fit_are_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError, match=naming(*text.split())):
        degrees(fleet.DistributedStrategy(**fields), 4)


def train_in_paddles_order(**fields: Any) -> dict[str, Any]:
    """The strategy comes with the optimizer; rank 0's values must still reach everybody."""
    fleet.init(is_collective=True)
    rank, size = fleet.data_shard()
    model = fleet.distributed_model(make_model(seed=rank))
    inner = optimizer_of("momentum", model)
    stepping = fleet.distributed_optimizer(inner, fleet.DistributedStrategy(**fields))
    for x, y in batches(STEPS, rank, size):
        F.cross_entropy(model(x), y).backward()
        stepping.step()
        stepping.zero_grad()
    fields = {"strategies": [strategy.field for strategy in model.strategies]}
    fleet.stop_worker()
    return {**fields, **parameters(model)}


def test_a_strategy_may_come_with_the_optimizer(ranks: Ranks) -> None:
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    for found in ranks.run(train_in_paddles_order, 2, **merge, fuse_all_reduce_ops=False):
        assert found["strategies"] == ["gradient_merge"]
        assert_equal(found, train_alone(merge=2), atol=1e-6)
    amp = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}  # its forward is around that of the model
    expected = ranks.run(train_autocast, 2, dtype="bfloat16", scale=1.0)
    for found, plain in zip(ranks.run(train_in_paddles_order, 2, **amp), expected, strict=True):
        assert_equal(found, plain, atol=1e-6)


def late_strategies() -> dict[str, Any]:
    texts = {}
    late = {
        "grid": {"sharding": True},
        "time": {"sync_timeout": 60.0},
        "trained": {"amp": True},
        "optimizer": {"amp": True},
        "another": {"lamb": True},
    }
    for name, fields in late.items():
        given = fleet.DistributedStrategy(lars=True) if name == "another" else None
        job = CollectiveJob(PaddleCloudRoleMaker(is_collective=True).read(), given)
        model = job.distribute_model(make_model())
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if name == "trained":
            model(torch.ones(2, 10)).sum().backward()
        if name == "optimizer":
            job.distribute_optimizer(inner)
        with pytest.raises(StrategyError) as found:
            job.use(fleet.DistributedStrategy(**fields), "fleet.distributed_optimizer")
        texts[name] = str(found.value)
    return texts


def test_a_strategy_that_comes_too_late_says_what_to_do(ranks: Ranks) -> None:
    reasons = {
        "grid": "lays the ranks out in another way",
        "time": "sync_timeout=60.0 counts from then on",
        "trained": "training has begun without it",
        "optimizer": "training has begun without it",
        "another": "strategy",
    }
    (found, _) = ranks.run(late_strategies, 2)
    for name, reason in reasons.items():
        assert reason in found[name]
        assert "fleet.init" in found[name]
    assert "fleet.init(strategy=strategy)" not in found["another"]  # which is for one that comes too late


def other_parameters() -> dict[str, Any]:
    def replace_parameters(self: Amp, model: Any) -> Any:
        model[0].weight = torch.nn.Parameter(model[0].weight.detach().clone())
        return model

    Amp.convert = replace_parameters  # type: ignore[method-assign]
    fleet.init(is_collective=True)
    model = fleet.distributed_model(make_model())
    with pytest.raises(StrategyError) as late:
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(amp=True))
    with pytest.raises(FleetError) as other:
        fleet.init_worker()
    return {"late": str(late.value), "other": str(other.value)}


def test_a_late_strategy_cannot_change_the_parameters(ranks: Ranks) -> None:
    (found,) = ranks.run(other_parameters, 1)
    assert "parameters" in found["late"]
    assert names(found["late"], "fleet.init", "fleet.distributed_model")
    assert "collective" in found["other"]


def described() -> dict[str, Any]:
    pairs = {"mp_degree": 2, "sharding_degree": 2}
    job = job_of(tensor_parallel=True, sharding=True, hybrid_configs=pairs)
    job.strategies = build(job.settings, job.world)
    dist.barrier()  # until then others read from the store, which is rank 0's
    return {"text": job.describe()}


def test_degrees_are_described_as_they_are(ranks: Ranks) -> None:
    text = ranks.run(described, 4)[0]["text"]
    assert names(text, "sharding 2", "model 2")
    assert lines_naming(text, "tensor_parallel", "tensor_parallel_degree", 2)
    assert lines_naming(text, "stage 1", "sharding_degree", 2)


# Data of unequal length, things among workers


def uneven(lengths: list[int]) -> dict[str, Any]:
    fleet.init(is_collective=True)
    rank = fleet.worker_index()
    model = fleet.distributed_model(make_model())
    stepping = fleet.distributed_optimizer(optimizer_of("momentum", model))
    num = 0
    for x, y in fleet.prefetch(batches(lengths[rank], rank, len(lengths))):
        F.cross_entropy(model(x), y).backward()
        stepping.step()
        stepping.zero_grad()
        num += 1
    fleet.barrier_worker()
    total = fleet.util.all_reduce(num)
    gathered = fleet.util.all_gather({"rank": rank})
    auc = fleet.metrics.sum(torch.tensor([1.0 + rank]))
    return {"num": num, "total": total, "ranks": [record["rank"] for record in gathered], "sum": float(auc[0])}


def test_ranks_with_unequal_data_end_together(ranks: Ranks) -> None:
    for found in ranks.run(uneven, 3, lengths=[5, 3, 4]):
        assert found == {"num": 3, "total": 9, "ranks": [0, 1, 2], "sum": 6.0}
    for found in ranks.run(uneven, 2, lengths=[0, 2]):
        assert found["num"] == 0


# Clipping


def train_clipped(max_norm: float, kind: str = "momentum", **fields: Any) -> dict[str, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    rank, size = fleet.data_shard()
    model = fleet.distributed_model(make_model())
    stepping = fleet.distributed_optimizer(optimizer_of(kind, model))
    norms = []
    for x, y in batches(4, rank, size):
        model.train_batch(x, y, F.cross_entropy)
        norms.append(float(stepping.clip_grad_norm_(max_norm)))
        stepping.step()
        stepping.zero_grad()
        assert norms[-1] == float(stepping.grad_norm) or math.isnan(norms[-1])
    whole = {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().float().clone()
        for name, parameter in model.named_parameters()
    }
    return {"norms": norms, **whole}


def clip_alone(max_norm: float, merge: int, size: int) -> dict[str, Any]:
    model, norms = make_model(), []
    stepping = optimizer_of("momentum", model)
    for number, (x, y) in enumerate(batches(4, -1, size), 1):
        (F.cross_entropy(model(x), y) / merge).backward()
        if number % merge == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
            stepping.step()
            stepping.zero_grad()
    return {"norms": norms, **parameters(model)}


MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
STAGE_3 = {"sharding": True, "sharding_configs": {"stage": 3}}
FP16 = {"amp": True}
CLIPPED: list[tuple[dict[str, Any], int, float]] = [
    ({}, 1, 1e-6),
    (MERGE, 2, 1e-6),
    (STAGE_3, 1, 1e-6),
    ({**STAGE_3, **MERGE}, 2, 1e-6),
    ({"pipeline": True}, 1, 1e-6),
    (FP16, 1, 1e-2),  # half precision
    ({"amp": True, "amp_configs": {"use_pure_fp16": True}}, 1, 1e-2),
]


@pytest.mark.parametrize(("fields", "merge", "atol"), CLIPPED)
def test_gradients_are_clipped_by_the_norm_of_all(
    ranks: Ranks, fields: dict[str, Any], merge: int, atol: float
) -> None:
    expected = clip_alone(0.05, merge, size=1 if "pipeline" in fields else 2)
    for found in ranks.run(train_clipped, 2, max_norm=0.05, **fields):
        assert found["norms"][merge - 1 :: merge] == pytest.approx(expected["norms"], abs=atol)
        if merge > 1:  # in between it is the norm of the last update
            assert math.isnan(found["norms"][0])
            assert found["norms"][merge] == found["norms"][merge - 1]
        assert_equal(
            {**expected, **found}, {name: value for name, value in expected.items() if name != "norms"}, atol=atol
        )


def clip_at_the_wrong_time() -> dict[str, Any]:
    fleet.init(is_collective=True)
    model, twin = fleet.distributed_model(make_model()), make_model()
    stepping, plain = fleet.distributed_optimizer(optimizer_of("momentum", model)), optimizer_of("momentum", twin)
    (x, y), (other_x, other_y) = batches(2, 0, 1)
    with pytest.raises(FleetError, match=naming("clip_grad_norm_", "loss.backward()")):
        stepping.clip_grad_norm_(1.0)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(FleetError, match=naming("max_norm", wrong)):
            stepping.clip_grad_norm_(wrong)
    F.cross_entropy(model(x) * 100, y).backward()
    assert float(stepping.clip_grad_norm_(0.05)) > 1
    stepping.zero_grad()  # this batch is left out: the next one is clipped by nothing
    for net, optimizer in ((model, stepping), (twin, plain)):
        F.cross_entropy(net(other_x), other_y).backward()
        optimizer.step()
    assert_equal(parameters(model.module), parameters(twin), atol=1e-7)
    return {}


def test_clipping_needs_gradients_and_ends_with_them(ranks: Ranks) -> None:
    ranks.run(clip_at_the_wrong_time, 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sync_nccl_allreduce": False}, "sync_nccl_allreduce=False nccl_comm_num=1"),
        (
            {"hierarchical_allreduce_inter_nranks": 2},
            "hierarchical_allreduce_inter_nranks=2 use_hierarchical_allreduce=False",
        ),
        ({"fuse_grad_size_in_MB": 8, "fuse_all_reduce_ops": False}, "fuse_grad_size_in_MB=8"),
    ],
)
def test_settings_without_effect_are_errors(fields: dict[str, Any], text: str) -> None:
    from torchfleet.collective.build import check

    with pytest.raises(StrategyError, match=naming(*text.split())):
        check(fleet.DistributedStrategy(**fields))


# Local SGD is saved as one model


def train_and_save(folder: str, num: int, resume: bool, **fields: Any) -> dict[str, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    rank, size = fleet.data_shard()
    model = fleet.distributed_model(make_model())
    stepping = fleet.distributed_optimizer(optimizer_of("momentum", model))
    first = fleet.load(folder)["step"] if resume else 0
    for step, (x, y) in enumerate(batches(num, rank, size)):
        if step >= first:
            model.train_batch(x, y, F.cross_entropy)
            stepping.step()
            stepping.zero_grad()
            if step == 4:  # between two averagings
                fleet.save(folder, extra={"step": 5})
    return parameters(model)


def test_local_sgd_goes_on_from_a_save_as_if_nothing_had_been(ranks: Ranks, tmp_path: Any) -> None:
    fields = {"localsgd": True, "localsgd_configs": {"k_steps": 3}}
    whole = ranks.run(train_and_save, 2, folder=str(tmp_path), num=9, resume=False, **fields)
    resumed = ranks.run(train_and_save, 2, folder=str(tmp_path), num=9, resume=True, **fields)
    for found, expected in zip(resumed, whole, strict=True):
        assert_equal(found, expected)
    model = fleet.load_inference_model(str(tmp_path), make_model(seed=5))
    ((first, second),) = [ranks.run(train_and_save, 2, folder=str(tmp_path / "x"), num=5, resume=False, **fields)]
    assert_equal(parameters(model), first)
    assert_equal(first, second)


def count_hooks() -> dict[str, Any]:
    fleet.init(is_collective=True)
    model = fleet.distributed_model(make_model())
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    own.register_step_pre_hook(lambda *_: calls.append("before"))
    own.register_step_post_hook(lambda *_: calls.append("after"))
    stepping = fleet.distributed_optimizer(own)
    stepping.register_step_post_hook(lambda *_: calls.append("late"))
    schedule = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5)
    F.cross_entropy(model(torch.ones(2, 10)), torch.tensor([0, 1])).backward()
    stepping.step()
    schedule.step()
    return {"calls": calls, "lr": stepping.param_groups[0]["lr"]}


def test_hooks_of_the_optimizer_are_called_once(ranks: Ranks) -> None:
    assert ranks.run(count_hooks, 1) == [{"calls": ["before", "after", "late"], "lr": 0.05}]


def trained_once(kind: str = "momentum", **fields: Any) -> tuple[Any, Any]:
    """A model and an optimizer after a step of a new job."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    model = fleet.distributed_model(make_model(seed=0))
    stepping = fleet.distributed_optimizer(optimizer_of(kind, model))
    (x, y), *_ = batches(STEPS, *fleet.data_shard())
    F.cross_entropy(model(x), y).backward()
    stepping.step()
    stepping.zero_grad()
    return model, stepping


def training_after_the_end() -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, end in (("stop_worker", fleet.stop_worker), ("reset", fleet.reset)):
        model, stepping = trained_once()
        end()
        x = batches(STEPS, 0, 1)[0][0]
        for part, call in (("model", partial(model, x)), ("optimizer", stepping.step)):
            try:
                call()
            except ModelError as error:
                found[f"{name} {part}"] = str(error)
        with torch.no_grad():
            found[f"{name} predicts"] = torch.equal(model.eval()(x), model.module(x))
    return found


def test_what_a_job_has_left_does_not_train(ranks: Ranks) -> None:
    for found in ranks.run(training_after_the_end, 2):
        for name in ("stop_worker", "reset"):
            assert names(found[f"{name} model"], f"fleet.{name}")
            assert names(found[f"{name} optimizer"], f"fleet.{name}")
            assert found[f"{name} predicts"]


def copies() -> dict[str, Any]:
    """Copies of models: their values, averages of weights, names; and the error where a rank has a part."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"same": 0}
    for fields in ({}, {"sharding": True}, {"amp": True}, {"sync_batch_norm": True}):
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
        torch.manual_seed(0)
        model = fleet.distributed_model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        stepping = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        mean, begun = AveragedModel(model), copy.deepcopy(model.module)
        assert not hasattr(copy.deepcopy(model), "strategies")
        mean.update_parameters(model)
        model(torch.arange(16.0).view(4, 4).cos()).sigmoid().square().sum().backward()
        stepping.step()
        mean.update_parameters(model)
        for first, last, averaged in zip(begun.parameters(), model.parameters(), mean.module.parameters(), strict=True):
            torch.testing.assert_close(averaged, (first + last) / 2)
        assert not torch.equal(begun[1].bias, model.module[1].bias)
        assert len([name for name, _ in model.named_buffers() if name in model.state_dict()]) == 3
        found["same"] += 1
        fleet.stop_worker()
    model, _ = trained_once(sharding=True, sharding_configs={"stage": 2})
    try:
        copy.deepcopy(model)
    except ModelError as error:
        found["cut"] = str(error)
    fleet.stop_worker()
    return found


def test_models_are_copied_and_averaged_or_refused_by_name(ranks: Ranks) -> None:
    for found in ranks.run(copies, 2):
        assert found["same"] == 4
        assert names(found["cut"], "sharding=True", "fleet.save")


def states_by_torch() -> dict[str, Any]:
    """The state of a model and an optimizer, taken and set by torch.distributed.checkpoint."""
    dist.init_process_group("gloo")
    for fields in ({}, {"sharding": True, "sharding_configs": {"stage": 3}}):
        model, stepping = trained_once("adam", **fields)
        own, state = get_state_dict(model, stepping)
        assert set(own) == set(model.state_dict())
        before = {name: full(value) for name, value in model.named_parameters()}
        moments = [full(stepping.state[parameter]["exp_avg"]) for parameter in model.parameters()]
        own, state = copy.deepcopy(own), copy.deepcopy(state)
        (x, y), *_ = batches(STEPS, *fleet.data_shard())
        F.cross_entropy(model(x), y).backward()
        stepping.step()
        stepping.zero_grad()
        assert any(not torch.equal(full(value), before[name]) for name, value in model.named_parameters())
        set_state_dict(model, stepping, model_state_dict=own, optim_state_dict=state)
        for name, value in model.named_parameters():
            assert torch.equal(full(value), before[name])
        for parameter, moment in zip(model.parameters(), moments, strict=True):
            assert torch.equal(full(stepping.state[parameter]["exp_avg"]), moment)
        fleet.stop_worker()
    return {}


def test_states_can_be_taken_and_set_by_torchs_checkpoints(ranks: Ranks) -> None:
    ranks.run(states_by_torch, 2)


def distribute_lbfgs() -> dict[str, Any]:
    fleet.init(is_collective=True)
    model = fleet.distributed_model(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match=naming("LBFGS", "closure")):
        fleet.distributed_optimizer(torch.optim.LBFGS(model.parameters()))
    return {}


def test_an_optimizer_that_calls_its_closure_itself_is_refused(ranks: Ranks) -> None:
    ranks.run(distribute_lbfgs, 1)
