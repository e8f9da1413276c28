"""Sequences cut over ranks, against the same training in one process; float32, to 1e-6 of numbers of about 1."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.planned_models import STEPS, alone, loss_of, made, same
from support.ranks import Ranks
from torch import nn
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.collective import build
from torchfleet.collective.sequence.context_parallel import attention_on
from torchfleet.collective.sequence.parts import part
from torchfleet.collective.sequence.sequence_inputs import SequenceInputs
from torchfleet.collective.world import Axis, degree_of_context

pytestmark = pytest.mark.slow
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
LENGTH, WIDTH, WORDS = 16, 8, 11


class Net(nn.Module):
    """Two kinds of attention; `kind` chooses what is returned, or what cannot be cut."""

    def __init__(self, kind: str = "logits") -> None:
        super().__init__()
        self.kind = kind
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, ids: Any, labels: Any = None, position_ids: Any = None) -> Any:
        position_ids = torch.arange(ids.shape[1])[None] if position_ids is None else position_ids
        rows = self.words(ids) + self.places(position_ids)
        query, key, value = self.qkv(rows).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool) if self.kind == "mask" else None
        is_causal, dropout = self.kind != "mask", 0.5 if self.kind == "dropout" else 0.0
        if self.kind == "by hand":
            return (F.softmax(query @ key.mT, -1) @ value).transpose(1, 2)
        rows = rows + F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal).transpose(
            1, 2
        ).flatten(2)
        logits = self.head(self.encoder(rows))
        if self.kind == "pooled":
            return logits[:, 0]
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def net(kind: str = "logits") -> Net:
    torch.manual_seed(3)
    return Net(kind)


def words(step: int, replica: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 * replica + step)
    ids, labels = (torch.randint(WORDS, (2, LENGTH), generator=drawn) for _ in range(2))
    labels[0, : 3 + step] = -100
    return ids, labels


def trained(model: Any, optimizer: Any, replicas: list[int], in_model: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for step in range(2):
        for replica in replicas:
            ids, labels = words(step, replica)
            loss = model(ids, labels) if in_model else F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
            (loss / len(replicas)).backward()
            found.setdefault(f"loss.{step}", float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found["evaluated"] = model(words(7)[0])
    state = {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()
    }
    return found | {name: value.detach().clone() for name, value in state.items()}


def started(fields: dict[str, Any], model: nn.Module) -> tuple[Any, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(context_parallel=True, **fields))
    made_model = fleet.distributed_model(model)
    return made_model, fleet.distributed_optimizer(torch.optim.SGD(made_model.parameters(), lr=0.1, momentum=0.9))


def train_each(cases: list[dict[str, Any]]) -> dict[str, Any]:
    torch.backends.mha.set_fastpath_enabled(False)
    found: dict[str, Any] = {}
    for number, fields in enumerate(cases):
        for in_model in (True, False):
            model, optimizer = started(fields, net())
            index, replicas = fleet.data_shard()
            found[f"{number} {in_model}"] = trained(model, optimizer, [index], in_model)
            is_first = fleet.is_first_worker()
            fleet.stop_worker()
            if is_first:
                one = net()
                sgd = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
                found[f"{number} {in_model} alone"] = trained(one, sgd, list(range(replicas)), in_model)
    return found


def check(results: list[dict[str, Any]]) -> None:
    """All ranks have the state and evaluation of one process; those of the first replica its losses."""
    for name in [name for name in results[0] if not name.endswith("alone")]:
        expected = results[0][f"{name} alone"]
        same(results[0][name], expected, name)
        losses = {key: value for key, value in expected.items() if "loss" in key}
        for found in results[1:]:
            same({**found[name], **losses}, expected, name)


def stage(number: int) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"stage": number}}


RECOMPUTED = {"recompute": True, "recompute_configs": {"checkpoints": ["encoder"]}}


def test_two_ranks_with_half_of_each_sequence_train_as_one_process(ranks: Ranks) -> None:
    check(ranks.run(train_each, 2, cases=[{}, {**stage(3), **RECOMPUTED}]))


def test_four_ranks_share_sequences_alone_or_in_pairs(ranks: Ranks) -> None:
    pairs = {"context_parallel_configs": {"context_parallel_degree": 2}}
    check(ranks.run(train_each, 4, cases=[{}, {**pairs, **stage(2)}]))


def attend_both() -> dict[str, Any]:
    """Attention and its gradients for this rank's tokens: by parts, and by one process."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    axis = Axis(dist.get_rank(), size, dist.group.WORLD)
    attention = attention_on(torch.device("cpu"), axis)
    found: dict[str, Any] = {}
    for is_causal in (True, False):
        drawn = torch.Generator().manual_seed(5)
        query, key, value, gradient = (torch.randn(2, 3, 8 * size, 4, generator=drawn) for _ in range(4))
        whole = [tensor.requires_grad_() for tensor in (query, key, value)]
        expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        expected.backward(gradient)  # type: ignore[no-untyped-call]
        own = [part(tensor.detach(), axis, 2).requires_grad_() for tensor in whole]
        output = attention(own[0], own[1], own[2], is_causal, None)
        output.backward(part(gradient, axis, 2))  # type: ignore[no-untyped-call]
        found[f"output {is_causal}"] = output.detach(), part(expected.detach(), axis, 2)
        for name, cut, tensor in zip("qkv", own, whole, strict=True):
            found[f"{name} {is_causal}"] = cut.grad, part(tensor.grad, axis, 2)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_attention_and_gradients_of_a_part_are_those_of_the_whole(ranks: Ranks, size: int) -> None:
    """Sums over all tokens in another order: to 1e-6 of the largest value, which is some eight roundings of float32."""
    for found in ranks.run(attend_both, size):
        for name, (by_parts, expected) in found.items():
            assert (by_parts - expected).abs().max() < 1e-6 * expected.abs().max().clamp(min=1), name


