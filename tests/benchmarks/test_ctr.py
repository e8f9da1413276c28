"""benchmarks/ctr: the sections of a step are timed without counting anything twice, and workers are put together."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import ctr, ctr_sections
from benchmarks.ctr_sections import PARTS, Sections, thread_seconds


class Work:
    now = 0.0  # what the clock says

    def outer(self) -> None:
        Work.now += 1
        self.inner()
        Work.now += 2

    def inner(self) -> None:
        Work.now += 10


def test_every_part_of_a_step_that_is_timed_is_there() -> None:
    assert all(callable(getattr(owner, name)) for owner, name, _ in PARTS)


def test_time_inside_of_another_part_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctr_sections, "PARTS", ((Work, "outer", "outer"), (Work, "inner", "inner")))
    clock = SimpleNamespace(perf_counter=lambda: Work.now, thread_time=lambda: Work.now / 2)
    monkeypatch.setattr(ctr_sections, "time", clock)
    sections, plain = Sections(), Work.outer
    with sections.timed():
        Work().outer()
        thread = threading.Thread(target=Work().outer)
        thread.start()
        thread.join(timeout=60)
    assert Work.outer is plain
    assert sections.own == sections.others == {"outer": 3.0, "inner": 10.0}
    assert sections.own_cpu == {"outer": 1.5, "inner": 5.0}


def test_processor_time_is_that_of_the_process_by_threads() -> None:
    found = thread_seconds()
    assert set(found) == {"training", "threads", "rest"}
    assert sum(found.values()) == pytest.approx(time.process_time(), abs=1.0)


def test_workers_are_put_together_by_medians_and_their_rates_added() -> None:
    workers: list[dict[str, Any]] = [{"samples_per_s": 10.0, "step_ms": 1.0}, {"samples_per_s": 20.0, "step_ms": 3.0}]
    assert ctr.summary(workers) == {"samples_per_s": 30.0, "step_ms": 2.0}


def test_children_find_what_the_benchmark_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert ctr.environment()["PYTHONPATH"].split(":") == [str(ctr.ROOT), "/somewhere"]
