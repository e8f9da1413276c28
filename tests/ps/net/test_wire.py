"""Messages and frames: what is encoded comes back, and whatever is not a message is refused without being believed."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.cases import each_of
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import FleetError, WireError
from torchfleet.ps.net.wire import (
    HEADER,
    MAX_ARRAYS,
    MAX_FRAME,
    Array,
    Command,
    Message,
    Role,
    call_of,
    decode,
    encode,
    encode_bytes,
    pack,
    unpack,
)
from torchfleet.ps.server.among_workers import BarrierBody
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

DTYPES = [np.dtype(name) for name in ("u1", "<u8", "<f4", "<f8")]
HEADER_BYTES, ARRAY_BYTES = 64, 20
CODES = {np.dtype("u1"): 1, np.dtype("<u8"): 2, np.dtype("<f4"): 3, np.dtype("<f8"): 4}

U8, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 32, 64))
ARRAYS = st.builds(
    Array,
    U32,
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=6))
    ),
)
MESSAGES = st.builds(Message, U8, U8, U8, U32, U64, U64, U64, U64, st.lists(ARRAYS, max_size=4), U64)


def as_bytes(frame: object) -> bytes:
    return bytes(frame) if isinstance(frame, bytes) else frame.tobytes()


def off_by(num_bytes: int) -> Callable[[object], memoryview]:
    """A carrier whose memory starts `num_bytes` behind a word: where small frames lie in a receive buffer."""

    def carry(frame: object) -> memoryview:
        words = np.zeros(2 + len(as_bytes(frame)) // 8, np.uint64)
        room = words.view(np.uint8)[num_bytes : num_bytes + len(as_bytes(frame))]
        room[:] = np.frombuffer(as_bytes(frame), np.uint8)
        return room.data

    return carry


CARRIERS: dict[str, Callable[[object], object]] = {
    "as encoded": lambda frame: frame,
    "bytes": as_bytes,
    "bytearray": lambda frame: bytearray(as_bytes(frame)),
    "memoryview": lambda frame: memoryview(as_bytes(frame)),
    **{f"{n} bytes off": off_by(n) for n in (0, 1, 3, 4, 7)},
}


class TestRoundTrip:
    @pytest.mark.parametrize("carry", CARRIERS.values(), ids=CARRIERS.keys())
    @given(message=MESSAGES)
    @settings(max_examples=examples(60))
    def test_what_is_encoded_is_decoded(self, carry: Callable[[object], object], message: Message) -> None:
        frames = [carry(frame) for frame in encode(message)]
        found = decode(frames)
        for name in ("command", "role", "flags", "worker", "client", "call", "sequence", "floor", "incarnation"):
            assert getattr(found, name) == getattr(message, name)
        assert call_of(frames) == message.call
        assert len(found.arrays) == len(message.arrays)
        for got, given_array in zip(found.arrays, message.arrays, strict=True):
            assert got.number == given_array.number
            assert got.data.dtype == given_array.data.dtype
            assert got.data.shape == given_array.data.shape
            assert got.data.tobytes() == given_array.data.tobytes()  # bytes, since NaN is not equal to itself
            assert got.data.flags.aligned
            assert got.data.flags.c_contiguous

    @given(data=hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=1, min_side=0, max_side=9)))
    @settings(max_examples=examples(30))
    def test_a_flat_array_arrives_as_one_column(self, data: np.ndarray) -> None:
        (array,) = decode(encode(Message(Command.PING, arrays=[Array(1, data)]))).arrays
        assert array.data.shape == (len(data), 1)
        assert array.data.tobytes() == data.tobytes()

    @pytest.mark.parametrize(
        "data",
        [np.arange(24.0).reshape(4, 6)[:, ::2], np.arange(24.0).reshape(4, 6).T, np.arange(24.0).reshape(4, 6)[::-1]],
        ids=["every second column", "transposed", "backwards"],
    )
    def test_an_array_in_scattered_memory_arrives_in_order(self, data: np.ndarray) -> None:
        (array,) = decode(encode(Message(Command.PING, arrays=[Array(1, data)]))).arrays
        assert np.array_equal(array.data, data)

    def test_arrays_are_neither_copied_on_the_way_out_nor_on_the_way_in(self) -> None:
        data = np.ones((100, 3), np.float32)
        frames = encode(Message(Command.PING, arrays=[Array(1, data)]))
        assert np.shares_memory(frames[1], data)
        assert np.shares_memory(decode(frames).arrays[0].data, data)

    def test_an_unaligned_frame_gives_the_same_kind_of_array_as_an_aligned_one(self) -> None:
        """Kernels are compiled per kind: one that cannot be written to would be compiled when the request is here."""
        frames = encode(Message(Command.PING, arrays=[Array(1, np.ones((3, 2), np.float32))]))
        aligned, unaligned = (decode([frames[0], off_by(n)(frames[1])]).arrays[0].data for n in (0, 1))
        assert aligned.flags.writeable
        assert unaligned.flags.writeable

    def test_the_bytes_are_those_of_the_protocol(self) -> None:
        """Clients and servers of one version must understand each other whenever they were built."""
        message = Message(Command.PUSH, Role.WORKER, 2, 3, 4, 5, 6, 7, [Array(8, np.ones((9, 10), np.float32))], 11)
        header, frame = encode(message)
        expected = b"TFLT" + bytes([2, 5, 1, 2]) + struct.pack("<IHxxQQQQQII", 3, 1, 4, 5, 6, 7, 11, 0, 0)
        assert header == expected + struct.pack("<IBxxxIQ", 8, 3, 10, 9)
        assert as_bytes(frame) == np.ones(90, "<f4").tobytes()

    def test_the_largest_number_of_arrays_goes_through_and_one_more_does_not(self) -> None:
        arrays = [Array(i, np.empty(0, np.uint8)) for i in range(MAX_ARRAYS)]
        assert len(decode(encode(Message(Command.PING, arrays=arrays))).arrays) == MAX_ARRAYS
        with pytest.raises(WireError, match=naming(4097, 4096)):
            encode(Message(Command.PING, arrays=[*arrays, arrays[0]]))

    def test_an_array_too_large_for_a_frame_is_refused_before_it_is_sent(self) -> None:
        data = np.empty(MAX_FRAME + 1, np.uint8)  # never touched: address space only
        with pytest.raises(WireError, match=naming(f"{MAX_FRAME + 1:,}", f"{MAX_FRAME:,}")):
            encode(Message(Command.PING, arrays=[Array(1, data)]))


def header(num_arrays: int = 1, magic: bytes = b"TFLT", version: int = 2) -> bytes:
    numbers = struct.pack("<IHxxQQQQQII", 0, num_arrays, 1, 42, 0, 0, 0, 0, 0)
    return magic + bytes([version, Command.PING, 1, 0]) + numbers


def array_entry(rows: int, columns: int, code: int = 3, table: int = 1) -> bytes:
    return struct.pack("<IBxxxIQ", table, code, columns, rows)


def announced(rows: int, columns: int, num_bytes: int, code: int = 3) -> list[bytes]:
    """A message whose one array is said to be rows × columns, with a frame of num_bytes."""
    return [header() + array_entry(rows, columns, code), bytes(num_bytes)]


BROKEN: dict[str, tuple[list[bytes], str]] = {
    "no frame": ([], "no frame at all"),
    "an empty frame": ([b""], "at least 48 bytes, found 0"),
    "another magic": ([header(0, magic=b"HTTP")], "magic bytes"),
    "a newer version": ([header(0, version=3)], "protocol version 2, found 3"),
    "an older version": ([header(0, version=1)[:48]], "protocol version 2, found 1: use the same torchfleet"),
    "version 0": ([header(0, version=0)], "protocol version 2, found 0"),
    "a header of version 1 that says 2": ([header(0)[:48]], "at least 64 bytes, found 48"),
    "a truncated header": ([header(0)[:-1]], "at least 64 bytes, found 63"),
    "bytes behind the header": ([header(0) + b"\0"], "cannot have 65 bytes"),
    "half an array entry": ([header() + array_entry(1, 1)[:-1], bytes(4)], "cannot have 83 bytes"),
    "an entry too many": ([header() + array_entry(1, 1) * 2, bytes(4)], "cannot have 104 bytes"),
    "more arrays than allowed": ([header(5000) + array_entry(0, 1) * 5000] + [b""] * 5000, "header for 5000 arrays"),
    "a frame too few": ([header() + array_entry(1, 1)], "announces 1 arrays, found 0"),
    "a frame too many": ([header() + array_entry(1, 1), bytes(4), bytes(4)], "announces 1 arrays, found 2"),
    "frames without an array": ([header(0), b""], "announces 0 arrays, found 1"),
    "an unknown dtype": (announced(1, 1, 4, code=9), "unknown dtype code 9; known are [1, 2, 3, 4]"),
    "dtype 0": (announced(1, 1, 4, code=0), "unknown dtype code 0"),
    "a count larger than the payload": (announced(1000, 8, 8 * 4), "1000 x 8 float32, which is 32000 bytes"),
    "a count smaller than the payload": (announced(1, 8, 2 * 8 * 4), "its frame has 64"),
    "a payload that ends within a number": (announced(1, 1, 3), "its frame has 3"),
    "another dtype's length": (announced(2, 2, 16, code=4), "its frame has 16"),
    "rows without a payload": (announced(1, 1, 0), "its frame has 0"),
    "a payload without rows": (announced(0, 4, 16), "which is 0 bytes"),
    "a huge count": (announced(2**63, 2**31, 64), "its frame has 64"),
    "a count that is 0 in 64 bits": (announced(2**62, 4, 0), "its frame has 0"),
    "a count that is 16 in 64 bits": (announced(2**62 + 1, 4, 16), "its frame has 16"),
    "the largest count there is": (announced(2**64 - 1, 2**32 - 1, 8), "its frame has 8"),
    "endless rows of no width": (announced(2**64 - 1, 0, 0), "rows of no bytes"),
    "2^63 rows of no width": (announced(2**63, 0, 0), "rows of no bytes"),
    "a few rows of no width too many": (announced(MAX_FRAME + 1, 0, 0), "rows of no bytes"),
}


class TestStrictness:
    @each_of(("frames", "text"), BROKEN.values(), ids=BROKEN.keys())
    @each_of("carry", [as_bytes, off_by(0), off_by(3)], ids=["bytes", "aligned", "unaligned"])
    def test_a_broken_message_is_refused(
        self, frames: list[bytes], text: str, carry: Callable[[object], object]
    ) -> None:
        with pytest.raises(WireError) as caught:
            decode([carry(frame) for frame in frames])
        assert text in str(caught.value)

    @pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 2**32 - 1), (7, 0), (MAX_FRAME, 0)])
    def test_an_array_without_bytes_keeps_its_shape(self, rows: int, columns: int) -> None:
        (array,) = decode(announced(rows, columns, 0)).arrays
        assert array.data.shape == (rows, columns)

    @pytest.mark.parametrize("code", CODES.values(), ids=map(str, CODES))
    def test_a_lie_about_the_size_allocates_nothing_of_it(self, code: int) -> None:
        lies = [
            announced(rows, columns, num_bytes, code)
            for rows in (10**6, 2**31, 2**40, 2**63, 2**64 - 1)
            for columns in (0, 1, 8, 2**31, 2**32 - 1)
            for num_bytes in (0, 8, 4096)
            if rows * columns or rows > MAX_FRAME
        ]
        tracemalloc.start()
        try:
            for frames in lies:
                with pytest.raises(WireError):
                    decode(frames)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 100_000, f"decoding took {peak:,} bytes"

    @each_of(
        ("frames", "call"),
        [
            ([], 0),
            ([b""], 0),
            ([header(0)[:47]], 0),
            ([header(0, version=1)[:48]], 42),
            ([header(0, magic=b"HTTP")], 0),
            ([header(3)], 42),
            ([header(0, version=9) + bytes(1000), b"x"], 42),
        ],
    )
    def test_the_call_of_a_broken_request_is_found_where_it_has_one(self, frames: list[bytes], call: int) -> None:
        assert call_of(frames) == call


class TestBodies:
    @pytest.mark.parametrize("spec", [TableSpec("a"), TableSpec("ä" * 200, "dense", size=7, rule=Rule("adam", lr=0.5))])
    def test_a_body_comes_back(self, spec: TableSpec) -> None:
        assert unpack(decode(encode(Message(1, arrays=[pack(spec)]))).arrays[0], TableSpec) == spec

    @each_of(
        ("body", "text"),
        [
            ({"name": 5}, "Expected `str`, got `int`"),
            ({}, "missing required field `name`"),
            ({"name": "a", "dim": "2"}, "Expected `int`"),
            ({"name": "a", "dim": 2.5}, "Expected `int`"),
            ({"name": "a", "rule": None}, "Expected `object`"),
            ({"name": "a", "colour": 1}, "unknown field `colour`"),
            (["a"], "Expected `object`, got `array`"),
            (None, "Expected `object`, got `None`"),
        ],
    )
    def test_a_body_of_another_type_is_refused(self, body: object, text: str) -> None:
        with pytest.raises(WireError, match="TableSpec") as caught:
            unpack(pack(body), TableSpec)
        assert text in str(caught.value)

    @each_of(
        "body",
        [
            {"dim": 0},
            {"dim": 1 << 40},
            {"seed": -1},
            {"kind": "dense"},
            {"kind": "other"},
            {"part": 3},
            {"rule": {"lr": -1.0}},
            {"rule": {"name": "adamw"}},
        ],
    )
    def test_a_description_that_makes_no_table_is_refused(self, body: dict[str, object]) -> None:
        with pytest.raises(FleetError):
            unpack(pack({"name": "a", **body}), TableSpec)

    @pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != np.uint8], ids=str)
    def test_a_body_is_made_of_bytes(self, dtype: np.dtype) -> None:
        with pytest.raises(WireError, match="bytes"):
            unpack(Array(0, np.zeros((4, 1), dtype)), TableSpec)

    @each_of("kind", [TableSpec, BarrierBody, dict])
    @each_of(
        "garbage",
        [
            b"",
            b"\xc1",
            b"\x81",
            b"\xdf\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff",
            b"\x81\xa1\xff\x00",
            b"\x81\x80\x01",
            b"\xc7\xff\x01",
            b"\x91" * 100_000,
            b"\x81\xa1a" * 100_000,
            msgspec.msgpack.encode(TableSpec("a")) + b"\0",
        ],
    )
    def test_garbage_is_refused(self, kind: type, garbage: bytes) -> None:
        with pytest.raises(FleetError):
            unpack(Array(0, np.frombuffer(garbage, np.uint8).reshape(-1, 1)), kind)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [TableSpec, BarrierBody, dict])
    @given(data=st.data())
    @settings(max_examples=examples(300))
    def test_random_bytes_give_a_body_or_an_error_of_ours(self, kind: type, data: st.DataObject) -> None:
        valid = msgspec.msgpack.encode(
            {"name": "ab", "num_workers": 2, "timeout": 1.0} if kind is BarrierBody else TableSpec("ab")
        )
        start = data.draw(st.integers(0, len(valid)))
        stop = data.draw(st.integers(start, len(valid)))
        garbage = valid[:start] + data.draw(st.binary(max_size=12)) + valid[stop:]
        try:
            body = unpack(Array(0, np.frombuffer(garbage, np.uint8).reshape(-1, 1)), kind)
        except FleetError:
            return
        assert isinstance(body, kind)


def many_arrays(num: int, seed: int = 0) -> Message:
    rng = np.random.default_rng(seed)
    kinds = [np.uint64, np.float32, np.uint8, np.float64]
    arrays = []
    for i in range(num):
        shape = int(rng.integers(0, 5)), int(rng.integers(0, 4))
        arrays.append(Array(i, rng.integers(0, 200, shape).astype(kinds[i % 4])))
    return Message(Command.PUSH, arrays=arrays)


@pytest.mark.parametrize("num", [8, 9, 40])
def test_many_small_arrays_travel_in_one_frame(num: int) -> None:
    message = many_arrays(num)
    frames = [bytes(frame) if isinstance(frame, bytes) else frame.tobytes() for frame in encode(message)]
    assert len(frames) == (1 + num if num <= 8 else 2)
    for shift in (0, 1):  # a receive buffer may begin anywhere
        room = bytearray(len(frames[1]) + shift)
        room[shift:] = frames[1]
        found = decode([frames[0], memoryview(room)[shift:], *frames[2:]])
        for ours, theirs in zip(message.arrays, found.arrays, strict=True):
            assert (theirs.number, theirs.data.dtype) == (ours.number, ours.data.dtype)
            np.testing.assert_array_equal(theirs.data, ours.data)


def test_a_frame_of_several_arrays_that_does_not_fit_the_header_is_refused() -> None:
    header, body = encode(many_arrays(20))
    for wrong in (body[:-8], body + bytes(8), body[:-1], b""):
        with pytest.raises(WireError):
            decode([header, wrong])
    huge = bytearray(header)
    huge[HEADER.size + 12 : HEADER.size + 20] = (1 << 62).to_bytes(8, "little")
    with pytest.raises(WireError):
        decode([bytes(huge), body])


def test_large_arrays_have_frames_of_their_own() -> None:
    message = Message(Command.PUSH, arrays=[Array(i, np.zeros((1 << 15, 1), np.uint64)) for i in range(9)])
    assert len(encode(message)) == 10


@pytest.mark.parametrize("num", [0, 1, 8, 9, 40])
@pytest.mark.parametrize("size", [3, 40_000])
def test_frames_are_encoded_as_arrays_of_their_bytes_are(num: int, size: int) -> None:
    """As one frame if they are many and small, and as they are otherwise."""
    rng = np.random.default_rng(num)
    frames = [rng.integers(0, 255, size + i).astype(np.uint8).tobytes() for i in range(num)]
    message = Message(Command.APPEND, Role.SERVER, call=7, client=9, term=3)
    made = encode_bytes(message, frames)
    message.arrays = [Array(0, np.frombuffer(frame, np.uint8)) for frame in frames]
    assert [as_bytes(frame) for frame in made] == [as_bytes(frame) for frame in encode(message)]
    assert [array.data.tobytes() for array in decode(made).arrays] == frames
    if len(made) == num + 1:
        assert all(frame is given for frame, given in zip(made[1:], frames, strict=True))


def test_a_frame_too_large_for_a_message_is_refused() -> None:
    large = np.zeros(MAX_FRAME + 1, np.uint8)  # whose pages nothing touches
    with pytest.raises(WireError, match=naming(f"{MAX_FRAME + 1:,}")):
        encode_bytes(Message(Command.APPEND, Role.SERVER), [large])
