"""CRC-32C by the processor's instruction, without Python's lock: other threads run Python while it is computed."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from torchfleet.ps.kernels.jit import kernel

WORD = 8  # bytes that one instruction takes
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
# Every x86-64 processor since 2008, and every aarch64 one since version 8.1 of its architecture.
HAS_INSTRUCTION = bool(binding.get_host_cpu_features().get("sse4.2" if _IS_X86 else "crc"))
_ALL = np.uint32(0xFFFFFFFF)


@intrinsic
def _with_word(typing_context: Any, crc: Any, address: Any) -> Any:
    """The register `crc` after the eight bytes at `address`, of any alignment."""
    signature = types.uint32(types.uint32, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, half = ir.IntType(64), ir.IntType(32)
        loaded = builder.load(builder.inttoptr(args[1], word.as_pointer()))
        loaded.align = 1
        register, name = (word, "llvm.x86.sse42.crc32.64.64") if _IS_X86 else (half, "llvm.aarch64.crc32cx")
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(register, [register, word]), name)
        before = builder.zext(args[0], word) if _IS_X86 else args[0]
        after = builder.call(function, [before, loaded])
        return builder.trunc(after, half) if _IS_X86 else after

    return signature, codegen


@kernel
def crc32c_of_words(address: int, num_words: int, crc: int) -> int:
    """The CRC-32C of `num_words` words at `address`; `crc`: that of the bytes before them. Needs HAS_INSTRUCTION."""
    register = np.uint32(crc) ^ _ALL
    for i in range(num_words):
        register = _with_word(register, address + WORD * i)
    return np.int64(register ^ _ALL)
