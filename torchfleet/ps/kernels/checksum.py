"""CRC-32C, the checksum of logs: one instruction for eight bytes where the processor has it.

zlib's CRC-32 takes eight times as long, which was the largest part of what a log costs.
"""

from __future__ import annotations

import platform
from typing import Any

import numba as nb
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from torchfleet.ps.kernels.intrinsics import load_word
from torchfleet.ps.kernels.jit import inlined, kernel

_POLYNOMIAL = 0x82F63B78
_ALL = np.uint32(0xFFFFFFFF)
_WORD = 8  # bytes
_LONG = 1 << 20  # bytes, in the time of which other threads are let in: to get the lock back takes nearly as long


def _instruction() -> tuple[str, int]:
    """LLVM's name of this processor's instruction, and the bits of its sum; no name: it has none."""
    machine, features = platform.machine().lower(), binding.get_host_cpu_features()
    if machine in ("aarch64", "arm64") and features.get("crc"):
        return "llvm.aarch64.crc32cx", 32
    if machine in ("x86_64", "amd64") and features.get("sse4.2"):
        return "llvm.x86.sse42.crc32.64.64", 64
    return "", 32


_NAME, _BITS = _instruction()


@intrinsic
def _add_word(typing_context: Any, crc: Any, word: Any) -> Any:
    """The sum with eight more bytes, by the processor's instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, small = ir.IntType(_BITS), ir.IntType(32)
        kind = ir.FunctionType(total, [total, ir.IntType(64)])
        instruction = cgutils.get_or_insert_function(builder.module, kind, _NAME)
        before = args[0] if small.width == _BITS else builder.zext(args[0], total)
        after = builder.call(instruction, [before, args[1]])
        return after if small.width == _BITS else builder.trunc(after, small)

    return types.uint32(types.uint32, types.uint64), codegen


def _table() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """What a byte adds to the sum."""
    sums = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        sums = np.where(sums & np.uint32(1), (sums >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), sums >> np.uint32(1))
    return sums


_TABLE = _table()


@inlined
def _add_word_by_table(crc: np.uint32, word: np.uint64) -> np.uint32:
    """The same on any processor."""
    for _ in range(_WORD):
        crc = _TABLE[(np.uint64(crc) ^ word) & np.uint64(0xFF)] ^ (crc >> np.uint32(8))
        word >>= np.uint64(8)
    return crc


add_word = _add_word if _NAME else _add_word_by_table


@inlined
def _sum(data: np.ndarray, crc: np.uint32) -> np.uint32:
    crc ^= _ALL
    num_whole = len(data) // _WORD * _WORD
    for at in range(0, num_whole, _WORD):
        crc = add_word(crc, load_word(data, at))
    if num_whole < len(data):
        last = np.uint64(0)
        for at in range(num_whole, len(data)):
            last |= np.uint64(data[at]) << np.uint64(8 * (at - num_whole))
        crc = add_word(crc, last)
    return crc ^ _ALL


@kernel
def _long(data: np.ndarray, crc: np.uint32) -> np.uint32:
    return _sum(data, crc)


@nb.njit(cache=True, error_model="numpy", _nrt=False)  # with the interpreter's lock: see _LONG
def _short(data: np.ndarray, crc: np.uint32) -> np.uint32:
    return _sum(data, crc)


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """The CRC-32C of bytes, filled up with zeros to a multiple of eight. `crc`: of what comes before them."""
    if not len(data):
        return crc
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False  # one kernel for memory of all kinds
    return int((_long if len(array) >= _LONG else _short)(array, np.uint32(crc)))
