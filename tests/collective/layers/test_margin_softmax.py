"""Margin softmax over ranks against its formula in plain torch: loss, gradients of weights and backbone, predictions.

Tolerances: float32 sums in another order agree to 1e-6 of numbers of about 1 (losses are about 10: 1e-5); after each
step a little less.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.messages import naming
from support.ranks import Ranks
from torch import nn

import torchfleet as fleet
from torchfleet.base.errors import DataError, ModelError
from torchfleet.collective.layers.margin_softmax import MarginSoftmax

CLASSES, DIM, SAMPLES = 10, 4, 9


def formula(
    features: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, scale: float, m1: float, m2: float, m3: float
) -> torch.Tensor:
    cosine = F.normalize(features) @ F.normalize(weight).t()
    own = F.one_hot(labels, len(weight)).bool()
    with_margin = (m1 * cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos() + m2).cos() - m3
    return F.cross_entropy(scale * torch.where(own, with_margin, cosine), labels)


def data(index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(index)
    return torch.randn(SAMPLES, 3, generator=random), torch.randint(0, CLASSES, (SAMPLES,), generator=random)


def backbone() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, DIM)


class Classifier(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.backbone = backbone()
        self.loss = MarginSoftmax(CLASSES, DIM, **settings)
        with torch.no_grad():
            self.loss.weight.mul_(100)  # of about 1, so that their gradients are too

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.backbone(inputs), labels)  # type: ignore[no-any-return]


def shares(size: int) -> list[slice]:
    """Uneven: of three ranks the first has 5 samples, the second 4 and the third none."""
    ends = {1: [9], 2: [7, 9], 3: [5, 9, 9], 4: [2, 3, 7, 9]}[size]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def step(settings: dict[str, Any], strategy: dict[str, Any], steps: int = 1) -> dict[str, Any]:
    """Loss, gradients, the weights after the step, and predictions for this rank's samples."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**strategy))
    model = fleet.distributed_model(Classifier(**settings))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    share = shares(dist.get_world_size())[dist.get_rank()]
    result: dict[str, Any] = {}
    for index in range(steps):
        inputs, labels = (tensor[share] for tensor in data(index))
        loss = model(inputs, labels)
        loss.backward()
        result[f"loss.{index}"] = float(loss.detach())
        result["weight.grad"] = model.module.loss.weight.grad.clone()
        result["backbone.grad"] = model.module.backbone.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    classes, scores = model.module.loss.predict(model.module.backbone(data()[0][share]))
    result.update(
        classes=classes, scores=scores, weight=model.module.loss.weight, backbone=model.module.backbone.weight
    )
    fleet.stop_worker()
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in result.items()}


def alone(settings: dict[str, Any], steps: int = 1) -> dict[str, Any]:
    """By the formula, whole."""
    net, made = backbone(), MarginSoftmax(CLASSES, DIM, **settings)
    weight = nn.Parameter(made.weight.detach() * 100)
    optimizer = torch.optim.SGD([*net.parameters(), weight], lr=0.1)
    result: dict[str, Any] = {}
    for index in range(steps):
        inputs, labels = data(index)
        if made.loss_type == "softmax":
            loss = F.cross_entropy(net(inputs) @ weight.t(), labels)
        else:
            loss = formula(net(inputs), labels, weight, made.scale, *made.margins)
        loss.backward()
        result[f"loss.{index}"] = float(loss.detach())
        result["weight.grad"], result["backbone.grad"] = weight.grad.clone(), net.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    products = net(data()[0]) @ weight.t()
    if made.loss_type != "softmax":
        products = F.normalize(net(data()[0])) @ F.normalize(weight).t()
    result["scores"], result["classes"] = products.max(1)
    return {**result, "weight": weight.detach(), "backbone": net.weight.detach()}


