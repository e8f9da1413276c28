"""Names in settings of collective training: one that selects nothing is an error with what there is, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import each_of
from support.messages import naming
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.base.errors import ModelError, StrategyError


class Images(torch.nn.Module):
    """As a network of images: names of its norms say nothing of norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.head = torch.nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.stem(images).mean((2, 3))
        for block in self.blocks:
            found = block(found)
        return self.head(found)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "FLEET_ROLE", "TRAINING_ROLE"):
        monkeypatch.delenv(name, raising=False)
    yield
    fleet.reset()


def distribute(model: torch.nn.Module, **fields: Any) -> torch.nn.Module:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    return fleet.distributed_model(model)


PLACES: dict[str, Any] = {
    "lars": lambda names: {"lars": True, "lars_configs": {"exclude_from_weight_decay": names}},
    "lamb": lambda names: {"lamb": True, "lamb_configs": {"exclude_from_weight_decay": names}},
    "recompute": lambda names: {"recompute": True, "recompute_configs": {"checkpoints": names}},
}
ERRORS = [
    ("lars", ["batch_norm", ".b_0"], "lars_configs exclude_from_weight_decay 'batch_norm' 'torch.nn.BatchNorm2d'"),
    ("lars", ["bias", ".b_0"], "'.b_0' 'bias'"),
    ("lars", ["linear_0.w_0"], "'linear_0.w_0' 'weight' 'torch.nn.Linear'"),
    ("lamb", ["layer_norm"], "lamb_configs exclude_from_weight_decay 'layer_norm'"),
    ("lamb", [torch.nn.LayerNorm], "'torch.nn.LayerNorm'"),
    ("lamb", ["haed"], "'haed' 'head.weight'"),
    ("recompute", ["block.*"], "recompute_configs checkpoints 'block.*' 'blocks.*'"),
    ("recompute", [torch.nn.LSTM], "checkpoints 'torch.nn.LSTM'"),
]


@each_of(("place", "names", "said"), ERRORS)
def test_a_name_that_selects_nothing_is_an_error_with_what_there_is(place: str, names: Any, said: str) -> None:
    try:
        with pytest.raises(ModelError, match=naming(*said.split())):
            distribute(Images(), **PLACES[place](names))
    finally:
        fleet.reset()


@each_of("names", [[3], [""], [None], "bias", [[torch.nn.Linear]]])
@each_of("place", PLACES)
def test_what_is_neither_a_name_nor_a_class_is_refused_when_it_is_set(place: str, names: Any) -> None:
    with pytest.raises(StrategyError, match=f"{place}_configs"):
        fleet.DistributedStrategy(**PLACES[place](names))


def one_step(names: list[Any]) -> dict[str, torch.Tensor]:
    model = distribute(Images(), lars=True, lars_configs={"exclude_from_weight_decay": names, "lars_weight_decay": 0.5})
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    model(torch.ones(2, 3, 5, 5) * torch.arange(2).view(2, 1, 1, 1)).square().sum().backward()
    optimizer.step()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fleet.reset()
    return found


def test_a_class_excludes_what_the_names_of_its_parameters_exclude() -> None:
    by_names, by_class = one_step(["stem.1."]), one_step([torch.nn.BatchNorm2d])
    torch.testing.assert_close(by_class, by_names, rtol=0, atol=0)
    without = one_step([])
    # its bias is zero: LARS moves it as plain momentum SGD does
    assert {name for name in without if not torch.equal(without[name], by_names[name])} == {"stem.1.weight"}


def test_a_class_in_a_file_is_its_name(tmp_path: Path) -> None:
    strategy = fleet.DistributedStrategy(**PLACES["lars"]([torch.nn.BatchNorm2d, "bias"]))
    assert strategy.lars_configs.exclude_from_weight_decay == ["torch.nn.BatchNorm2d", "bias"]
    strategy.save_to_yaml(tmp_path / "strategy.yaml")
    assert fleet.DistributedStrategy.load_from_yaml(tmp_path / "strategy.yaml") == strategy


def test_modules_to_recompute_may_be_given_by_class() -> None:
    model = distribute(Images(), **PLACES["recompute"]([torch.nn.Linear]))
    changed = {name for name, module in model.module.named_modules() if "forward" in vars(module)}
    assert changed == {"blocks.0", "blocks.1", "head"}


def in_stages(names: list[str]) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    try:
        made = distribute(
            model,
            pipeline=True,
            hybrid_configs={"pp_degree": 2},
            pipeline_configs={"stages": ["3"]},
            **PLACES["lamb"](names),
        )
        fleet.distributed_optimizer(torch.optim.Adam(made.parameters(), lr=0.1))
    except ModelError as error:
        return {"error": str(error)}
    finally:
        fleet.reset()
    return {"error": ""}


@pytest.mark.slow
def test_in_a_pipeline_a_name_counts_that_only_one_rank_has(ranks: Ranks) -> None:
    assert [found["error"] for found in ranks.run(in_stages, 2, names=["1.", "3.bias"])] == ["", ""]
    first, second = ranks.run(in_stages, 2, names=["batch_norm"])
    assert first["error"] == second["error"] != ""


@each_of("option", ["custom_white_list", "custom_black_list"])
def test_an_unknown_function_is_named_with_near_ones(option: str) -> None:
    try:
        with pytest.raises(StrategyError, match=naming(option, "'sofmax'", "'softmax'")):
            distribute(Images(), amp=True, amp_configs={option: ["sofmax"], "dtype": "bfloat16"})
    finally:
        fleet.reset()
