"""From text to dictionary, ids and parts: against plain Python, on the command line, and when it is stopped."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import lzma
import runpy
import signal
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import processes
from support.messages import names, naming
from support.paths import ROOT
from support.searches import examples

from torchfleet.apps.word2vec.corpus import Corpus
from torchfleet.apps.word2vec.preprocessing import build_dictionary, filter_corpus, keep_probabilities
from torchfleet.apps.word2vec.resplitting import resplit
from torchfleet.apps.word2vec.textfiles import Texts
from torchfleet.apps.word2vec.vocabulary import UNKNOWN, Vocabulary
from torchfleet.base.errors import DataError
from torchfleet.base.monitor import progress
from torchfleet.data.reading import streams

SCRIPT = ROOT / "examples" / "word2vec" / "preprocess.py"
LINES = ["the cat sat on the mat", "", "the dog sat", "a cat", "the end of the cat"]


def make(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def zipf_text(num_words: int, seed: int = 0, words_per_line: int = 20) -> str:
    ranks = np.minimum(np.random.default_rng(seed).zipf(1.3, num_words), 3000).tolist()
    lines = [ranks[at : at + words_per_line] for at in range(0, num_words, words_per_line)]
    return "".join(" ".join(f"w{rank}" for rank in line) + "\n" for line in lines)


def read_ids(folder: Path) -> list[int]:
    names = sorted(path.name for path in folder.iterdir() if path.name[0] != "_")
    return [int(word) for name in names for word in (folder / name).read_text().split()]


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """So that no test is the one that waits for the compiler, and shows a line of progress for it."""
    folder = tmp_path_factory.mktemp("warm")
    make(folder, "text", "a b a\n")
    build_dictionary(str(folder / "text"), str(folder / "dict"), 1)
    filter_corpus(str(folder / "text"), str(folder / "dict"), str(folder / "ids"), 1, downsample=0)
    resplit(str(folder / "ids"), str(folder / "parts"), 2)


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[str, str]:
    """(a text, its dictionary with all words)."""
    text, dictionary = make(tmp_path, "text", "\n".join(LINES)), str(tmp_path / "dict")
    build_dictionary(text, dictionary, min_count=1)
    return text, dictionary


# The vocabulary


def test_a_vocabulary_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Vocabulary(["the", UNKNOWN, "été", "\udcff\udcfe"], [9, 5, 2, 2])
    made.save(tmp_path / "dict")
    assert (tmp_path / "dict").read_bytes() == b"the 9\n<UNK> 5\n\xc3\xa9t\xc3\xa9 2\n\xff\xfe 2\n"
    read = Vocabulary.load(tmp_path / "dict")
    assert (read.words, read.counts.tolist(), read.unknown, read.total) == (made.words, [9, 5, 2, 2], 1, 18)
    assert (len(read), "the" in read, "no" in read, read.id_of("été"), read.id_of("no")) == (4, True, False, 2, None)
    assert read.fingerprint == made.fingerprint == zlib.crc32((tmp_path / "dict").read_bytes())
    assert Vocabulary(["the"], [8]).fingerprint != Vocabulary(["the"], [9]).fingerprint
    assert Vocabulary(["the"], [8]).unknown is None
    assert [path.name for path in tmp_path.iterdir()] == ["dict"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 3\nb\n", "line 2: expected `word count`, found 'b'"),
        ("a 3\n\nb 1\n", "line 2: expected `word count`, found ''"),
        ("a b 3\n", "line 1: expected `word count`, found 'a b 3'"),
        ("a 3\nb x\n", "line 2: expected `word count`, found 'b x'"),
        ("a -3\n", "line 1: expected `word count`, found 'a -3'"),
        ("a 0\n", "line 1: expected a count of at least 1, found 'a 0'"),
        ("a 99999999999999999999\n", "line 1: expected a count of at least 1, found"),
        ("a 3\nb 2\na 1\n", "line 3: the word 'a' is there twice"),
        ("", " has no words"),
        ("\n", " has no words"),
        (b"\xff\xfe\n", "line 1: expected `word count`, found '\\\\xff\\\\xfe'"),
    ],
)
def test_what_is_no_dictionary_is_named_with_its_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = make(tmp_path, "dict", text)
    with pytest.raises(DataError) as caught:
        Vocabulary.load(path)
    assert str(caught.value).startswith(path)
    assert message in str(caught.value)


def test_lines_in_another_order_and_compressed_dictionaries_are_read(tmp_path: Path) -> None:
    assert Vocabulary.load(make(tmp_path, "dict", "rare 1\r\nthe 9")).words == ["rare", "the"]
    assert Vocabulary.load(make(tmp_path, "dict.gz", gzip.compress(b"the 9\n"))).words == ["the"]
    with pytest.raises(DataError, match=naming(tmp_path / "none")):
        Vocabulary.load(tmp_path / "none")
    with pytest.raises(DataError, match=naming(2, 1)):
        Vocabulary(["a", "a"], [1, 1])


# Building a dictionary


def dictionary_of(text: bytes, min_count: int) -> bytes:
    counts = Counter(text.split())
    rare = sum(num for word, num in counts.items() if num < min_count or word == b"<UNK>")
    kept = [(-num, word) for word, num in counts.items() if num >= min_count and word != b"<UNK>"]
    return b"".join(b"%b %d\n" % (word, -num) for num, word in sorted(kept + [(-rare, b"<UNK>")] * bool(rare)))


@settings(max_examples=examples(60))
@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "ab", "<UNK>", "é", "word\x1c", "\x85"]), max_size=20), max_size=6),
    st.sampled_from([" ", "\t", " \n", "\r\n", "\v", "\f "]),
    st.integers(1, 4),
    st.integers(1, 50),
)
def test_a_dictionary_is_what_counting_by_hand_gives(
    tmp_path_factory: pytest.TempPathFactory, lines: list[list[str]], space: str, min_count: int, chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    for number, line in enumerate(lines):
        make(folder, f"text/{number}", space.join(line))
    text = "\n".join(space.join(line) for line in lines).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "CHUNK", chunk)
        if not text.split():
            with pytest.raises(DataError, match=naming(folder / "text")):
                build_dictionary(str(folder / "text"), str(folder / "dict"), min_count)
            assert not (folder / "dict").exists()
            return
        facts = build_dictionary(str(folder / "text"), str(folder / "dict"), min_count)
    written = (folder / "dict").read_bytes()
    assert written == dictionary_of(text, min_count)
    assert facts.num_words == len(text.split()) == Vocabulary.load(folder / "dict").total
    assert facts.num_distinct == len(set(text.split()) - {b"<UNK>"})
    assert facts.num_kept == len(written.splitlines()) - (b"<UNK> " in written)


def test_a_folder_is_read_by_name_without_hidden_files_and_decompressed(tmp_path: Path) -> None:
    make(tmp_path, "in/b.xz", lzma.compress(b"two two"))
    make(tmp_path, "in/a.gz", gzip.compress(b"one"))
    for name in ("_corpus.json", ".hidden", "folder/c"):
        make(tmp_path, f"in/{name}", "three")
    build_dictionary(str(tmp_path / "in"), str(tmp_path / "dict"), 1)
    assert (tmp_path / "dict").read_text() == "two 2\none 1\n"
    filter_corpus(str(tmp_path / "in"), str(tmp_path / "dict"), str(tmp_path / "out"), 1, 0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["_corpus.json", "a", "b"]
    assert read_ids(tmp_path / "out") == [1, 0, 0]


@pytest.mark.parametrize(
    ("max_bytes", "expected"), [(1, ""), (3, ""), (4, "one"), (6, "one"), (8, "one"), (9, "one two"), (17, "one two s")]
)
@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_max_bytes_cuts_back_to_the_last_white_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, expected: str, chunk: int
) -> None:
    """Nine bytes, then ten; a text that ends within the limit is whole."""
    monkeypatch.setattr(streams, "CHUNK", chunk)
    for name, text in (("a", "one twoxx"), ("b", "s threexxx")):
        make(tmp_path, f"in/{name}", text)
    texts = Texts(str(tmp_path / "in"), "test", max_bytes)
    found = b" ".join(piece.tobytes() for path in texts.paths() for piece in texts.pieces(path)).split()
    assert b" ".join(found).decode().replace("xx", "") == expected


def test_a_line_of_ten_million_words(tmp_path: Path) -> None:
    text = make(tmp_path, "text", b"a b c d e f g h i j " * 1_000_000)
    dictionary, out = str(tmp_path / "dict"), str(tmp_path / "out")
    assert build_dictionary(text, dictionary).num_words == 10_000_000
    assert Vocabulary.load(dictionary).counts.tolist() == [1_000_000] * 10
    assert filter_corpus(text, dictionary, out, downsample=0).num_written == 10_000_000
    corpus = Corpus(out, Vocabulary.load(dictionary))
    sizes = [len(block) for block in corpus.blocks(corpus.files, 1 << 20)]
    assert (sum(sizes), max(sizes), corpus.words) == (10_000_001, 1 << 20, 10_000_000)


# Filtering


def test_words_become_ids_and_lines_stay(tmp_path: Path, corpus: tuple[str, str]) -> None:
    text, dictionary = corpus
    facts = filter_corpus(text, dictionary, str(tmp_path / "out"), min_count=1, downsample=0)
    words = Vocabulary.load(dictionary).words
    expected = [" ".join(str(words.index(word)) for word in line.split()) for line in LINES if line]
    assert (tmp_path / "out" / "text").read_text() == "\n".join(expected) + "\n"
    assert (facts.num_read, facts.num_written, facts.num_unknown) == (16, 16, 0)
    assert json.loads((tmp_path / "out" / "_corpus.json").read_text()) == {
        "format": 1, "dictionary": Vocabulary.load(dictionary).fingerprint, "num_ids": len(words), "raw_words": 16,
        "words": 16, "downsample": 0, "seed": 0, "files": {"text": 16},
    }  # fmt: skip
    pairs = [line.split() for line in Path(f"{dictionary}_word_to_id_").read_text().splitlines()]
    assert pairs == [[word, str(number)] for number, word in enumerate(words)]


@pytest.mark.parametrize("has_unknown", [True, False])
def test_rare_and_strange_words_become_the_unknown_one_or_are_left_out(tmp_path: Path, has_unknown: bool) -> None:
    dictionary = make(tmp_path, "dict", "a 9\nb 3\n" + "<UNK> 2\n" * has_unknown)
    text = make(tmp_path, "text", "a a b strange <UNK> a\nb\na a a")
    facts = filter_corpus(text, dictionary, str(tmp_path / "out"), min_count=4, downsample=0)
    expected = "0 0 2 2 2 0\n2\n0 0 0\n" if has_unknown else "0 0 0\n0 0 0\n"
    assert (tmp_path / "out" / "text").read_text() == expected
    assert (facts.num_read, facts.num_unknown, facts.num_written) == (10, 4, 10 if has_unknown else 6)


def test_a_vocabulary_of_one_word(tmp_path: Path) -> None:
    text, dictionary = make(tmp_path, "text", "only only\nonly"), str(tmp_path / "dict")
    build_dictionary(text, dictionary, 1)
    filter_corpus(text, dictionary, str(tmp_path / "out"), 1, 0)
    corpus = Corpus(tmp_path / "out", Vocabulary.load(dictionary))
    assert [block.tolist() for block in corpus.blocks(corpus.files, 10)] == [[0, 0, -1, 0, -1]]


def test_the_same_seed_leaves_out_the_same_words_however_the_text_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = zipf_text(20_000)
    whole, dictionary = make(tmp_path, "text", text), str(tmp_path / "dict")
    build_dictionary(whole, dictionary)
    half = text.index("\n", len(text) // 2) + 1
    make(tmp_path, "two/a", text[:half])
    make(tmp_path, "two/b", text[half:])

    def ids(name: str, source: str, seed: int = 7) -> list[int]:
        filter_corpus(source, dictionary, str(tmp_path / name), downsample=0.01, seed=seed)
        return read_ids(tmp_path / name)

    first = ids("first", whole)
    assert 5_000 < len(first) < 15_000
    assert ids("again", whole) == ids("two-files", str(tmp_path / "two")) == first
    assert ids("other seed", whole, 8) != first
    monkeypatch.setattr(streams, "CHUNK", 777)
    assert ids("small chunks", whole) == first


def test_frequent_words_are_left_out_as_often_as_the_formula_says(tmp_path: Path) -> None:
    num_words, rate = 300_000, 0.001
    text, dictionary = make(tmp_path, "text", zipf_text(num_words)), str(tmp_path / "dict")
    build_dictionary(text, dictionary)
    filter_corpus(text, dictionary, str(tmp_path / "out"), downsample=rate, seed=3)
    vocabulary = Vocabulary.load(dictionary)
    found = np.bincount(read_ids(tmp_path / "out"), minlength=len(vocabulary))
    chances = keep_probabilities(vocabulary, rate)
    for count, number, chance in zip(vocabulary.counts.tolist(), found.tolist(), chances.tolist(), strict=True):
        share = count / (rate * num_words)
        assert chance == pytest.approx(min(1, (share**0.5 + 1) / share))
        assert abs(number - count * chance) <= 5 * (count * chance * (1 - chance)) ** 0.5 + 1e-9
    assert keep_probabilities(vocabulary, 5e-324).max() < 1e-150
    assert chances[0] < 0.1
    assert chances[-1] == 1


def test_a_dictionary_of_another_corpus_is_found_out(tmp_path: Path) -> None:
    text = make(tmp_path, "text", zipf_text(1000))
    other = make(tmp_path, "dict", "these 50\nare 40\nother 30\nwords 20\nw1 10\n<UNK> 1\n")
    with pytest.raises(DataError, match=naming("1,000")):
        filter_corpus(text, other, str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dict", "text"]


def test_a_corpus_of_mostly_rare_words_belongs_to_its_dictionary(tmp_path: Path) -> None:
    words = ["often"] * 100 + [f"rare{number}" for number in range(300)]
    text, dictionary = make(tmp_path, "text", " ".join(words)), str(tmp_path / "dict")
    build_dictionary(text, dictionary)
    assert filter_corpus(text, dictionary, str(tmp_path / "out")).num_unknown == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_count": 0}, "min_count 1 0"),
        ({"seed": -1}, "seed 0 2^63 -1"),
        ({"seed": 1 << 64}, "seed 0"),
        ({"downsample": float("inf")}, "downsample 0"),
        ({"downsample": -0.1}, "downsample 0"),
        ({"downsample": float("nan")}, "downsample 0"),
        ({"max_bytes": 0}, "max_bytes 1 0"),
    ],
)
def test_numbers_out_of_range_are_refused(
    tmp_path: Path, corpus: tuple[str, str], options: dict[str, float], message: str
) -> None:
    with pytest.raises(DataError, match=naming(*message.split())):
        filter_corpus(*corpus, str(tmp_path / "out"), **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_holds_files_is_left_alone(tmp_path: Path, corpus: tuple[str, str]) -> None:
    make(tmp_path, "out/mine", "precious")
    for run in (
        lambda: filter_corpus(*corpus, str(tmp_path / "out")),
        lambda: resplit(corpus[0], str(tmp_path / "out")),
    ):
        with pytest.raises(DataError, match=naming(tmp_path / "out", "mine")):
            run()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_files_that_would_get_one_name_or_be_read_as_text_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "in/a", "x")
    make(tmp_path, "in/a.gz", gzip.compress(b"x"))
    dictionary = make(tmp_path, "dict", "x 2\n")
    with pytest.raises(DataError, match=naming("'a'")):
        filter_corpus(str(tmp_path / "in"), dictionary, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match=naming(tmp_path / "in" / "dict")):
        build_dictionary(str(tmp_path / "in"), str(tmp_path / "in" / "dict"))


# Reading a corpus


def test_a_corpus_is_checked_against_its_vocabulary(tmp_path: Path, corpus: tuple[str, str]) -> None:
    out = tmp_path / "out"
    filter_corpus(*corpus, str(out), min_count=1, downsample=0)
    vocabulary = Vocabulary.load(corpus[1])
    good = Corpus(out, vocabulary)
    assert (good.files, good.words, good.raw_words) == ([str(out / "text")], 16, 16)
    with pytest.raises(DataError, match=naming(9, 2)):
        Corpus(out, Vocabulary(["a", "b"], [2, 1]))
    with pytest.raises(DataError, match=r"fingerprint.*\d"):
        Corpus(out, Vocabulary(vocabulary.words[::-1], vocabulary.counts))
    with (out / "text").open("a") as file:
        file.write("1 1\n")
    with pytest.raises(DataError, match=naming(16, 18)):
        list(good.blocks(good.files, 100))
    make(out, "more", "1")
    with pytest.raises(DataError, match="more"):
        Corpus(out, vocabulary)
    make(out, "_corpus.json", '{"format": 1}')
    with pytest.raises(DataError, match=naming("_corpus.json")):
        Corpus(out, vocabulary)
    with pytest.raises(DataError, match=naming(tmp_path / "none")):
        Corpus(tmp_path / "none", vocabulary)


def test_a_corpus_without_a_description_is_counted(tmp_path: Path) -> None:
    make(tmp_path, "part-0", "0 1 \n1")
    make(tmp_path, "part-1.gz", gzip.compress(b"0 2\n"))
    vocabulary = Vocabulary(["a", "b", "c"], [1, 1, 1])
    corpus = Corpus(tmp_path, vocabulary)
    assert (corpus.words, corpus.raw_words, list(corpus.words_of.values())) == (5, 5, [3, 2])
    assert [block.tolist() for block in corpus.blocks(corpus.files, 100)] == [[0, 1, -1, 1, -1, 0, 2, -1]]
    with pytest.raises(DataError, match=naming("part-1.gz", "byte 2", 2)):
        Corpus(tmp_path, Vocabulary(["a", "b"], [1, 1]))
    with pytest.raises(DataError, match=naming("words_per_block", 1)):
        next(corpus.blocks(corpus.files, 0))


# Splitting


def nearest_cuts(lines: list[int], num_files: int) -> list[int]:
    """Sizes of the parts for lines of these numbers of words, by trying."""
    total, ends = sum(lines), np.cumsum(lines).tolist()
    cuts = [0]
    for number in range(1, num_files + 1):
        even = total * number // num_files
        line = next(end for end in ends if end >= even)
        cuts.append(line if line - even <= 0.05 * total / num_files else even)
    return [b - a for a, b in itertools.pairwise(cuts)]


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 120), min_size=1, max_size=30), st.integers(1, 40), st.integers(1, 3))
def test_parts_are_even_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], num_files: int, num_inputs: int
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    numbers = iter(range(sum(lines)))
    text = [" ".join(str(next(numbers)) for _ in range(size)) + "\n" for size in lines]
    for i in range(num_inputs):
        make(folder, f"in/{i}", "".join(text[len(text) * i // num_inputs : len(text) * (i + 1) // num_inputs]))
    if num_files > sum(lines):
        with pytest.raises(DataError, match=naming(num_files, sum(lines))):
            resplit(str(folder / "in"), str(folder / "out"), num_files)
        assert not (folder / "out").exists()
        return
    parts = resplit(str(folder / "in"), str(folder / "out"), num_files)
    assert list(parts) == [f"part-{number:05}" for number in range(num_files)]
    assert list(parts.values()) == nearest_cuts(lines, num_files)
    assert read_ids(folder / "out") == list(range(sum(lines)))
    written = [len((folder / "out" / name).read_text().split()) for name in parts]
    assert written == list(parts.values())
    breaks = sum((folder / "out" / name).read_text().count("\n") for name in parts)
    assert len(lines) <= breaks < len(lines) + num_files


def test_a_long_line_is_cut_into_parts_that_differ_by_at_most_one(tmp_path: Path) -> None:
    make(tmp_path, "in/ids", " ".join(map(str, range(1000))))
    parts = resplit(str(tmp_path / "in"), str(tmp_path / "out"), 7)
    assert set(parts.values()) == {142, 143}
    assert (tmp_path / "out" / "part-00000").read_text() == " ".join(map(str, range(142))) + "\n"
    described = json.loads((tmp_path / "out" / "_corpus.json").read_text())
    assert (described["words"], described["dictionary"], described["raw_words"]) == (1000, None, None)


def test_parts_keep_the_facts_of_their_corpus(tmp_path: Path) -> None:
    text, dictionary = make(tmp_path, "text", zipf_text(5000)), str(tmp_path / "dict")
    build_dictionary(text, dictionary)
    filter_corpus(text, dictionary, str(tmp_path / "ids"), downsample=0.01, seed=5)
    resplit(str(tmp_path / "ids"), str(tmp_path / "parts"), 16)
    before, after = (json.loads((tmp_path / name / "_corpus.json").read_text()) for name in ("ids", "parts"))
    assert {**before, "files": 0} == {**after, "files": 0}
    corpus = Corpus(tmp_path / "parts", Vocabulary.load(dictionary))
    assert (len(corpus.files), corpus.raw_words) == (16, 5000)
    stream = np.concatenate(list(corpus.blocks(corpus.files, 64)))
    assert stream[stream >= 0].tolist() == read_ids(tmp_path / "ids")
    make(tmp_path / "ids", "text", "1 2 3\n")
    with pytest.raises(DataError, match=naming(3)):
        resplit(str(tmp_path / "ids"), str(tmp_path / "other"), 2)


def test_what_is_no_folder_of_ids_is_not_split(tmp_path: Path, corpus: tuple[str, str]) -> None:
    with pytest.raises(DataError, match=naming("text", "byte 0", "'the'")):
        resplit(corpus[0], str(tmp_path / "out"), 2)
    with pytest.raises(DataError, match=naming(tmp_path / "empty")):
        resplit(make(tmp_path, "empty", "\n"), str(tmp_path / "out"), 2)
    assert not (tmp_path / "out").exists()


# A run that is stopped

STOP_AT = """
import os, signal, sys
from torchfleet.apps.word2vec import preprocessing, writing
num_left, rename = int(sys.argv[1]), os.replace
def replace(a, b):
    global num_left
    num_left -= "_unfinished" in a
    if num_left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(a, b)
