"""Unchanged models of transformers and torchvision cut by plans, against the same training in one process.

Sums are made in another order: float32 results agree to 1e-6 of numbers of about 1.
"""

from __future__ import annotations

import importlib.util
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
from torchfleet.collective.tensors.local_tensors import local

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
KINDS = ["llama", "qwen2", "gpt2", "bert", "t5", "vit"]


def prepare_ranks() -> None:
    for kind in ("llama", "gpt2", "bert"):
        loss_of(made(kind), kind, 0)  # imports much of transformers, which the process of the tests need not do


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


def train_each(cases: list[list[Any]], replicas: int = 1, clip: float = 0.0) -> dict[str, Any]:
    """(model, tensor_parallel_configs, other fields) after each other; rank 0 also trains each model by itself."""
    found: dict[str, Any] = {}
    for number, (kind, configs, fields) in enumerate(cases):
        model, optimizer = started(kind, configs, fields)
        own = sum(local(parameter).numel() for parameter in model.parameters())
        found[str(number)] = {**steps_of(model, optimizer, kind, clip), **whole(model)}
        found[f"{number} share"] = own / sum(parameter.numel() for parameter in made(kind).parameters())
        if fleet.is_first_worker():
            found[f"{number} alone"] = alone(kind, replicas, clip)
        fleet.stop_worker()
    return found


def check(results: list[dict[str, Any]], cases: list[list[Any]], tolerance: float = 1e-6) -> None:
    """Every rank has the model of one process; other replicas than the first have other losses."""
    for number, case in enumerate(cases):
        expected = results[0][f"{number} alone"]
        same(results[0][str(number)], expected, str(case), tolerance)
        losses = {name: value for name, value in expected.items() if "loss" in name}
        for found in results[1:]:
            same({**found[str(number)], **losses}, expected, str(case), tolerance)


def by(degree: int, sequence: bool = False) -> dict[str, Any]:
    return {"tensor_parallel_degree": degree, "sequence_parallel": sequence}


def stage(number: int) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"stage": number}}


def again(kind: str) -> dict[str, Any]:
    layers = {"llama": "model.layers.*", "gpt2": "transformer.h.*", "bert": "bert.encoder.layer.*"}[kind]
    return {"recompute": True, "recompute_configs": {"checkpoints": [layers]}}


SOME: list[list[Any]] = [["llama", by(2, True), {}], ["gpt2", by(2), {}], ["bert", by(2, True), {}], ["vit", by(2), {}]]
EVERY: list[list[Any]] = [
    *([kind, by(2), {}] for kind in KINDS),
    *([kind, by(2, True), {}] for kind in KINDS if kind != "vit"),
]


@pytest.mark.parametrize("cases", [SOME, pytest.param(EVERY, marks=pytest.mark.long)], ids=["some", "every"])
def test_known_models_are_cut_and_train_as_one_process_does(ranks: Ranks, cases: list[list[Any]]) -> None:
    results = ranks.run(train_each, 2, cases=cases)
    check(results, cases)
    assert max(results[0][f"{number} share"] for number in range(len(cases))) < 0.65


@pytest.mark.long
def test_four_ranks_share_layers(ranks: Ranks) -> None:
    cases: list[list[Any]] = [["qwen2", by(4, True), {}], ["gpt2", by(4, True), {}], ["bert", by(4), {}]]
    check(ranks.run(train_each, 4, cases=cases), cases)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_plans_compose_with_sharding_clipping_and_recomputation(ranks: Ranks, kind: str) -> None:
    cases = [
        [kind, by(2, sequence), {**sharded, **recomputed}]
        for sequence in (False, True)
        for sharded in ({}, stage(1), stage(2), stage(3))
        for recomputed in ({}, again(kind))
    ]
    check(ranks.run(train_each, 4, cases=cases, replicas=2, clip=0.5), cases)


@pytest.mark.long
def test_plans_compose_with_amp(ranks: Ranks) -> None:
    """Half precision: against one process in float32, to its digits; the gradients of float16 are scaled."""
    cases: list[list[Any]] = [
        ["llama", by(2, True), {"amp": True, "amp_configs": {"dtype": "bfloat16"}}],
        ["gpt2", by(2, True), {"amp": True, **again("gpt2")}],
    ]
    check(ranks.run(train_each, 2, cases=cases), cases, tolerance=2e-3)


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


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_save_is_loaded_by_fewer_ranks(ranks: Ranks, size: int) -> None:
    """GPT-2: its fused layer is cut into consecutive columns, and its embedding is tied to the last layer."""
    with tempfile.TemporaryDirectory() as folder:
        fields = stage(3) if size == 4 else {}
        saved = ranks.run(save, size, folder=folder, kind="gpt2", configs=by(2), fields=fields)[0]
        cut = {"tensor_parallel": True, "tensor_parallel_configs": by(2, True)}
        less = ranks.run(load_and_go_on, 2, folder=folder, kind="gpt2", fields=cut) if size == 4 else []
        (plain,) = ranks.run(load_and_go_on, 1, folder=folder, kind="gpt2", fields={})
    for found in (*less, plain):
        for name, value in saved.items():
            assert torch.equal(found[f"loaded.{name}"], value), name
    for found in less:
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


def presets() -> dict[str, Any]:
    bert, llama = made("bert"), made("llama")
    assert preset_of(Net(), sequence=False) == {}
    inside = preset_of(nn.ModuleDict({"text": bert.bert}), sequence=False)
    assert inside["text.encoder.layer.*.output.dense"] == "row"
    assert "bert.encoder.layer.*" in preset_of(bert, sequence=True)
    with pytest.raises(ModelError, match=r"k_proj.*8 outputs.*pieces of 4"):  # two heads of keys for four ranks
        planned(llama, preset_of(llama, sequence=False), 4)
    return {}


def test_presets_are_found_by_class_in_larger_models_too(ranks: Ranks) -> None:
    ranks.run(presets, 1)  # where transformers is imported already


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
