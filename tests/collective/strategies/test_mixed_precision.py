"""amp: loss scaling against torch.amp.GradScaler, lists against what operations see, memory against the formulas."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support import precision_cases
from support.messages import names
from support.ranks import Ranks
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.collective.tensors.outputs import map_tensors, tensors


def errors_of_losses(**arguments: Any) -> dict[str, Any]:
    return precision_cases.errors_of_losses(**arguments)


def gradients_of_losses(**arguments: Any) -> dict[str, Any]:
    return precision_cases.gradients_of_losses(**arguments)


def gradients_of_inputs(**arguments: Any) -> dict[str, Any]:
    return precision_cases.gradients_of_inputs(**arguments)


def test_a_loss_outside_of_the_model_is_as_precise_as_with_a_scaler(ranks: Ranks) -> None:
    (found,) = ranks.run(errors_of_losses, 1, device="cpu", rows=32, classes=100)
    for divisor in (1, 8, 64):
        assert found[f"ours {divisor}"] < 1.01 * found[f"scaler {divisor}"] < 0.01


def outputs_of_bfloat16(pure: bool) -> dict[str, Any]:
    """The loss of what the model returns, beside that of torch.autocast, in float32 and in bfloat16."""
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(16, 1000), torch.randn(8, 16) * 4, torch.arange(8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
    fleet.init(
        is_collective=True,
        strategy=fleet.DistributedStrategy(
            amp=True, amp_configs={"use_pure_bf16": True} if pure else {"dtype": "bfloat16"}
        ),
    )
    model = fleet.distributed_model(model)
    found = {"ours": F.cross_entropy(model(x), y), "exact": F.cross_entropy(plain.float(), y)}
    with torch.no_grad():
        found |= {"without gradients": F.cross_entropy(model(x), y), "rounded": F.cross_entropy(plain, y)}
    return {name: value.detach() for name, value in found.items()}


@pytest.mark.parametrize("pure", [False, True])
def test_bfloat16_returns_float32_so_that_a_loss_outside_is_exact(ranks: Ranks, pure: bool) -> None:
    (found,) = ranks.run(outputs_of_bfloat16, 1, pure=pure)
    for name in ("ours", "without gradients"):
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], found["exact"], rtol=0, atol=1e-6)
    assert abs(float(found["rounded"]) - float(found["exact"])) > 1e-3, "the loss in bfloat16 is another one"


@pytest.mark.parametrize(("size", "num_passes"), [(1, 2), (2, 1)])
def test_terms_beside_the_outputs_have_their_true_gradients(ranks: Ranks, size: int, num_passes: int) -> None:
    for found in ranks.run(gradients_of_losses, size, device="cpu", num_passes=num_passes):
        for name in precision_cases.LOSSES:
            torch.testing.assert_close(found[name], found[f"{name} by hand"], rtol=2e-3, atol=2e-5)


def gradients_of_cut_layers() -> dict[str, Any]:
    return precision_cases.gradients_of_cut_layers()


def test_a_penalty_beside_layers_that_are_cut_is_averaged_once(ranks: Ranks) -> None:
    for found in ranks.run(gradients_of_cut_layers, 4):
        for name in ("before", "behind"):
            torch.testing.assert_close(found[name], found[f"{name} by hand"], rtol=5e-3, atol=5e-4)


def test_gradients_of_inputs_are_right_and_graphs_of_gradients_refused(ranks: Ranks) -> None:
    (found,) = ranks.run(gradients_of_inputs, 1, device="cpu")
    for name in ("asked", "x", "encoder", "own"):
        torch.testing.assert_close(found[f"ours {name}"], found[f"hand {name}"], rtol=5e-3, atol=1e-4)
    assert found["ours untouched"]
    assert "retain_graph=True" in found["twice"]
    assert "create_graph=True" in found["graph"]
    assert "backward(inputs=...)" in found["inputs"]
    assert "model" in found["pure"]


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    first: torch.Tensor
    second: Any


class Named(dict[str, Any]):
    """A kind of dictionary that torch does not know."""


def test_tensors_are_found_in_what_models_return() -> None:
    outputs = Slots(torch.zeros(1), [Named(third=torch.ones(1)), (2, "text")])
    made = map_tensors(lambda tensor: tensor + 5, outputs)
    assert [float(tensor) for tensor in tensors(outputs)] == [0.0, 1.0]
    assert [float(tensor) for tensor in tensors(made)] == [5.0, 6.0]
    assert isinstance(made, Slots)
    assert isinstance(made.second[0], Named)
    assert made.second[1] == (2, "text")


# Lists


def types_in_composites(**arguments: Any) -> dict[str, Any]:
    return precision_cases.types_in_composites(**arguments)


def test_lists_hold_inside_composite_functions_or_are_refused_by_name(ranks: Ranks) -> None:
    half, full = ["bfloat16"], ["float32"]
    softmax, linear, lstm = ({"custom_black_list": [name]} for name in ("softmax", "linear", "lstm"))
    whole = {"custom_black_list": ["softmax", "scaled_dot_product_attention"]}
    cases = {
        "plain": ("weights", {}, False),
        "softmax": ("weights", softmax, False),
        "linear": ("weights", linear, False),
        "white": ("weights", {"custom_white_list": ["softmax"], "custom_black_list": ["interpolate"]}, False),
        "one kernel": ("no weights", softmax, False),
        "as a whole": ("no weights", whole, False),
        "encoder": ("encoder", linear, False),
        "prediction": ("encoder", linear, True),
        "inside lstm": ("lstm", linear, False),
        "lstm": ("lstm", lstm, False),
    }
    (found,) = ranks.run(types_in_composites, 1, cases=cases)
    assert (found["plain"]["addmm"], found["plain"]["_softmax"], found["plain"]["bmm"]) == (half, half, half)
    assert (found["softmax"]["_softmax"], found["softmax"]["addmm"]) == (full, half)
    assert (found["linear"]["_softmax"], found["linear"]["addmm"]) == (half, full)
    assert (found["white"]["_softmax"], found["white"]["upsample_nearest1d"]) == (half, full)
    assert names(found["one kernel"], "'softmax'", "scaled_dot_product_attention")
    assert found["as a whole"]["_scaled_dot_product_flash_attention_for_cpu"] == full
    for name in ("encoder", "prediction"):
        assert found[name]["addmm"] == full
        assert "_transformer_encoder_layer_fwd" not in found[name]
    assert names(found["inside lstm"], "'linear'", "lstm")
    assert full in found["lstm"].values()
    assert half not in found["lstm"].values()


# Memory


def kept_bytes(**arguments: Any) -> dict[str, Any]:
    return precision_cases.kept_bytes(**arguments)


def pure_training(**arguments: Any) -> dict[str, Any]:
    return precision_cases.pure_training(**arguments)


BF16 = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}


def sharded(stage: int) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"stage": stage, "segment_broadcast_MB": 0.05}}


def test_stage_3_keeps_no_half_precision_weights_from_forward_to_backward(ranks: Ranks) -> None:
    cases = {"amp": BF16, "cut": {**BF16, **sharded(3)}}
    for found in ranks.run(kept_bytes, 2, cases=cases, width=48, num=4, rows=2):
        num = found["amp parameters"].numel()
        assert found["amp bytes"] > 2 * num  # the casts
        assert found["cut bytes"] < 0.2 * num
        torch.testing.assert_close(found["cut parameters"], found["amp parameters"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stage_1_deals_out_the_copies_in_float32(ranks: Ranks, dtype: str, tmp_path: Path) -> None:
    """Values, norms and saves are those of copies on every rank; memory is that of the formula."""
    pure = {"amp": True, "amp_configs": {f"use_pure_{dtype}": True}}
    found = ranks.run(pure_training, 2, cases={"whole": pure, "dealt": {**pure, **sharded(1)}}, folder=str(tmp_path))
    num = found[0]["whole parameters"].numel()
    for result in found:
        assert result["dealt norms"] == pytest.approx(result["whole norms"], rel=1e-5)
        assert min(result["whole norms"]) > 0.5
        for name in ("dealt parameters", "dealt continued", "whole continued"):
            torch.testing.assert_close(result[name], result["whole parameters"], rtol=0, atol=1e-6)
    # Parameters and the buckets of data parallelism, of which gradients are views, in two bytes; copies and moments.
    assert max(result["dealt bytes"] for result in found) < (2 + 2 + 12 / 2) * num * 1.15
    assert found[0]["whole bytes"] == pytest.approx((2 + 2 + 12) * num, rel=0.02)
