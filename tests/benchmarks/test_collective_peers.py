"""The benchmark beside other libraries: contenders make the same steps, and ratios are of the numbers beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import Ranks

from benchmarks import collective_peers
from benchmarks.peer_trainings import FAMILIES, by_ddp, by_fleet, lines_of

SMALL = ["--cpu", "--small", "--batch", "2", "--rounds", "1", "--seconds", "0.01", "--checked", "2"]
OURS = [argument for name in ("fleet", "ddp", "fleet_stage3", "fsdp2") for argument in ("--contender", name)]


def measured() -> dict[str, Any]:
    chosen = collective_peers.options([*SMALL, *OURS])
    dist.init_process_group("gloo")
    found = {family: collective_peers.measured("bert", family, chosen) for family in FAMILIES}
    return {name: value for family in found.values() for name, value in family.items()}


@pytest.mark.long
def test_contenders_make_the_same_steps(ranks: Ranks) -> None:
    for found in ranks.run(measured, 2):
        assert found["fleet_loss"] == pytest.approx(found["ddp_loss"], rel=1e-5)
        assert found["fleet_stage3_loss"] == pytest.approx(found["fsdp2_loss"], rel=1e-5)
        ratios = collective_peers.ratios(found)
        assert ratios["ratio_to_ddp"] == found["fleet_samples_per_s"] / found["ddp_samples_per_s"] > 0
        assert set(ratios) == {"ratio_to_ddp", "ratio_to_fsdp2"}  # memory of a host is that of one contender alone
    assert collective_peers.ratios({"fleet_mib": 3.0, "ddp_mib": 2.0}) == {"memory_ratio_to_ddp": 1.5}


def test_lines_are_those_that_one_writes() -> None:
    assert 10 < lines_of(by_fleet) < 16
    assert 10 < lines_of(by_ddp) < 16
