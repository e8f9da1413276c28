"""Word vectors: files that gensim and we read of each other, what is said of bad ones, saved models, neighbours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import each_of
from support.extras import Late
from support.fleets import in_process
from support.messages import naming
from support.scripts.saved_models import save
from support.searches import examples

from torchfleet.apps.word2vec.decimals import lines_of
from torchfleet.apps.word2vec.vectors import WordVectors
from torchfleet.apps.word2vec.vocabulary import Vocabulary
from torchfleet.base.errors import CheckpointError, DataError
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

gensim = Late("gensim.models")
pytestmark = pytest.mark.xdist_group("gensim")  # imported once, which takes seconds

ODD_WORDS = ["the", "<UNK>", "naïve", "日本", "a\u00a0b", "\udcff\udcfe", "1", "-0.5", "#", ":", '"', "\x1c"]


def random_vectors(num: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num, dim)).astype(np.float32)


def named(num: int) -> list[str]:
    return [f"word{i}" for i in range(num)]


def keyed(words: Sequence[str], vectors: np.ndarray) -> Any:
    made = gensim.KeyedVectors(vectors.shape[1])
    made.add_vectors(list(words), vectors)
    return made


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("dim", [1, 2, 3, 50])
@pytest.mark.parametrize("kind", ["text", "binary"])
def test_what_is_saved_is_loaded(kind: str, dim: int, tmp_path: Path) -> None:
    vectors = random_vectors(len(ODD_WORDS), dim, 7)
    path = tmp_path / "new folder" / "vectors"
    saved = WordVectors(ODD_WORDS, vectors)
    (saved.save_text if kind == "text" else saved.save_binary)(path)
    loaded = WordVectors.load(str(path))
    assert loaded.words == ODD_WORDS
    assert np.array_equal(loaded.vectors, vectors)
    assert os.listdir(path.parent) == ["vectors"]


def test_every_float32_comes_back_from_text() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 300_000, np.uint32).view(np.float32)
    tens = (10.0 ** np.arange(-45, 39)).astype(np.float32)
    around = [tens, np.nextafter(tens, np.float32(0)), np.nextafter(tens, np.float32(3e38))]
    values = np.concatenate([values[np.isfinite(values)], *around, -tens])
    read = np.array(lines_of(values[None])[0].split(), np.float32)
    assert np.array_equal(read.view(np.uint32), values.view(np.uint32))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@settings(max_examples=examples(200))
def test_numbers_read_back_and_take_no_more_room_than_nine_digits(numbers: list[float]) -> None:
    line = lines_of(np.array([numbers], np.float32))[0].decode()
    for text, number in zip(line.split(" "), numbers, strict=True):
        assert np.float32(text) == np.float32(number)
        assert len(text) <= len(f"{number:.8e}")


def test_numbers_are_written_short() -> None:
    numbers = [0, -0.0, 1, -1, 0.5, 7.25, 0.1, 10, 1.5e-5, 1e-6, 1e-45, 12345678]
    expected = "0 -0 1 -1 0.5 7.25 0.100000001 1e+01 1.49999996e-05 9.99999997e-07 1.40129846e-45 1.2345678e+07"
    assert lines_of(np.array([numbers], np.float32)) == [expected.encode()]


@pytest.mark.parametrize("binary", [False, True])
def test_gensim_reads_what_we_write(binary: bool, tmp_path: Path) -> None:
    words, vectors = [word for word in ODD_WORDS if word.isprintable()], random_vectors(8, 37)
    words = words[:8]
    path = str(tmp_path / "vectors")
    saved = WordVectors(words, vectors)
    (saved.save_binary if binary else saved.save_text)(path)
    loaded = gensim.KeyedVectors.load_word2vec_format(path, binary=binary)
    assert loaded.index_to_key == words
    assert np.array_equal(loaded.vectors, vectors)


@pytest.mark.parametrize("binary", [False, True])
def test_we_read_what_gensim_writes(binary: bool, tmp_path: Path) -> None:
    words, vectors = ODD_WORDS[:4], random_vectors(4, 37)
    keyed(words, vectors).save_word2vec_format(str(tmp_path / "vectors"), binary=binary)
    loaded = WordVectors.load(tmp_path / "vectors")
    assert loaded.words == words
    assert np.array_equal(loaded.vectors, vectors)


def test_text_and_binary_are_told_apart_by_content(tmp_path: Path) -> None:
    """Also where a vector's bytes look like white space, or a short text line is followed by foreign letters."""
    spaces = np.frombuffer(b"\n\n\n\n    \x00\x00\x00\x00", "<f4").reshape(1, 3)
    WordVectors(["a"], spaces).save_binary(tmp_path / "binary")
    assert np.array_equal(WordVectors.load(tmp_path / "binary").vectors, spaces)
    text = write(tmp_path / "text", "2 3\na 1 2 3\n日本日本日本日本 4 5 6\n".encode())
    assert WordVectors.load(text).vectors.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_lines_of_other_programs_are_read(tmp_path: Path) -> None:
    """Blanks at the end of lines (word2vec.c), carriage returns, no newline at the end, empty lines behind."""
    path = write(tmp_path / "vectors", b"2 2 \r\na 1.5 -2 \r\nb  1e-3 4\r\n\r\n")
    assert WordVectors.load(path).vectors.tolist() == np.array([[1.5, -2], [1e-3, 4]], np.float32).tolist()
    assert len(WordVectors.load(write(tmp_path / "vectors", b"2 2\na 1 2\nb 3 4"))) == 2


