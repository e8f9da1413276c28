"""Columns of Arrow and Parquet as slots, against pyarrow's own reading of them, and against the text format."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import each_of
from support.extras import Late, imported, needing
from support.messages import naming
from support.searches import examples

import torchfleet as fleet
from torchfleet.base.errors import DataError
from torchfleet.data.dataset import Dataset

pytestmark = needing("pyarrow")
pa, pq = Late("pyarrow"), Late("pyarrow.parquet")

SLOTS = [fleet.Slot("x", "float32", 3), fleet.Slot("ids"), fleet.Slot("w", "float32"), fleet.Slot("label", dim=1)]


def table(num: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, num)
    ids = [rng.integers(0, 1 << 40, n) for n in lengths]
    weights = [rng.random(n, np.float32) for n in lengths]
    x = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(3 * num, np.float32)), 3)
    return pa.table(
        {
            "x": x,
            "ids": pa.array(ids, pa.list_(pa.int64())),
            "w": pa.array(weights, pa.list_(pa.float32())),
            "label": pa.array(rng.integers(0, 2, num)),
        }
    )


def samples(dataset: Dataset) -> list[tuple[Any, ...]]:
    """One tuple per sample, as Python's values."""
    found = []
    for batch in dataset:
        parts = [
            [one.tolist() for one in slot.split()] if isinstance(slot, fleet.Ragged) else slot.tolist()
            for slot in batch.values()
        ]
        found += list(zip(*parts, strict=True))
    return found


def expected(whole: Any) -> list[tuple[Any, ...]]:
    """What pyarrow itself reads."""
    rows = whole.to_pylist()
    return [(row["x"], row["ids"] or [], row["w"] or [], [row["label"]]) for row in rows]


def write_text(path: Path, whole: Any) -> str:
    lines = []
    for x, ids, w, label in expected(whole):
        parts = [f"3 {' '.join(repr(v) for v in x)}", " ".join(map(str, [len(ids), *ids]))]
        parts += [" ".join([str(len(w)), *(repr(v) for v in w)]), f"1 {label[0]}"]
        lines.append(" ".join(parts))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@each_of("batch_size", [1, 7, 64, 1000])
@each_of("piece", [5, 64, 1000])
def test_all_samples_come_in_their_order_whatever_the_borders(batch_size: int, piece: int) -> None:
    whole = table(300)
    dataset = fleet.data.from_arrow(whole.to_batches(max_chunksize=piece), batch_size, SLOTS)
    assert samples(dataset) == expected(whole)
    assert [batch.num_samples for batch in dataset] == [
        min(batch_size, 300 - at) for at in range(0, 300, batch_size)
    ]  # a second pass


def test_parquet_and_text_are_the_same_batches_bit_for_bit(tmp_path: Path) -> None:
    whole = table(500)
    pq.write_table(whole, tmp_path / "a.parquet", row_group_size=130)
    of_text = fleet.QueueDataset()
    of_text.init(batch_size=32, use_var=SLOTS)
    of_text.set_filelist([write_text(tmp_path / "a.txt", whole)])
    pairs = zip(fleet.data.from_parquet(tmp_path / "a.parquet", 32, SLOTS), of_text, strict=True)
    for columns, rows in pairs:
        assert columns.num_samples == rows.num_samples
        for name in rows:
            mine, theirs = columns[name], rows[name]
            parts = zip(mine, theirs, strict=True) if isinstance(theirs, fleet.Ragged) else [(mine, theirs)]
            assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in parts)


def addresses(array: Any, itemsize: int) -> range:
    buffer = array.buffers()[-1]
    return range(buffer.address, buffer.address + buffer.size)


def test_batches_lie_in_arrows_memory() -> None:
    (piece,) = table(256).combine_chunks().to_batches()
    for number, batch in enumerate(fleet.data.from_arrow([piece], 64, SLOTS)):
        for name, size in {"x": 4, "ids": 8, "w": 4, "label": 8}.items():
            slot = batch[name]
            values = slot.values if isinstance(slot, fleet.Ragged) else slot
            assert values.data_ptr() in addresses(piece.column(name), size)
        assert batch["label"].data_ptr() == piece.column("label").buffers()[1].address + 64 * 8 * number
        assert batch["x"].data_ptr() == piece.column("x").values.buffers()[1].address + 64 * 3 * 4 * number


def test_slots_follow_from_the_types_of_columns() -> None:
    (batch,) = fleet.data.from_arrow(table(4), 4)
    assert list(batch) == ["x", "ids", "w", "label"]
    assert batch["x"].shape == (4, 3)
    assert batch["ids"].values.dtype == torch.int64
    assert batch["w"].values.dtype == torch.float32
    assert batch["label"].shape == (4, 1)


