"""What torch.compile has done so far, by its own counters: graphs, graph breaks, and the operations in each kernel."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class Counts:
    """The compiler's counters, which are per process, and the kernels it has loaded."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.breaks: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    @classmethod
    def now(cls) -> Counts:
        counts = cls()
        dynamo, metrics = _module("torch._dynamo.utils"), _module("torch._inductor.metrics")
        counters: Any = getattr(dynamo, "counters", {})
        counts.numbers["graphs"] = counters.get("stats", {}).get("unique_graphs", 0)
        counts.numbers["operations"] = getattr(metrics, "ir_nodes_pre_fusion", 0)
        counts.numbers["calls"] = counters.get("inductor", {}).get("extern_calls", 0)
        counts.breaks.update({_reason(text): num for text, num in counters.get("graph_break", {}).items()})
        counts.kernels.update(_kernels())
        return counts

    def __sub__(self, before: Counts) -> Counts:
        counts = Counts()
        counts.numbers = self.numbers - before.numbers
        counts.breaks, counts.kernels = self.breaks - before.breaks, self.kernels - before.kernels
        return counts

    def __str__(self) -> str:
        numbers, num_breaks = self.numbers, self.breaks.total()
        lines = [f"graphs {numbers['graphs']}, graph breaks {num_breaks}"]
        lines += [f"  graph break ({num}×): {reason}" for reason, num in self.breaks.most_common(5)]
        if numbers["operations"]:
            calls = f", {numbers['calls']} library calls" if numbers["calls"] else ""
            lines[0] += f"; {numbers['operations']} operations in {self.kernels.total()} kernels{calls}"
        lines += [f"  {num}× {kernel}" for kernel, num in self.kernels.most_common(12)]
        if len(self.kernels) > 12:
            lines.append(f"  and {len(self.kernels) - 12} other kinds of kernels")
        return "\n".join(lines)


def _kernels() -> Iterator[str]:
    """The operations in each kernel, such as `add, native_layer_norm`, read from the kernel's name."""
    cache = getattr(_module("torch._inductor.codecache"), "PyCodeCache", None)
    for module in getattr(cache, "modules", ()):
        if hasattr(module, "call"):  # skips the files of single kernels
            for name in vars(module):
                found = re.fullmatch(r"(?:triton_\w+?|cpp)_fused_(\w+?)_\d+", name)
                if found:
                    yield found[1].strip("_")


def _reason(text: str) -> str:
    """The first line of a text with many hints."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:200]


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
