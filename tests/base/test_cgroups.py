"""The limits of a container, in made-up trees of both versions, and for real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchfleet.base.cgroups import cpu_limit, memory_left, memory_limit
from torchfleet.ps.tables.rows import memory
from torchfleet.ps.tables.rows.memory import physical_bytes

V1_NONE = "9223372036854771712"  # what version 1 has where there is no limit
GB = 1 << 30


def made_up(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A /sys/fs/cgroup with these files, and a /proc/self/cgroup."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    own = folder / "own"
    own.write_text(membership)
    return folder / "cgroup", own


def tree(folder: Path, membership: str, files: dict[str, str]) -> int | None:
    """The memory limit of a process in such a tree."""
    return memory_limit(*made_up(folder, membership, files))


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "350000 100000", "a/b/cpu.max": "400000 100000"}, 3.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("5:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "100000", "cpu/d/cpu.cfs_period_us": "50000"}, 2.0),
        ("5:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1", "cpu/d/cpu.cfs_period_us": "50000"}, None),
        ("5:cpu,cpuacct:/d\n", {}, None),
    ],
    ids=["version 2", "version 2, no limit", "version 1", "version 1, no limit", "no files"],
)
def test_the_smallest_limit_of_processor_time_counts(
    tmp_path: Path, membership: str, files: dict[str, str], cores: float | None
) -> None:
    assert cpu_limit(*made_up(tmp_path, membership, files)) == cores


def test_the_smallest_limit_on_the_way_up_counts_in_version_2(tmp_path: Path) -> None:
    files = {"memory.max": "max", "a/memory.max": str(3 * GB), "a/b/memory.max": str(5 * GB), "c/memory.max": "1"}
    assert tree(tmp_path, "0::/a/b\n", files) == 3 * GB


def test_the_smallest_limit_on_the_way_up_counts_in_version_1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": V1_NONE,
        "memory/docker/memory.limit_in_bytes": V1_NONE,
        "memory/docker/1f/memory.limit_in_bytes": str(2 * GB),
        "cpu/docker/1f/memory.limit_in_bytes": "1",
    }
    assert tree(tmp_path, "5:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n0::/\n", files) == 2 * GB


def test_a_container_that_sees_its_own_group_as_the_root_is_limited(tmp_path: Path) -> None:
    """The path of the group is that of the host, and is not there inside."""
    assert tree(tmp_path, "4:memory:/docker/1f\n", {"memory/memory.limit_in_bytes": str(GB)}) == GB


def test_a_namespaced_container_of_version_2_is_limited(tmp_path: Path) -> None:
    assert tree(tmp_path, "0::/\n", {"memory.max": str(GB)}) == GB


def test_groups_of_both_versions_side_by_side_are_both_looked_at(tmp_path: Path) -> None:
    files = {"memory/a/memory.limit_in_bytes": str(2 * GB), "unified/a/memory.max": str(GB)}
    assert tree(tmp_path, "4:memory:/a\n0::/a\n", files) == GB


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/a\n", {"memory.max": "max", "a/memory.max": "max"}),
        ("0::/a\n", {"a/cpu.max": "max 100000"}),
        ("5:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "1"}),
        ("0::/../b\n", {"x/memory.max": "1"}),
        ("", {}),
    ],
    ids=["max", "no memory controller", "not in a memory group", "outside the namespace", "no groups"],
)
def test_without_a_limit_there_is_none(tmp_path: Path, membership: str, files: dict[str, str]) -> None:
    assert tree(tmp_path, membership, files) is None


def test_a_system_without_cgroups_has_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "none", tmp_path / "nowhere") is None


@pytest.mark.parametrize(("limit", "expected"), [(None, 64 * GB), (8 * GB, 8 * GB), (int(V1_NONE), 64 * GB)])
def test_physical_bytes_are_the_machine_or_the_limit_whichever_is_less(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, expected: int
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: limit)
    monkeypatch.setattr(memory.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 << 20}[name])
    assert physical_bytes() == expected


def own_group() -> Path | None:
    """The folder of this process's memory group, if groups can be made in it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = "/sys/fs/cgroup/memory" if "memory" in controllers.split(",") else "/sys/fs/cgroup"
        folder = Path(root + path)
        if (folder / "memory.limit_in_bytes").exists() or "memory" in _handed_down(folder):
            return folder if os.access(folder, os.W_OK) else None
    return None


def _handed_down(folder: Path) -> str:
    """Version 2: the controllers that groups in this one have."""
    path = folder / "cgroup.subtree_control"
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
def test_a_process_in_a_real_group_finds_its_limit() -> None:
    parent = own_group()
    if parent is None:
        pytest.skip("memory groups cannot be made here")
    group = parent / f"torchfleet-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"memory groups cannot be made here: {error}")
    try:
        limit = group / "memory.max"
        (limit if limit.exists() else group / "memory.limit_in_bytes").write_text(str(3 * GB))
        code = (
            f"import os, pathlib; pathlib.Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
            "from torchfleet.ps.tables.rows.memory import physical_bytes; print(physical_bytes())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == min(3 * GB, physical_bytes())
    finally:
        group.rmdir()  # empty again: its one process has ended


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        (
            "0::/a\n",
            {"a/memory.max": "5000", "a/memory.current": "4000", "a/memory.stat": "anon 1\ninactive_file 500"},
            1500,
        ),
        ("0::/a\n", {"a/memory.max": "max", "a/memory.current": "4000"}, 8192),
        (
            "4:memory:/d\n",
            {"memory/d/memory.limit_in_bytes": "9000", "memory/d/memory.usage_in_bytes": "8000"},
            1000,
        ),
        ("4:memory:/d\n", {"memory/d/memory.limit_in_bytes": V1_NONE, "memory/d/memory.usage_in_bytes": "8000"}, 8192),
    ],
    ids=["version 2", "version 2, no limit", "version 1", "version 1, no limit"],
)
def test_what_is_left_is_what_the_machine_and_all_groups_leave(
    tmp_path: Path, membership: str, files: dict[str, str], left: int
) -> None:
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal:  100 kB\nMemAvailable:  8 kB\n")
    root, own = made_up(tmp_path, membership, files)
    assert memory_left(root, own, machine) == left


def test_what_is_left_here_is_less_than_there_is() -> None:
    found = memory_left()
    assert found is not None
    assert 0 < found <= physical_bytes()