@each_of(
    ("make", "slot", "values"),
    [
        (lambda: pa.array([1, 2], pa.int8()), fleet.Slot("c", dim=1), [[1], [2]]),
        (lambda: pa.array([True, False]), fleet.Slot("c", dim=1), [[1], [0]]),
        (lambda: pa.array([2**64 - 1, 5], pa.uint64()), fleet.Slot("c", dim=1), [[-1], [5]]),
        (lambda: pa.array([0.5, 1.5]), fleet.Slot("c", "float32", 1), [[0.5], [1.5]]),
        (lambda: pa.array([1, 2]), fleet.Slot("c", "float32", 1), [[1.0], [2.0]]),
        (lambda: pa.array([7, 7, 9]).dictionary_encode(), fleet.Slot("c", dim=1), [[7], [7], [9]]),
        (lambda: pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())), fleet.Slot("c", dim=2), [[1, 2], [3, 4]]),
        (lambda: pa.array([[1], [2, 3]], pa.large_list(pa.int64())), fleet.Slot("c"), [[1], [2, 3]]),
        (lambda: pa.array([4, 5]), fleet.Slot("c"), [[4], [5]]),
        (lambda: pa.array([[1], None, [2, 3]], pa.list_(pa.int64())), fleet.Slot("c"), [[1], [], [2, 3]]),
        (lambda: pa.array([9, 1, 2, 3], pa.int64()).slice(1, 2), fleet.Slot("c", dim=1), [[1], [2]]),
        (lambda: pa.array([[0], [1, 2], [3]], pa.list_(pa.int64())).slice(1), fleet.Slot("c"), [[1, 2], [3]]),
        (lambda: pa.array([], pa.int64()), fleet.Slot("c", dim=1), []),
        (lambda: pa.array([[], []], pa.list_(pa.float32())), fleet.Slot("c", "float32"), [[], []]),
    ],
)
def test_types_of_columns_that_a_slot_takes(
    make: Callable[[], Any], slot: fleet.Slot, values: list[list[float]]
) -> None:
    dataset = fleet.data.from_arrow([pa.record_batch([make()], ["c"])], 10, [slot])
    assert [sample[0] for sample in samples(dataset)] == values


def test_nulls_are_read_as_the_number_that_was_given() -> None:
    batch = pa.record_batch([pa.array([1, None]), pa.array([[0.5, None], None])], ["a", "b"])
    slots = [fleet.Slot("a", dim=1), fleet.Slot("b", "float32")]
    assert samples(fleet.data.from_arrow([batch], 10, slots, fill_null=-1)) == [([1], [0.5, -1.0]), ([-1], [])]


@each_of(
    ("make", "slot", "text"),
    [
        (
            lambda: pa.array([0.5]),
            fleet.Slot("c"),
            "column 'c': expected integers or strings for slot 'c' (int64), found double",
        ),
        (lambda: pa.array([["a"]]), fleet.Slot("c", "float32"), "expected numbers for slot 'c' (float32), found list<"),
        (
            lambda: pa.array(["a"]).dictionary_encode(),
            fleet.Slot("c", "float32"),
            "numbers for slot 'c' (float32), found dictionary",
        ),
        (
            lambda: pa.array([1, None]),
            fleet.Slot("c", dim=1),
            "'c', row 101: expected integers or strings for slot 'c', found a null",
        ),
        (
            lambda: pa.array([[1, None]]),
            fleet.Slot("c"),
            "'c': expected integers or strings for slot 'c', found a null. fill_null=0",
        ),
        (
            lambda: pa.array([[1, 2], [3]]),
            fleet.Slot("c", dim=2),
            "'c', row 101: expected 2 values for slot 'c', found 1",
        ),
        (lambda: pa.array([1]), fleet.Slot("c", dim=2), "expected lists of 2 values for slot 'c', found int64"),
        (
            lambda: pa.array([float("nan")]),
            fleet.Slot("c", "float32", 1),
            "finite numbers for slot 'c', found nan or inf",
        ),
        (lambda: pa.array([1]), fleet.Slot("other"), "expected a column 'other' for slot 'other', found c"),
    ],
)
def test_wrong_columns_are_named(make: Callable[[], Any], slot: fleet.Slot, text: str) -> None:
    good = {"int64": pa.int64(), "float32": pa.float32()}[slot.dtype]
    first = pa.array([[1] * (slot.dim or 1)] * 100, pa.list_(good)) if slot.dim != 1 else pa.array([1] * 100, good)
    batches = [pa.record_batch([column], ["c" if slot.name == "c" else slot.name]) for column in (first,)]
    batches.append(pa.record_batch([make()], ["c"]))
    with pytest.raises(DataError) as caught:
        samples(fleet.data.from_arrow(batches, 50, [slot]))
    assert text in str(caught.value)


