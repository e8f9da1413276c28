"""Streams: the same bytes from every kind of file, and an error with its name for every file that is broken."""

from __future__ import annotations

import bz2
import functools
import gc
import gzip
import io
import lzma
import os
import random
import re
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.cases import each_of
from support.messages import names, naming
from support.zstd import CompressionParameter, ZstdCompressor, zstd

from torchfleet.base.errors import DataError
from torchfleet.data.reading.decompression import FORMATS, Decompressed
from torchfleet.data.reading.streams import CHUNK, check_files, chunks, compression, open_file


@functools.cache
def text() -> bytes:
    """Three chunks, which do not compress well."""
    dice = random.Random(0)
    return "".join(f"1 {dice.getrandbits(63)}\n" for _ in range(140_000)).encode()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, 1),
    ".zst": lambda data: zstd.compress(
        data, options={CompressionParameter.compression_level: 1, CompressionParameter.checksum_flag: 1}
    ),
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".bz2": lambda data: bz2.compress(data, 1),
}
endings = pytest.mark.parametrize("ending", list(COMPRESS))
pytestmark = pytest.mark.xdist_group("streams")  # the text is compressed once, which takes a second


@functools.cache
def whole(ending: str) -> bytes:
    return COMPRESS[ending](text()) if ending else text()


def read(path: Any) -> bytes:
    return b"".join(chunks(open_file(str(path)), str(path)))


def make(folder: Path, name: str, data: bytes) -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


def check_broken(path: str) -> None:
    with pytest.raises(DataError) as caught:
        read(path)
    assert names(str(caught.value), path)


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


# What is read


def test_a_plain_file_comes_in_chunks(tmp_path: Path) -> None:
    path = make(tmp_path, "part-0", text())
    pieces = list(chunks(open_file(path), path))
    assert b"".join(pieces) == text()
    assert max(map(len, pieces)) <= CHUNK
    assert len(pieces) > 2


@endings
@pytest.mark.parametrize("named", [True, False])
def test_a_compressed_file_is_decompressed_whatever_its_name(tmp_path: Path, ending: str, named: bool) -> None:
    path = make(tmp_path, "part-0" + ending * named, whole(ending))
    assert compression(path) == ending
    assert read(path) == text()


@endings
def test_compressed_members_one_behind_the_other_are_all_read(tmp_path: Path, ending: str) -> None:
    parts = [b"1 1\n", b"", text(), b"1 2"]
    path = make(tmp_path, "part-0" + ending, b"".join(map(COMPRESS[ending], parts)))
    assert read(path) == b"".join(parts)


@endings
def test_a_compressed_file_of_nothing_is_empty(tmp_path: Path, ending: str) -> None:
    assert read(make(tmp_path, "part-0" + ending, COMPRESS[ending](b""))) == b""


def test_a_streamed_zstandard_file_without_its_size_is_read(tmp_path: Path) -> None:
    made = ZstdCompressor(1)
    assert read(make(tmp_path, "part-0.zst", made.compress(text()) + made.flush())) == text()


@pytest.mark.parametrize("name", ["part-0", "part-0.txt", *(f"part-0{ending}" for ending in COMPRESS)])
def test_a_file_of_no_bytes_is_empty(tmp_path: Path, name: str) -> None:
    assert read(make(tmp_path, name, b"")) == b""


@pytest.mark.parametrize("text", [b"\n", b"B", b"BZ", b"\x1f", b"(", b"BZhang 1 2\n", b"BZh is a name\n"])
def test_a_text_that_only_begins_like_a_compressed_file_is_text(tmp_path: Path, text: bytes) -> None:
    assert read(make(tmp_path, "words", text)) == text


