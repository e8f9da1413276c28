"""Unchanged models of transformers and torchvision cut by plans, against the same training in one process.

Sums are made in another order: float32 results agree to 1e-6 of numbers of about 1.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from support.planned_models import LENGTH, STEPS, WORDS, alone, batch, loss_of, made, same
from support.ranks import Ranks
from torch import nn

import torchfleet as fleet
from torchfleet.base.errors import DataError, FleetError, ModelError, StrategyError
from torchfleet.collective.layers.plan_presets import preset_of
from torchfleet.collective.layers.plans import planned

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
KINDS = ["llama", "qwen2", "gpt2", "bert", "t5", "vit"]


def prepare_ranks() -> None:
    for kind in KINDS:
        loss_of(made(kind), kind, 0)  # imports much of transformers


def started(kind: str, configs: dict[str, Any], fields: dict[str, Any], dropout: float = 0.0) -> tuple[Any, Any]:
    strategy = fleet.DistributedStrategy(tensor_parallel=True, tensor_parallel_configs=configs, **fields)
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(made(kind, dropout).train())
    return model, fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"state.{name}": (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
        for name, value in model.state_dict().items()
    }


def steps_of(model: Any, optimizer: Any, kind: str, clip: float = 0.0, first: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for step in range(first, first + STEPS):
        loss = loss_of(model, kind, step + 10 * fleet.data_shard()[0])
        assert type(loss) is torch.Tensor
        found[f"loss.{step}"] = float(loss.detach())
        loss.backward()
        if clip:
            found[f"norm.{step}"] = float(optimizer.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad()
    return found


def train_each(cases: list[list[Any]], clip: float = 0.0) -> dict[str, Any]:
    """(model, tensor_parallel_configs, other fields) after each other, in the same processes."""
    found: dict[str, Any] = {}
    for number, (kind, configs, fields) in enumerate(cases):
        model, optimizer = started(kind, configs, fields)
        own = sum(
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel()
            for parameter in model.parameters()
        )
        found[str(number)] = {**steps_of(model, optimizer, kind, clip), **whole(model)}
        found[f"{number} own"] = own
        fleet.stop_worker()
    return found


def test_known_models_are_cut_and_train_as_one_process_does(ranks: Ranks) -> None:
    cases = [(kind, {"tensor_parallel_degree": 2}, {}) for kind in KINDS]
    cases += [(kind, {"tensor_parallel_degree": 2, "sequence_parallel": True}, {}) for kind in KINDS if kind != "vit"]
    results = ranks.run(train_each, 2, cases=cases)
    expected = {kind: alone(kind) for kind in KINDS}
    for number, (kind, configs, _) in enumerate(cases):
        for found in results:
            same(found[str(number)], expected[kind], f"{kind} {configs}")
        total = sum(parameter.numel() for parameter in made(kind).parameters())
        assert results[0][f"{number} own"] < 0.65 * total


def test_four_ranks_share_layers(ranks: Ranks) -> None:
    kinds = ["qwen2", "gpt2", "bert"]
    cases = [(kind, {"tensor_parallel_degree": 4, "sequence_parallel": kind != "bert"}, {}) for kind in kinds]
    expected = [alone(kind) for kind in kinds]
    for found in ranks.run(train_each, 4, cases=cases):
        for number, (kind, configs, _) in enumerate(cases):
            same(found[str(number)], expected[number], f"{kind} {configs}")


def test_plans_compose_with_sharding_clipping_and_recomputation(ranks: Ranks) -> None:
    two = {"tensor_parallel_degree": 2}
    sequence = {**two, "sequence_parallel": True}
    layers = {"llama": "model.layers.*", "gpt2": "transformer.h.*", "bert": "bert.encoder.layer.*"}
    cases: list[list[Any]] = []
    for kind, pattern in layers.items():
        recomputed = {"recompute": True, "recompute_configs": {"checkpoints": [pattern]}}
        stage = {"llama": 3, "gpt2": 2, "bert": 1}[kind]
        cases.append([kind, sequence, {**recomputed, "sharding": True, "sharding_configs": {"stage": stage}}])
    cases.append(["llama", two, {}])
    cases.append(["gpt2", two, {"sharding": True, "sharding_configs": {"stage": 3}}])
    results = ranks.run(train_each, 4, cases=cases, clip=0.5)
    expected = {kind: alone(kind, replicas=2, clip=0.5) for kind in layers}
    for number, (kind, configs, fields) in enumerate(cases):
        same(results[0][str(number)], expected[kind], f"{kind} {configs} {fields}")
        for found in results:  # other replicas have other losses
            losses = {name: value for name, value in expected[kind].items() if "loss" in name}
            same({**found[str(number)], **losses}, expected[kind], f"{kind} {configs} {fields}")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_every_stage_with_and_without_sequences_and_recomputation(ranks: Ranks, kind: str) -> None:
    layers = {"llama": "model.layers.*", "gpt2": "transformer.h.*", "bert": "bert.encoder.layer.*"}[kind]
    stages = [{}, *({"sharding": True, "sharding_configs": {"stage": stage}} for stage in (1, 2, 3))]
    again = [{}, {"recompute": True, "recompute_configs": {"checkpoints": [layers]}}]
    cases = [
        [kind, {"tensor_parallel_degree": 2, "sequence_parallel": cut}, {**stage, **recomputed}]
        for cut in (False, True)
        for stage in stages
        for recomputed in again
    ]
    expected = alone(kind, replicas=2, clip=0.5)
    results = ranks.run(train_each, 4, cases=cases, clip=0.5)
    for number, case in enumerate(cases):
        same(results[0][str(number)], expected, str(case))


def test_plans_compose_with_amp(ranks: Ranks) -> None:
    """Half precision: against one process in float32, to its digits; the gradients of float16 are scaled."""
    two = {"tensor_parallel_degree": 2, "sequence_parallel": True}
    cases = [("llama", two, {"amp": True, "amp_configs": {"dtype": "bfloat16"}}), ("gpt2", two, {"amp": True})]
    for found in ranks.run(train_each, 2, cases=cases):
        same(found["0"], alone("llama"), "llama bfloat16", 2e-3)
        same(found["1"], alone("gpt2"), "gpt2 float16", 1e-3)


def save(folder: str, kind: str, configs: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = started(kind, configs, fields)
    steps_of(model, optimizer, kind)
    fleet.save(folder)
    found = whole(model)
    fleet.stop_worker()
    return found


def load_and_go_on(folder: str, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    model = fleet.distributed_model(made(kind).train())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    fleet.load(folder)
    loaded = {f"loaded.{name}": value.clone() for name, value in whole(model).items()}
    found = {**loaded, **steps_of(model, optimizer, kind, first=STEPS), **whole(model)}
    fleet.stop_worker()
    return found


def test_a_save_of_four_ranks_is_loaded_by_two_and_by_one(ranks: Ranks) -> None:
    """GPT-2: its fused layer is cut into consecutive columns, and its embedding is tied to the last layer."""
    with tempfile.TemporaryDirectory() as folder:
        two = {"tensor_parallel_degree": 2}
        stage = {"sharding": True, "sharding_configs": {"stage": 3}}
        saved = ranks.run(save, 4, folder=folder, kind="gpt2", configs=two, fields=stage)[0]
        cut = {"tensor_parallel": True, "tensor_parallel_configs": {**two, "sequence_parallel": True}}
        again = ranks.run(load_and_go_on, 2, folder=folder, kind="gpt2", fields=cut)
        (plain,) = ranks.run(load_and_go_on, 1, folder=folder, kind="gpt2", fields={})
    for found in (*again, plain):
        for name, value in saved.items():
            assert torch.equal(found[f"loaded.{name}"], value), name
    for found in again:
        same(found, plain, "after loading")


class Net(nn.Module):
    """What a user has: layers of torch, an attribute with a number of heads, a loss computed outside."""

    def __init__(self, dim: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.words, self.heads = nn.Embedding(WORDS, dim), heads
        self.mix = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.out, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self.mix)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head(self.norm(x + self.out(mixed.transpose(1, 2).flatten(2))))  # type: ignore[no-any-return]


PLAN = {"words": "vocab", "mix.*": "column", "out": "row", "head": "vocab"}


def train_net(plan: dict[str, Any], degree: int) -> dict[str, Any]:
    configs = {"tensor_parallel_degree": degree, "plan": plan}
    strategy = fleet.DistributedStrategy(tensor_parallel=True, tensor_parallel_configs=configs)
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    net = Net()
    if degree > 1:
        net.heads //= degree
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        given = batch("own", step)
        logits = model(given["input_ids"])
        assert type(logits) is torch.Tensor
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model(batch("own", 9)["input_ids"])
    found = {"loss": float(loss.detach()), "logits": logits, **whole(model)}
    fleet.stop_worker()
    return found


def masks() -> dict[str, Any]:
    """What dropout leaves of a batch: of a whole tensor behind a row layer, and of a rank's columns in front of it."""
    strategy = fleet.DistributedStrategy(
        tensor_parallel=True,
        tensor_parallel_configs={"tensor_parallel_degree": 2, "plan": {"0": "column", "2": "row"}},
    )
    fleet.init(is_collective=True, strategy=strategy)
    layers = [nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 32), nn.Dropout(0.5)]
    seen: dict[str, torch.Tensor] = {}
    for name in ("1", "3"):
        layers[int(name)].register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.detach() != 0}))
    model = fleet.distributed_model(nn.Sequential(*layers).train())
    torch.manual_seed(5)
    model(torch.ones(2, 4))
    after = torch.rand(3)
    fleet.stop_worker()
    return {**seen, "after": after}