def test_several_columns_stand_side_by_side_in_a_slot() -> None:
    batch = pa.record_batch([pa.array([1, 2]), pa.array([0.5, 1.5]), pa.array([[7], [8, 9]])], ["I1", "I2", "raw"])
    slots = [fleet.Slot("dense", "float32", 2), fleet.Slot("ids")]
    dataset = fleet.data.from_arrow([batch], 2, slots, columns={"dense": ["I1", "I2"], "ids": "raw"})
    assert samples(dataset) == [([1.0, 0.5], [7]), ([2.0, 1.5], [8, 9])]


def test_a_window_is_shuffled_and_nothing_is_lost() -> None:
    whole = table(400)
    pieces = whole.to_batches(max_chunksize=50)

    def read(seed: int | None) -> list[tuple[Any, ...]]:
        return samples(fleet.data.from_arrow(pieces, 30, SLOTS, shuffle=100, seed=seed))

    in_order = expected(whole)
    first, again, other = read(3), read(3), read(4)
    assert first == again
    assert sorted(first) == sorted(other) == sorted(in_order)
    assert in_order != first != other
    place = {sample[0][0]: at for at, sample in enumerate(in_order)}
    moved = [abs(at - place[sample[0][0]]) for at, sample in enumerate(first)]
    assert max(moved) < 100  # no further than the window
    assert np.mean(moved) > 20  # and all over it: a third of the window is expected


def test_a_stream_that_cannot_begin_anew_says_so() -> None:
    dataset = fleet.data.from_arrow(iter(table(10).to_batches()), 5, SLOTS)
    assert len(samples(dataset)) == 10
    with pytest.raises(DataError, match="from_arrow"):
        samples(dataset)
    again = fleet.data.from_arrow(lambda: table(10).to_reader(), 5, SLOTS)
    assert len(samples(again)) == len(samples(again)) == 10


def _pieces(path: Path) -> Iterator[Path]:
    for number in range(4):
        pq.write_table(table(100, number), path / f"part-{number}.parquet")
        yield path / f"part-{number}.parquet"


@pytest.mark.parametrize("give", [str, lambda path: f"file://{path}", lambda path: sorted(map(str, path.glob("*.p*")))])
def test_folders_urls_and_lists_of_parquet_files(tmp_path: Path, give: Callable[[Path], Any]) -> None:
    files = list(_pieces(tmp_path))
    dataset = fleet.data.from_parquet(give(tmp_path), 64, SLOTS)
    assert samples(dataset) == [sample for file in files for sample in expected(pq.read_table(file))]
    threads = fleet.data.from_parquet(give(tmp_path), 64, SLOTS, thread_num=3)
    assert sorted(samples(threads)) == sorted(samples(dataset))


def test_a_pyarrow_dataset_is_read_with_its_own_filters(tmp_path: Path) -> None:
    ds = imported("pyarrow.dataset")
    list(_pieces(tmp_path))
    source = ds.dataset(tmp_path)
    found = samples(fleet.data.from_arrow(source.scanner(filter=ds.field("label") == 1), 64, SLOTS))
    whole = source.to_table(filter=ds.field("label") == 1)
    assert sorted(found) == sorted(expected(whole))


