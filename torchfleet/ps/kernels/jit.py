"""How every kernel is compiled, and where compiled kernels are cached."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba as nb

from torchfleet.base.errors import SecurityError
from torchfleet.base.ownership import make_own
from torchfleet.ps.kernels.shared_cache import SharedCache

_TEMPORARY = "torchfleet-kernels-"  # begins the name of a temporary cache


def keep_kernels(folder: Path) -> None:
    """Let numba cache compiled kernels beside their sources in `folder`, otherwise in the user's cache folder,
    otherwise in a temporary one. In the last case every process compiles again, which one line on stderr reports.

    The cache consists of pickles and machine code, which are executed when loaded. A folder in which others can write
    is not used; if NUMBA_CACHE_DIR names one, SecurityError is raised.
    """
    if nb.config.CACHE_DIR:  # the user has chosen
        _check_choice(Path(nb.config.CACHE_DIR))
        return
    stamp = _stamp(folder)
    if _is_usable(folder / "__pycache__"):
        _forget_old_kernels(folder / "__pycache__", stamp)
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    own = home / "torchfleet" / f"kernels-{stamp}"
    if not _is_usable(own):
        own = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        atexit.register(_remove, own, os.getpid())
        print(
            f"torchfleet: compiled kernels can be kept neither in {folder} nor in {home}, and are compiled anew in "
            "every process, which takes half a minute or more. Set NUMBA_CACHE_DIR to a folder to which only you can "
            "write.",
            file=sys.stderr,
            flush=True,
        )
    nb.config.CACHE_DIR = str(own)


def is_temporary() -> bool:
    """Whether kernels are cached in a temporary folder of this process."""
    return Path(nb.config.CACHE_DIR).name.startswith(_TEMPORARY)


def _stamp(folder: Path) -> str:
    """Changes with any of the sources: numba itself checks only the file of a kernel, not those of
    inlined functions.
    """
    return str(zlib.crc32(b"".join(source.read_bytes() for source in sorted(folder.glob("*.py")))))


def _forget_old_kernels(kept: Path, stamp: str) -> None:
    """Remove cached kernels whose source has changed."""
    with contextlib.suppress(OSError):  # another process may be doing the same
        noted = kept / "kernels.crc32"
        if not noted.exists() or noted.read_text() != stamp:
            for old in (*kept.glob("*.nbi"), *kept.glob("*.nbc"), *kept.glob("*.mark")):
                old.unlink(missing_ok=True)
            noted.write_text(stamp)


def mark_of_all() -> Path:
    """The file whose existence says that all kernels are cached, for these sources, versions and this processor.

    numba compiles a kernel again when its source file is newer, so the time of the sources counts, too.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    versions = f"{sys.version} {nb.__version__} {llvmlite.binding.get_host_cpu_name()}"
    times = [(source.stat().st_mtime_ns, source.stat().st_size) for source in sources]
    name = f"all-{zlib.crc32(f'{versions} {times}'.encode())}.mark"
    return Path(SharedCache(keep_kernels).cache_path) / name


def _is_usable(folder: Path) -> bool:
    """Whether this user, and no other, can write there."""
    try:
        make_own(folder)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except (OSError, SecurityError):
        return False


def _check_choice(folder: Path) -> None:
    try:
        make_own(folder.resolve())
    except OSError:
        return  # numba reports what is wrong with it
    except SecurityError as error:
        raise SecurityError(f"NUMBA_CACHE_DIR: compiled kernels are executed when they are loaded. {error}") from None


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process goes on using it
        shutil.rmtree(folder, ignore_errors=True)


keep_kernels(Path(__file__).parent)

# nogil; cached on disk between processes; IEEE division, because Python's would raise in the middle of an update, and
# checking for it takes as long as the arithmetic itself. Without numba's reference counts (_nrt): a kernel allocates
# nothing, and the atomic counts at every call of an inlined function took two thirds of the text parser's time.
_cached = nb.njit(nogil=True, cache=True, error_model="numpy", _nrt=False)
inlined = nb.njit(forceinline=True, error_model="numpy", _nrt=False)


KERNELS: list[Any] = []  # of the modules that were imported


def kernel(function: Callable[..., Any]) -> Any:
    made = _cached(function)
    made._cache = SharedCache(function)
    KERNELS.append(made)
    return made
