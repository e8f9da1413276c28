"""The files of a saved model: whole or not there, plain safetensors, and never believed when a single bit is wrong."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cases import each_of
from support.extras import Late
from support.messages import naming
from support.searches import examples

from torchfleet.base import storage as storages
from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint import manifest as manifests
from torchfleet.ps.checkpoint import part_file, part_reader
from torchfleet.ps.checkpoint.manifest import (
    FILE,
    Manifest,
    Parameter,
    Part,
    described,
    folder_of,
    next_save,
    read_manifest,
    remove_others,
    write_manifest,
)
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec

safetensors, safetensors_numpy = Late("safetensors"), Late("safetensors.numpy")

ADAM = Rule("adam", lr=0.25, beta1=0.5, low=-2.0)
SPARSE = TableSpec("items/ä", dim=2, rule=ADAM, initializer=Initializer("normal", 0.0, 0.5), seed=7)
DENSE = TableSpec("dense.0", "dense", size=6, rule=Rule("adagrad", lr=0.5))

dims = st.lists(st.integers(0, 5), min_size=0, max_size=3)
names = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda name: name != "__metadata__")


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Any bits at all, NaNs among them, in any of the three types."""
    made = {}
    for name in draw(st.lists(names, max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from(["<f4", "<u8", "<i8"])), draw(dims)
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
        made[name] = np.frombuffer(data, dtype).reshape(shape)
    return made


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def encoded(given_arrays: dict[str, np.ndarray]) -> bytes:
    return b"".join(bytes(buffer) for buffer in part_file.encode(given_arrays))


def by_hand(header: Any, body: bytes = bytes(64)) -> bytes:
    """A file with this header."""
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + body


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def give_bytes(place: Storage, data: bytes) -> None:
    """From now on its files have these bytes: without a disk, for tests of thousands of damages."""
    place.read = lambda name: data  # type: ignore[method-assign]
    place.read_buffer = lambda name: memoryview(bytearray(data))  # type: ignore[method-assign]


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield Storage(str(tmp_path / "model"))
        return
    yield Storage(f"memory://{tmp_path.name}/model")
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{tmp_path.name}"):
        memory.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "model"))


# Parts


class TestParts:
    @given(arrays())
    @settings(max_examples=examples(50))
    def test_arrays_come_back_to_the_bit(self, made: dict[str, np.ndarray]) -> None:
        assert_same(part_file.decode(encoded(made), "a file"), made)

    @given(arrays())
    @settings(max_examples=examples(40))
    def test_the_safetensors_library_reads_them(self, made: dict[str, np.ndarray]) -> None:
        assert_same(safetensors_numpy.load(encoded(made)), made)

    @given(arrays())
    @settings(max_examples=examples(40))
    def test_what_the_safetensors_library_writes_is_read(self, made: dict[str, np.ndarray]) -> None:
        assert_same(part_file.decode(safetensors_numpy.save(made), "a file"), made)

    def test_arrays_that_are_not_contiguous_are_written_as_they_look(self) -> None:
        made = {
            "rows": np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1:3],
            "keys": np.arange(6, dtype=np.uint64)[::2],
        }
        assert_same(part_file.decode(encoded(made), "a file"), made)
        assert part_file.checksum(part_file.encode(made)) == part_file.checksum([encoded(made)])

    @pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0)])
    def test_empty_arrays_reach_the_disk_and_come_back(self, storage: Storage, shape: tuple[int, ...]) -> None:
        made = {"keys": np.empty(0, np.uint64), "rows": np.empty(shape, np.float32)}
        storage.write("a", part_file.encode(made))
        assert_same(part_file.decode(storage.read("a"), "a file"), made)

    def test_the_data_are_aligned(self) -> None:
        for length in range(1, 30):
            data = encoded({"x" * length: np.zeros(1, np.uint64)})
            assert int.from_bytes(data[:8], "little") % 8 == 0

    @given(st.binary(max_size=200))
    @example(b"")
    @example(bytes(7))
    @example(bytes(8))
    @example(b"\xff" * 8)
    @example(by_hand(b"[" * 100_000)[:100_008])
    @settings(max_examples=examples(60))
    def test_garbage_is_refused_by_name(self, data: bytes) -> None:
        with pytest.raises(CheckpointError, match="place of the file"):
            part_file.decode(data, "place of the file")

    @given(st.binary(max_size=100))
    @settings(max_examples=examples(60))
    def test_a_header_of_garbage_is_refused_by_name(self, header: bytes) -> None:
        try:
            found = part_file.decode(by_hand(header), "place of the file")
        except CheckpointError as error:
            assert "place of the file" in str(error)  # noqa: PT017
        else:
            assert found == {}

    @given(st.data())
    @settings(max_examples=examples(40))
    def test_a_file_cut_off_anywhere_is_refused(self, data: st.DataObject) -> None:
        whole = encoded({"keys": np.arange(3, dtype=np.uint64), "rows": np.ones((3, 2), np.float32)})
        cut = data.draw(st.integers(0, len(whole) - 1))
        with pytest.raises(CheckpointError):
            part_file.decode(whole[:cut], "a file")

    @each_of(
        ("shape", "offsets"),
        [
            ([2**70], [0, 4]),
            ([2**62, 4], [0, 0]),
            ([2**32, 2**32], [0, 0]),
            ([-1], [0, 4]),
            ([-1, -1], [0, 4]),
            ([-2, -2], [0, 16]),
            ([1], [-4, 0]),
            ([1], [4, 0]),
            ([0], [-8, -8]),
            ([1], [0, 2**70]),
            ([1], [2**64, 2**64 + 4]),
            ([1], [62, 66]),
            ([17], [0, 68]),
            ([0], [2**70, 2**70]),
            ([0, 2**70], [0, 0]),
            ([0, 2**62, 4], [0, 0]),
            ([0] * 100, [0, 0]),
            ([1] * 100, [0, 4]),
        ],
        ids=lambda numbers: str(numbers)[:40],
    )
    def test_huge_and_negative_fields_are_refused(self, shape: list[int], offsets: list[int]) -> None:
        header = {"x": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}
        with pytest.raises(CheckpointError, match="a file"):
            part_file.decode(by_hand(header), "a file")

    @each_of("dtype", ["F64", "f32", "", "BOOL", "F32\0"])
    def test_other_types_are_refused(self, dtype: str) -> None:
        with pytest.raises(CheckpointError, match="'x'"):
            part_file.decode(by_hand({"x": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}), "a file")

    @pytest.mark.parametrize("size", [57, 1 << 20, 1 << 40, (1 << 64) - 1])
    def test_a_header_longer_than_the_file_is_refused(self, size: int) -> None:
        with pytest.raises(CheckpointError, match=naming(f"{size:,}")):
            part_file.decode(struct.pack("<Q", size) + bytes(56), "a file")