def test_parquet_in_memory_is_what_the_text_format_is(tmp_path: Path) -> None:
    (first, *_) = _pieces(tmp_path)
    found = []
    for files, form in (([str(first)], fleet.ParquetFormat()), ([write_text(tmp_path / "t", table(100, 0))], None)):
        dataset = fleet.InMemoryDataset()
        dataset.init(batch_size=30, use_var=SLOTS, data_format=form)
        dataset.set_filelist(files)
        dataset.load_into_memory()
        dataset.local_shuffle(seed=5)
        found.append(samples(dataset))
    assert found[0] == found[1]
    dataset.init(batch_size=30, use_var=SLOTS, data_format=fleet.ParquetFormat(shuffle=10))
    with pytest.raises(DataError, match=naming("shuffle=10", "QueueDataset")):
        dataset.load_into_memory()


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    pq.write_table(table(1000), bad)
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=naming("bad.parquet")):
        samples(fleet.data.from_parquet(bad, 10, SLOTS))
    bad.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[len(whole) // 2 + 4 :])
    with pytest.raises(DataError, match=naming("bad.parquet")):
        samples(fleet.data.from_parquet(bad, 10, SLOTS))
    with pytest.raises(DataError, match=naming("gone.parquet")):
        fleet.data.from_parquet(tmp_path / "gone.parquet", 10, SLOTS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=naming(".parquet", tmp_path / "empty")):
        fleet.data.from_parquet(tmp_path / "empty", 10, SLOTS)


@each_of(
    ("arguments", "text"),
    [
        ({"use_var": SLOTS, "columns": {"y": "x"}}, "'y' use_var"),
        ({"use_var": SLOTS, "columns": {"x": ["a", "b"]}}, "2 dim=3 dim=2"),
        ({"columns": {"x": "a"}}, "use_var"),
        ({"use_var": SLOTS, "shuffle": -1}, "shuffle"),
        ({"use_var": SLOTS, "fill_null": float("inf")}, "fill_null"),
        ({"use_var": SLOTS, "batch_size": 0}, "batch_size 1"),
    ],
)
def test_contradictions_are_found_before_anything_is_read(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=naming(*text.split())):
        fleet.data.from_arrow([], **arguments)
    with pytest.raises(DataError, match=naming("pyarrow", "Dataset", "Table")):
        fleet.data.from_arrow(5)
    with pytest.raises(DataError, match=naming("pyarrow", "dict")):
        samples(fleet.data.from_arrow([{"a": 1}], 1, SLOTS))


def ipc_stream(whole: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with imported("pyarrow.ipc").new_stream(sink, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=-(-len(whole) // 2))
    return bytes(sink.getvalue().to_pybytes())


NUM = 3011  # rows of a record batch; a number that does not stand anywhere else in the stream


def hostile_streams() -> dict[str, tuple[str, bytes]]:
    """Streams in which one number is replaced: the name of the column, and the stream."""
    ids = [[7] * (row % 4) for row in range(NUM)]
    words = pa.array(["a", "b"] * NUM)[:NUM].dictionary_encode()
    words = pa.DictionaryArray.from_arrays(words.indices, pa.array([5, 6]))
    offsets = np.concatenate(([0], np.cumsum([len(each) for each in ids]))).astype(np.int32)
    up_and_down, beyond, below = (offsets.copy() for _ in range(3))
    up_and_down[1:-1:2] = offsets[-1]
    beyond[-1] = 1 << 30
    below[0] = -5

    def stream(name: str, column: Any, old: bytes, new: bytes) -> tuple[str, bytes]:
        written = ipc_stream(pa.table({name: pa.concat_arrays([column, column])}))
        assert old in written
        return name, written.replace(old, new)

    lists = pa.array(ids, pa.list_(pa.int64()))
    numbers = pa.array(np.arange(NUM) + (1 << 40))
    length, many = np.int64(NUM).tobytes(), np.int64(NUM * 100_000).tobytes()
    return {
        "length": stream("label", numbers, length, many),
        "up and down": stream("ids", lists, offsets.tobytes(), up_and_down.tobytes()),
        "beyond": stream("ids", lists, offsets.tobytes(), beyond.tobytes()),
        "below": stream("ids", lists, offsets.tobytes(), below.tobytes()),
        "words": stream("label", words, np.array([0, 1] * 9, np.int32).tobytes(), np.full(18, 9, np.int32).tobytes()),
    }


@each_of("what", ["length", "up and down", "beyond", "below", "words"])
def test_a_record_batch_that_leads_out_of_its_memory_is_refused(what: str) -> None:
    name, stream = hostile_streams()[what]
    slot = fleet.Slot("ids") if name == "ids" else fleet.Slot("label", dim=1)
    dataset = fleet.data.from_arrow(lambda: imported("pyarrow.ipc").open_stream(stream), 16, [slot])
    with pytest.raises(DataError, match=naming(name, "row 0")):
        samples(dataset)


def test_a_damaged_ipc_stream_is_an_error_of_ours() -> None:
    written, read = ipc_stream(table(40)), imported("pyarrow.ipc").open_stream
    assert len(samples(fleet.data.from_arrow(lambda: read(written), 8, SLOTS))) == 40
    with pytest.raises(DataError, match=naming("record batch 1")):
        samples(fleet.data.from_arrow(lambda: read(written[: len(written) * 3 // 4]), 8, SLOTS))


def test_a_name_that_is_not_utf8_is_an_error_of_ours() -> None:
    stream = ipc_stream(table(40)).replace(b"label", b"l\xb8bel")
    with pytest.raises(DataError, match=naming("UTF-8")):
        samples(fleet.data.from_arrow(lambda: imported("pyarrow.ipc").open_stream(stream), 8, SLOTS))


def test_flipped_bytes_of_an_ipc_stream_give_samples_or_an_error_of_ours() -> None:
    rng, ipc = np.random.default_rng(0), imported("pyarrow.ipc")
    written = np.frombuffer(ipc_stream(table(40)), np.uint8)
    for _ in range(examples(200)):
        flipped = written.copy()
        flipped[rng.integers(0, len(written), 3)] ^= rng.integers(1, 256, 3).astype(np.uint8)
        with contextlib.suppress(OSError, pa.ArrowException):
            reader = ipc.open_stream(flipped.tobytes())  # by the user: its errors are Arrow's
            with contextlib.suppress(DataError):
                samples(fleet.data.from_arrow(reader, 8, SLOTS))


def test_a_damaged_parquet_file_is_named_with_row_group_and_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(3000), path, row_group_size=1000, use_dictionary=False, compression="snappy")
    column = pq.ParquetFile(path).metadata.row_group(1).column(3)
    assert column.path_in_schema.startswith("label")
    content = bytearray(path.read_bytes())
    begin = column.data_page_offset
    content[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    dataset = fleet.QueueDataset()
    dataset.init(batch_size=8, use_var=SLOTS, data_format=fleet.ParquetFormat())
    dataset.set_filelist([str(path)])
    with pytest.raises(DataError, match=naming("a.parquet", "row group 1", "label")):
        samples(dataset)


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "dictionary"])
def test_strings_become_ids_without_a_word_about_them(coded: bool, tmp_path: Path) -> None:
    cities, tags = ["Köln", "", "Paris", "Köln"], [["a", "b"], [], ["c"], None]
    column = pa.array(cities)
    whole = pa.table({"city": column.dictionary_encode() if coded else column, "tags": tags})
    pq.write_table(whole, tmp_path / "part.parquet")
    expected = [([_id(city)], [_id(tag) for tag in own or []]) for city, own in zip(cities, tags, strict=True)]
    assert samples(fleet.data.from_arrow(whole, 3)) == expected
    assert samples(fleet.data.from_parquet(str(tmp_path), 3)) == expected


def _id(text: str) -> int:
    return int(np.uint64(fleet.hash_string(text)).astype(np.int64))


def test_a_null_string_is_an_error_or_the_id_that_fill_null_says() -> None:
    whole = pa.table({"city": ["a", None]})
    with pytest.raises(DataError, match=naming("city", "null")):
        samples(fleet.data.from_arrow(whole, 2))
    assert samples(fleet.data.from_arrow(whole, 2, fill_null=5)) == [([_id("a")],), ([5],)]


@each_of(
    ("make", "slot", "fill", "expected"),
    [
        (lambda: pa.array([1, None]), fleet.Slot("c", "float32", 1), 0.5, [1.0, 0.5]),
        (lambda: pa.array([1, None], pa.int8()), fleet.Slot("c", dim=1), 1000, [1, 1000]),
        (lambda: pa.array([1, None], pa.uint64()), fleet.Slot("c", dim=1), -1, [1, -1]),
        (lambda: pa.array([True, None]), fleet.Slot("c", dim=1), 5.0, [1, 5]),
    ],
)
def test_nulls_are_filled_in_the_type_of_the_slot(
    make: Callable[[], Any], slot: fleet.Slot, fill: float, expected: list[float]
) -> None:
    dataset = fleet.data.from_arrow([pa.record_batch([make()], ["c"])], 2, [slot], fill_null=fill)
    assert [sample[0][0] for sample in samples(dataset)] == expected


@each_of(
    ("make", "fill"),
    [
        (lambda: pa.array([1, None]), 0.5),
        (lambda: pa.array(["a", None]), 0.5),
        (lambda: pa.array([1, None], pa.uint64()), 1 << 63),
        (lambda: pa.array(["a", None]), 1 << 63),
    ],
)
def test_a_null_id_is_filled_with_a_whole_number_of_64_bits_only(make: Callable[[], Any], fill: float) -> None:
    dataset = fleet.data.from_arrow([pa.record_batch([make()], ["c"])], 2, [fleet.Slot("c", dim=1)], fill_null=fill)
    with pytest.raises(DataError, match=naming("'c'", "int64", f"fill_null={fill}")):
        samples(dataset)


def test_strings_in_a_slot_of_numbers_are_an_error() -> None:
    with pytest.raises(DataError, match=naming("city", "float32")):
        samples(fleet.data.from_arrow(pa.table({"city": ["a"]}), 1, use_var=[fleet.Slot("city", "float32", 1)]))
