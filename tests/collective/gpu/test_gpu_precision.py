"""amp on a GPU: loss scaling against torch.amp.GradScaler, memory against the formulas of docs/collective/amp.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import precision_cases
from support.ranks import Ranks

pytestmark = pytest.mark.gpu

BF16 = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
PURE = {"amp": True, "amp_configs": {"use_pure_bf16": True}}


def errors_of_losses(**arguments: Any) -> dict[str, Any]:
    return precision_cases.errors_of_losses(**arguments)


def gradients_of_losses(**arguments: Any) -> dict[str, Any]:
    return precision_cases.gradients_of_losses(**arguments)


def gradients_of_inputs(**arguments: Any) -> dict[str, Any]:
    return precision_cases.gradients_of_inputs(**arguments)


def peak_bytes(**arguments: Any) -> dict[str, Any]:
    return precision_cases.peak_bytes(**arguments)


def test_a_loss_outside_of_the_model_is_as_precise_as_with_a_scaler(ranks: Ranks) -> None:
    (found,) = ranks.run(errors_of_losses, 1, device="cuda", rows=8192, classes=2000)
    print(found)
    for divisor in (1, 8, 64):
        assert found[f"ours {divisor}"] < 1.2 * found[f"scaler {divisor}"] < 0.02


@pytest.mark.parametrize(("size", "num_passes"), [(1, 2), (2, 1)])
def test_terms_beside_the_outputs_have_their_true_gradients(ranks: Ranks, size: int, num_passes: int) -> None:
    for found in ranks.run(gradients_of_losses, size, device="cuda", num_passes=num_passes):
        for name in precision_cases.LOSSES:
            torch.testing.assert_close(found[name], found[f"{name} by hand"], rtol=5e-3, atol=1e-4)


def test_gradients_of_inputs_are_right(ranks: Ranks) -> None:
    (found,) = ranks.run(gradients_of_inputs, 1, device="cuda")
    for name in ("asked", "x", "encoder", "own"):
        torch.testing.assert_close(found[f"ours {name}"], found[f"hand {name}"], rtol=1e-2, atol=1e-3)


def test_memory_of_parameters_is_that_of_the_formulas(ranks: Ranks) -> None:
    """Bytes per parameter, with few activations."""
    (found,) = ranks.run(peak_bytes, 1, cases={"amp": BF16, "pure": PURE}, width=2048, num=8, rows=16)
    print(found)
    assert found["amp rest"] == pytest.approx(12, abs=0.5)
    assert found["amp forward"] == pytest.approx(14, abs=0.5)
    assert found["pure rest"] == pytest.approx(14, abs=0.5)
    assert found["pure forward"] == pytest.approx(14, abs=0.5)
    assert found["pure backward"] < 17


def test_pure_precision_keeps_fewer_activations_than_amp(ranks: Ranks) -> None:
    """What norms are given has two bytes a number instead of four."""
    width, num, rows = 1024, 8, 16384
    (found,) = ranks.run(peak_bytes, 1, cases={"amp": BF16, "pure": PURE}, width=width, num=num, rows=rows)
    print(found)
    for moment in ("forward", "backward"):
        fewer = (found[f"amp {moment}"] - found[f"pure {moment}"]) * found["num"]
        assert fewer > 0.8 * 2 * width * num * rows


def test_copies_in_float32_are_dealt_out(ranks: Ranks) -> None:
    """Two ranks on one GPU. Data parallelism has, beside its gradients, buckets of their size."""
    dealt = {**PURE, "sharding": True, "sharding_configs": {"stage": 1}}
    for found in ranks.run(peak_bytes, 2, cases={"whole": PURE, "dealt": dealt}, width=2048, num=8, rows=16):
        print(found)
        assert found["whole rest"] == pytest.approx(2 + 12 + 2, abs=0.5)
        assert found["dealt rest"] == pytest.approx(2 + 12 / 2 + 2, abs=0.8)  # whole parameters are dealt out
