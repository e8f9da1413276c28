"""One rule for raw values, in training and in requests: the oracle compares in float32 with plain numpy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import each_of
from support.extras import Late, needing
from support.inference_requests import tensor
from support.messages import naming
from support.searches import examples

import torchfleet as fleet
from torchfleet.api.serving.description import ServingDescription
from torchfleet.apps.serve.endpoints.inference_protocol import InferenceProtocol
from torchfleet.apps.serve.samples import Joiner
from torchfleet.base.errors import DataError
from torchfleet.data import FeatureFile
from torchfleet.data.features import Feature

pa, parquet = Late("pyarrow"), Late("pyarrow.parquet")

EDGES = [0.1, 0.7, 1.1, 18.0, 30.0, 16777217.0]
MISSING = len(EDGES) + 1
AGE = Feature("a", shape=[1], buckets=EDGES, missing=MISSING)
Ids = list[int] | str


def bucket(value: float | None) -> int:
    """Plain float32 arithmetic."""
    if value is None or math.isnan(value):
        return MISSING
    edges = np.array(EDGES, np.float64).astype(np.float32)
    return int(np.count_nonzero(edges <= np.float64(value).astype(np.float32)))


def trained(feature: Feature, column: Any) -> Ids:
    """What training makes of a column: ids, or that it is refused."""
    try:
        found = FeatureFile([feature]).tensors({feature.name: column})[feature.name]
    except DataError:
        return "refused"
    assert found.shape[0] == len(column)
    return found.flatten().tolist()


def requested(feature: Feature, datatype: str, values: list[Any], dtype: Any = None) -> Ids:
    """What a request means: in JSON, or with a dtype in binary."""
    protocol = InferenceProtocol(ServingDescription([feature], "batch"), ["out"], 10_000)
    one = {"name": feature.name, "datatype": datatype, "shape": [len(values), *(feature.shape or [])]}
    body, size = json.dumps({"inputs": [{**one, "data": values}]}).encode(), None
    if dtype is not None:
        raw = np.array([np.nan if value is None else value for value in values], dtype).tobytes()
        head = json.dumps({"inputs": [{**one, "parameters": {"binary_data_size": len(raw)}}]}).encode()
        body, size = head + raw, len(head)
    try:
        samples = protocol.decode(body, size).samples
        found = Joiner([feature]).joined([samples]).values[feature.name]
    except DataError:
        return "refused"
    return found.flatten().tolist()


NUMBERS = st.one_of(
    st.sampled_from([*EDGES, 0.6999999, 0.70000005, 16777216, 16777218, -0.0, 25, 40]),
    st.integers(-(1 << 62), 1 << 62),
    st.floats(-1e38, 1e38, width=64),
    st.none(),
)


@needing("pyarrow")
@settings(max_examples=examples(60))
@given(st.lists(NUMBERS, min_size=1, max_size=8))
def test_a_number_has_one_bucket_however_it_is_given(values: list[float | None]) -> None:
    expected = [bucket(value) for value in values]
    doubles = [None if value is None else float(value) for value in values]
    as_nan = [np.nan if value is None else value for value in doubles]
    assert trained(AGE, doubles) == expected
    assert trained(AGE, values) == expected
    assert trained(AGE, np.array(as_nan)) == expected
    assert trained(AGE, pa.array(doubles, pa.float64())) == expected
    assert requested(AGE, "FP64", doubles) == expected
    assert requested(AGE, "FP64", doubles, "<f8") == expected
    assert requested(AGE, "FP32", doubles) == expected
    assert requested(AGE, "FP32", doubles, "<f4") == expected
    narrow = np.array(as_nan).astype(np.float32)
    assert trained(AGE, narrow) == trained(AGE, pa.array(narrow, from_pandas=True)) == expected


@needing("pyarrow")
@settings(max_examples=examples(40))
@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.sampled_from([18, 30, 25]), min_size=1, max_size=8))
def test_whole_numbers_are_bucketed_like_others(values: list[int]) -> None:
    expected = [bucket(value) for value in values]
    for dtype in (np.int32, np.int64, np.float64):
        assert trained(AGE, np.array(values, dtype)) == expected
    for kind in (pa.int32(), pa.int64()):
        assert trained(AGE, pa.array(values, kind)) == expected
        assert trained(AGE, pa.array([*values, None], kind)) == [*expected, MISSING]
        assert trained(AGE, pa.chunked_array([values, [None]], kind)) == [*expected, MISSING]
    assert requested(AGE, "INT64", values) == requested(AGE, "INT64", values, "<i8") == expected
    assert requested(AGE, "INT32", values, "<i4") == expected
    assert requested(AGE, "INT64", [*values, None]) == [*expected, MISSING]


@pytest.mark.parametrize("feature", [Feature("a", shape=[1], buckets=EDGES), Feature("a", "float32", [1])])
@pytest.mark.parametrize("value", [None, math.nan])
def test_missing_numbers_are_refused_unless_the_feature_says_what_stands_for_them(
    feature: Feature, value: float | None
) -> None:
    assert trained(feature, [0.5, value]) == "refused"
    assert trained(feature, np.array([0.5, np.nan], np.float32)) == "refused"
    assert requested(feature, "FP32", [0.5, None]) == "refused"
    assert requested(feature, "FP32", [0.5, None], "<f4") == "refused"
    with pytest.raises(DataError, match=naming("a", "missing")):
        FeatureFile([feature]).tensors({"a": [0.5, value]})


@pytest.mark.parametrize("feature", [AGE, Feature("a", "float32", [1], missing=-1)])
@pytest.mark.parametrize("value", [1e300, -1e39, math.inf])
def test_numbers_that_float32_cannot_hold_are_refused_on_both_sides(feature: Feature, value: float) -> None:
    assert trained(feature, [0.5, value]) == "refused"
    assert requested(feature, "FP64", [0.5, value], "<f8") == "refused"
    if math.isfinite(value):
        assert requested(feature, "FP64", [0.5, value]) == requested(feature, "FP32", [0.5, value]) == "refused"


def test_floats_are_rounded_alike_and_missing_ones_filled() -> None:
    feature, values = Feature("x", "float32", [1], missing=-1.5), [0.1, None, 16777217, 3]
    expected = [float(np.float32(value)) for value in (0.1, -1.5, 16777217, 3)]
    assert trained(feature, values) == requested(feature, "FP64", values) == expected
    assert requested(feature, "FP32", values, "<f4") == requested(feature, "FP64", values, "<f8") == expected
    assert trained(feature, [1, 2]) == requested(feature, "INT64", [1, 2]) == [1.0, 2.0]


WORDS = Feature("w", shape=[1], vocabulary=["Berlin", "Paris"], missing=3)
HASHED = Feature("w", shape=[1], hash_size=1000, hash_seed=5, missing=1000)


def strings(feature: Feature, values: list[str | None]) -> list[int]:
    if feature is WORDS:
        known = {"Berlin": 1, "Paris": 2, None: 3}
        return [known.get(value, 0) for value in values]
    return [1000 if value is None else fleet.hash_string(value, seed=5) % 1000 for value in values]


@needing("pyarrow")
@pytest.mark.parametrize("feature", [WORDS, HASHED], ids=["vocabulary", "hash"])
def test_strings_have_one_id_however_they_are_given(feature: Feature) -> None:
    values = ["Paris", None, "Köln", "", "Berlin"]
    expected = strings(feature, values)
    assert trained(feature, values) == trained(feature, np.array(values, object)) == expected
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        assert trained(feature, pa.array(values).cast(kind)) == expected
    assert requested(feature, "BYTES", values) == expected
    assert feature.num_ids == max(expected) + 1 if feature is WORDS else 1001
    assert trained(feature, [None, None]) == requested(feature, "BYTES", [None, None]) == strings(feature, [None] * 2)


REFUSED = {
    "strings for buckets": (AGE, ["25", "40"], "BYTES"),
    "strings for floats": (Feature("x", "float32", [1]), ["1", "2"], "BYTES"),
    "numbers for a vocabulary": (WORDS, [1, 2], "INT64"),
    "floats for a vocabulary": (WORDS, [1.0, 2.0], "FP32"),
    "ids beyond the hash size": (HASHED, [5000, 1], "INT64"),
    "negative ids": (HASHED, [1, -3], "INT64"),
    "floats for hashes": (HASHED, [1.0, 2.5], "FP64"),
    "floats for ids": (Feature("i", shape=[1]), [1.0, 2.0], "FP32"),
    "booleans for buckets": (AGE, [True, False], "BOOL"),
    "a null among ids": (Feature("i", shape=[1]), [1, None], "INT64"),
}


@each_of("case", REFUSED)
def test_values_of_another_type_are_refused_on_both_sides(case: str) -> None:
    feature, values, datatype = REFUSED[case]
    assert trained(feature, values) == "refused"
    assert requested(feature, datatype, values) == "refused"


def test_ids_that_were_hashed_before_are_taken_in_their_range() -> None:
    values = [0, 999, 5]
    assert trained(HASHED, values) == requested(HASHED, "INT64", values) == requested(HASHED, "INT64", values, "<i8")
    protocol = InferenceProtocol(ServingDescription([HASHED], "batch"), ["out"], 8, learn_pause=0.0)
    for value in (5, 6, 999):  # from the second on, a kernel reads them
        protocol.decode(json.dumps({"inputs": [tensor("w", "INT64", [1, 1], [value])]}).encode(), None)
    for value in (1001, -1, 1 << 62):
        with pytest.raises(DataError, match=naming("w", value)):
            protocol.decode(json.dumps({"inputs": [tensor("w", "INT64", [1, 1], [value])]}).encode(), None)


def test_nested_lists_of_strings_are_an_array() -> None:
    file = FeatureFile([Feature("w", shape=[2], vocabulary=["a", "b"])])
    assert file.tensors({"w": [["a", "b"], ["c", "a"]]})["w"].tolist() == [[1, 2], [0, 1]]
    with pytest.raises(DataError, match=naming("w")):
        file.tensors({"w": [["a", "b"], ["c"]]})


def test_columns_of_different_lengths_are_refused_by_name() -> None:
    file = FeatureFile([Feature("a"), Feature("b")])
    with pytest.raises(DataError, match=naming("a", 3, "b", 1)):
        file.tensors({"a": [1, 2, 3], "b": [7]})


@needing("pyarrow")
def test_ids_beside_a_null_keep_all_bits() -> None:
    big = (1 << 62) + 1
    assert trained(Feature("i", missing=-1), pa.array([big, None])) == [big, -1]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"buckets": [16777216.0, 16777217.0]}, "16777217.0"),
        ({"buckets": [1.0, 1e300]}, "1e+300"),
        ({"buckets": [1.0], "missing": 3}, "3"),
        ({"buckets": [1.0], "missing": 0.5}, "0.5"),
        ({"hash_size": 10, "missing": -1}, "-1"),
        ({"dtype": "float32", "missing": 1e300}, "1e+300"),
        ({"dtype": "float32", "missing": math.nan}, "nan"),
    ],
)
def test_features_that_no_value_could_follow_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=naming("a", named)):
        Feature("a", **fields)


def test_the_number_of_ids_counts_that_of_missing_values() -> None:
    assert [Feature("a", buckets=[1.0, 2.0], missing=missing).num_ids for missing in (None, 0, 2, 3)] == [3, 3, 3, 4]
    ids: npt.NDArray[np.int64] = np.array(trained(AGE, [0.0, 1e9, None]))
    assert ids.max() + 1 == AGE.num_ids


@needing("pyarrow")
def test_views_of_strings_with_nulls_are_read_like_plain_strings() -> None:
    """Arrow has neither fill_null nor a dictionary's decoding for them."""
    values = ["Paris", None, "Köln"]
    for kind, view in ((pa.string(), pa.string_view()), (pa.binary(), pa.binary_view())):
        found = []
        for made in (kind, view, pa.dictionary(pa.int32(), kind), pa.dictionary(pa.int32(), view)):
            table = pa.table(
                {"w": pa.array(values).cast(kind).cast(made) if made == view else dictionary(values, made)}
            )
            (batch,) = fleet.data.from_arrow(table, batch_size=3, fill_null=7)
            found.append(batch["w"].flatten().tolist())
        assert found == [[fleet.data.hash_strings([value])[0] if value else 7 for value in values]] * 4


