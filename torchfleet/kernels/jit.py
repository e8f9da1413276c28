"""How every kernel is compiled."""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

import numba as nb


def forget_old_kernels(folder: Path) -> None:
    """Remove what numba has kept of kernels whose source has changed since.

    Numba itself looks at the file of a kernel only, and not at those of the functions that it has inlined.
    """
    sources = sorted(folder.glob("*.py"))
    stamp = str(zlib.crc32(b"".join(source.read_bytes() for source in sources)))
    kept = folder / "__pycache__"
    with contextlib.suppress(OSError):  # a folder that cannot be written to holds no kernels either
        kept.mkdir(exist_ok=True)
        noted = kept / "kernels.crc32"
        if not noted.exists() or noted.read_text() != stamp:
            for old in (*kept.glob("*.nbi"), *kept.glob("*.nbc")):
                old.unlink(missing_ok=True)
            noted.write_text(stamp)


forget_old_kernels(Path(__file__).parent)

# Without the interpreter's lock; kept on disk between processes; and with IEEE's division: Python's would raise in the
# middle of an update, and checking for it takes as long as the arithmetic itself. Without numba's reference counts
# (_nrt): a kernel allocates nothing, and the atomic counts at every call of an inlined function took two thirds of the
# text parser's time.
kernel = nb.njit(nogil=True, cache=True, error_model="numpy", _nrt=False)
inlined = nb.njit(forceinline=True, error_model="numpy", _nrt=False)
