"""Files dealt to workers: every file to exactly one, counts differ by at most one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import jobs
from support.messages import naming
from support.searches import examples

import torchfleet as fleet
from torchfleet.base.errors import DataError, FleetError
from torchfleet.data.dataset import file_shard


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "PSERVER_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with jobs.clean_facade():
        yield


def be_worker(index: int, num: int) -> None:
    fleet.init(fleet.UserDefinedRoleMaker(index, "worker", num, ["127.0.0.1:7001"]))


@settings(max_examples=examples(100))
@given(num_files=st.integers(0, 100), num=st.integers(1, 150))
def test_every_file_goes_to_one_worker_and_counts_differ_by_at_most_one(num_files: int, num: int) -> None:
    files = [f"part-{i}" for i in range(num_files)]
    shares = [file_shard(files, index, num) for index in range(num)]
    assert sorted(path for share in shares for path in share) == sorted(files)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=examples(30))
@given(num_files=st.integers(0, 20), num=st.integers(1, 8))
def test_a_script_on_each_worker_gets_its_share(num_files: int, num: int) -> None:
    files = [f"part-{i}" for i in range(num_files)]
    given_files, shares = list(files), []
    for index in range(num):
        with jobs.clean_facade():
            be_worker(index, num)
            shares.append(fleet.util.get_file_shard(files))
            assert fleet.split_files(files) == shares[-1]
    assert files == given_files
    assert sorted(path for share in shares for path in share) == sorted(files)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_share_keeps_the_order_of_the_list_and_its_kind_of_paths() -> None:
    be_worker(1, 3)
    files = tuple(Path(f"{10 - i}") for i in range(10))
    share = fleet.util.get_file_shard(files)
    assert share == [path for path in files if path in share]


def test_one_worker_alone_gets_all_files() -> None:
    fleet.init()
    assert fleet.util.get_file_shard(["b", "a"]) == ["b", "a"]


def test_the_list_may_be_anything_to_go_through() -> None:
    be_worker(0, 2)
    assert fleet.split_files(f"part-{i}" for i in range(5)) == ["part-0", "part-2", "part-4"]


@pytest.mark.parametrize("single", ["part-0", b"part-0", Path("part-0")])
def test_a_single_path_is_refused(single: object) -> None:
    be_worker(0, 2)
    with pytest.raises(DataError, match=naming("get_file_shard", "part-0")):
        fleet.util.get_file_shard(single)  # type: ignore[arg-type]


def test_before_init_it_says_what_to_call() -> None:
    with pytest.raises(FleetError, match=r"fleet\.init"):
        fleet.util.get_file_shard(["a"])
