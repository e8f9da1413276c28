"""Whether a cluster of Ray can ever hold a job, and what a job that waits for room says."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.on_ray import ray_cluster, ray_room
from torchfleet.launch.clusters.on_ray.ray_cluster import PlacementGroup
from torchfleet.launch.clusters.on_ray.ray_room import Share, cores_of, have_room, refuse_too_large
from torchfleet.launch.job_spec import Resources

IDS = [f"{number:056x}" for number in range(3)]


def share(num: int, role: str = "worker", **bundle: float) -> Share:
    return Share(num, role, bundle)


def fits_somehow(nodes: list[dict[str, float]], shares: list[Share]) -> bool:
    """Every way to place the processes."""
    bundles = [each.bundle for each in shares for _ in range(each.num)]
    for chosen in itertools.product(range(len(nodes)), repeat=len(bundles)):
        used = [dict.fromkeys(("CPU", "GPU"), 0.0) for _ in nodes]
        for place, bundle in zip(chosen, bundles, strict=True):
            for name, need in bundle.items():
                used[place][name] += need
        if all(used[i][name] <= node[name] + 1e-9 for i, node in enumerate(nodes) for name in used[i]):
            return True
    return False


NODES = st.lists(
    st.fixed_dictionaries({"CPU": st.sampled_from([0.0, 1.0, 2.5, 3.0]), "GPU": st.sampled_from([0.0, 1.0])}),
    max_size=3,
)
BUNDLE = st.fixed_dictionaries({"CPU": st.sampled_from([0.5, 1.0, 2.0])}, optional={"GPU": st.sampled_from([0.5, 1.0])})
SHARE = st.builds(Share, st.integers(1, 3), st.just("worker"), BUNDLE)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(NODES, st.lists(SHARE, min_size=1, max_size=2))
def test_a_job_has_room_if_there_is_any_way_to_place_it(nodes: list[dict[str, float]], shares: list[Share]) -> None:
    assert have_room(nodes, shares) == fits_somehow(nodes, shares)


def test_a_large_job_is_judged_exactly() -> None:
    nodes = [{"CPU": 64.0}] * 100  # 16 servers of 4 cores, or 10 workers of 6 beside one server
    assert have_room(nodes, [share(100, "server", CPU=4), share(1000, CPU=6)])
    assert not have_room(nodes, [share(101, "server", CPU=4), share(1000, CPU=6)])


def test_a_cluster_of_our_own_gets_whole_cores_for_all_processes() -> None:
    assert cores_of([share(1, "server", CPU=1), share(3, CPU=0.5)]) == 3
    assert cores_of([share(3, CPU=1 / 3)]) == 1


class Cluster:
    """Ray, with one node of two cores. `types`: what its monitor calls the nodes; None: it has not run yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, types: list[str] | None, is_v2: bool = False) -> None:
        report = {"autoscaler_report": {"active_nodes": dict.fromkeys(types or [], 1)}}
        kept = {b"__autoscaler_v2_enabled": b"1" if is_v2 else b"0"}
        if types is not None:
            kept[b"__autoscaling_status"] = json.dumps(report).encode()
        monkeypatch.setattr(ray_room, "import_module", lambda name: SimpleNamespace(_internal_kv_get=kept.get))

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Alive": False, "Resources": {"CPU": 64.0}}
        return [{"Alive": True, "Resources": {"CPU": 2.0, "memory": 4e9}}, dead]


THREE = [share(1, "server", CPU=1), share(2, CPU=1)]


def test_a_job_that_never_fits_is_refused_with_what_it_needs_and_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RoleError, match=naming("1 server", "2 workers", "1 CPU", "2 CPU")):
        refuse_too_large(Cluster(monkeypatch, [f"node_{IDS[0]}"]), THREE)
    with pytest.raises(RoleError, match=naming("1 GPU", "0 GPU")):
        refuse_too_large(Cluster(monkeypatch, [f"node_{IDS[0]}"]), [share(1, CPU=1, GPU=1)])


@pytest.mark.parametrize(
    ("types", "is_v2"),
    [
        (["ray.head.default"], False),  # an autoscaler: its types have names
        ([f"node_{IDS[0]}", "large_workers"], False),
        ([f"node_{IDS[0]}"], True),
        (None, False),  # not known yet
    ],
)
def test_a_job_waits_where_an_autoscaler_may_bring_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, types: list[str] | None, is_v2: bool
) -> None:
    refuse_too_large(Cluster(monkeypatch, types, is_v2), THREE)


def test_a_job_that_fits_once_others_have_ended_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_too_large(Cluster(monkeypatch, [f"node_{IDS[0]}"]), [share(1, "server", CPU=1), share(1, CPU=1)])


def test_a_waiting_job_says_what_is_missing_when_that_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([0.0] * 5 + [1.0] * 5 + [0.0] * 2)
    ray = SimpleNamespace(available_resources=lambda: {"CPU": next(free)}, cluster_resources=lambda: {"CPU": 4.0})
    waits = iter([False] * 12 + [True])
    group = SimpleNamespace(wait=lambda seconds: next(waits))
    groups = SimpleNamespace(placement_group=lambda bundles, strategy: group)
    monkeypatch.setattr(ray_cluster, "require_ray", lambda: ray)
    monkeypatch.setattr(ray_cluster, "import_module", lambda name: groups)
    told: list[str] = []
    looks: list[None] = []
    PlacementGroup(2, Resources(), "PACK", "2 workers").wait(told.append, lambda: looks.append(None))
    assert len(looks) == 12
    assert [("0 of 4" in line, "1 of 4" in line) for line in told] == [(True, False), (False, True), (True, False)]