def test_a_plan_of_the_users_own_and_its_dropout(ranks: Ranks) -> None:
    (plain,) = ranks.run(train_net, 1, plan=PLAN, degree=1)
    for found in ranks.run(train_net, 2, plan=PLAN, degree=2):
        same(found, plain, "own plan")
    first, second = ranks.run(masks, 2)
    assert torch.equal(first["3"], second["3"])
    assert not torch.equal(first["1"], second["1"])
    assert torch.equal(first["after"], second["after"])


@pytest.mark.parametrize(
    ("plan", "degree", "error", "named"),
    [
        ({"mixed.*": "column"}, 2, ModelError, ["mixed.*", "mix.*"]),
        ({"mix.*": "columns"}, 2, StrategyError, ["columns", "column", "row", "vocab"]),
        ({"mix.*": 3}, 2, StrategyError, ["3"]),
        ({"mix.*": "divide"}, 2, StrategyError, ["divide:NAME"]),
        ({"mix.*": "column"}, 3, ModelError, ["mix.0", "8", "3"]),
        ({"out": "row"}, 3, ModelError, ["out", "8 inputs", "3"]),
        ({"mix.*": "column:heads"}, 4, ModelError, ["ModuleList", "heads"]),
        ({"out": "column:heads"}, 4, ModelError, ["8 outputs", "pieces of 4", "4"]),
        ({"": "divide:heads"}, 8, ModelError, ["heads", "4", "8"]),
        ({"out": "divide:heads"}, 2, ModelError, ["heads", "Linear"]),
        ({"norm": "column"}, 2, ModelError, ["norm", "LayerNorm"]),
        ({"words": "row"}, 2, ModelError, ["words", "Embedding"]),
        ({"out": ["row", "column"]}, 2, StrategyError, ["out", "row", "column"]),
        ({"norm": "sequence"}, 2, StrategyError, ["blocks"]),
        ({"mix.*": "blocks", "norm": "sequence"}, 2, ModelError, ["mix.0"]),
        ({"mix.*": "heads"}, 2, ModelError, ["mix.0", "Linear"]),
    ],
)
def test_plans_that_do_not_fit_are_named(
    plan: dict[str, Any], degree: int, error: type[FleetError], named: list[str]
) -> None:
    with pytest.raises(error) as found:
        planned(Net(), plan, degree)
    assert all(word in str(found.value) for word in named), str(found.value)


