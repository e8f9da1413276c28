"""Facts about a machine and its limits for a process, read from /proc, /sys and the limits of this process."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
from pathlib import Path

import msgspec

from torchfleet.base import cgroups

_UNLIMITED = -1
_ADJTIMEX_BYTES = 512  # more than its structure has, in every version
_UNSYNCHRONIZED = 5  # what adjtimex returns for a clock that is not synchronized


class MachineFacts(msgspec.Struct):
    """Bytes, unless a name says otherwise. None: unknown on this machine."""

    host: str
    kernel: str
    processor: str
    num_cores: int  # that this process may use
    num_processors: int  # of the machine
    cpu_limit: float | None  # of its container, in cores
    load: float  # processes that wanted a core in the last minute
    memory: int | None
    memory_left: int | None
    memory_limit: int | None  # of its container
    swap_used: int | None
    shared_memory_free: int | None  # /dev/shm
    temporary_free: int | None  # /tmp
    open_files: int  # -1: no limit; so for the next two
    processes: int
    locked_memory: int
    somaxconn: int | None
    tcp_read_most: int | None
    tcp_write_most: int | None
    num_ports: int | None  # for connections that this machine makes
    overcommit: int | None
    governor: str | None
    huge_pages: str | None  # transparent ones: always, madvise or never
    is_synchronized: bool | None  # the system clock
    gpus: list[str] = []


def machine_facts(root: Path = Path("/")) -> MachineFacts:
    """Facts of this machine. `root`: where its files are, if not at /."""
    proc, net = root / "proc", root / "proc/sys/net"
    memory = _meminfo(proc / "meminfo")
    allowed = len(os.sched_getaffinity(0))
    limit = cgroups.cpu_limit(root / "sys/fs/cgroup", proc / "self/cgroup")
    ports = _numbers(net / "ipv4/ip_local_port_range")
    used = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0) if "SwapTotal" in memory else None
    return MachineFacts(
        host=socket.gethostname(),
        kernel=platform.release(),
        processor=_processor(proc / "cpuinfo"),
        num_cores=max(1, allowed if limit is None else min(allowed, int(limit))),
        num_processors=os.cpu_count() or 1,
        cpu_limit=limit,
        load=_load(proc / "loadavg"),
        memory=memory.get("MemTotal"),
        memory_left=cgroups.memory_left(root / "sys/fs/cgroup", proc / "self/cgroup", proc / "meminfo"),
        memory_limit=cgroups.memory_limit(root / "sys/fs/cgroup", proc / "self/cgroup"),
        swap_used=used,
        shared_memory_free=_free(root / "dev/shm"),
        temporary_free=_free(root / "tmp"),
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        somaxconn=next(iter(_numbers(net / "core/somaxconn")), None),
        tcp_read_most=next(reversed(_numbers(net / "ipv4/tcp_rmem")), None),
        tcp_write_most=next(reversed(_numbers(net / "ipv4/tcp_wmem")), None),
        num_ports=ports[1] - ports[0] + 1 if len(ports) == 2 else None,
        overcommit=next(iter(_numbers(proc / "sys/vm/overcommit_memory")), None),
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        huge_pages=_chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        is_synchronized=_is_synchronized(),
        gpus=_gpus(proc / "driver/nvidia/gpus"),
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _numbers(path: Path) -> list[int]:
    return [int(word) for word in (_text(path) or "").split() if word.isascii() and word.isdigit()]


def _meminfo(path: Path) -> dict[str, int]:
    lines = [line.split() for line in (_text(path) or "").splitlines()]
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def _processor(path: Path) -> str:
    for line in (_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _load(path: Path) -> float:
    try:
        return float((_text(path) or "0").split()[0])
    except (ValueError, IndexError):
        return 0.0


def _free(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _chosen(path: Path) -> str | None:
    """The word in brackets."""
    text = _text(path) or ""
    return text.partition("[")[2].partition("]")[0] or None


def _gpus(path: Path) -> list[str]:
    found = []
    for each in sorted(path.glob("*/information")):
        lines = (_text(each) or "").splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def _is_synchronized() -> bool | None:
    """Whether the kernel reports that the system clock is synchronized."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_ADJTIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _UNSYNCHRONIZED