def same(found: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Losses and backbone are equal on all ranks; their pieces of the rest, one after the other, make the whole."""
    for name, value in expected.items():
        if name.startswith("loss"):
            for result in found:
                assert result[name] == pytest.approx(value, rel=tolerance, abs=10 * tolerance)
            assert len({result[name] for result in found}) == 1
        elif name.startswith("backbone"):
            for result in found:
                torch.testing.assert_close(result[name], value, rtol=tolerance, atol=tolerance)
        else:
            whole = torch.cat([result[name] for result in found])
            torch.testing.assert_close(whole, value, rtol=tolerance, atol=tolerance)


SETTINGS = [
    {"loss_type": "arcface", "scale": 8.0},
    {"loss_type": "cosface", "scale": 8.0},
    {"loss_type": "arcface", "scale": 8.0, "m1": 1.2, "m2": 0.3, "m3": 0.1},
    {"loss_type": "softmax"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_rank_computes_the_formula(settings: dict[str, Any]) -> None:
    expected = alone(settings)
    model = Classifier(**settings)
    loss = model(*data())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected["loss.0"], rel=1e-6)
    torch.testing.assert_close(model.loss.weight.grad, expected["weight.grad"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.backbone.weight.grad, expected["backbone.grad"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_two_ranks_equal_one(ranks: Ranks, settings: dict[str, Any]) -> None:
    same(ranks.run(step, 2, settings=settings, strategy={}, steps=2), alone(settings, 2), tolerance=2e-6)


def test_uneven_classes_and_a_rank_without_samples(ranks: Ranks) -> None:
    found = ranks.run(step, 3, settings=SETTINGS[0], strategy={})
    assert [len(result["weight"]) for result in found] == [4, 4, 2]
    same(found, alone(SETTINGS[0]))


def test_gathered_over_batches(ranks: Ranks) -> None:
    """gradient_merge of two equal batches: one step, as if one batch."""
    merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    found = ranks.run(step, 2, settings=SETTINGS[0], strategy=merged)
    expected = alone(SETTINGS[0])
    before = Classifier(**SETTINGS[0])
    assert torch.equal(torch.cat([result["weight"] for result in found]), before.loss.weight)  # no step so far
    torch.testing.assert_close(torch.cat([result["weight.grad"] for result in found]), expected["weight.grad"])


def few_classes() -> dict[str, Any]:
    """Three classes over four ranks: the last has none."""
    fleet.init(is_collective=True)
    layer = MarginSoftmax(3, DIM, scale=8.0)  # the ranks have not met yet
    fleet.distributed_model(nn.ModuleList([layer, nn.Linear(1, 1)]))
    features = torch.eye(DIM)[:3].requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(DIM)[layer.first : layer.first + len(layer.weight)])
    loss = layer(features, torch.tensor([0, 1, 2]))
    loss.backward()
    classes, scores = layer.predict(features)
    fleet.stop_worker()
    return {"loss": float(loss.detach()), "own": len(layer.weight), "classes": classes, "scores": scores}


def test_more_ranks_than_classes(ranks: Ranks) -> None:
    found = ranks.run(few_classes, 4)
    assert [result["own"] for result in found] == [1, 1, 1, 0]
    expected = formula(torch.eye(DIM)[:3], torch.tensor([0, 1, 2]), torch.eye(DIM)[:3], 8.0, 1.0, 0.5, 0.0)
    for result in found:
        assert result["loss"] == pytest.approx(float(expected), rel=1e-6)
        assert result["classes"].tolist() == [0, 1, 2]
        torch.testing.assert_close(result["scores"], torch.ones(3))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_features_give_float32_logits(dtype: torch.dtype, tolerance: float) -> None:
    """At scale 64 a logit in half precision would be wrong by 0.03 and exp(64) too large; features are rounded once."""
    layer = MarginSoftmax(CLASSES, DIM)
    inputs, labels = data()
    features = backbone()(inputs).detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(features, labels)
    loss.backward()
    exact = features.detach().double().requires_grad_()
    expected = formula(exact, labels, layer.weight.detach().double(), 64.0, 1.0, 0.5, 0.0)
    expected.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(features.grad, exact.grad.to(dtype), rtol=tolerance, atol=tolerance)


def test_first_values_do_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MarginSoftmax(5000, 2).weight
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 7)
    shards = []
    for rank in range(7):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        shards.append(MarginSoftmax(5000, 2).weight)
    assert torch.equal(torch.cat(shards), whole)
    assert float(whole.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert not torch.equal(MarginSoftmax(5000, 2, seed=1).weight, whole)
    assert len(torch.unique(whole.detach().view(torch.int32), dim=0)) == 5000


def test_a_margin_makes_the_task_harder() -> None:
    features, labels = backbone()(data()[0]), data()[1]
    losses = [
        float(MarginSoftmax(CLASSES, DIM, scale=8.0, m2=m2)(features, labels).detach()) for m2 in (0.0, 0.25, 0.5)
    ]
    assert losses == sorted(losses)
    assert losses[2] > losses[0] + 0.5


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"loss_type": "sphere"}, "arcface cosface softmax 'sphere'"),
        ({"loss_type": "softmax", "m2": 0.1}, "'softmax'"),
        ({"scale": 0.0}, "scale"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=naming(*text.split())):
        MarginSoftmax(CLASSES, DIM, **settings)


def test_wrong_batches_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MarginSoftmax(CLASSES, DIM)
    with pytest.raises(ModelError, match=naming("features", "(n, 4)", "(2, 5)")):
        layer(torch.zeros(2, 5), torch.zeros(2))
    with pytest.raises(ModelError, match=naming("label", 2)):
        layer(torch.zeros(2, DIM), torch.zeros(3))
    with pytest.raises(DataError, match=naming(0, 9, "-1", 10)):
        layer(torch.ones(2, DIM), torch.tensor([-1, 10]))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ModelError, match=naming(1, 2)):
        layer(torch.ones(2, DIM), torch.tensor([1, 2]))


def test_features_on_top_of_their_class_have_finite_gradients() -> None:
    """acos has no slope at 1."""
    layer = MarginSoftmax(CLASSES, DIM)
    features = layer.weight.detach()[:3].clone().requires_grad_()
    layer(features, torch.arange(3)).backward()
    assert all(math.isfinite(float(gradient)) for gradient in features.grad.flatten())
