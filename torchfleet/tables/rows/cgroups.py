"""The memory limit that a container, a batch system or systemd has set for this process: cgroups, versions 1 and 2."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_limit(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """The smallest limit of this process's groups and of all above them, in bytes; None if there is none.

    Inside a container the root is often the container's own group, while `own` still names the host's path: so what
    does not exist on the way up is skipped. Version 1 has a huge number where there is no limit.
    """
    limits = [limit for path in _files(root, own) if (limit := _read(path)) is not None]
    return min(limits, default=None)


def _files(root: Path, own: Path) -> list[Path]:
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux, or no cgroups
        return []
    found = []
    for line in lines:
        number, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            found += _upwards(root / "memory", group, "memory.limit_in_bytes")
        elif number == "0":  # version 2; beside version 1 it is mounted at `unified`
            found += _upwards(root, group, "memory.max") + _upwards(root / "unified", group, "memory.max")
    return found


def _upwards(mount: Path, group: str, file: str) -> list[Path]:
    parts = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
    return [mount.joinpath(*parts[:end], file) for end in range(len(parts), -1, -1)]


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no such group here, or its limit is hidden from this process
        return None
    return None if text == "max" else int(text)
