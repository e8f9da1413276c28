"""Reads a file into rows: opened, passed through a command or a generator, and parsed."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchfleet.base.errors import DataError
from torchfleet.data.reading import streams
from torchfleet.data.reading.criteo import CriteoFormat
from torchfleet.data.reading.formats import MAX_LINE, LineSource, MultiSlotParser, Parser
from torchfleet.data.reading.generator import DataGenerator
from torchfleet.data.reading.parquet import ParquetFormat, ParquetReader
from torchfleet.data.reading.pipe import piped
from torchfleet.data.sample_rows import SampleRows
from torchfleet.data.slots import SampleLayout, Slot

_GROUP = 1 << 16  # bytes of text from a generator before they are parsed


@dataclass(frozen=True)
class ReadOptions:
    """How files become rows. Contradictions raise DataError at once."""

    use_var: Sequence[Slot]
    pipe_command: str | DataGenerator | None = None
    data_format: CriteoFormat | ParquetFormat | None = None
    on_bad_line: str = "error"

    def __post_init__(self) -> None:
        if self.on_bad_line not in ("error", "skip"):
            raise DataError(f"on_bad_line must be 'error' or 'skip', found {self.on_bad_line!r}")
        if self.pipe_command is not None and self.data_format is not None:
            raise DataError("pipe_command and data_format exclude each other: leave one of them out")
        command: Any = self.pipe_command
        if isinstance(command, type) and issubclass(command, DataGenerator):
            raise DataError(f"pipe_command={command.__name__} is a class: give an object of it, with ()")
        if not isinstance(command, (str, DataGenerator, type(None))) or command == "":
            raise DataError(f"pipe_command must be a shell command or a data generator, found {command!r}")
        if not isinstance(self.data_format, (CriteoFormat, ParquetFormat, type(None))):
            raise DataError(
                f"data_format must be a fleet.CriteoFormat or fleet.ParquetFormat, found {self.data_format!r}"
            )
        if isinstance(self.data_format, ParquetFormat) and self.on_bad_line == "skip":
            raise DataError("on_bad_line='skip' is for text: a Parquet file has no malformed lines. Leave it out.")
        self.reader(SampleLayout(self.use_var))  # raises for slots that do not fit the format

    def reader(self, layout: SampleLayout, is_over: Callable[[], bool] = lambda: False) -> FileReader | ParquetReader:
        """A reader for one thread. `is_over`: whether to stop reading; checked while a pipe command has no output."""
        if isinstance(self.data_format, ParquetFormat):
            return ParquetReader(self.data_format, layout, is_over)
        return FileReader(self, self._parser(layout), layout, is_over)

    def _parser(self, layout: SampleLayout) -> Parser:
        form = self.data_format
        return form.parser(layout) if isinstance(form, CriteoFormat) else MultiSlotParser(layout)


class FileReader:
    """Reads one file after another. Used by one thread."""

    def __init__(self, options: ReadOptions, parser: Parser, layout: SampleLayout, is_over: Callable[[], bool]) -> None:
        self._options, self._parser, self._layout, self._is_over = options, parser, layout, is_over
        self._skip = options.on_bad_line == "skip"

    def source(self, path: str) -> LineSource:
        """The source of this file's lines, for `read`; it counts skipped lines."""
        command = self._options.pipe_command
        name = f"{path} (output of `{command}`)" if isinstance(command, str) else path
        return LineSource(name, self._skip)

    def read(self, path: str, source: LineSource) -> Iterator[SampleRows]:
        """The file's rows, some at a time. Malformed lines are passed to `source.refuse`."""
        command = self._options.pipe_command
        if isinstance(command, str):
            return self._parser.read(piped(path, command, self._skip, self._is_over), source)
        if command is None:
            return self._parser.read(streams.chunks(streams.open_file(path), path), source)
        return self._parser.read(self._generated(path, command, source), source)

    def _generated(self, path: str, generator: DataGenerator, source: LineSource) -> Iterator[bytes]:
        def complain(number: int, error: Exception) -> None:
            reason = f": {type(generator).__name__} raised {type(error).__name__}: {error}"
            try:
                source.refuse(number, reason)
            except DataError as refusal:
                raise refusal from error

        stream = io.BufferedReader(_Chunked(path))
        lines = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape")
        names = [slot.name for slot in self._layout.slots]
        group: list[str] = []
        size = 0
        for text in generator.lines(_bounded(lines, source.name), complain, names):
            group.append(text)
            size += len(text)
            if size >= _GROUP:
                yield "".join(group).encode(errors="surrogateescape")
                group, size = [], 0
        if group:
            yield "".join(group).encode(errors="surrogateescape")


def _bounded(lines: io.TextIOWrapper, name: str) -> Iterator[str]:
    """Yield the lines. Raises DataError for a line of MAX_LINE characters or more."""
    for number in itertools.count(1):
        line = lines.readline(MAX_LINE)
        if len(line) == MAX_LINE and not line.endswith("\n"):
            raise DataError(f"{name}, line {number} is longer than {MAX_LINE:,} characters: is this a text file?")
        if not line:
            return
        yield line


class _Chunked(io.RawIOBase):
    """A file's chunks as a stream, so that damaged files raise DataError here too."""

    def __init__(self, path: str) -> None:
        self._chunks = streams.chunks(streams.open_file(path), path)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        num = min(len(buffer), len(self._rest))
        buffer[:num] = self._rest[:num]
        self._rest = self._rest[num:]
        return num
