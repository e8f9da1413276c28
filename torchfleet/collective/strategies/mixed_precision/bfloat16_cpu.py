"""Whether this CPU has bfloat16 instructions. Without them bfloat16 takes many times as long as float32."""

from __future__ import annotations

import warnings
from pathlib import Path

_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}  # x86-64; aarch64
_CPUINFO = Path("/proc/cpuinfo")


class SlowBfloat16(UserWarning):
    """amp computes in bfloat16 on a CPU without instructions for it."""


def warn_if_slow() -> None:
    """Warn if the CPU lists its features and bfloat16 is not among them."""
    if _CPUINFO.exists() and not has_instructions(_CPUINFO.read_text()):
        warnings.warn(
            "amp computes in bfloat16, and this CPU has no bfloat16 instructions (/proc/cpuinfo lists none of "
            f"{', '.join(sorted(_INSTRUCTIONS))}): a step takes tens to hundreds of times as long as in float32. Leave "
            "amp out on such machines, or use a GPU.",
            SlowBfloat16,
            stacklevel=2,
        )


def has_instructions(cpuinfo: str) -> bool:
    """Whether the flags of the first processor include bfloat16; True for a text without flags, as nothing is known."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not _INSTRUCTIONS.isdisjoint(flags.split())
    return True