os.replace = replace
preprocessing.filter_corpus(*sys.argv[2:5], min_count=1, downsample=0)
"""


@pytest.mark.parametrize("num_renamed", [0, 1, 2])
def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path: Path, num_renamed: int) -> None:
    """Killed before a file has its name, in between, and right before the description."""
    for name in ("a", "b"):
        make(tmp_path, f"in/{name}", "x y x")
    source, dictionary, out = str(tmp_path / "in"), make(tmp_path, "dict", "x 4\ny 2\n"), str(tmp_path / "out")
    arguments = [sys.executable, "-c", STOP_AT, str(num_renamed), source, dictionary, out]
    assert processes.run(arguments, timeout=200).returncode == -signal.SIGKILL
    vocabulary = Vocabulary.load(dictionary)
    with pytest.raises(DataError, match=naming(out)):
        Corpus(out, vocabulary)
    with pytest.raises(DataError, match=naming(out)):
        resplit(out, str(tmp_path / "parts"), 2)
    if num_renamed:
        with pytest.raises(DataError, match=naming(out)):
            filter_corpus(source, dictionary, out, min_count=1, downsample=0)
    else:
        filter_corpus(source, dictionary, out, min_count=1, downsample=0)
        assert Corpus(out, vocabulary).words == 6


def test_a_disk_that_is_full_at_the_end_leaves_the_folder_as_it_was(
    tmp_path: Path, corpus: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, to: str) -> None:
        if to.endswith("_corpus.json"):
            raise OSError(28, "No space left on device")
        Path(source).rename(to)

    monkeypatch.setattr("os.replace", full)
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=naming(tmp_path / "out", "No space left")):
        filter_corpus(*corpus, str(tmp_path / "out"), min_count=1)
    assert list((tmp_path / "out").iterdir()) == []


# The command line


def run(*arguments: object) -> tuple[int, str, str]:
    """(exit status, output, errors) of the script, in this process."""
    out, errors, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [str(SCRIPT), *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = before
    return int(ended.value.code or 0), out.getvalue(), errors.getvalue()


def test_the_three_commands_one_after_the_other(tmp_path: Path) -> None:
    make(tmp_path, "text/all", zipf_text(5000))
    text, dictionary, ids, parts = (tmp_path / name for name in ("text", "dict", "ids", "parts"))
    status, out, _ = run("--build_dict", "--build_dict_corpus_dir", text, "--dict_path", dictionary)
    assert status == 0
    assert names(out, "5,000")
    filtering = ("--filter_corpus", "--dict_path", dictionary, "--input_corpus_dir", text, "--output_corpus_dir")
    status, out, _ = run(*filtering, ids, "--seed", 4, "--downsample", 0.01, "--min_count", 6)
    assert (status, names(out, "5,000")) == (0, True)
    status, out, _ = run("--data_resplit", "--input_corpus_dir", ids, "--output_corpus_dir", parts, "--num_files", 8)
    assert (status, names(out, "8 files")) == (0, True)
    assert read_ids(parts) == read_ids(ids)
    assert Corpus(parts, Vocabulary.load(dictionary)).raw_words == 5000
    status, out, _ = run(*filtering, tmp_path / "little", "--max_bytes", 1000, "--downsample", 0)
    words = (tmp_path / "text" / "all").read_bytes()[:1000].rpartition(b" ")[0].split()
    assert len(read_ids(tmp_path / "little")) == len(words)


BUILD = ("--build_dict", "--dict_path", "new", "--build_dict_corpus_dir")
SPLIT = ("--data_resplit", "--input_corpus_dir", "in", "--output_corpus_dir", "out")
FILTER = ("--filter_corpus", "--output_corpus_dir", "out", "--input_corpus_dir", "in", "--dict_path")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected one of --build_dict, --filter_corpus, --data_resplit; found none"),
        ((*BUILD, "in", "--data_resplit"), "found --build_dict and --data_resplit"),
        (("--build_dict", "--dict_path", "d"), "--build_dict needs --build_dict_corpus_dir"),
        ((*BUILD, "none"), "no file or folder at none"),
        ((*BUILD, "empty"), "no files in the folder empty"),
        ((*BUILD, "blank"), "blank has no words"),
        ((*BUILD, "in", "--min_count", "-3"), "min_count must be at least 1, found -3"),
        ((*BUILD, "in", "--max_bytes", "-3"), "max_bytes must be at least 1, found -3"),
        ((*BUILD, "in", "--downsample", "1"), "--downsample does not go with --build_dict, which takes"),
        ((*SPLIT, "--max_bytes", "10"), "--max_bytes does not go with --data_resplit"),
        ((*SPLIT, "--num_files", "0"), "num_files must be at least 1, found 0"),
        ((*SPLIT,), "1,024 files cannot be made of 4 words in in"),
        ((*FILTER, "none"), "none: cannot be opened"),
        ((*FILTER, "blank"), "blank has no words"),
        ((*FILTER, "dict", "--seed", "-1"), "seed must be at least 0"),
        ((*FILTER, "dict"), "is this the dictionary of this corpus?"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "_FIRST", 1e9)  # on a busy machine a line of progress would come first
    make(tmp_path, "in/text", "1 2 3 4\n")
    make(tmp_path, "blank", " \n ")
    make(tmp_path, "dict", "a 5\nb 5\n")
    (tmp_path / "empty").mkdir()
    status, out, errors = run(*arguments)
    assert (status, out, errors.count("\n")) == (1, "", 1)
    assert errors.startswith("preprocess.py: ")
    assert message in errors
    assert not {"out", "new"} & {path.name for path in tmp_path.iterdir()}
