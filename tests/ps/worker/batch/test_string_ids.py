"""Ids of whole arrays of strings, against `fleet.hash_string` of every string."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extras import Late, needing
from support.messages import naming
from support.searches import examples

import torchfleet as fleet
from torchfleet.base.errors import DataError
from torchfleet.ps.worker.batch.string_ids import are_strings, with_hashed

pa = Late("pyarrow")
TEXTS = ["", "a", "größe", "x" * 100, "12345678", "1234567", "日本語", "🙂🙂🙂", "a\0b", "\udc80\udcff!", "é" * 4]


def expected(texts: list[Any], seed: int = 0, size: int = 0) -> list[int]:
    hashes = [fleet.hash_string(text, seed) for text in texts]
    return np.array([one % size if size else one for one in hashes], np.uint64).view(np.int64).tolist()


@pytest.mark.parametrize(("seed", "size"), [(0, 0), (3, 1_000_001), (2**64 - 1, 7)])
def test_arrays_of_text_bytes_and_objects_hash_as_single_strings(seed: int, size: int) -> None:
    data = [text.encode(errors="surrogateescape") for text in TEXTS]
    for given_array, texts in (
        (np.array(TEXTS), TEXTS),
        (np.array(TEXTS).astype(">U100"), TEXTS),
        (np.array(TEXTS, object), TEXTS),
        (TEXTS, TEXTS),
        (np.array(data), data),
        (np.array(data)[::-1], data[::-1]),
    ):
        assert fleet.hash_strings(given_array, seed, size).tolist() == expected(texts, seed, size)


@settings(max_examples=examples(60))
@given(st.lists(st.text(max_size=20).filter(lambda text: not text.endswith("\0")), max_size=8))
def test_any_text(texts: list[str]) -> None:
    assert fleet.hash_strings(np.array(texts, "U20")).tolist() == expected(texts)


def test_the_shape_is_kept_and_a_slice_is_hashed_where_it_lies() -> None:
    array = np.array(TEXTS[:6]).reshape(2, 3)
    assert fleet.hash_strings(array).shape == (2, 3)
    assert fleet.hash_strings(array[:, 1]).tolist() == expected([TEXTS[1], TEXTS[4]])
    assert fleet.hash_strings(np.empty((0, 3), "U4")).shape == (0, 3)


@needing("pyarrow")
@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "large_binary", "string_view"])
def test_arrow_arrays_are_hashed_as_single_strings(kind: str) -> None:
    texts = [text for text in TEXTS if "\udc80" not in text]
    array = pa.array([text.encode() for text in texts], pa.binary()).cast(pa.string()).cast(kind)
    assert fleet.hash_strings(array, 5, 99).tolist() == expected(texts, 5, 99)
    assert fleet.hash_strings(array[2:-3]).tolist() == expected(texts[2:-3])
    assert fleet.hash_strings(pa.chunked_array([array[:4], array[4:]])).tolist() == expected(texts)
    assert fleet.hash_strings(array[:0]).tolist() == []
    if kind != "string_view":
        coded = array.dictionary_encode()
        assert fleet.hash_strings(pa.chunked_array([coded])).tolist() == expected(texts)


@needing("pyarrow")
def test_nothing_is_read_behind_arrows_memory() -> None:
    """A buffer that ends with its last string: the tail is hashed in a copy."""
    data = b"abcdefghijklmnopqrstuvwxyz"
    offsets = np.array([0, 3, 10, 26], np.int32)
    array = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(data)])
    assert fleet.hash_strings(array).tolist() == expected(["abc", "defghij", "klmnopqrstuvwxyz"])
    wrong = np.array([0, 3, 99, 26], np.int32)
    array = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(wrong.tobytes()), pa.py_buffer(data)])
    with pytest.raises(DataError, match=naming("offsets")):
        fleet.hash_strings(array)


def test_what_is_no_string_is_an_error() -> None:
    wrong: list[Any] = [np.arange(3), ["a", 1], ["\ud800"], np.array(["\ud800"])]
    for values in wrong:
        with pytest.raises(DataError, match=naming("hash_strings")):
            fleet.hash_strings(values)
    with pytest.raises(DataError, match=naming("seed", -1)):
        fleet.hash_strings(["a"], seed=-1)


@needing("pyarrow")
def test_numbers_and_nulls_of_arrow_are_errors() -> None:
    for array in (pa.array([1, 2]), pa.array(["a", None])):
        with pytest.raises(DataError, match=naming("hash_strings")):
            fleet.hash_strings(array)
    assert not are_strings(pa.array([1]))


def test_slots_and_lists_of_slots_get_tensors_in_the_place_of_strings() -> None:
    ids, offsets = torch.tensor([1]), torch.tensor([0])
    assert with_hashed([ids, ids])[0] is ids
    values, starts = with_hashed((np.array(["a", "b"]), offsets))
    assert values.tolist() == expected(["a", "b"])
    assert starts is offsets
    found = with_hashed([ids, np.array(["a"])])
    assert [one.tolist() for one in found] == [[1], expected(["a"])]
