"""Threads that call a function of torch first at the same time, under a recorder."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from support.jobs import in_threads

from torchfleet.ps.worker.batch.op_lookup import look_up_one_at_a_time
from torchfleet.ps.worker.batch.recorder import Recorder

SECONDS = 0.3  # that a thread within a lookup waits for another one to be there, too


@pytest.mark.parametrize(
    ("place", "name", "path"),
    [(torch._ops, "_get_packet", ["sin"]), (torch._C, "_get_operation_overload", ["sin", "default"])],
    ids=["function", "overload"],
)
def test_both_get_the_object_that_torch_keeps(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, path: list[str]
) -> None:
    """torch keeps the address of the one that it is given, and the later of two others alive."""
    look_up_one_at_a_time()
    both, really = threading.Barrier(2), getattr(place, name)
    num_made = []

    def slow(*arguments: Any) -> Any:
        num_made.append(1)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(SECONDS)
        return really(*arguments)

    parent: Any = torch._ops._OpNamespace("aten")  # one that has looked nothing up
    for step in path[:-1]:
        parent = getattr(parent, step)
    monkeypatch.setattr(place, name, slow)
    first, second = in_threads(lambda _: getattr(parent, path[-1]), 2)
    assert first is second is getattr(parent, path[-1])
    assert len(num_made) == 1


def test_a_recorder_looks_functions_up_so() -> None:
    recorder = Recorder({})
    recorder.begin()
    recorder.end()
    for kind in (torch._ops._OpNamespace, torch._ops.OpOverloadPacket):
        assert kind.__getattr__.__module__ == kind.__module__
        assert kind.__getattr__.__code__.co_filename.endswith("op_lookup.py")
