"""The benchmark of optimizer steps: every contender steps, and is beside its rival."""

from __future__ import annotations

from typing import Any

from support.ranks import Ranks

from benchmarks import optimizer_steps


def measured() -> dict[str, Any]:
    import torch

    model = optimizer_steps.Shapes(350e6, torch.device("meta"))
    small = optimizer_steps.measure(1e5, torch.device("cpu"), rounds=1, steps=1)
    return {"num": sum(parameter.numel() for parameter in model.parameters()), **small}


def test_every_contender_has_a_rival_and_a_roof(ranks: Ranks) -> None:
    (found,) = ranks.run(measured, 1)
    assert 345e6 < found.pop("num") < 355e6
    for name, (rival, own, other) in optimizer_steps.RIVALS.items():
        assert found[f"{name}_ratio"] == found[f"{name}_us"] / found[f"{rival}_us"] > 0
        assert found[f"{name}_roof"] == own / other
