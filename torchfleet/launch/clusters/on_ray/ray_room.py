"""Checks whether the nodes of a Ray cluster could ever hold a job, and says what is missing if they could not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torchfleet.base.errors import RoleError

_STATUS = b"__autoscaling_status"  # where Ray's monitor writes what `ray status` shows
_V2 = b"__autoscaler_v2_enabled"
_SMALL = 1e-6  # Ray itself rounds resources to 1e-4


@dataclass(frozen=True)
class Share:
    """`num` processes of one role that reserve `bundle` each."""

    num: int
    role: str
    bundle: Mapping[str, float]

    def __str__(self) -> str:
        many = self.num != 1
        each = ", ".join(f"{value:g} {name}" for name, value in self.bundle.items())
        return f"{self.num} {self.role}{'s' if many else ''} with {each}{' each' if many else ''}"


def cores_of(shares: Sequence[Share]) -> int:
    """Return the number of cores that all processes reserve together."""
    return math.ceil(sum(share.num * share.bundle["CPU"] for share in shares) - _SMALL)


def have_room(nodes: Sequence[Mapping[str, float]], shares: Sequence[Share]) -> bool:
    """Whether these nodes, when empty, hold the shares, at most two. Processes of a share may be on any node."""
    first, second = (*shares, *(Share(0, "", {}) for _ in range(2)))[:2]
    best = {0: 0}  # placed processes of the first share → maximum of the second beside them
    for node in nodes:
        most = min(first.num, _times(node, first.bundle, first.num))
        here = [(i, _times(_without(node, first.bundle, i), second.bundle, second.num)) for i in range(most + 1)]
        grown: dict[int, int] = {}
        for placed, beside in best.items():
            for more, others in here:
                num = min(first.num, placed + more)
                grown[num] = max(grown.get(num, 0), min(second.num, beside + others))
        best = grown
    return best.get(first.num, -1) >= second.num


def refuse_too_large(ray: Any, shares: Sequence[Share]) -> None:
    """Raise RoleError if the cluster can never hold the shares: its nodes are too small, and no autoscaler adds others.

    Ray does not say whether it has an autoscaler until its monitor has run once; nothing is refused before.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if have_room(nodes, shares) or not _is_fixed():
        return
    names = sorted({name for share in shares for name in share.bundle})
    found = ", ".join(f"{sum(node.get(name, 0) for node in nodes):g} {name}" for name in names)
    largest = ", ".join(f"{max((node.get(name, 0) for node in nodes), default=0):g} {name}" for name in names)
    raise RoleError(
        f"the cluster of Ray can never hold this job: it needs {' and '.join(map(str, shares))}. Its nodes "
        f"({len(nodes)}) have {found} in all, and at most {largest} on one of them, and no autoscaler adds nodes. "
        "Start more nodes (`ray start --address=...`), or ask for fewer processes or for less of each (--worker_num, "
        "--worker_cpus)."
    )


def _is_fixed() -> bool:
    """Whether Ray has said that it adds no nodes.

    Without an autoscaler Ray's monitor reports each node as a type of its own, named by the id of the node. Version 2
    of the autoscaler reports elsewhere: this function assumes that it adds nodes.
    """
    kv = import_module("ray.experimental.internal_kv")
    if kv._internal_kv_get(_V2) == b"1":
        return False
    report = json.loads(kv._internal_kv_get(_STATUS) or b"{}").get("autoscaler_report") or {}
    types = report.get("active_nodes") or {}
    return bool(types) and all(_is_node(name) for name in types)


def _is_node(name: str) -> bool:
    prefix, _, number = name.partition("_")
    return prefix == "node" and len(number) == 56 and all(letter in "0123456789abcdef" for letter in number)


def _times(node: Mapping[str, float], bundle: Mapping[str, float], most: int) -> int:
    """Return how often the bundle fits on the node, at most `most` times."""
    fits = (int((node.get(name, 0.0) + _SMALL) // need) for name, need in bundle.items() if need > 0)
    return max(0, min((most, *fits)))


def _without(node: Mapping[str, float], bundle: Mapping[str, float], num: int) -> dict[str, float]:
    return {name: have - num * bundle.get(name, 0.0) for name, have in node.items()}