def dictionary(values: list[str | None], kind: Any) -> Any:
    """An array of this type; of a dictionary, its words have the type's own."""
    if not hasattr(kind, "value_type"):
        return pa.array(values).cast(kind)
    words = [value for value in values if value is not None]
    places = pa.array([None if value is None else words.index(value) for value in values], pa.int32())
    return pa.DictionaryArray.from_arrays(places, pa.array(words).cast(kind.value_type))


@needing("pyarrow")
def test_what_arrow_cannot_read_is_not_called_damaged(tmp_path: Path) -> None:
    words = pa.array(["x", "y", "z", "x"]).dictionary_encode()
    table = pa.table({"w": pa.ListArray.from_arrays(pa.array([0, 2, 3, 4]), words)})
    for rows in (1, 3):
        parquet.write_table(table, tmp_path / f"{rows}.parquet", row_group_size=rows)
    (batch,) = fleet.data.from_parquet(str(tmp_path / "3.parquet"), batch_size=3)
    assert batch["w"].values.tolist() == fleet.data.hash_strings(["x", "y", "z", "x"]).tolist()
    with pytest.raises(DataError, match=naming(tmp_path / "1.parquet", "w", "Arrow")) as caught:
        list(fleet.data.from_parquet(str(tmp_path / "1.parquet"), batch_size=3))
    assert "is it cut off" not in str(caught.value)