def test_presets_are_found_by_class_in_larger_models_too() -> None:
    bert = made("bert")
    assert preset_of(Net(), sequence=False) == {}
    inside = preset_of(nn.ModuleDict({"text": bert.bert}), sequence=False)
    assert inside["text.encoder.layer.*.output.dense"] == "row"
    assert "bert.encoder.layer.*" in preset_of(bert, sequence=True)
    with pytest.raises(ModelError, match=r"k_proj.*8 outputs.*pieces of 4"):  # two heads of keys for four ranks
        planned(llama := made("llama"), preset_of(llama, sequence=False), 4)


def refusals() -> dict[str, Any]:
    """The types of the errors, each with a job of its own."""
    found: dict[str, Any] = {}
    wrong: dict[str, Any] = {
        "unknown": (Net, {}, {}),
        "both": (Net, {"plan": PLAN, "sequence_parallel": True}, {}),
        "no sequence": (Net, {"sequence_parallel": True}, {}),
        "pipeline": (lambda: made("gpt2"), {}, {"pipeline": True, "hybrid_configs": {"mp_degree": 2}}),
        "length": (lambda: made("gpt2"), {"sequence_parallel": True}, {}),
    }
    for name, (make, configs, fields) in wrong.items():
        settings = {"tensor_parallel_degree": 2, **configs}
        strategy = fleet.DistributedStrategy(tensor_parallel=True, tensor_parallel_configs=settings, **fields)
        fleet.init(is_collective=True, strategy=strategy)
        try:
            model = fleet.distributed_model(make())
            model(torch.zeros(1, LENGTH - 1, dtype=torch.int64))
        except FleetError as error:
            found[name] = f"{type(error).__name__}: {error}"
        fleet.stop_worker()
    return found


def test_models_and_settings_that_cannot_be_cut_are_named(ranks: Ranks) -> None:
    for found in ranks.run(refusals, 2):
        assert found["unknown"].startswith(ModelError.__name__)
        assert all(word in found["unknown"] for word in ("Net", "plan", "LlamaModel", "ColumnParallelLinear"))
        for name in ("both", "no sequence", "pipeline"):
            assert found[name].startswith(StrategyError.__name__), found[name]
        assert found["length"].startswith(DataError.__name__)
        assert str(LENGTH - 1) in found["length"]
