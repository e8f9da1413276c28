"""amp: loss scaling against torch.amp.GradScaler, lists against what operations see, memory against the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import precision_cases
from support.ranks import Ranks


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


@pytest.mark.parametrize(("size", "num_passes"), [(1, 2), (2, 1)])
def test_terms_beside_the_outputs_have_their_true_gradients(ranks: Ranks, size: int, num_passes: int) -> None:
    for found in ranks.run(gradients_of_losses, size, device="cpu", num_passes=num_passes):
        for name in precision_cases.LOSSES:
            torch.testing.assert_close(found[name], found[f"{name} by hand"], rtol=2e-3, atol=2e-5)


def test_gradients_of_inputs_are_right_and_graphs_of_gradients_refused(ranks: Ranks) -> None:
    (found,) = ranks.run(gradients_of_inputs, 1, device="cpu")
    for name in ("asked", "x", "encoder", "own"):
        torch.testing.assert_close(found[f"ours {name}"], found[f"hand {name}"], rtol=5e-3, atol=1e-4)
    assert found["ours untouched"]
    assert "retain_graph=True" in found["twice"]
    assert "create_graph=True" in found["graph"]
    assert "backward(inputs=...)" in found["inputs"]
