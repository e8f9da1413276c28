"""amp in float8, emulated on the CPU: products against the formula in plain torch, layers that stay, refusals."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.extras import is_installed, needing
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.base.errors import MissingPackage, ModelError, StrategyError
from torchfleet.collective.strategies.mixed_precision import float8
from torchfleet.collective.strategies.mixed_precision.precision import precision

FLOAT8 = {"amp": True, "amp_configs": {"dtype": "float8"}}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
CPU = torch.device("cpu")


def emulate() -> None:
    """Products of float8 numbers in float32, on any device."""
    float8.check_device = lambda device: None
    float8.float8_config = lambda torchao: torchao.Float8LinearConfig(pad_inner_dim=True, emulate=True)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_device", "float8_config"):  # set back at the end
        monkeypatch.setattr(float8, name, getattr(float8, name))
    emulate()


def prepare_ranks() -> None:
    if is_installed("torchao"):
        import torchao.float8  # noqa: F401


def layers_of(**configs: Any) -> float8.Float8Layers:
    settings = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "float8", **configs})
    return float8.Float8Layers(settings, CPU)


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = LARGEST[dtype] / tensor.abs().max()
    return (tensor * scale).to(dtype).float() / scale


# Products


@needing("torchao")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("rows", [32, 7])
def test_products_have_operands_rounded_by_the_formula(rows: int) -> None:
    torch.manual_seed(0)
    plain, x, slope = torch.nn.Linear(64, 48), torch.randn(rows, 64, requires_grad=True), torch.randn(rows, 48)
    layer = layers_of().convert(plain)
    assert layer.weight is plain.weight
    assert list(layer.state_dict()) == ["weight", "bias"]
    y = layer(x)
    y.backward(slope)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    x8, weight8, slope8 = rounded(x.detach(), e4m3), rounded(plain.weight.detach(), e4m3), rounded(slope, e5m2)
    for found, expected in (
        (y, x8 @ weight8.T + plain.bias),
        (x.grad, slope8 @ weight8),
        (plain.weight.grad, slope8.T @ x8),
        (plain.bias.grad, slope.sum(0)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needing("torchao")
@pytest.mark.usefixtures("emulated")
def test_an_output_is_off_by_no_more_than_the_rounding_of_its_operands() -> None:
    torch.manual_seed(1)
    plain, x = torch.nn.Linear(256, 64, bias=False), torch.randn(128, 256)
    exact = (x.double() @ plain.weight.double().T).float()
    found = layers_of().convert(torch.nn.Sequential(plain))(x)
    size = x.abs() @ plain.weight.abs().T
    tiny = 256 * (x.abs().max() * plain.weight.abs().max()) * 2**-10 / 448 * 2  # numbers below the smallest normal one
    bound = (2 / 16 + 1 / 256) * size + tiny
    assert bool(((found - exact).abs() <= bound).all())
    assert float((found - exact).detach().norm() / exact.norm()) > 1e-3, "nothing was rounded"


# Layers


class Own(torch.nn.Linear):
    """A layer that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@needing("torchao")
@pytest.mark.usefixtures("emulated")
def test_layers_that_do_not_fit_stay_and_are_named() -> None:
    from torchao.float8.float8_linear import Float8Linear

    model = torch.nn.ModuleDict(
        {
            "body": torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)),
            "odd": torch.nn.Linear(32, 10),
            "own": Own(32, 32),
            "hooked": torch.nn.Linear(32, 32),
            "attention": torch.nn.MultiheadAttention(32, 2),
            "head": torch.nn.Linear(32, 32),
        }
    )
    model["hooked"].register_forward_hook(lambda *_: None)
    layers = layers_of(float8_exclude=["he*"])
    converted = layers.convert(model)
    names = [name for name, module in converted.named_modules() if isinstance(module, Float8Linear)]
    assert names == ["body.0", "body.2"]
    text = layers.report()
    assert "2 of 7 linear layers" in text
    assert "odd (32 × 10, no multiples of 16)" in text
    assert "head (excluded)" in text
    assert "own (a Own)" in text
    assert "hooked (has hooks" in text
    assert "attention.out_proj (a NonDynamicallyQuantizableLinear)" in text


