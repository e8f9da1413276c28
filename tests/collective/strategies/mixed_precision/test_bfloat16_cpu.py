"""bfloat16 on a CPU: a warning where it has no instructions for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchfleet as fleet
from torchfleet.collective.strategies.mixed_precision import bfloat16_cpu
from torchfleet.collective.strategies.mixed_precision.bfloat16_cpu import SlowBfloat16, has_instructions

ARM = "processor\t: 0\nFeatures\t: fp asimd aes {}\n"
X86 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f {}\nbugs\t\t: spectre_v1\n"


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    yield
    fleet.reset()


@pytest.mark.parametrize("text", [ARM.format("bf16"), X86.format("avx512_bf16"), X86.format("amx_bf16"), "Hardware: x"])
def test_instructions_are_found_and_silence_is_no_answer(text: str) -> None:
    assert has_instructions(text)


@pytest.mark.parametrize("text", [ARM.format("i8mm"), X86.format("avx512vl")])
def test_processors_without_them_are_known(text: str) -> None:
    assert not has_instructions(text)


def warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, strategy: Any) -> list[str]:
    monkeypatch.setattr(bfloat16_cpu, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if strategy.mode == "hybrid":
            fleet.init(strategy=strategy)
        else:
            fleet.init(is_collective=True, strategy=strategy)
        model = fleet.distributed_model(torch.nn.Linear(2, 1))
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if strategy.mode == "hybrid":
            fleet.init_worker()
        fleet.reset()
    return [str(found.message) for found in caught if found.category is SlowBfloat16]


BFLOAT = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
HYBRID = {"a_sync": True, "a_sync_configs": {"hybrid": True}}


@pytest.mark.parametrize(
    "fields", [BFLOAT, {**BFLOAT, **HYBRID}, {"amp": True, "amp_configs": {"use_pure_bf16": True}}]
)
def test_training_in_bfloat16_warns_where_it_is_slow(fields: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (text,) = warned(tmp_path, monkeypatch, ARM.format(""), fleet.DistributedStrategy(**fields))
    assert "bfloat16" in text
    assert "amp" in text


@pytest.mark.parametrize(
    ("text", "fields"), [(ARM.format("bf16"), BFLOAT), (ARM.format(""), {"amp": True}), (ARM.format(""), {})]
)
def test_other_training_does_not(text: str, fields: Any, tmp_path: Path, monkeypatch: Any) -> None:
    assert warned(tmp_path, monkeypatch, text, fleet.DistributedStrategy(**fields)) == []
