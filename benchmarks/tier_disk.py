"""What a disk can do past the page cache: the roof of benchmarks.tiers."""

from __future__ import annotations

import mmap
import os
import statistics
import time

import numpy as np
import numpy.typing as npt

from torchfleet.ps.tables.tiers.disk import Disk, open_disk

BLOCK, NUM_BLOCKS = 1 << 20, 64  # sequential: bytes of a request, and requests under way
PAGE, NUM_PAGES = 4096, 4096  # random reads, and how many at once


def disk_speed(folder: str, num_bytes: int) -> dict[str, float]:
    """Random reads of 4 KiB and sequential bytes per second."""
    file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
    disk, blocks = open_disk(file), _memory(NUM_BLOCKS, BLOCK)
    blocks[:] = np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8)
    start = time.perf_counter()
    for first in range(0, num_bytes, NUM_BLOCKS * BLOCK):
        _write(disk, first, blocks)
    written = num_bytes / (time.perf_counter() - start)
    start = time.perf_counter()
    for first in range(0, num_bytes, NUM_BLOCKS * BLOCK):
        disk.read(first + BLOCK * np.arange(NUM_BLOCKS), blocks)
    read = num_bytes / (time.perf_counter() - start)
    rates = _random_reads(disk, num_bytes)
    disk.close()
    os.close(file)
    return {
        "disk_write_bytes_per_s": written,
        "disk_read_bytes_per_s": read,
        "disk_reads_per_s": statistics.median(rates),
    }


def _memory(num: int, size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, num * size), np.uint8).reshape(num, size)


def _write(disk: Disk, first: int, blocks: npt.NDArray[np.uint8]) -> None:
    for i in range(len(blocks)):
        disk.begin_write(i, first + i * BLOCK, blocks[i])
    ended = 0
    while ended < len(blocks):
        ended += len(disk.end_writes(1))


def _random_reads(disk: Disk, num_bytes: int) -> list[float]:
    pages, draw, rates = _memory(NUM_PAGES, PAGE), np.random.default_rng(1), []
    for _ in range(9):
        offsets, start = PAGE * draw.integers(0, num_bytes // PAGE, NUM_PAGES), time.perf_counter()
        disk.read(offsets, pages)
        rates.append(NUM_PAGES / (time.perf_counter() - start))
    return rates
