"""Slots and rows: samples as lists of values, against the batches that are made of their rows."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import each_of
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import DataError
from torchfleet.data.sample_rows import NO_ROWS, SampleRows
from torchfleet.data.slots import Batch, Ragged, RowSelection, SampleLayout, Slot

Sample = list[list[Any]]  # the values of each slot

slot_kinds = st.tuples(st.sampled_from(["int64", "float32"]), st.sampled_from([None, None, 1, 2, 3, 13]))
ids = st.integers(-(2**63), 2**63 - 1)
numbers = st.floats(width=32, allow_nan=False)


def as_words(slots: Sequence[Slot], sample: Sample) -> list[int]:
    """A row as docs say: a count where it may vary, then the values, low word first."""
    words: list[int] = []
    for slot, values in zip(slots, sample, strict=True):
        words += [len(values)] * (slot.dim is None)
        for value in values:
            if slot.dtype == "int64":
                words += [value % 2**32, (value % 2**64) >> 32]
            else:
                words.append(int(np.float32(value).view(np.uint32)))
    return words


def as_rows(slots: Sequence[Slot], samples: list[Sample]) -> SampleRows:
    words = [as_words(slots, sample) for sample in samples]
    starts = np.cumsum([0, *map(len, words)], dtype=np.int64)
    return SampleRows(np.array([word for row in words for word in row], np.uint32), starts)


def check_batch(slots: Sequence[Slot], batch: Batch, samples: list[Sample]) -> None:
    assert list(batch) == [slot.name for slot in slots]
    assert len(batch) == len(slots)
    assert batch.num_samples == len(samples)
    for s, slot in enumerate(slots):
        dtype = torch.int64 if slot.dtype == "int64" else torch.float32
        columns = [sample[s] for sample in samples]
        flat = torch.tensor([value for values in columns for value in values], dtype=dtype)
        found = batch[slot.name]
        if slot.dim is None:
            assert isinstance(found, Ragged)
            assert found.num_samples == len(samples)
            assert found.offsets.dtype == torch.int64
            assert found.offsets.tolist() == np.cumsum([0, *map(len, columns)])[:-1].tolist()
            assert [part.tolist() for part in found.split()] == [torch.tensor(v, dtype=dtype).tolist() for v in columns]
            values = found.values
        else:
            assert found.shape == (len(samples), slot.dim)
            values = found.flatten()
        assert values.dtype == dtype
        assert values.is_contiguous()
        assert values.data_ptr() % values.element_size() == 0
        assert values.numpy().tobytes() == flat.numpy().tobytes()


@st.composite
def layouts(draw: st.DrawFn) -> list[Slot]:
    kinds = draw(st.lists(slot_kinds, min_size=1, max_size=6))
    return [Slot(f"s{i}", dtype=dtype, dim=dim) for i, (dtype, dim) in enumerate(kinds)]


def samples_of(slots: list[Slot], max_size: int = 6) -> st.SearchStrategy[list[Sample]]:
    return st.lists(
        st.tuples(
            *(
                st.lists(
                    ids if slot.dtype == "int64" else numbers,
                    min_size=slot.dim or 0,
                    max_size=slot.dim if slot.dim is not None else 5,
                )
                for slot in slots
            )
        ).map(list),
        max_size=max_size,
    )


# Batches against a plain-Python oracle


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.data())
def test_a_batch_of_several_pieces_holds_their_samples_in_order(data: st.DataObject) -> None:
    slots = data.draw(layouts())
    layout = SampleLayout(slots)
    pieces, expected = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        samples = data.draw(samples_of(slots))
        order = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=8)) if samples else []
        pieces.append(RowSelection(as_rows(slots, samples), np.array(order, np.int64)))
        expected += [samples[i] for i in order]
    check_batch(slots, layout.batch(pieces), expected)


@pytest.mark.parametrize("num", [1, 2, 7])
def test_int64_values_are_aligned_behind_an_odd_number_of_floats(num: int) -> None:
    slots = [
        Slot("f", dtype="float32", dim=1),
        Slot("ids"),
        Slot("g", dtype="float32"),
        Slot("one", dim=1),
        Slot("h", dtype="float32", dim=3),
    ]
    samples: list[Sample] = [[[0.5], [2**40 + i] * (i % 3), [1.5] * (i % 2), [-i], [1.0, 2.0, 3.0]] for i in range(num)]
    check_batch(slots, SampleLayout(slots).batch([RowSelection(as_rows(slots, samples), np.arange(num))]), samples)


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_a_slot_that_is_empty_in_every_sample_is_an_empty_ragged(dtype: str) -> None:
    slots = [Slot("empty", dtype=dtype), Slot("label", dim=1)]
    samples: list[Sample] = [[[], [i]] for i in range(3)]
    batch = SampleLayout(slots).batch([RowSelection(as_rows(slots, samples), np.arange(3))])
    check_batch(slots, batch, samples)
    assert batch["empty"].values.shape == (0,)
    assert batch["empty"].offsets.tolist() == [0, 0, 0]


def test_a_batch_without_samples_has_empty_tensors() -> None:
    slots = [Slot("a", dim=3), Slot("b"), Slot("c", dtype="float32", dim=2)]
    for pieces in ([], [RowSelection(NO_ROWS, np.empty(0, np.int64))]):
        check_batch(slots, SampleLayout(slots).batch(pieces), [])


def test_a_sample_with_very_many_values_is_whole() -> None:
    slots = [Slot("ids"), Slot("f", dtype="float32")]
    many = list(range(200_001))
    samples: list[Sample] = [[many, []], [[], [float(i) for i in many[:999]]], [[-1], [0.25]]]
    check_batch(slots, SampleLayout(slots).batch([RowSelection(as_rows(slots, samples), np.arange(3))]), samples)


def test_offsets_are_those_of_an_embedding_bag() -> None:
    slots = [Slot("ids")]
    samples: list[Sample] = [[[1, 2, 3]], [[]], [[0, 0]], [[]]]
    ragged = SampleLayout(slots).batch([RowSelection(as_rows(slots, samples), np.arange(4))])["ids"]
    bag = torch.nn.EmbeddingBag(4, 2, mode="sum")
    expected = torch.stack([bag.weight[torch.tensor(s[0], dtype=torch.int64)].sum(0) for s in samples])
    assert torch.allclose(bag(ragged.values, ragged.offsets), expected)


def test_batches_do_not_share_memory_with_their_rows_or_each_other() -> None:
    slots = [Slot("a", dim=1)]
    rows = as_rows(slots, [[[1]], [[2]]])
    first, second = (SampleLayout(slots).batch([RowSelection(rows, np.arange(2))]) for _ in range(2))
    first["a"].zero_()
    rows.words[:] = 9
    assert second["a"].tolist() == [[1], [2]]


# Rows


@settings(max_examples=examples(50))
@given(st.data())
def test_picked_rows_are_those_rows_in_that_order(data: st.DataObject) -> None:
    slots = data.draw(layouts())
    samples = data.draw(samples_of(slots, max_size=8).filter(bool))
    order = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=12))
    picked = as_rows(slots, samples).pick(np.array(order, np.int64))
    expected = as_rows(slots, [samples[i] for i in order])
    assert picked.num == len(order)
    assert picked.words.tolist() == expected.words.tolist()
    assert picked.starts.tolist() == expected.starts.tolist()


@settings(max_examples=examples(60))
@given(st.data())
def test_rows_of_another_length_than_their_counts_say_are_found(data: st.DataObject) -> None:
    slots = data.draw(layouts())
    samples = data.draw(samples_of(slots).filter(bool))
    layout, rows = SampleLayout(slots), as_rows(slots, samples)
    assert layout.check(rows)
    last = len(rows.starts) - 1
    longer = SampleRows(np.append(rows.words, np.uint32(0)), rows.starts + (np.arange(last + 1) == last))
    assert not layout.check(longer)
    if len(rows.words):
        assert not layout.check(SampleRows(rows.words[:-1], np.minimum(rows.starts, len(rows.words) - 1)))
        assert not layout.check(SampleRows(rows.words, rows.starts[:-1]))
    assert not layout.check(SampleRows(rows.words, rows.starts + 1))


def test_counts_that_reach_far_beyond_the_row_are_found() -> None:
    layout = SampleLayout([Slot("a"), Slot("b", dtype="float32")])
    for words in ([2**32 - 1, 0, 0], [1, 5, 0, 2**32 - 1], [0, 2**31], [0]):
        rows = SampleRows(np.array(words, np.uint32), np.array([0, len(words)]))
        assert not layout.check(rows)
    words = np.array([1, 5, 0, 0], np.uint32)
    assert layout.check(SampleRows(words, np.array([0, 4])))
    for starts in ([0, 9, 4], [0, -4, 4], [0, 4, 0, 4], [4, 4]):
        assert not layout.check(SampleRows(words, np.array(starts)))


# Slot, Layout, Batch, Ragged


def test_a_slot_is_int64_and_of_any_length_unless_said_otherwise() -> None:
    slot = Slot("C1")
    assert (slot.name, slot.dtype, slot.dim) == ("C1", "int64", None)
    assert Slot("C1") == Slot("C1", "int64", None)
    assert Slot("C1") != Slot("C1", dim=1)


@pytest.mark.parametrize("name", ["", None, 5, b"a"])
def test_a_slot_needs_a_name(name: Any) -> None:
    with pytest.raises(DataError, match="name"):
        Slot(name)


@each_of("dtype", ["float64", "int32", "", None, torch.float32, np.int64, "INT64", ["int64"]])
def test_a_slot_of_another_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(DataError, match=naming("'a'", "dtype", "int64", "float32")):
        Slot("a", dtype=dtype)


@each_of("dim", [0, -1, 1.0, "3", (1,), float("nan")])
def test_a_slot_of_an_impossible_size_is_refused(dim: Any) -> None:
    with pytest.raises(DataError, match=naming("'a'", "dim", 1)):
        Slot("a", dim=dim)


@each_of("slots", [[], (), None, ["a"], [Slot("a"), "b"], "a", [Slot]])
def test_a_layout_of_no_slots_or_other_things_is_refused(slots: Any) -> None:
    with pytest.raises(DataError, match=naming("use_var", "fleet.Slot")):
        SampleLayout(slots)


def test_two_slots_of_one_name_are_refused() -> None:
    with pytest.raises(DataError, match=naming("a", "b")):
        SampleLayout([Slot("b"), Slot("a"), Slot("c"), Slot("a", dim=1), Slot("b", dtype="float32")])


def test_a_batch_is_a_mapping_that_names_its_slots() -> None:
    batch = Batch({"a": torch.zeros(2, 1), "b": Ragged(torch.arange(3), torch.tensor([0, 2]))}, 2)
    assert next(iter(batch.items()))[0] == "a"
    assert "b" in batch
    assert "c" not in batch
    assert batch.get("c") is None
    assert repr(batch) == "Batch(2 samples: a, b)"
    with pytest.raises(KeyError, match=naming("'c'", "a", "b")):
        batch["c"]


def test_a_batch_survives_pickling() -> None:
    batch = Batch({"a": torch.ones(2, 1), "b": Ragged(torch.arange(3), torch.tensor([0, 2]))}, 2)
    again = pickle.loads(pickle.dumps(batch))
    assert again.num_samples == 2
    assert again["a"].tolist() == [[1], [1]]
    assert isinstance(again["b"], Ragged)
    assert [part.tolist() for part in again["b"].split()] == [[0, 1], [2]]


@each_of("offsets", [[], [0], [0, 3], [0, 1, 3], [0, 0, 0, 3]])
def test_a_ragged_unpacks_and_splits_whatever_its_number_of_samples(offsets: list[int]) -> None:
    ragged = Ragged(torch.arange(3), torch.tensor(offsets, dtype=torch.int64))
    values, starts = ragged
    assert values is ragged.values
    assert starts is ragged.offsets
    assert ragged.num_samples == len(offsets)
    assert [part.tolist() for part in ragged.split()] == [
        list(range(3))[a:b] for a, b in zip(offsets, [*offsets[1:], 3], strict=False)
    ]


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_ragged_with_other_values_can_be_made_from_one(num: int) -> None:
    ragged = Ragged(torch.arange(3), torch.arange(num))
    doubled = ragged._replace(values=ragged.values * 2)
    assert doubled.values.tolist() == [0, 2, 4]
    assert doubled.offsets is ragged.offsets