@pytest.mark.parametrize("ending", ["", *COMPRESS])
@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_urls_are_read_as_files_are(tmp_path: Path, memory: MemoryFileSystem, scheme: str, ending: str) -> None:
    data = whole(ending)
    if scheme == "memory":
        path = f"memory://folder/part-0{ending}"
        memory.pipe(path, data)
    else:
        path = "file://" + make(tmp_path, f"part-0{ending}", data)
    assert check_files([path]) == [path]
    assert read(path) == text()
    assert read(path) == text()


@pytest.mark.parametrize(
    "name", ["with blank", "ünïcode", "a'b\"c", "a:b", "a::b", "2024-01-01T10::00", "%20", "#1", "?x"]
)
def test_any_name_of_a_local_file_is_a_name(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name, b"1 5\n")
    assert check_files([path]) == [path]
    assert read(path) == b"1 5\n"


@pytest.mark.parametrize("ending", ["", *COMPRESS])
@pytest.mark.parametrize("to_the_end", [True, False])
@pytest.mark.usefixtures("no_old_garbage")
def test_no_file_is_left_open(tmp_path: Path, ending: str, to_the_end: bool) -> None:
    path = make(tmp_path, "part-0" + ending, whole(ending))
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stream = chunks(open_file(path), path)
        next(stream)
        if to_the_end:
            assert len(list(stream)) > 1
        else:
            stream.close()
        del stream
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


# What is broken


@endings
@pytest.mark.parametrize("share", [0.02, 0.5, 0.97, 1.0])
def test_a_compressed_file_that_is_cut_off_is_named(tmp_path: Path, ending: str, share: float) -> None:
    """Also if only its last byte is missing: no other check would find that samples were lost."""
    data = whole(ending)
    check_broken(make(tmp_path, "part-0" + ending, data[: min(int(len(data) * share), len(data) - 1)]))


@endings
def test_a_compressed_file_cut_off_right_behind_its_first_bytes_is_named(tmp_path: Path, ending: str) -> None:
    check_broken(make(tmp_path, "part-0" + ending, whole(ending)[:12]))


