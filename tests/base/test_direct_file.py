"""Large files written past the page cache: they hold what was written, wherever the file system allows it or not."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from torchfleet.base import direct_file, storage
from torchfleet.base.storage import Storage

STAGED = 1 << 13


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "STAGED", STAGED)
    monkeypatch.setattr(storage, "_LARGE", 1)


def some_bytes(num: int) -> bytes:
    return np.random.default_rng(num).integers(0, 256, num, np.uint8).tobytes()


@pytest.mark.parametrize("size", [1, 4095, 4096, STAGED - 1, STAGED, STAGED + 1, 5 * STAGED, 5 * STAGED + 4097])
def test_a_file_holds_its_buffers_one_after_the_other(size: int, tmp_path: Path):
    data = some_bytes(size)
    cuts = [0, *sorted(np.random.default_rng(1).integers(0, size + 1, 5).tolist()), size]
    buffers = [data[start:stop] for start, stop in itertools.pairwise(cuts)]
    (tmp_path / "file.tmp").write_bytes(some_bytes(99_999))  # left by a killed process
    Storage(str(tmp_path)).write("file", [np.frombuffer(part, np.uint8) if part else b"" for part in buffers])
    assert (tmp_path / "file").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_a_file_system_that_refuses_direct_writes_gets_plain_ones(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_direct, refused, original = [False], [0], {"open": os.open, "pwrite": os.pwrite}

    def open_file(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and call == "open":
            refused[0] += 1
            os.close(original["open"](path, flags & ~os.O_DIRECT, mode))  # as Linux: the file is made all the same
            raise OSError(errno.EINVAL, "no O_DIRECT")
        is_direct[0] |= bool(flags & os.O_DIRECT)
        return int(original["open"](path, flags, mode))

    def pwrite(file: int, data: object, offset: int) -> int:
        if is_direct[0] and call == "pwrite" and not refused[0]:
            refused[0] += 1
            raise OSError(errno.EINVAL, "not aligned")
        return int(original["pwrite"](file, data, offset))

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "pwrite", pwrite)
    data = some_bytes(3 * STAGED + 5)
    Storage(str(tmp_path)).write("file", [data])
    assert refused == [1]
    assert (tmp_path / "file").read_bytes() == data


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="full"):
        Storage(str(tmp_path)).write("file", [some_bytes(3 * STAGED)])
    assert not list(tmp_path.iterdir())
