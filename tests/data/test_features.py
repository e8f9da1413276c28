"""Features: strings, missing values and lines of text become what training reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import torchfleet as fleet
from torchfleet.base.errors import DataError
from torchfleet.data.features import Feature, SampleText, TextSamples, as_in_text, text_of
from torchfleet.data.reading.reader import ReadOptions

ROWS = [
    b"1\t" + b"\t".join(b"%d" % i for i in range(13)) + b"\t" + b"\t".join(b"%08x" % (7 * i) for i in range(26)),
    b"0\t" + b"\t" * 12 + b"\t" + b"\t".join(b"" if i % 3 else b"cafe" for i in range(26)),
]


def test_strings_are_hashed_as_in_training() -> None:
    strings = [b"", b"a", "größe".encode(), b"x" * 100, bytes(range(256))]
    for seed, size in ((0, 0), (3, 1_000_001)):
        found = Feature("city", hash_seed=seed, hash_size=size).hashed(strings)
        expected = [fleet.hash_string(string, seed) for string in strings]
        expected = [number % size for number in expected] if size else expected
        assert found.view(np.uint64).tolist() == expected


@pytest.mark.parametrize("log_scale", [False, True])
def test_lines_become_what_a_dataset_makes_of_them(tmp_path: Path, log_scale: bool) -> None:
    (tmp_path / "part").write_bytes(b"".join(row + b"\n" for row in ROWS))
    dataset = fleet.QueueDataset()
    form = fleet.CriteoFormat(hash_size=1001, log_scale=log_scale)
    dataset.init(batch_size=2, use_var=form.slots(), data_format=form)
    dataset.set_filelist([str(tmp_path / "part")])
    (expected,) = list(dataset)
    described = text_of(dataset.read_options)
    assert described is not None
    found = TextSamples(described).batch(ROWS)
    assert list(found) == list(expected)
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


def test_a_missing_category_is_that_of_an_empty_field() -> None:
    form = fleet.CriteoFormat(hash_size=1001, log_scale=True)
    described = text_of(ReadOptions(form.slots(), data_format=form))
    assert described is not None
    empty = TextSamples(described).batch([ROWS[1]])
    for column in (2, 3, 26):
        found = as_in_text(Feature(f"C{column}", shape=[1]), described)
        assert (found.hash_seed, found.hash_size) == (column, 1001)
        assert found.default == empty[f"C{column}"][0].tolist()
        assert found.hashed([b""]).tolist() == found.default
    dense = as_in_text(Feature("dense_input", "float32", [13]), described)
    assert dense.default == [0.0] * 13
    assert as_in_text(Feature("other", shape=[1]), described) == Feature("other", shape=[1])


def test_text_of_slots_is_read_without_a_program() -> None:
    slots = [fleet.Slot("a"), fleet.Slot("b", "float32", 2)]
    described = text_of(ReadOptions(slots))
    assert described == SampleText("slots", described.slots)  # type: ignore[union-attr]
    batch = TextSamples(described).batch([b"2 5 6 2 0.5 1.5", b"0 2 1 2"])  # type: ignore[arg-type]
    assert batch["a"].values.tolist() == [5, 6]
    assert batch["a"].offsets.tolist() == [0, 2]
    assert batch["b"].tolist() == [[0.5, 1.5], [1.0, 2.0]]
    assert text_of(ReadOptions(slots, pipe_command="cat")) is None
    assert text_of(None) is None


@pytest.mark.parametrize("line", [b"", b"1", b"2 5 6 2 0.5", b"1 5 2 1 2\n1 5 2 1 2", b"1 x 2 1 2"])
def test_malformed_lines_are_refused(line: bytes) -> None:
    described = text_of(ReadOptions([fleet.Slot("a"), fleet.Slot("b", "float32", 2)]))
    assert described is not None
    with pytest.raises(DataError):
        TextSamples(described).batch([b"1 5 2 1 2", line])


def test_wrong_features_are_refused() -> None:
    for wrong in (
        {"default": [1]},
        {"hash_size": 1 << 63},
        {"hash_seed": -1},
    ):
        with pytest.raises(DataError):
            Feature("a", shape=[2], **wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError):
        Feature("a", shape=[-1])