def prepare_ranks() -> None:
    if importlib.util.find_spec("transformers") is not None:
        loss_of(made("llama"), "llama", 0)  # imports much of transformers


def train_known(cases: list[list[Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (kind, fields) in enumerate(cases):
        model, optimizer = started(fields, made(kind).train())
        found[str(number)] = {}
        for step in range(STEPS):
            loss = loss_of(model, kind, step)
            loss.backward()  # type: ignore[no-untyped-call]
            found[str(number)][f"loss.{step}"] = float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        for name, value in model.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[str(number)][f"state.{name}"] = whole.detach().clone()
        if fleet.is_first_worker():
            found[f"{number} alone"] = alone(kind)
        fleet.stop_worker()
    return found


@needs_transformers
def test_models_of_transformers_train_as_one_process(ranks: Ranks) -> None:
    """They shift the labels themselves, take positions, and count tokens with labels."""
    cases: list[list[Any]] = [["llama", {}], ["gpt2", stage(2)]]
    check(ranks.run(train_known, 2, cases=cases))


@needs_transformers
@pytest.mark.long
def test_known_models_compose_with_tensor_parallelism(ranks: Ranks) -> None:
    tensor = {"tensor_parallel": True, "hybrid_configs": {"mp_degree": 2}}
    again = {"recompute": True, "recompute_configs": {"checkpoints": ["model.layers.*"]}}
    cases: list[list[Any]] = [["llama", {**tensor, **again}], ["bert", {}], ["qwen2", stage(3)], ["gpt2", tensor]]
    check(ranks.run(train_known, 4, cases=cases))


def refusals() -> dict[str, Any]:
    """The kinds of Net that are refused, and how."""
    found: dict[str, Any] = {}
    for kind in ("mask", "dropout", "by hand", "pooled"):
        model, _optimizer = started({}, net(kind))
        try:
            model(words(0)[0])
        except ModelError as error:
            found[kind] = str(error)
        fleet.stop_worker()
    return found


def test_what_cannot_be_cut_is_refused_on_every_rank(ranks: Ranks) -> None:
    for found in ranks.run(refusals, 2):
        assert sorted(found) == ["by hand", "dropout", "mask", "pooled"]


AXIS = Axis(1, 2, None)


def test_inputs_are_cut_where_the_first_and_the_last_chunk_make_the_same_work() -> None:
    ids, labels = words(0)
    cut = SequenceInputs(net(), AXIS, "position_ids").cut((ids,), {"labels": labels})
    mine = [*range(4, 8), *range(8, 12)]
    assert cut.kwargs["position_ids"].tolist() == [mine]
    assert torch.equal(cut.args[0], ids[:, mine])
    assert torch.equal(cut.kwargs["labels"], labels[:, mine])
    assert cut.has_labels
    assert cut.loss_factor == pytest.approx(16 * 2 / 29)


@pytest.mark.parametrize("shape", [(2, 6), (2,)])
def test_lengths_that_cannot_be_shared_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError):
        SequenceInputs(net(), AXIS, "position_ids").cut((torch.zeros(shape, dtype=torch.long),), {})


def test_a_part_without_labels_is_refused() -> None:
    ids, labels = words(0)
    with pytest.raises(ModelError):
        SequenceInputs(net(), AXIS, "position_ids").cut((ids, torch.full_like(labels, -100)), {})


def test_padded_sequences_are_refused() -> None:
    ids = words(0)[0]

    class Masked(nn.Module):
        def forward(self, ids: Any, attention_mask: Any = None) -> Any: ...

    inputs = SequenceInputs(Masked(), AXIS, "")
    with pytest.raises(ModelError):
        inputs.cut((ids,), {"attention_mask": torch.tensor([[1] * 12 + [0] * 4] * 2)})
    assert inputs.cut((ids,), {"attention_mask": torch.ones_like(ids)}).kwargs["attention_mask"].shape == (2, 8)


@pytest.mark.parametrize("fields", [{"pipeline": True}, {"localsgd": True}, {"context_parallel": False}])
def test_contradictions_are_refused(fields: dict[str, Any]) -> None:
    configs = {"context_parallel_degree": 2}
    with pytest.raises(StrategyError):
        settings({"context_parallel": True, "context_parallel_configs": configs, **fields})


def settings(fields: dict[str, Any]) -> None:
    build.check(fleet.DistributedStrategy(**fields))


def test_a_degree_must_divide_the_ranks() -> None:
    strategy = fleet.DistributedStrategy(context_parallel=True, context_parallel_configs={"context_parallel_degree": 3})
    with pytest.raises(StrategyError):
        degree_of_context(strategy, {"data": 4, "sharding": 1})
    assert degree_of_context(strategy, {"data": 3, "sharding": 2}) == 3


def test_a_model_must_take_positions() -> None:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(context_parallel=True))
    with pytest.raises(ModelError):
        fleet.distributed_model(nn.Linear(2, 2))
    fleet.stop_worker()
