"""Stages 2 and 3 with torch.compile, fused optimizers and layers of transformers, against the same without."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.extras import needing
from support.messages import names
from support.ranks import Ranks
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategies.mixed_precision.weight_types import WeightTypes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sharding")]

NUM_BLOCKS = 10  # more than dynamo compiles anew for one function, 8
OPERATIONS = 5  # of a block: a norm, two products, an activation, a sum
graphs: list[int] = []  # operations of each that was compiled


def prepare_ranks() -> None:
    """What the first compilation and the first model of transformers import takes seconds."""
    import torch._inductor.debug
    import torch._inductor.pattern_matcher
    import torch.distributed.tensor.experimental._func_map  # noqa: F401

    with contextlib.suppress(ImportError):  # without transformers, its tests are skipped
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


class Net(torch.nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(num_blocks)])
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """A backend of torch.compile that needs no compiler."""
    graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
    return aot_eager(graph, inputs)


def losses(
    stage: int, way: str, optimizer: str = "AdamW", num_blocks: int = NUM_BLOCKS, **options: Any
) -> torch.Tensor:
    """Of a few steps; the model is compiled as a whole by a flag ("flag"), or block by block by the user ("blocks")."""
    sharding = {"sharding": True, "sharding_configs": {"stage": stage, "segment_broadcast_MB": 0.01}}
    flags = {"fuse_elewise_add_act_ops": way == "flag"}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(build_strategy=flags, **sharding))
    torch.manual_seed(0)
    net = Net(num_blocks)
    for block in net.blocks if way == "blocks" else ():
        block.compile()
    model = fleet.distributed_model(net)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, **options)
    stepping = fleet.distributed_optimizer(made)
    torch.manual_seed(1 + fleet.worker_index())
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    found = []
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        stepping.step()
        stepping.zero_grad()
        found.append(loss.detach())
    fleet.stop_worker()
    return torch.stack(found)


def compiled(stage: int) -> dict[str, Any]:
    real = torch.compile
    torch.compile = lambda call, mode="default": real(call, backend=counted)  # by whom, not what
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for way in ("eager", "flag", "blocks"):
        graphs.clear()
        torch._dynamo.reset()
        found[way], found[f"{way} graphs"] = losses(stage, way), torch.tensor(graphs)
    return found


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_blocks_are_compiled_once_and_train_as_without(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(compiled, 2, stage=stage):
        assert not len(found["eager graphs"])
        for way in ("flag", "blocks"):
            torch.testing.assert_close(found[way], found["eager"], rtol=1e-5, atol=1e-6)
            # The first block's input needs no gradient, that of the others does: two graphs for all blocks, whole ones.
            assert found[f"{way} graphs"].tolist() == [OPERATIONS, OPERATIONS]


def fused(stage: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {
        f"{name} {kind}": losses(stage, "eager", name, num_blocks=2, **{kind: True})
        for name in ("Adam", "AdamW")
        for kind in ("fused", "foreach")
    }
    found["message"] = ""
    try:
        losses(stage, "eager", "SGD", num_blocks=2, fused=True)
    except StrategyError as error:
        found["message"] = str(error)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_fused_steps_are_those_of_lists_of_tensors_or_refused(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(fused, 2, stage=stage):
        for name in ("Adam", "AdamW"):
            torch.testing.assert_close(found[f"{name} fused"], found[f"{name} foreach"], rtol=1e-5, atol=1e-6)
        assert names(found["message"], f"stage {stage}", "SGD", "fused=True", "foreach=True")


# Layers of transformers


@needing("transformers")
def test_layers_of_gpt2_are_gathered_in_half_precision() -> None:
    from transformers.pytorch_utils import Conv1D

    layer, kept, half = Conv1D(8, 4), torch.float32, torch.bfloat16
    settings = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
    assert WeightTypes(DistributedStrategy(**settings))(layer, kept) == half
    assert WeightTypes(DistributedStrategy())(layer, kept) == kept
    settings["amp_configs"] = {"dtype": "bfloat16", "custom_black_list": ["addmm"]}
    assert WeightTypes(DistributedStrategy(**settings))(layer, kept) == kept
    with torch.autocast("cpu", half):  # which is why
        assert layer(torch.randn(2, 4)).dtype == half


def both_ways() -> dict[str, Any]:
    dist.init_process_group("gloo")
    return {"cut": gpt2(sharding=True), "plain": gpt2(sharding=False)}


def gpt2(sharding: bool) -> torch.Tensor:
    from transformers import GPT2Config, GPT2LMHeadModel

    fields = {"sharding": True, "sharding_configs": {"stage": 3, "segment_broadcast_MB": 0.01}} if sharding else {}
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"}, **fields)
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=50, n_layer=2, n_embd=16, n_head=2, n_positions=8, **ends, **drop)
    model = fleet.distributed_model(GPT2LMHeadModel(config))
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(1 + fleet.worker_index())
    ids = torch.randint(0, 50, (4, 8))
    found = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    fleet.stop_worker()
    return torch.stack(found)


@needing("transformers")
def test_gpt2_in_stage_3_trains_as_under_amp_alone(ranks: Ranks) -> None:
    for found in ranks.run(both_ways, 2):
        torch.testing.assert_close(found["cut"], found["plain"], rtol=5e-3, atol=5e-3)
        assert float(found["cut"][-1]) < float(found["cut"][0]) - 0.3
