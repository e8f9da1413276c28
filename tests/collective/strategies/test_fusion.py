"""Fusion: the compiled model equals the eager one, what was fused is said, optimizers step by one kernel."""

from __future__ import annotations

import copy
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import each_of
from support.messages import names, naming
from torch import nn

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.strategy.execution import BuildStrategy
from torchfleet.collective.strategies.fusion import COMPILING, Fusion, fuse_optimizer
from torchfleet.collective.strategies.recomputation.recompute import recompute

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def fusion_of(rank: int = 0, flags: tuple[str, ...] = COMPILING[:1], device: str = "cpu", **fields: Any) -> Fusion:
    strategy = DistributedStrategy(build_strategy=BuildStrategy(**dict.fromkeys(flags, True)), **fields)
    return Fusion(strategy, SimpleNamespace(device=torch.device(device), rank=rank))  # type: ignore[arg-type]


class Broken(nn.Module):
    """Two graphs, with something between them that cannot be compiled; the second is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8))
        recompute(self.last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x) + 1.0)
        torch._dynamo.graph_break()
        return self.last(x)


def losses(model: nn.Module, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        loss = (model(torch.randn(16, 4, generator=generator)) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@needs_compiler
@pytest.mark.long
def test_a_compiled_model_trains_like_the_eager_one_and_says_what_was_fused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Within 1e-5 of a loss: sums inside a kernel are taken in another order."""
    import torch._inductor.config  # not at the top: it takes seconds, and most tests do without

    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # no processes that outlive the test
    torch.manual_seed(0)
    model = Broken()
    fusion = fusion_of()
    compiled = fusion.convert(copy.deepcopy(model))
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert losses(compiled) == pytest.approx(losses(model), rel=1e-5)
    fusion.after_step()
    said = capsys.readouterr().out
    assert names(said, "graphs 2", "graph breaks 1")
    assert "1×" in said
    assert "relu" in said
    operations, kernels = (int(said.split(word)[0].split()[-1]) for word in (" operations in", " kernels"))
    assert operations > kernels > 0
    fusion.after_step()
    assert capsys.readouterr().out == "", "it is said once"
    assert fusion.report().strip() == said.strip()


@pytest.mark.parametrize("flag", COMPILING[:4])
def test_any_of_the_flags_compiles(flag: str):
    assert fusion_of(flags=(flag,)).compiled_for == [flag]


def test_without_them_the_model_is_left_alone():
    model = nn.Linear(2, 2)
    fusion = fusion_of(flags=("fuse_all_optimizer_ops",))
    assert fusion.convert(model)._compiled_call_impl is None
    fusion.after_step()
    assert fusion.report() == ""


@pytest.mark.parametrize("variable", [None, "no-such-compiler -O2"])
def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, variable: str | None):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    if variable:
        monkeypatch.setenv("CXX", variable)
    with pytest.raises(StrategyError, match=naming((variable or "g++").split()[0], "apt install")):
        fusion_of()


@each_of(
    ("flags", "fields", "match"),
    [
        (COMPILING[1:2], {"pipeline": True}, "fuse_bn_act_ops pipeline"),
        (
            COMPILING[:1],
            {"recompute": True, "recompute_configs": {"checkpoints": ["a"], "enable_offload": True}},
            "fuse_elewise_add_act_ops recompute_configs['enable_offload']",
        ),
        (COMPILING[4:], {"device": "cuda", "gradient_merge": True}, "gradient_merge"),
        (
            COMPILING[4:],
            {"device": "cuda", "sharding": True, "sharding_configs": {"stage": 3}},
            "sharding 3",
        ),
        (("fuse_all_optimizer_ops",), {"lamb": True}, "fuse_all_optimizer_ops lamb"),
        (("fuse_all_optimizer_ops",), {"dgc": True}, "fuse_all_optimizer_ops dgc"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: tuple[str, ...], fields: dict[str, Any], match: str):
    with pytest.raises(StrategyError, match=naming(*match.split())):
        fusion_of(flags=flags, **fields)


# Optimizers


@each_of(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, "fused kernel"),
        (torch.optim.Adam, {}, "fused kernel"),
        (torch.optim.AdamW, {}, "fused kernel"),
        (torch.optim.Adagrad, {}, "fused kernel"),
        (torch.optim.RMSprop, {}, "foreach"),
        (torch.optim.NAdam, {}, "foreach"),
    ],
)
def test_an_optimizer_steps_by_its_fused_or_list_kernels(kind: Any, options: dict[str, Any], expected: str):
    """Within 1e-6 of a value: the same formulas, with multiplications and additions contracted."""
    fusion, found = fusion_of(flags=("fuse_all_optimizer_ops",)), []
    for is_fused in (True, False):
        parameter = nn.Parameter(torch.linspace(-1, 1, 10))
        optimizer = kind([parameter], lr=0.1, **options)
        if is_fused:
            assert fusion.optimizer(optimizer, {}) is optimizer
            assert expected in fusion.report()
        for _ in range(5):
            parameter.grad = parameter.detach() * 0.5 + 0.1
            optimizer.step()
        found.append(parameter.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


def test_a_state_saved_without_fusion_is_loaded_into_a_fused_optimizer():
    parameter = nn.Parameter(torch.ones(3))
    plain, fused = torch.optim.Adam([parameter]), torch.optim.Adam([parameter])
    fusion = fusion_of(flags=("fuse_all_optimizer_ops",))
    fusion.optimizer(fused, {})
    parameter.grad = torch.ones(3)
    plain.step()
    fused.load_state_dict(plain.state_dict())
    assert not fused.param_groups[0]["fused"]
    fusion.after_load()
    assert fused.param_groups[0]["fused"]
    fused.step()
    assert fused.state[parameter]["step"] == 2


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_without_such_kernels_is_refused(kind: Any):
    with pytest.raises(ModelError, match=naming(kind.__name__, "fused", "foreach")):
        fuse_optimizer(kind([nn.Parameter(torch.ones(3))]))


def test_a_sequential_is_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo passes over frames that are torch.nn's own, as the forward of a Sequential is."""
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda call, mode: real(call, backend="eager")
    )  # what is compiled, not by whom
    fusion = fusion_of()
    model = fusion.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), torch.relu(model[0](x)), rtol=0, atol=1e-6)
    assert "graphs 1" in fusion.report()
