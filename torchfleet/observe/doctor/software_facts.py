"""Versions of the packages of a job, and where compiled kernels are kept."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import msgspec
import zmq

import torchfleet

_SHOWN = ("torch", "numba", "llvmlite", "numpy", "pyzmq", "triton", "msgspec")
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)\s*([^;]*)")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9A-Za-z.+]*)")


class SoftwareFacts(msgspec.Struct):
    """Versions by name, and requirements of torchfleet that are not met."""

    torchfleet: str
    python: str
    packages: dict[str, str]
    libzmq: str
    has_curve: bool
    unmet: list[str]
    kernel_folder: str  # cache of compiled kernels; empty: no cache, and every process compiles them
    num_kernels: int  # in that folder


def software_facts(kernels: Path | None = None) -> SoftwareFacts:
    """Facts of this Python. `kernels`: the folder of the kernels' sources, if not that of the package."""
    folder = _kernel_folder(kernels or Path(torchfleet.__file__).parent / "ps" / "kernels")
    return SoftwareFacts(
        torchfleet=torchfleet.__version__,
        python=platform.python_version(),
        packages={name: found for name in _SHOWN if (found := _version(name))},
        libzmq=zmq.zmq_version(),
        has_curve=bool(zmq.has("curve")),
        unmet=[text for requirement in _requirements() if (text := unmet(requirement))],
        kernel_folder=str(folder or ""),
        num_kernels=len(list(folder.rglob("*.nbi"))) if folder else 0,
    )


def unmet(requirement: str) -> str:
    """What is wrong with a package that torchfleet needs, such as "numpy>=1.26"; "" if nothing is."""
    match = _REQUIREMENT.match(requirement)
    if match is None or ";" in requirement:  # a package of an extra, which a user may leave out
        return ""
    name, bounds = match[1], match[2]
    found = _version(name)
    if found is None:
        return f"{name} is not installed, and torchfleet needs {requirement}"
    met = all(_holds(_numbers(found), sign, _numbers(bound)) for sign, bound in _BOUND.findall(bounds))
    return "" if met else f"{name} is {found}, and torchfleet needs {requirement}"


def _holds(found: tuple[int, ...], sign: str, bound: tuple[int, ...]) -> bool:
    size = max(len(found), len(bound))
    a, b = (version + (0,) * (size - len(version)) for version in (found, bound))
    return {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}[sign]


def _numbers(version: str) -> tuple[int, ...]:
    """The release: 2.13.0+cpu is (2, 13, 0)."""
    release = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[str]:
    try:
        return metadata.requires("torchfleet") or []
    except metadata.PackageNotFoundError:
        return []


def _kernel_folder(sources: Path) -> Path | None:
    """Return the folder that torchfleet/ps/kernels/jit.py uses: NUMBA_CACHE_DIR, the one next to the sources, or the
    user's cache. None: it is not writable."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    beside = sources / "__pycache__"
    if given:
        return Path(given) if _is_writable(Path(given)) else None
    if _is_writable(beside):
        return beside
    return home / "torchfleet" if _is_writable(home) else None


def _is_writable(folder: Path) -> bool:
    """Whether the folder, or its first existing parent, is writable."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)