@endings
def test_a_second_member_that_is_cut_off_is_named(tmp_path: Path, ending: str) -> None:
    check_broken(
        make(tmp_path, "part-0" + ending, COMPRESS[ending](b"1 1\n") + whole(ending)[: len(whole(ending)) // 2])
    )


@endings
def test_a_second_member_with_a_damaged_beginning_is_named(tmp_path: Path, ending: str) -> None:
    damaged = b"\x00\xff" + whole(ending)[2:]
    check_broken(make(tmp_path, "part-0" + ending, COMPRESS[ending](b"1 1\n") + damaged))


@endings
def test_a_compressed_file_with_a_wrong_byte_in_the_middle_is_named(tmp_path: Path, ending: str) -> None:
    data = bytearray(whole(ending))
    data[len(data) // 2] ^= 0xFF
    check_broken(make(tmp_path, "part-0" + ending, bytes(data)))


@endings
@pytest.mark.parametrize("contents", ["text", "one byte", "another compression"])
def test_a_name_that_promises_another_compression_is_an_error(tmp_path: Path, ending: str, contents: str) -> None:
    other = ".xz" if ending == ".gz" else ".gz"
    data = {"text": b"1 5\n1 6\n", "one byte": whole(ending)[:1], "another compression": whole(other)}[contents]
    path = make(tmp_path, "part-0" + ending, data)
    with pytest.raises(DataError, match=naming(path, ending, f"{data[:6]!r}")):
        open_file(path)


class Lost(Exception):
    """As the errors of network libraries: no OSError."""


class Flaky(io.RawIOBase):
    def __init__(self) -> None:
        self._num = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._num += 1
        if self._num > 3:
            raise Lost("connection lost")
        line = b"1 5\n" * (len(buffer) // 4)
        buffer[: len(line)] = line
        return len(line)


def test_whatever_the_file_system_raises_in_the_middle_names_the_file() -> None:
    with pytest.raises(DataError, match=naming("s3://bucket/part-0", "connection lost")):
        list(chunks(Flaky(), "s3://bucket/part-0"))  # type: ignore[arg-type]


# The list of files


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    here, gone = make(tmp_path, "here", b""), [str(tmp_path / f"gone-{i}") for i in range(5)]
    with pytest.raises(DataError, match=naming(gone[0], 2)):
        check_files([here, gone[0]])
    with pytest.raises(DataError, match=naming(*gone[:3], 2, 6)):
        check_files([here, *gone])
    with pytest.raises(DataError, match=re.escape(gone[0])):
        open_file(gone[0])


def test_a_link_to_nowhere_is_a_missing_file(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=naming(link)):
        check_files([str(link)])


@pytest.mark.parametrize("path", ["memory://folder/gone", "nosuchscheme://a/b", "file:///no/such/file"])
def test_a_url_that_cannot_be_opened_is_named(memory: MemoryFileSystem, path: str) -> None:
    with pytest.raises(DataError, match=re.escape(path)):
        read(check_files([path])[0])


def test_a_folder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=naming(f"'{tmp_path}'")):
        check_files([str(tmp_path)])
    with pytest.raises(DataError, match=re.escape(f"file://{tmp_path}")):
        read(check_files([f"file://{tmp_path}"])[0])


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user who is not root")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = make(tmp_path, "secret", b"1 5\n")
    os.chmod(path, 0)
    with pytest.raises(DataError, match=naming(path, "PermissionError")):
        open_file(path)


def test_a_file_that_is_twice_in_the_list_is_refused(tmp_path: Path) -> None:
    a, b = make(tmp_path, "a", b""), make(tmp_path, "b", b"")
    with pytest.raises(DataError, match=naming(f"'{b}'")):
        check_files([a, b, b])


@pytest.mark.parametrize("files", ["part-0", b"part-0", Path("part-0")])
def test_a_single_path_is_refused_with_the_way_out(files: Any) -> None:
    with pytest.raises(DataError, match="set_filelist"):
        check_files(files)


def test_paths_are_taken_as_text_and_as_path_objects(tmp_path: Path) -> None:
    a, b = make(tmp_path, "a", b""), make(tmp_path, "b", b"")
    assert check_files([a, Path(b)]) == [a, b]  # type: ignore[list-item]
    assert check_files(iter((a, b))) == [a, b]  # type: ignore[arg-type]
    assert check_files([]) == []


@each_of("files", [[b"part-0"], [None], [3], [["a"]], None, 3])
def test_what_is_no_list_of_paths_is_refused(files: Any) -> None:
    with pytest.raises(DataError, match="set_filelist"):
        check_files(files)


# Bombs: few bytes that stand for many


@endings
def test_what_a_few_bytes_stand_for_is_never_in_memory_as_a_whole(tmp_path: Path, ending: str) -> None:
    size = 32 << 20
    bomb = make(tmp_path, "bomb" + ending, COMPRESS[ending](bytes(size)))
    assert os.path.getsize(bomb) < size / 200
    tracemalloc.start()
    try:
        found = sum(map(len, chunks(open_file(bomb), bomb)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == size
    assert peak < 8 * CHUNK, f"{peak:,} bytes"


def test_every_shape_of_zstd_frame_comes_back_whole(tmp_path: Path) -> None:
    """Headers of all lengths; raw, repeated and compressed blocks; tiny ones; frames behind one another."""
    dice = random.Random(3)
    parts, frames = [], []
    for i in range(60):
        data = [
            dice.randbytes(dice.randrange(400_000)),
            bytes(dice.randrange(900_000)),
            text()[: dice.randrange(10**6)],
        ][i % 3]
        options = {
            CompressionParameter.compression_level: 1 + i % 5,
            CompressionParameter.checksum_flag: i & 1,
            CompressionParameter.content_size_flag: i >> 1 & 1,
        }
        if i % 4:
            frames.append(zstd.compress(data, options=options))
        else:
            out = ZstdCompressor(options=options)
            pieces = [data[at : at + 10_000] for at in range(0, len(data), 10_000)]
            flushed = (out.compress(piece, ZstdCompressor.FLUSH_BLOCK) for piece in pieces)
            frames.append(b"".join([*flushed, out.flush()]))
        parts.append(data)
    path = make(tmp_path, "part.zst", b"".join(frames))
    assert read(path) == b"".join(parts)
    with open(path, "rb") as raw, io.BufferedReader(Decompressed(Trickle(raw), FORMATS[".zst"])) as stream:
        assert stream.read(1 << 20) == b"".join(parts)[: 1 << 20]


SKIPPABLE = (0x184D2A5E).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"  # RFC 8878, section 3.1.2


@pytest.mark.parametrize("where", ["before", "between", "behind", "alone"])
def test_skippable_frames_of_zstd_are_skipped(tmp_path: Path, where: str) -> None:
    frame = zstd.compress(b"1 5\n")
    data = {
        "before": SKIPPABLE + frame * 2,
        "between": frame + SKIPPABLE + frame,
        "behind": frame * 2 + SKIPPABLE * 2,
        "alone": SKIPPABLE,
    }[where]
    assert read(make(tmp_path, "part.zst", data)) == (b"" if where == "alone" else b"1 5\n1 5\n")


def _with_dictionary() -> bytes:
    words = zstd.train_dict([f"{i} {i * i} same words\n".encode() for i in range(500)], 1000)
    return zstd.compress(b"7 49 same words\n", zstd_dict=words)


@pytest.mark.parametrize(
    "data",
    [
        zstd.compress(b"1 5\n") + b"garbage",
        SKIPPABLE[:-1],
        SKIPPABLE[:4] + b"\xff" * 4 + b"ends long before",
        zstd.compress(b"1 5\n")[:4],
        pytest.param(_with_dictionary(), id="a dictionary that is not here"),
    ],
)
def test_what_is_no_whole_zstd_file_is_refused(tmp_path: Path, data: bytes) -> None:
    check_broken(make(tmp_path, "part.zst", data))


@pytest.mark.parametrize(("log", "is_read"), [(27, True), (28, False)])
def test_a_zstd_window_of_more_than_128_mib_is_refused(tmp_path: Path, log: int, is_read: bool) -> None:
    made = ZstdCompressor(options={CompressionParameter.window_log: log})
    path = make(tmp_path, "part.zst", made.compress(b"1 5\n") + made.flush())
    if is_read:
        assert read(path) == b"1 5\n"
    else:
        check_broken(path)


def test_a_decompressor_gives_at_most_what_is_asked_for() -> None:
    made = FORMATS[".zst"]()
    found = len(made.decompress(zstd.compress(bytes(1 << 24)), 1000))
    assert found <= 1000
    assert not made.needs_input
    while not made.eof:
        got = len(made.decompress(b"", 1 << 20))
        assert got <= 1 << 20
        found += got
    assert found == 1 << 24


class Trickle(io.BytesIO):
    """A file that is read a few bytes at a time."""

    def __init__(self, raw: io.BufferedReader) -> None:
        super().__init__(raw.read())
        self._dice = random.Random(4)

    def read(self, size: int | None = -1) -> bytes:
        return super().read(self._dice.randrange(1, 40))


def test_a_dictionary_that_is_too_large_is_refused(tmp_path: Path) -> None:
    lying = bytearray(lzma.compress(b"a", preset=0))
    # The size of the dictionary is one byte of the block's header, behind the filter's number and the length of this.
    at = lying.index(b"\x21\x01") + 2
    lying[at] = 37  # 1.5 GiB
    end = 12 + (lying[12] + 1) * 4 - 4
    lying[end : end + 4] = zlib.crc32(bytes(lying[12:end])).to_bytes(4, "little")
    path = make(tmp_path, "part.xz", bytes(lying))
    with pytest.raises(DataError, match="Memory usage limit exceeded"):
        read(path)