# Folders


class TestStorage:
    @given(buffers=st.lists(st.binary(max_size=50), max_size=5))
    @settings(max_examples=examples(40))
    def test_buffers_come_back_as_one(self, buffers: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
        for place in (Storage(str(tmp_path_factory.getbasetemp() / "buffers")), Storage("memory://buffers")):
            place.write("deep/er/file", buffers)
            assert place.read("deep/er/file") == b"".join(buffers)

    def test_a_large_array_is_written_whole(self, storage: Storage) -> None:
        """Longer than one call to write takes in."""
        array = np.arange((1 << 22) + 12_345, dtype=np.float32).reshape(-1, 1)
        storage.write("large", [b"head", array.data])
        assert storage.read("large") == b"head" + array.tobytes()
        assert storage.read_buffer("large") == b"head" + array.tobytes()

    def test_a_buffer_may_be_written_to_and_the_file_stays(self, storage: Storage) -> None:
        for data in (b"", b"0123456789"):
            storage.write("a", [data])
            buffer = storage.read_buffer("a")
            assert (bytes(buffer), buffer.readonly) == (data, False)
            buffer[:1] = b"9"[: len(data)]
            assert storage.read("a") == data

    def test_short_reads_are_continued(self, folder: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        class Short(io.FileIO):
            def readinto(self, buffer: Any) -> int | None:
                return super().readinto(memoryview(buffer)[:3])

        folder.write("a", [b"0123456789"])
        monkeypatch.setattr(storages, "open", lambda path, mode, **_: Short(path, mode), raising=False)
        assert folder.read_buffer("a") == b"0123456789"

    def test_short_writes_are_continued(self, folder: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        class Short(io.FileIO):
            def write(self, data: Any) -> int:
                return super().write(bytes(data)[:3])

        monkeypatch.setattr(storages, "open", lambda path, mode, **_: Short(path, mode), raising=False)
        folder.write("a", [b"0123456789", np.arange(5).data])
        monkeypatch.undo()
        assert folder.read("a") == b"0123456789" + np.arange(5).tobytes()

    def test_folders_are_named_and_files_are_not(self, storage: Storage) -> None:
        assert list(storage.folders()) == []
        storage.write("save-1/a", [b"a"])
        storage.write("save-2/deep/b", [b"b"])
        storage.write("save-3", [b"c"])
        assert sorted(storage.folders()) == ["save-1", "save-2"]
        assert storage.exists("save-1/a")
        storage.remove_folder("save-1")
        assert sorted(storage.folders()) == ["save-2"]
        assert not storage.exists("save-1/a")
        assert storage.read("save-2/deep/b") == b"b"

    def test_a_missing_file_is_named(self, storage: Storage) -> None:
        with pytest.raises(CheckpointError, match=naming("model/save-1/a")):
            storage.read("save-1/a")
        with pytest.raises(CheckpointError, match=naming("model/save-1/a")):
            storage.read_buffer("save-1/a")
        assert not storage.exists("save-1/a")

    def test_a_folder_where_a_file_is_expected_is_named(self, folder: Storage) -> None:
        folder.write("manifest.json/x", [b""])
        with pytest.raises(CheckpointError, match=naming("model/manifest.json")):
            read_manifest(folder)

    @each_of("dirname", ["", None, 7, b"", b"bytes", ["a"]])
    def test_what_is_no_path_is_refused(self, dirname: Any) -> None:
        with pytest.raises(CheckpointError):
            Storage(dirname)

    def test_a_protocol_that_nobody_knows_is_refused_as_an_error_of_ours(self) -> None:
        with pytest.raises(CheckpointError, match="foo"):
            Storage("foo://model")

    def test_one_folder_has_one_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        spellings = ["model", "./model", "model/", Path("model"), tmp_path / "x" / ".." / "model"]
        assert {Storage(spelling).path for spelling in spellings} == {str(tmp_path / "model")}  # type: ignore[arg-type]

    def test_a_file_gets_its_name_after_its_bytes_are_on_disk(
        self, folder: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        happened: list[str] = []

        def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                what = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else arguments[1]
                happened.append(f"{name} {Path(what).name} {folder.exists('a')}")
                return run(*arguments)

            return call

        ways = {"fsync": noted("fsync", os.fsync), "replace": noted("replace", os.replace)}
        monkeypatch.setattr(storages, "os", SimpleNamespace(**{**vars(os), **ways}))
        folder.write("a", [b"abc"])
        assert happened == ["fsync a.tmp False", "replace a False", "fsync model True"]

    @pytest.mark.parametrize("failing", ["fsync", "replace"])
    def test_a_write_that_fails_leaves_the_old_file(
        self, folder: Storage, monkeypatch: pytest.MonkeyPatch, failing: str
    ) -> None:
        folder.write("a", [b"old"])

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(storages, "os", SimpleNamespace(**{**vars(os), failing: fail}))
        with pytest.raises(OSError, match="No space left"):
            folder.write("a", [b"new and longer"])
        monkeypatch.undo()
        assert folder.read("a") == b"old"

    def test_a_folder_given_as_a_file_url_is_written_as_safely_as_by_its_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A manifest must be replaced in one step: else a kill in the middle loses the old model with the new."""
        url = Storage(f"file://{tmp_path}/model")
        url.write("a", [b"old"])

        class Killed(BaseException):
            pass

        def pieces() -> Iterator[bytes]:
            yield b"new"
            raise Killed

        with pytest.raises(Killed):
            url.write("a", pieces())  # type: ignore[arg-type]
        assert (tmp_path / "model" / "a").read_bytes() == b"old"


# Manifests


def a_manifest(save: str = "save-000003", number: int = 3, kind: str = "full") -> Manifest:
    tables = [
        described(SPARSE, True, 12, 3, []),
        described(DENSE, True, 9, 6, [Parameter("out.weight", [2, 2], 0), Parameter("scale", [], 4)]),
    ]
    made = [
        Part(SPARSE.name, "items_-1.0-00000.safetensors", 0, 3, 100, 2**32 - 1),
        Part(SPARSE.name, "items_-1.1-00000.safetensors", 1, 0, 64, 7),
        Part(DENSE.name, "dense.0-2.0-00000.safetensors", 0, 3, 2**40, 0),
        Part(DENSE.name, "dense.0-2.1-00000.safetensors", 1, 3, 2**40, 0, start=3),
    ]
    return Manifest(save, number, kind, 2, tables, made, num_files=len(made))


class TestManifest:
    def test_it_comes_back_as_it_was(self, storage: Storage) -> None:
        write_manifest(storage, a_manifest())
        assert read_manifest(storage) == a_manifest()

    def test_a_table_in_it_is_described_whole(self, storage: Storage) -> None:
        write_manifest(storage, a_manifest())
        found = read_manifest(storage)
        assert found.table(SPARSE.name).spec() == SPARSE
        assert found.table(DENSE.name).spec() == DENSE
        assert [part.shard for part in found.parts_of(DENSE.name)] == [0, 1]

    @given(
        rule=st.builds(
            Rule,
            st.sampled_from(["sgd", "adagrad", "adam"]),
            *(st.floats(0, 1e38) for _ in range(2)),
            *(st.floats(0, 1, exclude_max=True) for _ in range(2)),
            low=st.floats(-1e38, -1) | st.just(-np.inf),
            high=st.floats(1, 1e38) | st.just(np.inf),
        ),
        name=st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30),
        numbers=st.lists(st.integers(0, 2**63 - 1), min_size=3, max_size=3),
    )
    @settings(max_examples=examples(30))
    def test_any_table_comes_back(self, rule: Rule, name: str, numbers: list[int]) -> None:
        spec = TableSpec(name, "array", dim=3, size=1 << 48, rule=rule, seed=numbers[0])
        table = described(spec, True, numbers[1], numbers[2] >> 15, [])
        made = Manifest("save-1", 1, "full", 1, [table], [Part(name, "a.safetensors", 0, 0, 64, 0)], num_files=1)
        place = Storage("memory://any")
        write_manifest(place, made)
        assert read_manifest(place) == made
        assert read_manifest(place).table(name).spec() == spec

    def test_it_is_json_that_other_programs_read(self, folder: Storage) -> None:
        write_manifest(folder, a_manifest())
        found = json.loads(folder.read(FILE))
        assert [table["name"] for table in found["manifest"]["tables"]] == [SPARSE.name, DENSE.name]

    def test_no_model_is_told_from_a_damaged_one(self, storage: Storage) -> None:
        with pytest.raises(CheckpointError, match=naming("manifest.json")):
            read_manifest(storage)
        storage.write(FILE, [b""])
        with pytest.raises(CheckpointError, match=naming("manifest.json")):
            read_manifest(storage)

    def test_every_flipped_bit_is_noticed(self, folder: Storage) -> None:
        write_manifest(folder, a_manifest())
        whole = folder.read(FILE)
        for bit in range(8 * len(whole)):
            give_bytes(folder, flipped(whole, bit))
            with pytest.raises(CheckpointError, match=naming("manifest.json")):
                read_manifest(folder)

    def test_every_cut_is_noticed(self, folder: Storage) -> None:
        write_manifest(folder, a_manifest())
        whole = folder.read(FILE)
        unnoticed = []
        for length in range(len(whole)):
            give_bytes(folder, whole[:length])
            try:
                read_manifest(folder)
                unnoticed.append(length - len(whole))
            except CheckpointError as error:
                assert "manifest.json" in str(error)  # noqa: PT017
        assert unnoticed == []

    @pytest.mark.parametrize("more", [b"\n", b"}\n", b"\0", b"garbage"])
    def test_more_behind_it_is_noticed(self, folder: Storage, more: bytes) -> None:
        write_manifest(folder, a_manifest())
        Path(folder.path, FILE).write_bytes(folder.read(FILE) + more)
        with pytest.raises(CheckpointError, match=naming("manifest.json")):
            read_manifest(folder)

    @given(st.binary(max_size=100))
    @settings(max_examples=examples(40))
    def test_garbage_is_damage(self, data: bytes) -> None:
        place = Storage("memory://garbage")
        place.write(FILE, [data])
        with pytest.raises(CheckpointError, match=naming("manifest.json")):
            read_manifest(place)

    @pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b"1", b"", b"\xff", b"[" * 50_000])
    def test_other_json_with_a_good_checksum_is_refused(self, folder: Storage, body: bytes) -> None:
        folder.write(FILE, [b'{"checksum": %d, "manifest":\n%s}\n' % (zlib.crc32(body), body)])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(folder)

    @pytest.mark.parametrize(("field", "value"), [("version", 3), ("format", "other")])
    def test_another_version_is_refused_and_named(self, folder: Storage, field: str, value: Any) -> None:
        write_manifest(folder, msgspec.structs.replace(a_manifest(), **{field: value}))
        with pytest.raises(CheckpointError, match=naming(value)):
            read_manifest(folder)

    def test_an_unknown_table_is_named_with_those_there_are(self) -> None:
        with pytest.raises(CheckpointError, match=naming("'itmes'", "items/ä", "dense.0")):
            a_manifest().table("itmes")


class TestNumbers:
    def test_saves_are_numbered_above_all_that_are_there(self, storage: Storage) -> None:
        assert next_save(storage) == 1
        storage.write(f"{folder_of(4)}/a", [b""])
        assert next_save(storage) == 5
        write_manifest(storage, a_manifest(number=9))
        assert next_save(storage) == 10
        storage.write("save-0000123/a", [b""])
        assert next_save(storage) == 124

    def test_a_damaged_manifest_does_not_hinder_the_next_save(self, storage: Storage) -> None:
        storage.write(FILE, [b"garbage"])
        storage.write(f"{folder_of(4)}/a", [b""])
        assert next_save(storage) == 5

    @pytest.mark.parametrize("name", ["save-", "save-x", "save--1", "save-1.5", "save-²", "saved-7", "notes"])
    def test_folders_with_other_names_play_no_part(self, folder: Storage, name: str) -> None:
        folder.write(f"{name}/a", [b""])
        assert next_save(folder) == 1

    def test_other_saves_are_removed_and_nothing_else(self, storage: Storage) -> None:
        made = a_manifest()
        kept = [made.save, "notes", "save-the-notes", "saved", "save-"]
        for name in [*kept, "save-000001", "save-000002", "save-7", "save-1000000"]:
            storage.write(f"{name}/a", [b"a"])
        remove_others(storage, made)
        assert sorted(storage.folders()) == sorted(kept)


# Damage to a part is found when it is read


def saved_part(folder: Storage) -> tuple[Manifest, Part]:
    buffers = part_file.encode({"keys": np.arange(2, dtype=np.uint64), "rows": np.ones((2, 2), np.float32)})
    folder.write("save-1/a.safetensors", buffers)
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    part = Part("items", "a.safetensors", 0, 2, size, part_file.checksum(buffers))
    return Manifest("save-1", 1, "full", 1, [], [part]), part


class TestDamage:
    def test_a_whole_part_is_read(self, storage: Storage) -> None:
        made, part = saved_part(storage)
        found = part_reader.read_part(storage, made.save, part)
        assert found["keys"].tolist() == [0, 1]
        assert (found["rows"] == 1).all()

    def test_every_flipped_bit_is_noticed_and_the_file_named(self, folder: Storage) -> None:
        made, part = saved_part(folder)
        whole = folder.read("save-1/a.safetensors")
        for bit in range(8 * len(whole)):
            give_bytes(folder, flipped(whole, bit))
            with pytest.raises(CheckpointError, match=naming("save-1/a.safetensors")):
                part_reader.read_part(folder, made.save, part)

    def test_every_cut_and_more_is_noticed_and_the_file_named(self, folder: Storage) -> None:
        made, part = saved_part(folder)
        whole = folder.read("save-1/a.safetensors")
        for data in [*(whole[:length] for length in range(len(whole))), whole + b"\0", whole + whole]:
            give_bytes(folder, data)
            with pytest.raises(CheckpointError, match=naming("save-1/a.safetensors")):
                part_reader.read_part(folder, made.save, part)

    def test_a_missing_part_is_named(self, storage: Storage) -> None:
        made, part = saved_part(storage)
        storage.remove_folder("save-1")
        with pytest.raises(CheckpointError, match=naming("save-1/a.safetensors")):
            part_reader.read_part(storage, made.save, part)

    @pytest.mark.parametrize("num", [0, 1, 2, 3, 10])
    def test_parts_are_read_in_their_order(self, folder: Storage, num: int) -> None:
        chosen = []
        for i in range(num):
            buffers = part_file.encode({"keys": np.full(3, i, np.uint64)})
            folder.write(f"save-1/{i}", buffers)
            size = sum(memoryview(buffer).nbytes for buffer in buffers)
            chosen.append(Part("items", str(i), 0, 3, size, part_file.checksum(buffers)))
        made = manifests.Manifest("save-1", 1, "full", 1, [], chosen)
        pairs = part_reader.read_parts(
            folder, made.save, chosen, lambda part, arrays: (part.file, arrays["keys"].tolist())
        )
        found = list(pairs)
        assert found == [(str(i), [i] * 3) for i in range(num)]

    def test_the_safetensors_library_opens_a_part_on_disk(self, folder: Storage) -> None:
        saved_part(folder)
        with safetensors.safe_open(f"{folder.path}/save-1/a.safetensors", "np") as file:
            assert sorted(file.keys()) == ["keys", "rows"]
            assert file.get_tensor("rows").tolist() == [[1, 1], [1, 1]]