@needing("torchao")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_report_names_build_strategy_where_the_model_is_not_compiled(is_compiled: bool) -> None:
    flags = {"build_strategy": {"fuse_elewise_add_act_ops": True}} if is_compiled else {}
    layers = float8.Float8Layers(fleet.DistributedStrategy(**FLOAT8, **flags), CPU)
    layers.convert(torch.nn.Linear(32, 32))
    assert ("build_strategy" not in layers.report()) == is_compiled


@needing("torchao")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("model", "exclude", "match"),
    [
        (torch.nn.Linear(10, 16), [], "no linear layer that it could use.*10 × 16"),
        (torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3)), [], "no linear layer"),
        (torch.nn.Sequential(torch.nn.Linear(16, 16)), ["hed"], "float8_exclude.*no module.*'hed'"),
    ],
)
def test_a_model_without_such_layers_is_refused(model: torch.nn.Module, exclude: list[str], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        layers_of(float8_exclude=exclude).convert(model)


# What is refused


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "check_device", lambda device: None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingPackage, match=r"dtype='float8' needs the package torchao.*torchfleet\[fp8\]"):
        layers_of()


def test_without_such_a_gpu_it_says_which_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StrategyError, match=r"compute capability 8\.9 or higher.*found a job on the cpu.*bfloat16"):
        layers_of()
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(StrategyError, match=r"found NVIDIA A100 with 8\.0"):
        float8.check_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    float8.check_device(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"amp_configs": {"dtype": "float8", "custom_black_list": ["matmul_v2"]}}, "'matmul_v2' in custom_black_list"),
        ({"amp_configs": {"dtype": "float8", "use_pure_fp16": True}}, "use_pure_fp16 and dtype='float8' contradict"),
        ({"amp_configs": {"dtype": "float8", "init_loss_scaling": 2.0}}, "init_loss_scaling.*float8 need no scale"),
        ({"amp_configs": {"float8_exclude": ["head"]}}, "float8_exclude is given, but dtype='float16'"),
        ({"amp_configs": {"dtype": "float8"}, "pipeline": True}, "float8.*and pipeline cannot be used together"),
        ({"amp_configs": {"dtype": "float8"}, "tensor_parallel": True}, "and tensor_parallel cannot be used together"),
    ],
)
def test_contradictions_name_both_sides(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(StrategyError, match=match):
        checked(fields)


def checked(fields: dict[str, Any]) -> None:
    settings = fleet.DistributedStrategy(amp=True, **fields)
    precision(settings.amp_configs)
    float8.Float8Layers(settings, CPU)


# On ranks

CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {"amp_configs": {"dtype": "bfloat16"}},
    "plain": {},
    "recompute": {"recompute": True, "recompute_configs": {"checkpoints": ["0"]}},
    "pure": {"amp_configs": {"dtype": "float8", "use_pure_bf16": True}},
    **{f"stage {stage}": {"sharding": True, "sharding_configs": {"stage": stage}} for stage in (1, 2, 3)},
}


def trained() -> dict[str, Any]:
    """Of each case, losses of a few steps on this rank's batches, and what the layers are."""
    emulate()
    dist.init_process_group("gloo")
    return {
        f"{name} {key}": value for name, case in CASES.items() for key, value in train(**{**FLOAT8, **case}).items()
    }


def train(**fields: Any) -> dict[str, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    torch.manual_seed(0)
    body = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 32)
    )
    model = fleet.distributed_model(torch.nn.Sequential(body, torch.nn.Linear(32, 10)))
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(1 + fleet.worker_index())
    x, y = torch.randn(24, 32), torch.randint(0, 10, (24,))
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    kinds = [type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.Linear)]
    fleet.stop_worker()
    return {"losses": torch.stack(losses), "kinds": ",".join(kinds).replace("FSDP", "")}


@needing("torchao")
@pytest.mark.slow
def test_training_falls_as_in_bfloat16(ranks: Ranks) -> None:
    """The steps are the same but for rounding: of 1/16 of each operand at most, and half of that on the average."""
    for found in ranks.run(trained, 2):
        plain = found["bfloat16 losses"]
        assert found["bfloat16 kinds"] == "Linear,Linear,Linear"
        for name in CASES:
            own = found[f"{name} losses"]
            torch.testing.assert_close(own, plain, rtol=0.1, atol=0.05, msg=lambda text, name=name: f"{name}: {text}")
            assert float(own[-1]) < 0.6 * float(own[0])
            assert name == "bfloat16" or found[f"{name} kinds"] == "Float8Linear,Float8Linear,Linear"
