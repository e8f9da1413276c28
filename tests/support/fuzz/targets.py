"""The decoders of everything that comes from outside, each with a few good inputs to begin with."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from support.fuzz.messages import SPEC, server_target, wire_target
from support.fuzz.search import Target
from support.zstd import zstd

from torchfleet.apps.word2vec import vector_files
from torchfleet.base import network_links, printable
from torchfleet.base.errors import FleetError, MissingPackage, RoleError
from torchfleet.base.role import named_variables
from torchfleet.base.storage import Storage
from torchfleet.base.strategy import distributed_strategy, prototxt, textformat
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.tracing import profile_folder
from torchfleet.base.tracing.span import Span
from torchfleet.collective.checkpoint import collective_manifest
from torchfleet.data import arrow_columns
from torchfleet.data.reading import criteo, decompression, formats, streams
from torchfleet.data.slots import SampleLayout, Slot
from torchfleet.launch import server_launcher
from torchfleet.launch.simulate import conditions
from torchfleet.ps.checkpoint import manifest, manifest_file, part_file
from torchfleet.ps.server.log import log_entry, log_records
from torchfleet.ps.tables.settings import expressions, table_size

_SHARED_MEMORY = "/dev/shm"


def all_targets(folder: Path) -> list[Target]:
    """Every one of them; files are made in `folder`."""
    makers = (_manifest, _collective, _part, _prototxt, _yaml, _condition, _multi_slot, _criteo, _vectors)
    others = [make(folder) for make in (*makers, _compressed, _addresses, _sizes, _terminal, _log, _profile, _arrow)]
    return [wire_target(), server_target(), *others]


def fast_folder() -> contextlib.AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else None)


# Saved models


def _manifest_run(folder: Path, name: str, read: Callable[[Storage], Any]) -> Callable[[bytes], None]:
    place = folder / name
    place.mkdir()
    storage = Storage(str(place))

    def run(data: bytes) -> None:
        (place / manifest_file.FILE).write_bytes(manifest_file._encode(data))  # its checksum fits
        read(storage)

    return run


def _manifest(folder: Path) -> Target:
    part = manifest.Part("rows", "rows-0.safetensors", 0, 3, 100, 7)
    table = manifest.described(SPEC, False, 5, 3, [])
    made = manifest.Manifest("save-000001", 1, "full", 1, [table], [part], num_files=1)
    run = _manifest_run(folder, "ps", manifest.read_manifest)
    modules = [manifest, manifest_file]
    return Target("manifest", run, [msgspec.json.encode(made)], modules, [b'"version":', b'"format":', b"save-000009"])


def _collective(folder: Path) -> Target:
    piece = collective_manifest.SavedPiece("f", [0], [2], 0, 8, 7)
    tensor = collective_manifest.SavedTensor("w", "model", "F32", [2], [piece])
    made = collective_manifest.CollectiveManifest("save-000001", 1, 2, [tensor], "", [], {}, {}, {}, {})
    run = _manifest_run(folder, "collective", collective_manifest.read)
    return Target("collective manifest", run, [msgspec.json.encode(made)], [collective_manifest], [b'"version":'])


def _part(folder: Path) -> Target:
    arrays = {
        "keys": np.arange(4, dtype=np.uint64),
        "values": np.ones((4, 2), np.float32),
        "none": np.zeros(0, np.uint8),
    }
    whole = b"".join(bytes(memoryview(buffer)) for buffer in part_file.encode(arrays) if len(buffer))

    def run(data: bytes) -> None:
        for array in part_file.decode(data, "part").values():
            array.sum()  # every element is in the file

    tokens = [b'"dtype":"F32"', b'"shape":[1,2]', b'"data_offsets":[0,8]', b"U64"]
    return Target("part file", run, [whole], [part_file], tokens)


# Requests and parts of a profile


def _profile(folder: Path) -> Target:
    """A request is looked for by every process of a job; parts are read by the process that asked."""
    place = folder / "profile"
    place.mkdir()
    span = Span("step 1", "step", 1, 2, "steps", 1, 2**64 - 1, more={"server": "server 0", "way_ms": 0.5})
    part = profile_folder.Part("worker", 0, 1, 1, "h", "m", 1, 2, "sync", [span], [profile_folder.Offset(1, 2, 3)])
    request = profile_folder.new_request(20, 0, True, now=time.time() + 3600)

    def run(data: bytes) -> None:
        for name in ("request.json", "worker.0.part.json"):
            (place / name).write_bytes(data)
        found = profile_folder.ProfileFolder(place).look()
        assert found is None or re.fullmatch("[0-9a-f]{16}", found.id)
        profile_folder.read(place / "worker.0.part.json", profile_folder.Part)

    return Target(
        "profile", run, [msgspec.json.encode(made) for made in (request, part)], [profile_folder], [b'"id":"../x"']
    )


# The log of a server


def _log(folder: Path) -> Target:
    """The first frame of an entry, behind it those that it announces; and a file of records as it is."""
    effects = log_entry.Effects(
        [log_entry.NotedTable(7, b"x" * 8)], token=3, refused=log_entry.Refused(*[1] * 5, "", "")
    )
    entry = log_entry.Entry(1, 5, 1, 9, 0.5, 0.0, 2, b"peer", effects, [b"abcd"])
    head = bytes(log_entry.encode_entry(entry)[0])
    whole = b"".join(bytes(buffer) for buffer in log_records.record_of(log_entry.encode_entry(entry), 0))

    def run(data: bytes) -> None:
        for frames in log_records.Records(memoryview(data), "log"):
            log_entry.decode_entry(frames)
        lengths = log_entry.lengths_in(memoryview(data))
        found = log_entry.decode_entry([data, *(bytes(min(length, 1 << 10)) for length in lengths)])
        for written in found.effects.tables:
            log_entry.noted_of(written)

    return Target("log", run, [head, whole, whole + whole], [log_entry, log_records], [b"TFL1"])


# Settings


def _file_run(path: Path, read: Callable[[Path], Any]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return run


def _prototxt(folder: Path) -> Target:
    seed = (
        b'amp: true\namp_configs {\n init_loss_scaling: 9\n custom_white_list: "a\\x41"\n}\na_sync_configs <k_steps: 4>'
    )
    tokens = [b"amp: true", b"sharding_configs {", b"}", b"[1, 2]", b"hybrid_configs { mp_degree: 2 }", b"inf", b"0x1F"]
    run = _file_run(folder / "s.prototxt", DistributedStrategy.load_from_prototxt)
    return Target("prototxt", run, [seed], [prototxt, textformat], tokens)


def _yaml(folder: Path) -> Target:
    seed = b"a_sync: true\na_sync_configs: {k_steps: 4, half_async: false}\nrpc_timeout: 3.5\n"
    tokens = [b"amp: true\n", b"amp_configs: {}", b"&a", b"*a", b"!!python/object", b"? ", b"|", b"- ", b"2020-01-01"]
    run = _file_run(folder / "s.yaml", DistributedStrategy.load_from_yaml)
    return Target("strategy YAML", run, [seed], [distributed_strategy], tokens)


def _condition(folder: Path) -> Target:
    names = ("show", "click", "count")
    columns = {name: np.array([0.0, 1.0, np.nan]) for name in names}

    def run(data: bytes) -> None:
        expressions.parse(data.decode("latin-1"), names)(columns)

    seeds = [b"count >= 3 and (show > 1 or not click == 7)", b"log(show + 1) / -2 * min(click, 3) < 1e-3"]
    tokens = [b" and ", b" or ", b"not ", b"(", b")", b"min(", b"<=", b"!=", b"count", b"log("]
    return Target("condition", run, seeds, [expressions], tokens)


def _addresses(folder: Path) -> Target:
    def run(data: bytes) -> None:
        text = data.decode("latin-1")
        for read in (
            lambda: server_launcher._addresses("--servers", text),
            lambda: server_launcher._addresses("--workers", text),
            lambda: named_variables.endpoints_of(text, "FLEET_SERVER_ENDPOINTS"),
        ):
            with contextlib.suppress(RoleError):
                assert len(read()) < 1 << 18

    return Target("addresses", run, [b"a:7000*4,[::1]:7,b:0"], [server_launcher, named_variables], [b":0*9", b":65535"])


def _sizes(folder: Path) -> Target:
    def run(data: bytes) -> None:
        text = data.decode("latin-1")
        readers = (lambda: table_size.parse_bytes(text, "x"), lambda: network_links.parse_link(text))
        for read in (*readers, lambda: conditions.parse_straggler(text)):
            with contextlib.suppress(FleetError):
                read()

    seeds, tokens = [b"8GB", b"25Gbit,20us", b"0.05x3"], [b"Gbit", b"us", b"e9"]
    return Target("sizes and links", run, seeds, [table_size, network_links, conditions], tokens)


# Data


def _rows_of(parser: formats.Parser, data: bytes) -> None:
    """The rows and the refused lines are the same wherever a chunk ends, and a line alone gives what it gives in a
    file."""
    lines = data.split(b"\n")
    whole = _parsed(parser, [data])
    assert _parsed(parser, [data[: len(data) // 2], data[len(data) // 2 :]]) == whole
    alone = [_parsed(parser, [line + b"\n"]) for line in lines[:8]]
    if len(lines) <= 8 and lines[-1]:
        assert [row for rows, _, _ in alone for row in rows] == whole[0]
        assert sum(num for _, num, _ in alone) == whole[1]


def _parsed(parser: formats.Parser, chunks: list[bytes]) -> tuple[list[bytes], int, str]:
    """The words of each row, the number of refused lines, and why the first of them was."""
    source, found = formats.LineSource("data", skip=True), []
    for rows in parser.read(chunks, source):
        assert len(rows.words) == rows.starts[-1]
        found += [rows.words[a:b].tobytes() for a, b in zip(rows.starts, rows.starts[1:], strict=False)]
    return found, source.skipped.num, source.skipped.first


def _multi_slot(folder: Path) -> Target:
    parser = formats.MultiSlotParser(SampleLayout([Slot("a"), Slot("b", dtype="float32", dim=2), Slot("c", dim=1)]))
    seeds = [b"2 1 2 2 0.5 1e-3 1 7\n0 2 1 2 1 9\n", b"1 18446744073709551615 2 3.4e38 -0.0 1 1\r\n!bad 3: no\n"]
    return Target("multi-slot text", lambda data: _rows_of(parser, data), seeds, [formats], [b" 1 ", b"1e38", b"\n"])


def _criteo(folder: Path) -> Target:
    plain = criteo.CriteoFormat().parser(SampleLayout(criteo.CriteoFormat.slots()))
    slots = [Slot(slot.name) if slot.name.startswith("C") else slot for slot in criteo.CriteoFormat.slots()]
    ragged = criteo.CriteoFormat(hash_size=(1 << 63) - 1, log_scale=True).parser(SampleLayout(slots))
    seed = (
        b"1\t" + b"\t".join(b"%d" % i for i in range(13)) + b"\t" + b"\t".join(b"%08x" % i for i in range(26)) + b"\n"
    )

    def run(data: bytes) -> None:
        for parser in (plain, ragged):
            _rows_of(parser, data)
        assert _parsed(plain, [data])[1:] == _parsed(ragged, [data])[1:]  # both refuse the same lines

    tokens = [b"\t", b"\n", b"-3", b"9223372036854775807", b"-9223372036854775808", b"\t\t\t\t"]
    return Target("Criteo text", run, [seed, seed.replace(b"\t7\t", b"\t\t")], [criteo, formats], tokens)


def _vectors(folder: Path) -> Target:
    path = folder / "vectors"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        words, vectors = vector_files.read_vectors(str(path))
        assert len(words) == len(vectors)

    seeds = [b"2 2\na 1 2\nb 0.5 1e-3\n", b"1 2\na \x00\x00\x80\x3f\x00\x00\x00\x40\n"]
    return Target("word vectors", run, seeds, [vector_files], [b" ", b"\n", b"9" * 30, b"1e39"])


def _arrow(folder: Path) -> Target:
    """Without pyarrow there is nothing to read."""
    slots = [Slot("ids"), Slot("x", "float32", 2), Slot("label", dim=1)]
    seeds = []
    with contextlib.suppress(MissingPackage):
        pa = arrow_columns.pyarrow()
        ids = pa.array([[1, 2], None, [3]], pa.list_(pa.int64()))
        x = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float32)), 2)
        whole = pa.table({"ids": ids, "x": x, "label": pa.array([5, 6, 5]).dictionary_encode()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, whole.schema) as writer:
            writer.write_table(whole)
        seeds.append(sink.getvalue().to_pybytes())

    def run(data: bytes) -> None:
        pa = arrow_columns.pyarrow()
        with contextlib.suppress(pa.ArrowException, OSError, MemoryError):  # of Arrow itself
            columns = arrow_columns.ColumnReader(slots, {}, 0.0)
            for batch in pa.ipc.open_stream(data):
                for column in columns.samples(batch, "stream").columns.values():
                    (column[0] if isinstance(column, tuple) else column).sum()

    return Target("Arrow stream", run, seeds, [arrow_columns], [bytes(8), (1 << 40).to_bytes(8, "little")])


def _compressed(folder: Path) -> Target:
    path = folder / "data"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        num = sum(map(len, streams.chunks(streams.open_file(str(path)), str(path))))
        assert num <= 1 << 32

    text = b"1 2 3\n" * 50
    seeds = [compress(text) for compress in (gzip.compress, zstd.compress, lzma.compress, bz2.compress)]
    return Target("compressed data", run, seeds, [streams, decompression])


def _terminal(folder: Path) -> Target:
    def run(data: bytes) -> None:
        shown = printable.printable(data.decode("latin-1"))
        assert not {chr(code) for code in (*range(9), *range(10, 27), *range(28, 32), *range(127, 160))} & set(shown)
        assert "\x1b" not in printable.bare(data.decode("latin-1"))

    return Target(
        "terminal", run, [b"\x1b[31mred\x1b[0m \x1b]52;c;aa\x07 b\r\n"], [printable], [b"\x1b[", b"\x1b]", b"\x1b\\"]
    )
