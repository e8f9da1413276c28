"""The Criteo format: raw rows against a plain-Python reader, and the string hash for ever."""

from __future__ import annotations

import itertools
import lzma
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cases import each_of
from support.messages import names, naming
from support.paths import REAL_DATA
from support.searches import examples

import torchfleet as fleet
from torchfleet.base.errors import DataError
from torchfleet.data.reading.formats import LineSource
from torchfleet.data.sample_rows import SampleRows
from torchfleet.data.slots import Batch, RowSelection, SampleLayout, Slot
from torchfleet.ps.kernels.text import hash_all

REAL = REAL_DATA / "criteo" / "kaggle.txt.xz"
LOW = [0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
DIFF = [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]


def mix(x: int) -> int:
    """As docs/data.md has it."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 % 2**64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    return x


def documented_hash(data: bytes, seed: int) -> int:
    h = mix((seed + 0x9E3779B97F4A7C15 * (len(data) + 1)) % 2**64)
    padded = data + bytes(-len(data) % 8)
    for w in np.frombuffer(padded, "<u8").tolist():
        h = mix(h ^ w)
    return h


def read(text: bytes, size: int = 1 << 20, skip: bool = False, slots: Sequence[Slot] | None = None, **options: Any):
    layout = SampleLayout(slots or fleet.CriteoFormat.slots())
    source = LineSource("part-0", skip)
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    pieces: list[SampleRows] = list(fleet.CriteoFormat(**options).parser(layout).read(chunks, source))
    return layout.batch([RowSelection(rows, np.arange(rows.num)) for rows in pieces]), source


def oracle(lines: list[bytes], hash_size: int = 1_000_001, log_scale: bool = False) -> tuple[Any, Any, Any]:
    """(dense, ids, labels) of good lines, in plain Python."""
    dense, ids, labels = [], [], []
    for line in lines:
        fields = line.split(b"\t")
        assert len(fields) == 40
        scaled = [(int(f) - low) / diff if f else 0.0 for f, low, diff in zip(fields[1:14], LOW, DIFF, strict=True)]
        dense.append([math.log1p(max(0.0, x)) for x in scaled] if log_scale else scaled)
        ids.append([documented_hash(field, column) % hash_size for column, field in enumerate(fields[14:], 1)])
        labels.append([int(fields[0])])
    return (
        torch.tensor(dense, dtype=torch.float64).reshape(-1, 13).to(torch.float32),
        torch.tensor(ids, dtype=torch.int64).reshape(-1, 26),
        torch.tensor(labels, dtype=torch.int64).reshape(-1, 1),
    )


def check(batch: Batch, lines: list[bytes], **options: Any) -> None:
    dense, ids, labels = oracle(lines, **options)
    assert batch.num_samples == len(lines)
    if options.get("log_scale"):
        torch.testing.assert_close(batch["dense_input"], dense, rtol=2e-7, atol=0)
    else:
        assert torch.equal(batch["dense_input"], dense)
    assert torch.equal(torch.cat([batch[f"C{i}"] for i in range(1, 27)], 1), ids)
    assert torch.equal(batch["label"], labels)


def row(label: str = "1", numbers: Sequence[str] = ("5",) * 13, fields: Sequence[str] = ("68fd1e64",) * 26) -> bytes:
    return "\t".join([label, *numbers, *fields]).encode()


number = st.one_of(st.just(""), st.integers(-3, 70000).map(str), st.integers(-(10**15) + 1, 10**15 - 1).map(str))
field = st.one_of(
    st.just(b""),
    st.text("0123456789abcdef", min_size=8, max_size=8).map(str.encode),
    st.binary(max_size=30).map(lambda data: data.translate(None, b"\t\n\r")),
)


@st.composite
def rows(draw: st.DrawFn) -> bytes:
    numbers = [draw(number).encode() for _ in range(13)]
    return b"\t".join([draw(st.sampled_from([b"0", b"1"])), *numbers, *(draw(field) for _ in range(26))])


# The string hash


@each_of(
    ("text", "seed", "value"),
    [
        ("", 0, 0xE220A8397B1DCDAF),
        ("", 26, 0xC3B7F4E80F554DDA),
        ("a", 0, 0x0386D66DB423D8FA),
        ("68fd1e64", 1, 0x65080FEC9524914F),
        ("12345678", 0, 0x0012C7CCBE9607E9),
        ("123456789", 7, 0x8005BFF52CDEDB1B),
        ("é", 0, 0xA8062950CCC531BF),
        ("The quick brown fox jumps over the lazy dog", 18446744073709551615, 0x9E8218E2241BC048),
        (b"\x00", 0, 0xCD73FE3DE975AC26),
        (b"\xff\xfe", 5, 0x0C651E15ADF1E1E9),
    ],
)
def test_the_string_hash_never_changes(text: str | bytes, seed: int, value: int) -> None:
    assert fleet.hash_string(text, seed) == value
    data = text.encode() if isinstance(text, str) else text
    assert documented_hash(data, seed) == value


def test_the_seed_of_the_hash_is_0_unless_said_otherwise() -> None:
    assert fleet.hash_string("abc") == fleet.hash_string("abc", seed=0) != fleet.hash_string("abc", seed=1)


@pytest.mark.slow
@settings(max_examples=examples(50))
@given(st.one_of(st.text(max_size=40), st.binary(max_size=40)), st.integers(0, 2**64 - 1))
@example("", 0)
@example(b"\x00", 0)
@example(bytes(8), 0)
def test_the_string_hash_is_the_documented_one(text: str | bytes, seed: int) -> None:
    data = text.encode() if isinstance(text, str) else text
    assert fleet.hash_string(text, seed) == fleet.hash_string(data, seed) == documented_hash(data, seed)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 2**64 - 1))
def test_the_kernel_hashes_as_python_does(texts: list[bytes], seed: int) -> None:
    data = np.frombuffer(b"".join(texts) + b"\xff" * 8, np.uint8)
    ends = np.array(list(itertools.accumulate(map(len, texts))), np.int64)
    hashes = np.empty(len(texts), np.uint64)
    hash_all(data, ends, np.uint64(seed), hashes)
    assert hashes.tolist() == [documented_hash(text, seed) for text in texts]


def test_zero_bytes_at_the_end_count() -> None:
    assert len({fleet.hash_string(b"a" + bytes(num)) for num in range(20)}) == 20


def test_bytes_that_are_no_utf8_hash_as_they_are_in_a_line_of_a_generator() -> None:
    """A generator gets such bytes as lone surrogates; its ids must be those that CriteoFormat makes of the file."""
    field = b"ab\xff\xfe\x80"
    text = field.decode("utf-8", "surrogateescape")
    assert fleet.hash_string(text, 3) == documented_hash(field, 3)


# Rows


@pytest.mark.slow
@settings(max_examples=examples(20))
@given(
    st.lists(rows(), max_size=4),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.integers(1, 2000),
    st.sampled_from([1, 2, 1000, 1_000_001, 2**63 - 1]),
    st.booleans(),
)
def test_rows_are_read_as_plain_python_reads_them_wherever_they_are_cut(
    lines: list[bytes], ending: bytes, ends: bool, size: int, hash_size: int, log_scale: bool
) -> None:
    text = ending.join(lines) + ending * (ends and bool(lines))
    batch, _ = read(text, size, hash_size=hash_size, log_scale=log_scale)
    check(batch, lines, hash_size=hash_size, log_scale=log_scale)


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("num", [1, 3000])
def test_rows_of_nothing_but_tabs_are_read(is_ragged: bool, num: int) -> None:
    """The shortest row there is: every byte of it becomes up to three words."""
    slots = [Slot(s.name) if is_ragged and s.name.startswith("C") else s for s in fleet.CriteoFormat.slots()]
    batch, _ = read((b"0" + b"\t" * 39 + b"\n") * num, slots=slots)
    assert batch["dense_input"].tolist() == [[0.0] * 13] * num
    assert batch["label"].tolist() == [[0]] * num
    for i in range(1, 27):
        expected = [documented_hash(b"", i) % 1_000_001] * num
        if is_ragged:
            assert batch[f"C{i}"].values.tolist() == expected
            assert batch[f"C{i}"].offsets.tolist() == list(range(num))
        else:
            assert batch[f"C{i}"].flatten().tolist() == expected


def test_the_slots_are_dense_input_26_ids_and_label() -> None:
    assert fleet.CriteoFormat.slots() == [
        Slot("dense_input", dtype="float32", dim=13),
        *(Slot(f"C{i}", dim=1) for i in range(1, 27)),
        Slot("label", dim=1),
    ]


def test_log_scale_takes_the_logarithm_of_the_scaled_number() -> None:
    line = row(numbers=["20", "-10", "", *["7"] * 10])
    batch, _ = read(line, log_scale=True)
    found = batch["dense_input"][0].tolist()
    assert found[0] == pytest.approx(math.log(2), rel=1e-6)
    assert found[1:3] == [0.0, 0.0]
    plain, _ = read(line)
    assert plain["dense_input"][0, 1].item() == pytest.approx(-7 / 603)


@each_of(
    ("line", "values"),
    [
        (b"", ""),
        (b"\r", ""),
        (row()[:-9], "40; 39"),
        (row() + b"\t", "40; 41"),
        (row() + b"\tx" * 100, "40; 140"),
        (b"1", "40; 1"),
        (row().replace(b"\t", b" "), "column 1; 0; 1; '1 5 5"),
        (row(label="2"), "column 1; 0; 1; '2'"),
        (row(label=""), "column 1; 0; 1; ''"),
        (row(label="-1"), "column 1; 0; 1; '-1'"),
        (row(label="01"), "column 1; 0; 1; '01'"),
        (row(label="x" * 60), f"column 1; 0; 1; '{'x' * 40}...'"),
        (row(numbers=["x", *["1"] * 12]), "column 2; 'x'"),
        (row(numbers=[*["1"] * 12, "-"]), "column 14; '-'"),
        (row(numbers=[*["1"] * 5, " ", *["1"] * 7]), "column 7; ' '"),
        (row(numbers=[*["1"] * 5, "nan", *["1"] * 7]), "column 7; 'nan'"),
        (row(numbers=[*["1"] * 5, "1-", *["1"] * 7]), "column 7; '1-'"),
        (row(numbers=[*["1"] * 5, "é", *["1"] * 7]), "column 7; 'é'"),
    ],
)
@each_of("num_before", [0, 2])
def test_a_malformed_row_is_named_with_its_column(line: bytes, values: str, num_before: int) -> None:
    text = (row() + b"\n") * num_before + line + b"\n" + row() + b"\n"
    with pytest.raises(DataError) as caught:
        read(text)
    assert names(str(caught.value), "part-0", f"line {num_before + 1}", *filter(None, values.split("; ")))
    batch, source = read(text, skip=True)
    check(batch, [row()] * (num_before + 1))
    assert source.skipped.num == 1
    assert source.skipped.first == str(caught.value)


@settings(max_examples=examples(60))
@given(st.binary(max_size=200), st.integers(1, 64))
def test_any_bytes_are_rows_or_malformed_lines_and_none_is_lost(data: bytes, size: int) -> None:
    batch, source = read(data, size, skip=True)
    num_lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    assert batch.num_samples + source.skipped.num == num_lines


def test_a_field_of_many_kilobytes_is_hashed_whole() -> None:
    line = row(fields=["x" * 3_000_000, *["a"] * 25])
    batch, _ = read(line + b"\n" + row(), 1 << 16)
    check(batch, [line, row()])


@each_of("hash_size", [0, -1, 2**63, 2**64, 1000.5, "1000", None])
def test_an_impossible_hash_size_is_refused(hash_size: Any) -> None:
    with pytest.raises(DataError, match="hash_size"):
        fleet.CriteoFormat(hash_size=hash_size)


@each_of("change", ["fewer", "order", "dtype", "dim", "mixed"])
def test_other_slots_are_refused(change: str) -> None:
    slots = fleet.CriteoFormat.slots()
    slots = {
        "fewer": slots[:-1],
        "order": slots[::-1],
        "dtype": [Slot("dense_input", dim=13), *slots[1:]],
        "dim": [Slot("dense_input", dtype="float32", dim=12), *slots[1:]],
        "mixed": [slots[0], Slot("C1"), *slots[2:]],
    }[change]
    with pytest.raises(DataError, match=naming("CriteoFormat", "fleet.CriteoFormat.slots()")):
        fleet.CriteoFormat().parser(SampleLayout(slots))


@pytest.mark.skipif(not REAL.exists(), reason="needs the shared data")
def test_real_rows_are_read_as_plain_python_reads_them() -> None:
    with lzma.open(REAL) as stream:
        text = stream.read()
    lines = text.split(b"\n")[:-1]
    batch, _ = read(text)
    assert batch.num_samples == len(lines) == 24_326
    assert batch["label"].double().mean().item() == pytest.approx(0.234, abs=1e-3)
    some = lines[:200] + lines[-100:]
    picked, _ = read(b"\n".join(some))
    check(picked, some)
    assert torch.equal(
        torch.cat([picked["C26"], picked["label"]], 1)[:200], torch.cat([batch["C26"], batch["label"]], 1)[:200]
    )
