"""Data generators: user code that turns a line into samples, in a pipe or in this process."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchfleet.base.errors import DataError

Sample = list[tuple[str, list[Any]]]


class DataGenerator:
    """The base class of both generators: groups of samples, and the two ways to run."""

    _batch = 1  # class attributes: a subclass need not call __init__
    _names: list[str] | None = None

    def set_batch(self, batch_size: int) -> None:
        """Set how many samples `generate_batch` gets at a time."""
        if not isinstance(batch_size, int) or batch_size < 1:
            raise DataError(f"set_batch: expected a number of at least 1, found {batch_size!r}")
        self._batch = batch_size

    def generate_sample(self, line: str | None) -> Callable[[], Iterable[Any]]:
        """Returns a function whose iterator yields the line's samples: lists of (name, values). Users implement it."""
        raise NotImplementedError(f"{type(self).__name__}.generate_sample(line) is to return a function that yields")

    def generate_batch(self, samples: list[Any]) -> Callable[[], Iterable[Any]]:
        """Returns a function whose iterator yields the samples to write for a group; by default the group itself."""

        def same() -> Iterator[Any]:
            yield from samples

        return same

    def run_from_stdin(self) -> None:
        """Print the samples of every line of stdin. Raises DataError for a failing line, or reports it in the output if
        bad lines are skipped.
        """
        skip = os.environ.get("FLEET_ON_BAD_LINE") == "skip"
        out = sys.stdout
        for stream in (sys.stdin, out):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="surrogateescape")

        def complain(number: int, error: Exception) -> None:
            if not skip:
                raise DataError(f"input line {number}: {type(error).__name__}: {error}") from error
            reason = " ".join(str(error).split())
            out.write(f"!bad input line {number}: {type(error).__name__}: {reason}\n")

        for text in self.lines(sys.stdin, complain):
            out.write(text)
        out.flush()

    def run_from_memory(self) -> None:
        """Print the samples of generate_sample(None)."""
        for text in self.lines([None], _raise):
            sys.stdout.write(text)
        sys.stdout.flush()

    def lines(
        self, source: Iterable[str | None], complain: Callable[[int, Exception], None], names: list[str] | None = None
    ) -> Iterator[str]:
        """The multi-slot text of all samples. `complain`: gets the number of a failing line and its error. `names`: the
        slots that every sample must have.
        """
        self._names = names
        waiting: list[Any] = []
        for number, line in enumerate(source, 1):
            try:
                waiting += [_listed(sample) for sample in self.generate_sample(line)() if sample is not None]
            except Exception as error:  # the user's code may raise anything
                complain(number, error)
            while len(waiting) >= self._batch:
                group, waiting = waiting[: self._batch], waiting[self._batch :]
                yield self._text(group, number, complain)
        if waiting:
            yield self._text(waiting, number, complain)

    def _text(self, group: list[Any], number: int, complain: Callable[[int, Exception], None]) -> str:
        """The group's text; if it fails, no text, and one call of `complain` for each of its samples."""
        try:
            return "".join(self._line(sample) for sample in self.generate_batch(group)() if sample is not None)
        except Exception as error:
            for _ in group:
                complain(number, error)
            return ""

    def _line(self, sample: Any) -> str:
        pairs = _listed(sample)
        names = [name for name, _ in pairs]
        if self._names is not None and names != self._names:
            raise DataError(f"expected the slots {', '.join(self._names)}, found {', '.join(map(str, names))}")
        text = " ".join(self._slot(name, values) for name, values in pairs) + "\n"
        self._names = names  # only now: a sample that fails does not set the names
        return text

    def _slot(self, name: str, values: Any) -> str:
        raise NotImplementedError


class MultiSlotDataGenerator(DataGenerator):
    """Values are numbers."""

    def _slot(self, name: str, values: Any) -> str:
        if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
            raise DataError(f"slot '{name}': expected a list of numbers, found {values!r}")
        texts = [_number(name, value) for value in values]
        return " ".join([str(len(texts)), *texts])


class MultiSlotStringDataGenerator(DataGenerator):
    """Values are strings, written unchanged: faster where the numbers are text already."""

    def _slot(self, name: str, values: Any) -> str:
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            raise DataError(f"slot '{name}': expected a list of strings, found {values!r}")
        return " ".join([str(len(values)), *values])


def _number(name: str, value: Any) -> str:
    if type(value) is int or type(value) is float:
        return repr(value)
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, (int, float)):
        return repr(value + 0)
    raise DataError(f"slot '{name}': expected numbers, found {value!r}; for text use MultiSlotStringDataGenerator")


def _listed(sample: Any) -> Sample:
    """The sample as a list: a zip could be iterated only once."""
    pairs = list(sample)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DataError(f"expected a sample of (name, values) pairs, found {pair!r} in it")
    return [(name, values) for name, values in pairs]


def _raise(number: int, error: Exception) -> None:
    raise error
