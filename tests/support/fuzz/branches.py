"""Which branches of some modules an execution takes, as sys.settrace sees them: from one line to the next."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

Arc = tuple[str, str, int, int]  # file, function, from line, to line
_CONDITIONAL = ("POP_JUMP", "JUMP_IF", "FOR_ITER")


class Branches:
    """Arcs that were seen, of all that the modules' conditional jumps can take."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._files = {str(module.__file__) for module in modules}
        self._all = {arc for file in self._files for arc in _arcs_of(file)}
        self.seen: set[Arc] = set()  # more than branches: every step from a line to the next

    def counts(self) -> tuple[int, int]:
        """Branches that were taken, and how many there are, in functions that were entered."""
        entered = {arc[:2] for arc in self.seen}
        return len(self._all & self.seen), sum(arc[:2] in entered for arc in self._all)

    def watch(self, call: Callable[[], Any]) -> None:
        """Call, and note what it takes. What it raises is raised."""
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        file, name, last, add = code.co_filename, code.co_name, code.co_firstlineno, self.seen.add

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                add((file, name, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line


def _arcs_of(file: str) -> Iterator[Arc]:
    for code in _codes(compile(Path(file).read_text(), file, "exec")):
        if not code.co_name.startswith("<module"):
            yield from _arcs(file, code)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _arcs(file: str, code: CodeType) -> Iterator[Arc]:
    lines = {at: line for start, stop, line in code.co_lines() if line for at in range(start, stop, 2)}
    instructions = [found for found in dis.get_instructions(code) if found.offset in lines]
    for found, following in itertools.pairwise(instructions):
        if any(part in found.opname for part in _CONDITIONAL):
            here = lines[found.offset]
            ways = {lines.get(int(found.argval), here), lines[following.offset]}
            if len(ways) == 2:  # a jump within a line is not seen
                yield from ((file, code.co_name, here, there) for there in ways if there != here)
