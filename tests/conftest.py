"""Fixtures that more than one file of tests uses, and the order in which tests run."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.extras import skips_in_one_line
from support.fleets import Fleet, in_process
from support.nursery import has_gpu_driver
from support.paths import ROOT
from support.processes import preloaded
from support.ranks import Ranks, nursery
from support.searches import load_profile

from torchfleet.ps.server.server import Server

load_profile()  # before a file of tests is imported: settings of single tests build on it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one_of", type=int, default=1, metavar="N", help="run one of N tests of each file: make quick")


def pytest_configure(config: pytest.Config) -> None:
    """GPUs are hidden from all tests unless `-m gpu` asks for those that use one: the others, and all that they start,
    run as on a machine without."""
    asked = config.getoption("-m")
    if has_gpu_driver() and ("gpu" not in asked or "not gpu" in asked):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first: a slow test that began last would leave the other cores idle.

    Tests marked `gpu` are skipped unless `-m gpu` asks for them and there is one. Tests marked `cluster`, `browser`,
    `ecosystem`, `long` or `install` run if `-m` names their mark, or one of them is asked for by its name.
    """
    asked = config.getoption("-m")
    left_out = [mark for mark in ("cluster", "browser", "ecosystem", "long", "install") if mark not in asked]
    if not any("::" in argument for argument in config.args):
        others = {item for item in items if any(item.get_closest_marker(mark) for mark in left_out)}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    left = set(_one_of(config.getoption("--one_of"), items))
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = [item for item in items if item in left]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if _shares_fixtures(item) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def _one_of(num: int, items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Every `num`-th test of each file, beginning with its first; those marked `slow` are counted apart."""
    seen: Counter[tuple[Path, bool]] = Counter()
    for item in items:
        place = item.path, item.get_closest_marker("slow") is not None
        if seen[place] % num == 0:
            yield item
        seen[place] += 1


def _shares_fixtures(item: pytest.Item) -> bool:
    """Whether a fixture is made once for the tests of the item's file: then one process runs them."""
    found: Any = getattr(item, "_fixtureinfo", None)
    defs = itertools.chain.from_iterable(found.name2fixturedefs.values()) if found is not None else ()
    return any(one.scope == "module" and item.nodeid.startswith(f"{one.baseid}::") for one in defs)


def has_gpu() -> bool:
    """FLEET_TEST_DEVICE=cpu: tests of tests/collective/gpu are to be tried out on the CPU."""
    import torch

    return torch.cuda.is_available() or os.environ.get("FLEET_TEST_DEVICE") == "cpu"


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Processes of pytest-xdist are forked by one that has collected the tests: not where a GPU is, because collecting
    asks for GPUs, after which a forked process cannot use them.
    """
    if has_gpu_driver() or not session.config.pluginmanager.hasplugin("dsession"):
        return (yield)
    from support.forked_workers import forking

    with forking(session.config.args):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Files of tests are imported and their tests made without searches for garbage, of which there is hardly any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end: no collection of garbage need look at those million objects."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skips are counted in one line, by what they need, also those of the processes of pytest-xdist."""
    reports = terminalreporter.stats.get("skipped", [])
    if reports:
        terminalreporter.write_line(skips_in_one_line(str(report.longrepr[-1]) for report in reports), yellow=True)


@pytest.fixture(scope="module")
def no_old_garbage() -> None:
    """For tests that collect garbage: what others have left is looked at once, not by each of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_server_outlives_the_tests() -> Iterator[None]:
    yield
    children = [child for child in psutil.Process().children(recursive=True) if _is_server(child)]
    _, left = psutil.wait_procs(children, timeout=60)
    assert not left, f"server processes were left behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def networks_are_traced_once() -> Iterator[None]:
    from support.traces import trace_once

    with pytest.MonkeyPatch.context() as monkeypatch:
        trace_once(monkeypatch)
        yield


@pytest.fixture(autouse=True)
def compilers_are_back() -> Iterator[None]:
    """A worker that a test leaves behind before its first call would keep later tests from compiling."""
    yield
    recorder = sys.modules.get("torchfleet.ps.worker.batch.recorder")
    for number in list(recorder._owners) if recorder is not None else []:
        recorder._remove_owner(number)


@pytest.fixture(scope="module", autouse=True)
def no_job_outlives_a_module() -> Iterator[None]:
    yield
    found = sys.modules.get("torchfleet.api.current_job")
    if found is not None:
        found.current.job = None


@pytest.fixture(autouse=True)
def earlier_jobs_are_forgotten() -> Iterator[None]:
    """Calls without a job say that stop_worker was called, and fleet.init that it was called with other arguments: not
    by an earlier test. A job that a test leaves is no job of the next one."""
    found = sys.modules.get("torchfleet.api.current_job")
    before = None if found is None else found.current.job
    yield
    found = sys.modules.get("torchfleet.api.current_job")
    if found is not None:
        found.current.job, found.current.has_stopped, found.current.arguments = before, False, {}


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A later test of this process would take a group that a test leaves for its own."""
    was_there = _has_group()
    yield
    if _has_group() and not was_there:
        sys.modules["torch.distributed"].destroy_process_group()
        pytest.fail("the test has left a process group of torch.distributed")


def _has_group() -> bool:
    found = sys.modules.get("torch.distributed")
    return found is not None and found.is_available() and bool(found.is_initialized())


def _is_server(process: psutil.Process) -> bool:
    """By its arguments without the folder of the repository: this may be called torchfleet, and a helper of
    multiprocessing that lives as long as the tests would count, too."""
    try:
        arguments = " ".join(process.cmdline()[1:]).replace(str(ROOT), "")
        return process.status() != psutil.STATUS_ZOMBIE and "torchfleet" in arguments
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def server() -> Server:
    """A server without a transport: requests are given to it by hand."""
    return Server(max_table_bytes=1 << 22)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Two servers in this process."""
    with in_process(2) as made:
        yield made


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes of collective jobs, forked from one that has imported torch."""
    with nursery() as made:
        yield made


@pytest.fixture
def lightning_imported() -> Iterator[None]:
    """Processes of the test have imported Lightning, which takes seconds, when they are forked."""
    with preloaded("support.scripts.lightning_job", "torchfleet.apps.lightning"):
        yield


@pytest.fixture
def transformers_imported() -> Iterator[None]:
    with preloaded("support.scripts.fleet_trainer_job", "torchfleet.apps"):
        yield