def test_of_a_word_that_comes_twice_the_first_is_read_as_gensim_does(tmp_path: Path) -> None:
    path = str(write(tmp_path / "vectors", b"4 1\na 1\nb 2\na 3\nc 4\n"))
    loaded, theirs = WordVectors.load(path), gensim.KeyedVectors.load_word2vec_format(path)
    assert loaded.words == theirs.index_to_key[:3] == ["a", "b", "c"]  # gensim leaves an empty one behind them
    assert loaded.vectors.tolist() == theirs.vectors[:3].tolist() == [[1], [2], [4]]


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (b"", "line 1"),
        (b"the 0.1 0.2\n", "line 1; 'the 0.1 0.2'"),
        (b"\xff\xfe\x00" * 100, "line 1"),
        (b"2 x\na 1\n", "line 1; '2 x'"),
        (b"-2 3\na 1\n", "line 1; '-2 3'"),
        (b"0 3\n", "line 1; 0; 3"),
        (b"2 1" + b"0" * 30 + b"\na 1\n", "line 1"),
        (b"1" + b"0" * 30 + b" 1" + b"0" * 60 + b"\na \x00\x00\x80\x3f", "line 1"),
        (b"1" + b"0" * 30 + b" 2\na 1 2\n", "line 2"),
        (b"2 3\na 1 2 3\nb 1 2\n", "line 3; 3; 2; 'b'"),
        (b"2 3\na 1 2 3\nb 1 2 3 4\n", "line 3; 3; 4; 'b'"),
        (b"2 3\na 1 2 x\nb 1 2 3\n", "line 2; 3; 'x'"),
        (b"2 3\na\nb 1 2 3\n", "line 2; 3; 0; 'a'"),
        (b"2 3\n 1 2 3\nb 1 2 3\n", "line 2; 3"),
        (b"3 3\na 1 2 3\nb 1 2 3\n", "2; 3"),
        (b"999999999999 3\na 1 2 3\n", "1"),
        (b"1 3\na 1 2 3\nb 1 2 3\n", "line 3; 1"),
        (b"2 2\na 1 2\nb nan 2\n", "'b'"),
        (b"1 1\na 1e39\n", "'a'"),
    ],
)
def test_what_is_wrong_with_a_text_file_is_said(content: bytes, values: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.txt", content)
    with pytest.raises(DataError, match=naming("bad.txt", *values.split("; "))):
        WordVectors.load(path)


def test_a_binary_file_that_is_cut_off_says_at_which_word(tmp_path: Path) -> None:
    words, vectors = ["the", "king", "of"], random_vectors(3, 5)
    WordVectors(words, vectors).save_binary(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "cut"
    write(path, whole[:-3])
    with pytest.raises(DataError, match=naming(3, "'of'", 20, 18)):
        WordVectors.load(path)
    write(path, whole[: whole.index(b"king ") + 7])
    with pytest.raises(DataError, match=naming(2, 3, "'king'", 20)):
        WordVectors.load(path)
    write(path, whole[: whole.index(b"king ") + 2])
    with pytest.raises(DataError, match=naming(2, 3, "byte 28", 31)):
        WordVectors.load(path)
    write(path, whole + b"and 1")
    with pytest.raises(DataError, match="byte"):
        WordVectors.load(path)
    write(path, b"999999999999" + whole[1:])
    with pytest.raises(DataError, match=naming(4, "999,999,999,999")):
        WordVectors.load(path)


def test_a_path_that_is_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=naming(tmp_path / "nowhere")):
        WordVectors.load(tmp_path / "nowhere")
    with pytest.raises(DataError, match=naming(tmp_path)):
        WordVectors.load(tmp_path)


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = WordVectors(["a", "b"], random_vectors(2, 3))
    vectors.save_text(tmp_path / "vectors")
    before = (tmp_path / "vectors").read_bytes()

    def full(values: np.ndarray) -> list[bytes]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchfleet.apps.word2vec.vector_files.lines_of", full)
    with pytest.raises(DataError, match=naming(tmp_path / "vectors", "No space left")):
        vectors.save_text(tmp_path / "vectors")
    assert (tmp_path / "vectors").read_bytes() == before
    assert os.listdir(tmp_path) == ["vectors"]


@each_of("word", ["", "new york", "a\tb", "a\n", "\x0b", "\x0c", "\r"])
def test_a_word_with_white_space_is_refused(word: str) -> None:
    with pytest.raises(DataError, match=naming(2)):
        WordVectors(["a", word], random_vectors(2, 3))


def test_words_and_vectors_must_fit() -> None:
    with pytest.raises(DataError, match=naming(2, "(3, 4)")):
        WordVectors(["a", "b"], random_vectors(3, 4))
    with pytest.raises(DataError):
        WordVectors([], np.empty((0, 4), np.float32))
    with pytest.raises(DataError, match=naming(3, "'a'")):
        WordVectors(["a", "b", "a"], random_vectors(3, 4))
    with pytest.raises(DataError, match=naming(1, "'b'")):
        WordVectors(["a", "b"], np.array([[1.0], [np.inf]], np.float32))


def test_a_word_has_its_row() -> None:
    rows = random_vectors(2000, 4)
    vectors = WordVectors(named(2000), rows)
    assert len(vectors) == 2000
    assert vectors.dim == 4
    assert "word7" in vectors
    assert "word2000" not in vectors
    assert np.array_equal(vectors["word7"], rows[7])
    with pytest.raises(DataError, match=naming("'Word17x'", "2,000", "word17")):
        vectors["Word17x"]


@pytest.mark.parametrize("values", ["normal", "ties"])
def test_neighbours_are_those_of_gensim(values: str) -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(400, 8)) if values == "normal" else rng.integers(-1, 2, (400, 4)) + 0.5
    rows = rows.astype(np.float32)
    ours, theirs = WordVectors(named(400), rows), keyed(named(400), rows)
    for i in range(0, 400, 7):
        assert ours.most_similar(f"word{i}", 12) == theirs.most_similar(f"word{i}", topn=12)
        assert ours.most_similar(f"word{i}", 5, 50) == theirs.most_similar(f"word{i}", topn=5, restrict_vocab=50)
        assert ours.most_similar(3 * rows[i], 5) == theirs.most_similar([3 * rows[i]], topn=5)


