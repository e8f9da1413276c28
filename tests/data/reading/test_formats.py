"""Text formats: the multi-slot text against a plain-Python reader, and an account of every line that is malformed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import each_of
from support.messages import names, naming
from support.searches import examples

from torchfleet.base.errors import DataError
from torchfleet.data.reading import formats
from torchfleet.data.reading.formats import LineSource, MultiSlotParser
from torchfleet.data.sample_rows import SampleRows
from torchfleet.data.slots import RowSelection, SampleLayout, Slot

SLOTS = [Slot("dense", dtype="float32", dim=2), Slot("ids"), Slot("weights", dtype="float32"), Slot("label", dim=1)]
GOOD = "2 0.5 -1e3 3 1 22 333 1 0.25 1 0"
Sample = list[list[Any]]


def cut_up(text: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(text), size):
        yield text[at : at + size]


def read(
    text: bytes, size: int = 1 << 20, slots: Sequence[Slot] = SLOTS, skip: bool = False
) -> tuple[list[SampleRows], LineSource]:
    source = LineSource("part-0", skip)
    return list(MultiSlotParser(SampleLayout(slots)).read(cut_up(text, size), source)), source


def samples_of(pieces: list[SampleRows], slots: Sequence[Slot] = SLOTS) -> list[Sample]:
    batch = SampleLayout(slots).batch([RowSelection(rows, np.arange(rows.num)) for rows in pieces])
    columns = [
        batch[slot.name].tolist() if slot.dim is not None else [part.tolist() for part in batch[slot.name].split()]
        for slot in slots
    ]
    return [list(values) for values in zip(*columns, strict=True)]


def oracle(line: str) -> Sample:
    """One line, in plain Python; ValueError or StopIteration if it is none."""
    tokens = iter(line.split())
    sample: Sample = []
    for slot in SLOTS:
        count = int(next(tokens))
        values = [next(tokens) for _ in range(count)]
        if count < 0 or slot.dim not in (None, count):
            raise ValueError
        if slot.dtype == "int64":
            if not all(-(2**63) <= int(value) < 2**64 for value in values):
                raise ValueError
            sample.append([(int(value) + 2**63) % 2**64 - 2**63 for value in values])
        else:
            sample.append([float(np.float32(float(value))) for value in values])
    if next(tokens, None) is not None or not np.isfinite(sample[0] + sample[2]).all():
        raise ValueError
    return sample


def refusal(line: str | bytes, slots: Sequence[Slot] = SLOTS, before: str = "") -> str:
    text = before.encode() + (line if isinstance(line, bytes) else line.encode())
    with pytest.raises(DataError) as caught:
        read(text + b"\n" + GOOD.encode() + b"\n", slots=slots)
    return str(caught.value)


ids = st.integers(-(2**63), 2**64 - 1).map(str)
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr)
gaps = st.sampled_from([" ", " ", " ", "\t", "  ", " \t "])


@st.composite
def lines(draw: st.DrawFn) -> str:
    tokens: list[str] = []
    for slot in SLOTS:
        size = {"min_size": slot.dim or 0, "max_size": slot.dim or 4}
        values = draw(st.lists(ids if slot.dtype == "int64" else numbers, **size))
        tokens += [str(len(values)), *values]
    text = draw(st.sampled_from(["", "", " ", "\t"])) + tokens[0]
    for token in tokens[1:]:
        text += draw(gaps) + token
    return text + draw(st.sampled_from(["", "", " ", " \t"]))


# Good lines


@settings(max_examples=examples(60))
@given(st.lists(lines(), max_size=6), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.integers(1, 200))
def test_lines_are_read_as_plain_python_reads_them_wherever_they_are_cut(
    good: list[str], ending: str, ends: bool, size: int
) -> None:
    text = ending.join(good) + ending * (ends and bool(good))
    pieces, source = read(text.encode(), size)
    assert samples_of(pieces) == [oracle(line) for line in good]
    assert source.skipped.num == 0


def test_every_place_to_cut_two_chunks_gives_the_same_samples() -> None:
    good = [GOOD, "2 1 2 0 0 1 1", "2\t-0.125 12345678.9 \t1 18446744073709551615 2 1e-45 3.4e38 1 -7"]
    text = "\r\n".join(good).encode()
    expected = [oracle(line) for line in good]
    for cut in range(len(text) + 1):
        pieces = list(MultiSlotParser(SampleLayout(SLOTS)).read([text[:cut], text[cut:]], LineSource("part-0")))
        assert samples_of(pieces) == expected, cut


def test_chunks_may_be_empty() -> None:
    text = [b"", b"2 0 ", b"", b"1 0 0 1 ", b"", b"5\n", b"", b"2 1 1 0 0 1 6"]
    pieces = list(MultiSlotParser(SampleLayout(SLOTS)).read(text, LineSource("part-0")))
    assert samples_of(pieces) == [[[0, 1], [], [], [5]], [[1, 1], [], [], [6]]]


@each_of("text", [b"", b"2 1 2 0 0 1 3", b"2 1 2 0 0 1 3\n", b"2 1 2 0 0 1 3\r\n", b"2 1 2 0 0 1 3\r"])
def test_the_last_line_may_lack_its_newline(text: bytes) -> None:
    pieces, _ = read(text)
    assert samples_of(pieces) == [[[1, 2], [], [], [3]]] * bool(text)


def test_a_parser_reads_one_file_after_another_and_counts_lines_anew() -> None:
    parser = MultiSlotParser(SampleLayout(SLOTS))
    for name in ("part-0", "part-1"):
        assert len(samples_of(list(parser.read([(GOOD + "\n").encode() * 3], LineSource(name))))) == 3
    with pytest.raises(DataError, match=naming("part-2", "line 2", "'dense'")):
        list(parser.read([(GOOD + "\nx\n").encode()], LineSource("part-2")))
    assert len(samples_of(list(parser.read([GOOD.encode()], LineSource("part-3"))))) == 1


def test_rows_stay_as_they_are_while_the_parser_goes_on() -> None:
    slots = [Slot("a", dim=1)]
    source = LineSource("part-0")
    parser = MultiSlotParser(SampleLayout(slots))
    stream = parser.read(cut_up(b"".join(b"1 %d\n" % i for i in range(5000)), 97), source)
    first = next(stream)
    before = first.words.copy()
    rest = list(stream)
    assert (first.words == before).all()
    assert [sample[0][0] for sample in samples_of([first, *rest], slots)] == list(range(5000))


@pytest.mark.parametrize("size", [1000, 4096, 1 << 20])
def test_a_line_far_longer_than_a_chunk_is_read_whole(size: int) -> None:
    slots = [Slot("ids"), Slot("f", dtype="float32")]
    num = 100_000
    text = f"1 5 0\n{num} {' '.join(map(str, range(num)))} 2 0.5 0.25\n0 1 1\n".encode()
    pieces, _ = read(text, size, slots)
    assert samples_of(pieces, slots) == [[[5], []], [list(range(num)), [0.5, 0.25]], [[], [1.0]]]


def test_a_long_line_in_small_chunks_takes_time_in_proportion() -> None:
    """A pipe may hand over some kilobytes at a time."""
    num = 6 << 20
    text = b"%d " % num + b"1 " * num + b"\n"
    begin = time.thread_time()
    pieces, _ = read(text, 1024, [Slot("ids")])
    assert pieces[0].words[0] == num
    assert time.thread_time() - begin < 2.0  # in one chunk: a tenth of it


def test_a_line_without_end_is_refused_before_memory_is_full() -> None:
    endless = (b"1 " * 512 for _ in iter(int, 1))
    with mock.patch.object(formats, "MAX_LINE", 100_000), pytest.raises(DataError) as caught:
        list(MultiSlotParser(SampleLayout(SLOTS)).read(endless, LineSource("part-0")))
    assert names(str(caught.value), "part-0", "line 1", "100,000")


def test_counts_of_several_digits_and_zeros_in_front_are_counts() -> None:
    slots = [Slot("a"), Slot("b", dim=12)]
    twelve = " ".join("9" * 12)
    pieces, _ = read(f"012 {twelve} 012 {twelve}\n00 0012 {twelve}\n".encode(), slots=slots)
    assert samples_of(pieces, slots) == [[[9] * 12, [9] * 12], [[], [9] * 12]]


def test_a_slot_alone_may_be_empty_in_every_line() -> None:
    pieces, _ = read(b"0\n0\n0", slots=[Slot("a")])
    assert samples_of(pieces, [Slot("a")]) == [[[]], [[]], [[]]]


def test_thousands_of_numbers_for_python_in_one_line_and_in_many_are_read() -> None:
    slots = [Slot("f", dtype="float32")]
    token = "0.30000000000000000000001"
    good = [f"{n} {' '.join([token] * n)}" for n in (700, 700, 5000, 0, 1, 3000)]
    pieces, _ = read("\n".join(good).encode(), slots=slots)
    assert [len(sample[0]) for sample in samples_of(pieces, slots)] == [700, 700, 5000, 0, 1, 3000]
    assert {value for sample in samples_of(pieces, slots) for value in sample[0]} == {float(np.float32(0.3))}


# Malformed lines: what, where, and what was found


@each_of(
    ("line", "values"),
    [
        ("", ""),
        (" \t ", ""),
        ("\r", ""),
        ("x", "'dense'; 'x'"),
        ("-1", "'dense'; '-1'"),
        ("2.0 1 1", "'dense'; '2.0'"),
        ("2 1 1 99999999999999999999 1", "'ids'; '99999999999999999999'"),
        ("2 1 1 2147483648 1", "'ids'; '2147483648'"),
        ("3 1 1 1", "'dense'; dim=2; 3"),
        ("0 0 0 1 1", "'dense'; dim=2; 0"),
        ("2", "'dense'; 2; 0"),
        ("2 1", "'dense'; 2; 1"),
        ("2 1 1 3 7 8", "'ids'; 3; 2"),
        ("2 1 1 2147483647 5", "'ids'; 2147483647; 1"),
        ("2 1 1", "'ids'; 2; 4"),
        ("2 1 1 0 0", "'label'; 4; 4"),
        ("2 1 1 2 7 abc", "'ids'; 'abc'"),
        ("2 1 1 2 7 1.5", "'ids'; '1.5'"),
        ("2 1 1 2 7 1x 0", "'ids'; '1x'"),
        ("2 1 1 1 18446744073709551616",
         "'ids'; int64; '18446744073709551616'"),
        ("2 1 1 1 -9223372036854775809",
         "'ids'; int64; '-9223372036854775809'"),
        ("2 1 abc", "'dense'; 'abc'"),
        ("2 1 nan", "'dense'; 'nan'"),
        ("2 1 1 0 1 -inf", "'weights'; '-inf'"),
        ("2 1 1 0 1 1e39", "'weights'; float32; '1e39'"),
        ("2 1 1 0 1 -1e400 1 5", "'weights'; float32; '-1e400'"),
        ("2 1 1 0 0 1 5 6", "'label'; '6'"),
        ("2 1 1 0 0 1 5 \t#", "'label'; '#'"),
        ("2 1 1 0 0 1 " + "z" * 50, f"'label'; '{'z' * 40}...'"),
        ("\ufeff2 1 1 0 0 1 5", "'dense'; '\\ufeff2'"),
        ("!bad", "'dense'; '!bad'"),
    ],
)  # fmt: skip
@each_of("num_before", [0, 3])
@each_of("ending", ["", "\r"])
def test_a_malformed_line_is_named_with_its_slot_and_what_was_found(
    line: str, values: str, num_before: int, ending: str
) -> None:
    said = refusal(line + ending, before=(GOOD + "\n") * num_before)
    assert names(said, "part-0", f"line {num_before + 1}", *filter(None, values.split("; ")))


@each_of(
    ("line", "found"),
    [
        (b"2 1 1 1 \xff\xfe", "'\ufffd\ufffd'"),
        (b"2 1 1 1 5\x00", "'5\\x00'"),
        (b"2 1 1 1 \x1b[0m", "'\\x1b[0m'"),
        (b"2 1 1 1 5\x0b6", "'5\\x0b6'"),
        (b"2 1 1 1 \x0c5", "'\\x0c5'"),
        (b"2 1 1 1 5\xc2\xa06", "'5\\xa06'"),
    ],
)
def test_strange_bytes_are_shown_as_they_are(line: bytes, found: str) -> None:
    assert names(refusal(line), "part-0", "line 1", "'ids'", found)


@settings(max_examples=examples(60))
@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_are_samples_or_malformed_lines_and_none_is_lost(data: bytes, size: int) -> None:
    pieces, source = read(data, size, skip=True)
    num_lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    assert sum(rows.num for rows in pieces) + source.skipped.num == num_lines


@settings(max_examples=examples(60))
@given(st.lists(lines(), min_size=1, max_size=3), st.data())
def test_a_good_text_with_one_byte_changed_is_read_as_python_would_or_refused(
    good: list[str], data: st.DataObject
) -> None:
    text = bytearray("\n".join(good).encode())
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(b"0 9-.e+x\n\t\xff\x00"))
    pieces, source = read(bytes(text), skip=True)
    expected, num_bad = [], 0
    for line in bytes(text).split(b"\n")[: text.count(b"\n") + (not text.endswith(b"\n"))]:
        try:
            with np.errstate(over="ignore"):
                expected.append(oracle(line.decode("ascii")))
        except (ValueError, StopIteration):
            num_bad += 1
    assert samples_of(pieces) == expected
    assert source.skipped.num == num_bad


def test_the_first_malformed_line_is_named_when_a_later_one_is_found_sooner() -> None:
    """Numbers that the kernel leaves to Python are looked at after all lines of the chunk."""
    slots = [Slot("f", dtype="float32", dim=1)]
    text = b"1 1\n1 0.1234567890123456789012345\n1 " + b"9" * 60 + b"\n1 1\n1 abc\n"
    with pytest.raises(DataError, match=naming("part-0", "line 3", "'f'", "float32", f"'{'9' * 40}...'")):
        read(text, slots=slots)
    pieces, source = read(text, slots=slots, skip=True)
    assert samples_of(pieces, slots) == [[[1.0]], [[float(np.float32(0.1234567890123456789))]], [[1.0]]]
    assert source.skipped.num == 2


# Leaving them out


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from([GOOD, "2 1 2 0 0 1 1", "", "x", "2 1 2 1 a 0 1 1", "2 1 1e999 0 0 1 1"]), max_size=12),
    st.integers(1, 60),
)
def test_skipped_lines_are_counted_and_the_first_is_kept(text: list[str], size: int) -> None:
    good = [line for line in text if line in (GOOD, "2 1 2 0 0 1 1")]
    pieces, source = read("".join(line + "\n" for line in text).encode(), size, skip=True)
    assert samples_of(pieces) == [oracle(line) for line in good]
    assert source.skipped.num == len(text) - len(good)
    bad = next((number for number, line in enumerate(text, 1) if line not in good), None)
    assert not bad or names(source.skipped.first, "part-0", f"line {bad}")
    assert bool(source.skipped.first) == (bad is not None)


def test_thousands_of_malformed_lines_in_a_row_are_skipped() -> None:
    pieces, source = read((b"\n" * 5000 + GOOD.encode() + b"\n" + b"x\n" * 5000), skip=True)
    assert len(samples_of(pieces)) == 1
    assert source.skipped.num == 10_000
    assert names(source.skipped.first, "part-0", "line 1")


def test_a_malformed_line_gives_none_of_its_values() -> None:
    slots = [Slot("a"), Slot("f", dtype="float32")]
    text = b"3 1 2 3 1 0.1234567890123456789012345\n3 4 5 6 2 0.1234567890123456789012345 x\n1 7 0\n"
    pieces, source = read(text, slots=slots, skip=True)
    assert samples_of(pieces, slots) == [[[1, 2, 3], [float(np.float32(0.1234567890123456789))]], [[7], []]]
    assert source.skipped.num == 1
