"""The benchmark beside other libraries: contenders make the same steps, and ratios are of the numbers beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

import torchfleet as fleet
from benchmarks import collective_peers
from benchmarks.host_tensors import HostTensors, peak_of
from benchmarks.peer_ranks import ratios, task_of
from benchmarks.peer_trainings import FAMILIES, by_ddp, by_fleet, lines_of

SMALL = ["--cpu", "--small", "--batch", "2", "--rounds", "1", "--seconds", "0.01", "--checked", "2"]
OURS = [argument for name in ("fleet", "ddp", "fleet_stage3", "fsdp2") for argument in ("--contender", name)]


def measured() -> dict[str, Any]:
    chosen = collective_peers.options([*SMALL, *OURS])
    dist.init_process_group("gloo")
    found = {family: collective_peers.measured("bert", family, chosen) for family in collective_peers.families(chosen)}
    return {name: value for family in found.values() for name, value in family.items()}


@pytest.mark.long
def test_contenders_make_the_same_steps(ranks: Ranks) -> None:
    for found in ranks.run(measured, 2):
        assert found["fleet_loss"] == pytest.approx(found["ddp_loss"], rel=1e-5)
        assert found["fleet_stage3_loss"] == pytest.approx(found["fsdp2_loss"], rel=1e-5)
        made = ratios(found)
        assert made["ratio_to_ddp"] == found["fleet_samples_per_s"] / found["ddp_samples_per_s"] > 0
        kinds = {"ratio_to", "cpu_ratio_to", "memory_ratio_to"}  # resident memory is that of one contender alone
        assert set(made) == {f"{kind}_{rival}" for kind in kinds for rival in ("ddp", "fsdp2")}


def in_half_precision() -> dict[str, Any]:
    """Losses of a small GPT-2 in bfloat16."""
    dist.init_process_group("gloo")
    chosen = collective_peers.options(SMALL)
    task = task_of("gpt2", torch.device("cpu"), chosen)
    torch.manual_seed(1 + dist.get_rank())
    batches = [task.batch(task.batch_size) for _ in range(2)]
    found: dict[str, Any] = {}
    for own, make in {**FAMILIES["sharded"], **FAMILIES["pure"]}.items():
        if own != "deepspeed":
            step = make(task, True)
            torch.manual_seed(2)
            found[own] = [float(step(batch).detach()) for batch in batches][-1]
            if own.startswith("fleet"):
                fleet.stop_worker()
    return found


@pytest.mark.long
def test_rivals_in_half_precision_compute_alike(ranks: Ranks) -> None:
    for found in ranks.run(in_half_precision, 2):
        for ours, rival in (("fleet_stage3", "fsdp2"), ("fleet_pure", "fsdp2_pure")):
            assert found[ours] == pytest.approx(found[rival], rel=0.01)


def test_ratios_say_what_is_more() -> None:
    found = {"fleet_mib": 3.0, "ddp_mib": 2.0, "fleet_cpu_s": 0.2, "ddp_cpu_s": 0.1, "ddp_rss_mib": 1.0}
    assert ratios(found) == {"memory_ratio_to_ddp": 1.5, "cpu_ratio_to_ddp": 0.5}


def test_memory_of_host_tensors_is_the_most_at_any_time() -> None:
    with HostTensors() as host:
        kept = torch.zeros(1 << 18)
        gone = torch.zeros(1 << 20)
        del gone
        last = torch.zeros(1 << 19)
    assert host.peak == 4 * ((1 << 18) + (1 << 20))
    assert kept.numel() + last.numel() == 3 << 18
    assert peak_of([(2, 11, -7), (1, 11, 7), (3, 12, 4)]) == 7
    assert peak_of([(1, 11, 7), (2, 11, 6)]) == 7, "one address has one tensor"


def test_memory_of_host_tensors_does_not_count_what_was_made_before() -> None:
    """As Python's garbage collector may take it back at any time."""
    with HostTensors():
        before = [torch.zeros(1 << 20)]
    with HostTensors() as host:
        before.clear()
        made = torch.zeros(1 << 18)
    assert host.peak == made.nbytes


def test_lines_are_those_that_one_writes() -> None:
    assert 10 < lines_of(by_fleet) < 16
    assert 10 < lines_of(by_ddp) < 16