def test_neighbours_of_all_kinds_of_requests() -> None:
    vectors = WordVectors(["a", "b", "zero", "c"], np.array([[1, 0], [2, 0], [0, 0], [-1, 1]], np.float32))
    assert vectors.most_similar("a", 10) == [("b", 1.0), ("c", pytest.approx(-(0.5**0.5)))]
    assert vectors.most_similar("a", 0) == []
    assert vectors.most_similar("zero") == []
    assert vectors.most_similar(np.array([0, 5.0]), 1) == [("c", pytest.approx(0.5**0.5))]
    with pytest.raises(DataError, match=naming(2, "(3,)")):
        vectors.most_similar(np.zeros(3, np.float32))
    with pytest.raises(DataError, match="restrict=0"):
        vectors.most_similar("a", restrict=0)


DIM = 5
KINDS = {"sparse": TableSpec("emb", dim=DIM, rule=Rule("adam", lr=0.1))}
KINDS["array"] = TableSpec("emb", "array", dim=DIM, size=40, rule=Rule("adam", lr=0.1))
DENSE = TableSpec("dense.0", "dense", size=5, rule=Rule("adam", lr=0.1))


def saved_model(folder: Path, spec: TableSpec, keys: np.ndarray, num_servers: int, with_state: bool) -> np.ndarray:
    """A model whose rows are 0.5 + key; returned for all 40 words."""
    rows = (np.arange(40)[:, None] + np.full((40, DIM), 0.5)).astype(np.float32)
    with in_process(num_servers) as fleet:
        client = fleet.client()
        client.create_table(spec)
        client.create_table(DENSE)
        client.assign("emb", keys, np.concatenate([rows[keys], np.ones((len(keys), 2 * DIM), np.float32)], axis=1))
        save(client, [spec, DENSE], str(folder), with_state)
    return rows


