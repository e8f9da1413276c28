"""Kernels of text: words as bytes.split finds them, maps that keep every word apart, ids to text and back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.messages import names, naming
from support.searches import examples

from torchfleet.apps.word2vec import textfiles
from torchfleet.apps.word2vec.corpus import read_ids
from torchfleet.apps.word2vec.textfiles import padded, whole_words
from torchfleet.apps.word2vec.wordmap import WordMap
from torchfleet.apps.word2vec.writing import IdWriter
from torchfleet.base.errors import DataError
from torchfleet.ps.kernels import words

SPACE = b" \t\n\r\v\f"
GOLDEN, ALL = 0x9E3779B97F4A7C15, (1 << 64) - 1

few_letters = st.text("ab \n", max_size=60).map(str.encode)
any_bytes = st.binary(max_size=80)
spaced = st.lists(st.one_of(st.binary(max_size=20), st.sampled_from([SPACE[i : i + 1] for i in range(6)]))).map(
    b"".join
)
texts = st.one_of(few_letters, any_bytes, spaced)


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & ALL
    return x ^ (x >> 31)


def cut_at(text: bytes, size: int) -> list[bytes]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def counted(text: bytes, size: int = 1 << 20, **options: int) -> list[tuple[bytes, int]]:
    found = WordMap(**options)
    for piece in whole_words(cut_at(text, size), "text"):
        found.count(piece)
    return [(found.word(number), int(found.counts[number])) for number in range(len(found))]


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(texts, st.integers(1, 40))
@example(b"", 1)
@example(b"word", 1)
@example(b"a" * 17 + b" " + b"a" * 16 + b"\0 " + b"a" * 16, 8)
def test_words_are_counted_in_the_order_in_which_they_first_came(text: bytes, size: int) -> None:
    expected = list(Counter(text.split()).items())
    assert counted(text, size) == expected
    assert counted(text, size, num_slots=2, num_bytes=16) == expected


def test_exactly_six_bytes_are_white_space_wherever_they_stand() -> None:
    for byte in range(256):
        for place in range(18):
            text = b"x" * place + bytes([byte]) + b"y" * 9
            assert [word for word, _ in counted(text)] == text.split(), (byte, place)
    assert all(not bytes([byte]).split() for byte in SPACE)


def test_a_map_grows_to_a_hundred_thousand_words() -> None:
    names = [b"%x" % (number * 7919) for number in range(100_000)]
    found = counted(b" ".join(names + names[:50_000]), num_slots=2, num_bytes=16)
    assert [word for word, _ in found] == names
    assert [count for _, count in found] == [2] * 50_000 + [1] * 50_000


def test_words_whose_hashes_are_equal_stay_apart() -> None:
    """Sixteen bytes each; an attacker who knows the salt can choose the second half so that the hashes meet."""
    salt = 12345
    start = mix((salt + GOLDEN * 17) & ALL)
    first = int.from_bytes(b"firstone", "little")
    meeting = {b"firstonesecondhf"}
    for number in range(2000):
        other = b"%08d" % number
        half = mix(start ^ first) ^ int.from_bytes(b"secondhf", "little") ^ mix(start ^ int.from_bytes(other, "little"))
        word = other + half.to_bytes(8, "little")
        meeting |= {word} if len(word.split()) == 1 and word.strip() == word else set()
    assert len(meeting) > 1000
    text = b"\n".join(sorted(meeting)) + b"\n"
    assert sorted(counted(text * 3, salt=salt)) == [(word, 3) for word in sorted(meeting)]


def test_a_word_may_be_longer_than_many_chunks_but_not_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"a " + b"b" * 5000 + b" c"
    assert counted(text, 7) == [(b"a", 1), (b"b" * 5000, 1), (b"c", 1)]
    monkeypatch.setattr(textfiles, "MAX_WORD", 4000)
    with pytest.raises(DataError, match=naming("text", "4,000")):
        counted(text, 7)


def test_pieces_hold_whole_words_and_end_with_a_newline() -> None:
    pieces = [piece.tobytes() for piece in whole_words([b"one tw", b"o", b" three"], "text")]
    assert all(piece.endswith(words.PADDING) for piece in pieces)
    assert [piece[: -len(words.PADDING)] for piece in pieces] == [b"one ", b"two ", b"three\n"]


# Ids


def encoded(text: bytes, known: list[bytes], ids: list[int], keep: list[float], seed: int, room: int) -> bytes:
    found, state, out = WordMap.of(known), np.zeros(words.WRITER_STATE_SIZE, np.int64), np.empty(room, np.uint8)
    limits = np.ceil(np.array(keep) * 2.0**53).astype(np.uint64)
    piece, at, written = padded(text), 0, b""
    while at < len(text):
        at = words.encode_words(
            piece, at, len(text), found.slots, found.entries, found.arena, found.state, np.array(ids, np.int32),
            limits, ids[-1], np.uint64(seed), out, state,
        )  # fmt: skip
        written += out[: state[words.OUT_USED]].tobytes()
        state[words.OUT_USED] = 0
    assert state[words.NUM_READ] == len(text.split())
    assert state[words.NUM_WRITTEN] == len(written.split())
    return written


def expected_ids(text: bytes, known: list[bytes], ids: list[int], keep: list[float], seed: int) -> bytes:
    stream, number, lines = mix((mix(seed) + GOLDEN) & ALL), 0, []
    for line in text.split(b"\n"):
        kept = []
        for word in line.split():
            index = known.index(word) if word in known else len(known)
            draw = mix((stream + number * GOLDEN) & ALL) >> 11
            kept += [b"%d" % ids[index]] if ids[index] >= 0 and draw < keep[index] * 2**53 else []
            number += 1
        lines.append(b" ".join(kept))
    # The last line ends when its file does.
    body = b"".join(line + b"\n" for line in lines[:-1] if line)
    return body + lines[-1]


@pytest.mark.slow
@settings(max_examples=examples(50))
@given(
    st.lists(st.sampled_from([b"a", b"bb", b"ccc", b"longer-than-eight", b"?", b" ", b"\n", b"\t"]), max_size=60),
    st.sampled_from([[0, 1, 2, 3, 7], [5, 99_999, 0, 2**31 - 1, -1], [7, 10, 100, 7, 7]]),
    st.sampled_from([[1.0, 1, 1, 1, 1], [0.5, 0.1, 0.9, 1, 0.3], [1.0, 0, 0, 0, 0]]),
    st.integers(0, 2**63),
    st.sampled_from([12, 13, 40, 4096]),
)
def test_words_become_ids_line_by_line(
    parts: list[bytes], ids: list[int], keep: list[float], seed: int, room: int
) -> None:
    text = b" ".join(parts).replace(b" \n ", b"\n")
    known = [b"a", b"bb", b"ccc", b"longer-than-eight"]
    assert encoded(text, known, ids, keep, seed, room) == expected_ids(text, known, ids, keep, seed)


lines_of_ids = st.lists(
    st.lists(st.one_of(st.integers(0, 12), st.integers(0, 2**31 - 1)), min_size=1, max_size=12), max_size=12
)


@pytest.mark.slow
@settings(max_examples=examples(50))
@given(lines_of_ids, st.integers(1, 30), st.integers(1, 20), st.booleans())
def test_ids_are_written_and_read_back(
    tmp_path_factory: pytest.TempPathFactory, lines: list[list[int]], size: int, max_words: int, few: bool
) -> None:
    path = str(tmp_path_factory.getbasetemp() / "ids")
    stream = np.array([x for line in lines for x in (*line, -1)], np.int32)
    with IdWriter(path) as writer:
        writer.buffer = np.empty(12 if few else 4096, np.uint8)
        at = 0
        while at < len(stream):
            at = writer.write(stream, at, max_words)
    assert Path(path).read_text() == "".join(" ".join(map(str, line)) + "\n" for line in lines)
    blocks = list(read_ids([path, path], size))
    assert all(0 < len(block) <= size for block in blocks)
    assert np.concatenate([np.empty(0, np.int32), *blocks]).tolist() == [*stream.tolist()] * 2


def read(tmp_path: Path, text: bytes, size: int = 100, num_ids: int = 1 << 31) -> list[list[int]]:
    (tmp_path / "ids").write_bytes(text)
    return [block.tolist() for block in read_ids([str(tmp_path / "ids")], size, num_ids)]


def test_a_block_ends_with_a_line_unless_the_line_alone_is_longer(tmp_path: Path) -> None:
    assert read(tmp_path, b"1 2\n3 4\n5 6\n", 7) == [[1, 2, -1, 3, 4, -1], [5, 6, -1]]
    assert read(tmp_path, b"1 2\n3 4 5 6 7 8\n9\n", 5) == [[1, 2, -1], [3, 4, 5, 6, 7], [8, -1, 9, -1]]
    assert read(tmp_path, b"1 2 3\n4\n", 3) == [[1, 2, 3], [-1, 4, -1]]
    assert read(tmp_path, b"1 2\n3", 1) == [[1], [2], [-1], [3], [-1]]


@pytest.mark.slow
def test_ids_stand_between_any_white_space_and_empty_lines_are_passed_over(tmp_path: Path) -> None:
    assert read(tmp_path, b"\n \n 1\t2 \r\n\n\v3\f\n  \n") == [[1, 2, -1, 3, -1]]
    assert read(tmp_path, b"") == []
    assert read(tmp_path, b" \n\n") == []
    assert read(tmp_path, b"007") == [[7, -1]]


@pytest.mark.parametrize(
    "token", ["x", "-1", "+1", "1.0", "1e3", "12x", "x12", "1,2", "12345678x", "0x10", "\0", "1\0", "é", "１", "nan"]
)
def test_what_is_no_id_is_named_with_its_byte(tmp_path: Path, token: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, f"1 2\n3 {token} 4\n".encode())
    assert names(str(caught.value), f"{tmp_path}/ids", "byte 6", 0, f"{token!r}")


@pytest.mark.parametrize("token", ["100", "101", "4294967296", "18446744073709551616", "9" * 40, "0" * 20 + "5"])
def test_an_id_that_is_too_large_is_named_with_its_byte(tmp_path: Path, token: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, f"99 {token}".encode(), num_ids=100)
    assert names(str(caught.value), "byte 3", token, 100)


def test_the_byte_is_counted_over_many_chunks(tmp_path: Path) -> None:
    text = b"12345 " * 400_000 + b"here"
    with pytest.raises(DataError, match=naming(f"byte {6 * 400_000}", "'here'")):
        read(tmp_path, text, 1 << 16)
