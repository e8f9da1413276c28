"""The memory and cores that this process may use, by its cgroups: limits of a container, a batch system or systemd."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

_ROOT, _OWN, _MACHINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")


def memory_limit(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """The smallest limit of this process's cgroups and all their ancestors, in bytes; None without a limit.

    Version 1 uses a huge number for "no limit".
    """
    texts = [
        text for path in _files(root, own, "memory", "memory.limit_in_bytes", "memory.max") if (text := _read(path))
    ]
    return min((int(text) for text in texts if text != "max"), default=None)


def memory_left(root: Path = _ROOT, own: Path = _OWN, machine: Path = _MACHINE) -> int | None:
    """Bytes that this process can still allocate, limited by the machine and by its cgroups; None if unknown.

    Page cache that the kernel can reclaim counts as free.
    """
    left = [1024 * number for name, number in _numbers(machine) if name == "MemAvailable:"]
    for file, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for path in _files(root, own, "memory", "memory.limit_in_bytes", "memory.max"):
            limit, in_use = _read(path), _read(path.with_name(used))
            if path.name == file and limit and limit != "max" and in_use:
                files = dict(_numbers(path.with_name("memory.stat"))).get(cached, 0)
                left.append(int(limit) - int(in_use) + files)
    return min(left, default=None)


def cpu_limit(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """The CPU time per second that this process's cgroups and all their ancestors allow; None without a limit.

    Version 1 uses -1 for "no limit".
    """
    limits = []
    for path in _files(root, own, "cpu", "cpu.cfs_quota_us", "cpu.max"):
        quota, _, period = (_read(path) or "max").partition(" ")
        period = period or _read(path.with_name("cpu.cfs_period_us")) or "100000"
        if quota not in ("max", "-1"):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def usable_cores() -> int:
    """Cores that this process and its children may run on: those of its CPU affinity, limited by its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cpu_limit()
    return max(1, allowed if limit is None else min(allowed, math.floor(limit)))


def _files(root: Path, own: Path, controller: str, file1: str, file2: str) -> list[Path]:
    """Files that may hold limits: `file1` of version 1 and `file2` of version 2, from the process's cgroup upwards.

    Inside a container the root is often the container's own cgroup, while `own` still names the host's path. The caller
    therefore skips files that do not exist.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux, or no cgroups
        return []
    found = []
    for line in lines:
        number, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            found += _upwards(root / controller, group, file1)
        elif number == "0":  # version 2; beside version 1 it is mounted at `unified`
            found += _upwards(root, group, file2) + _upwards(root / "unified", group, file2)
    return found


def _upwards(mount: Path, group: str, file: str) -> list[Path]:
    parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
    return [mount.joinpath(*parts[:end], file) for end in range(len(parts), -1, -1)]


def _numbers(path: Path) -> list[tuple[str, int]]:
    """Parse a file with a name and a number on every line."""
    lines = [line.split() for line in (_read(path) or "").splitlines()]
    return [(line[0], int(line[1])) for line in lines if len(line) > 1 and line[1].isdigit()]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # the cgroup does not exist here, or this process may not read its limit
        return None