def vocabulary_of(num: int) -> Vocabulary:
    """Word 3 is <UNK>."""
    words = named(num)
    words[3] = "<UNK>"
    return Vocabulary(words, np.arange(num, 0, -1))


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("kind", ["sparse", "array"])
def test_a_saved_model_has_vectors(kind: str, num_servers: int, with_state: bool, tmp_path: Path) -> None:
    keys = np.random.default_rng(0).permutation(40)
    rows = saved_model(tmp_path / "model", KINDS[kind], keys, num_servers, with_state)
    vectors = WordVectors.load_checkpoint(tmp_path / "model", vocabulary_of(40))
    assert vectors.words == [f"word{i}" for i in range(40) if i != 3]
    assert np.array_equal(vectors.vectors, np.delete(rows, 3, axis=0))


def test_words_that_were_never_trained_are_left_out(tmp_path: Path) -> None:
    rows = saved_model(tmp_path / "model", KINDS["sparse"], np.array([30, 3, 7, 12]), 2, True)
    vectors = WordVectors.load_checkpoint(str(tmp_path / "model"), vocabulary_of(50))
    assert vectors.words == ["word7", "word12", "word30"]
    assert np.array_equal(vectors.vectors, rows[[7, 12, 30]])


def test_a_dictionary_or_table_of_another_model_is_told(tmp_path: Path) -> None:
    saved_model(tmp_path / "sparse", KINDS["sparse"], np.arange(40), 2, True)
    saved_model(tmp_path / "array", KINDS["array"], np.arange(40), 2, True)
    saved_model(tmp_path / "unknown", KINDS["sparse"], np.array([3]), 2, True)
    with pytest.raises(CheckpointError, match=naming(20)):
        WordVectors.load_checkpoint(tmp_path / "sparse", vocabulary_of(20))
    with pytest.raises(CheckpointError, match=naming(40, 50)):
        WordVectors.load_checkpoint(tmp_path / "array", vocabulary_of(50))
    with pytest.raises(CheckpointError, match=naming("'embedding'", "emb", "dense.0")):
        WordVectors.load_checkpoint(tmp_path / "sparse", vocabulary_of(40), "embedding")
    with pytest.raises(CheckpointError, match=naming("'dense.0'")):
        WordVectors.load_checkpoint(tmp_path / "sparse", vocabulary_of(40), "dense.0")
    with pytest.raises(CheckpointError, match=naming(tmp_path / "unknown", "'emb'")):
        WordVectors.load_checkpoint(tmp_path / "unknown", vocabulary_of(40))
    with pytest.raises(CheckpointError, match=naming(tmp_path)):
        WordVectors.load_checkpoint(tmp_path, vocabulary_of(40))
