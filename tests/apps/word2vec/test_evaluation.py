"""Analogies and pairs of words: gensim's results, question by question; and examples/word2vec/evaluate.py."""

from __future__ import annotations

import contextlib
import io
import math
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.extras import Late
from support.fleets import in_process
from support.messages import names, naming
from support.paths import ROOT
from support.scripts.saved_models import save

from torchfleet.apps.word2vec import evaluation
from torchfleet.apps.word2vec.evaluation import AnalogySection, analogies, read_pairs, read_questions, word_pairs
from torchfleet.apps.word2vec.vectors import WordVectors
from torchfleet.apps.word2vec.vocabulary import Vocabulary
from torchfleet.base.errors import DataError
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

gensim = Late("gensim.models")
pytestmark = pytest.mark.xdist_group("gensim")  # imported once, which takes seconds

EVALUATE = ROOT / "examples" / "word2vec" / "evaluate.py"
ANALOGY = ROOT.parent / "shared" / "data" / "analogy"
NUM = 300


@pytest.fixture(autouse=True)
def quiet_division() -> Iterator[None]:
    """gensim divides by the length of vectors of length zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def keyed(vectors: WordVectors) -> Any:
    made = gensim.KeyedVectors(vectors.dim)
    made.add_vectors(vectors.words, vectors.vectors)
    return made


def mixed_words(num: int, seed: int) -> list[str]:
    """Words in one to four spellings, in any order: capitals and small letters differ."""
    spellings = [f(f"wört{i}") for i in range(num) for f in (str, str.capitalize, str.upper, str.swapcase)]
    chosen = list(dict.fromkeys(np.random.default_rng(seed).permutation(spellings).tolist()))
    return chosen[:num]


def normal(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(NUM, 10))


def structured(rng: np.random.Generator) -> np.ndarray:
    """Sums of a few parts and some noise: many analogies hold."""
    parts = rng.normal(size=(2, 17, 12))
    return parts[0, np.arange(NUM) % 17] + parts[1, np.arange(NUM) // 17 % 17] + 0.05 * rng.normal(size=(NUM, 12))


def tied(rng: np.random.Generator) -> np.ndarray:
    """Small whole numbers: many words have the same vector, or the same cosine."""
    return rng.integers(-1, 2, (NUM, 4))


def close(rng: np.random.Generator) -> np.ndarray:
    """Words in groups that differ by the last bits of a float32."""
    return rng.normal(size=(20, 30))[rng.integers(0, 20, NUM)] * (1 + 1e-7 * rng.normal(size=(NUM, 30)))


def with_zeros(rng: np.random.Generator) -> np.ndarray:
    values = structured(rng)
    values[rng.integers(0, NUM, 8)] = 0
    return values


def one_question_each(rng: np.random.Generator, words: list[str], num: int) -> list[AnalogySection]:
    """Sections of one question each, so that gensim says which are right: some unknown words, some repeated ones."""
    names = [*words, "nowhere"]
    questions = rng.choice(names, (num, 4))
    grid = rng.integers(0, 17, (num, 4))  # questions that `structured` answers
    for i in range(0, num, 2):
        a, b, c, d = grid[i]
        questions[i] = [words[17 * x % NUM + y] for x, y in ((a, b), (a, c), (d, b), (d, c))]
    questions[1::20, 1] = questions[1::20, 0]
    questions[3::20, 2] = names[-1]
    return [AnalogySection(f"section {i}", [tuple(question)]) for i, question in enumerate(questions.tolist())]


def write_questions(path: Path, sections: list[AnalogySection]) -> str:
    lines = [f": {s.name}\n" + "".join(f"{' '.join(question)}\n" for question in s.questions) for s in sections]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def counts_of_gensim(vectors: WordVectors, path: str, restrict: int, fold: bool) -> list[tuple[str, int, int]]:
    _, found = keyed(vectors).evaluate_word_analogies(path, restrict_vocab=restrict, case_insensitive=fold)
    return [(s["section"], len(s["correct"]), len(s["correct"]) + len(s["incorrect"])) for s in found]


@pytest.mark.slow
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("restrict", [200, 1000])
@pytest.mark.parametrize("make", [normal, structured, tied, close, with_zeros])
def test_every_question_is_answered_as_by_gensim(make, restrict: int, fold: bool, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(evaluation, "_BLOCK", 50 * NUM)  # several blocks
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        vectors = WordVectors(mixed_words(NUM, seed), make(rng).astype(np.float32))
        sections = one_question_each(rng, vectors.words, 180)
        path = write_questions(tmp_path / "questions", sections)
        assert read_questions(path) == sections
        result = analogies(vectors, sections, restrict, fold)
        *expected, (_, correct, seen) = counts_of_gensim(vectors, path, restrict, fold)
        assert [(s.name, s.correct, s.seen) for s in result.sections] == expected
        assert (result.total.correct, result.total.seen) == (correct, seen)
        assert result.total.skipped == len(sections) - seen > 0
        assert seen > 20
        assert correct > 5 or make is not structured


@pytest.mark.parametrize("make", [normal, tied, close, with_zeros])
def test_of_equal_answers_gensims_is_taken(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The expected answers are gensim's best and second: where these are equal, its order decides."""
    rng = np.random.default_rng(7)
    vectors = WordVectors([f"w{i}" for i in range(NUM)], make(rng).astype(np.float32))
    theirs, sections = keyed(vectors), []
    for a, b, c in rng.choice(vectors.words[:250], (150, 3)).tolist():
        for answer, _ in theirs.most_similar([b, c], [a], topn=2, restrict_vocab=250):
            sections.append(AnalogySection(f"{len(sections)}", [(a, b, c, answer)]))
    path = write_questions(tmp_path / "questions", sections)
    result = analogies(vectors, sections, 250)
    assert [(s.name, s.correct, s.seen) for s in result.sections] == counts_of_gensim(vectors, path, 250, True)[:-1]
    assert result.total.correct > 100


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 9])
def test_few_words_and_many_spellings_are_as_in_gensim(num: int, tmp_path: Path) -> None:
    """All of the best five may be the question's own words, in other letters, and the expected one of them too."""
    rng = np.random.default_rng(num)
    words = ["abcd", "ABCD", "Abcd", "aBcd", "abCd", "abcD", "ABcd", "x", "X"][:num]
    vectors = WordVectors(words, rng.normal(size=(num, 3)).astype(np.float32))
    sections = [AnalogySection(f"s{i}", [tuple(rng.choice(["abcd", "x"], 4).tolist())]) for i in range(40)]
    path = write_questions(tmp_path / "questions", sections)
    result = analogies(vectors, sections)
    assert [(s.name, s.correct, s.seen) for s in result.sections] == counts_of_gensim(vectors, path, 30000, True)[:-1]


def test_clear_questions_are_answered_in_blocks_and_near_ties_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    asked: list[int] = []
    one_by_one = evaluation._answer
    monkeypatch.setattr(evaluation, "_answer", lambda *arguments: asked.append(1) or one_by_one(*arguments))
    words = [f"w{i}" for i in range(NUM)]
    sections = [AnalogySection("all", [tuple(rng.choice(words, 4, replace=False).tolist()) for _ in range(500)])]
    analogies(WordVectors(words, normal(rng).astype(np.float32)), sections)
    assert len(asked) < 10
    analogies(WordVectors(words, tied(rng).astype(np.float32)), sections)
    assert len(asked) > 100


@pytest.mark.skipif(not ANALOGY.is_dir(), reason="needs the shared data")
def test_the_usual_files_are_read_and_judged_as_by_gensim(tmp_path: Path) -> None:
    path = str(ANALOGY / "questions-words.txt")
    sections = read_questions(path)
    assert (len(sections), sum(len(section.questions) for section in sections)) == (14, 19544)
    words = sorted({word.lower() for section in sections[:1] for question in section.questions for word in question})
    pairs = [read_pairs(ANALOGY / name) for name in ("wordsim353.tsv", "simlex999.txt")]
    assert [len(each) for each in pairs] == [353, 999]
    assert pairs[1][0] == ("old", "new", 1.58)
    words += sorted(
        {word.lower() for one, other, _ in pairs[0][::3] + pairs[1][::3] for word in (one, other)} - {*words}
    )
    vectors = WordVectors(words, np.random.default_rng(0).normal(size=(len(words), 8)).astype(np.float32))
    result = analogies(vectors, sections)
    expected = counts_of_gensim(vectors, path, 30000, True)
    assert [(s.name, s.correct, s.seen) for s in result.sections] == expected[:-1]
    assert result.total.seen + result.total.skipped == 19544
    for name in ("wordsim353.tsv", "simlex999.txt"):
        assert_pairs_as_gensim(vectors, str(ANALOGY / name))


def assert_pairs_as_gensim(vectors: WordVectors, path: str, **options: object) -> None:
    ours = word_pairs(vectors, path, **options)  # type: ignore[arg-type]
    renamed = {{"restrict": "restrict_vocab"}.get(name, name): value for name, value in options.items()}
    pearson, spearman, unknown = keyed(vectors).evaluate_word_pairs(path, **renamed)
    assert ours.pearson == pytest.approx(pearson[0], abs=1e-12)
    assert ours.spearman == pytest.approx(spearman[0], abs=1e-12)
    assert 100 * ours.skipped / (ours.seen + ours.skipped) == pytest.approx(unknown, abs=1e-12)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("make", [normal, structured, tied, close, with_zeros])
def test_correlations_are_those_of_gensim(make, fold: bool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(5)
    vectors = WordVectors(mixed_words(NUM, 5), make(rng).astype(np.float32))
    chosen = rng.choice([*vectors.words, "nowhere"], (150, 2)).tolist()
    lines = [
        f"{one}\t{other}\t{score / 2}\n" for (one, other), score in zip(chosen, rng.integers(0, 20, 150), strict=True)
    ]
    lines[30:30] = ["# a comment\tof\t1\n", "\n", "two\twords\n", "no\tnumber\there\n"]
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(lines), encoding="utf-8")
    assert_pairs_as_gensim(vectors, str(path), case_insensitive=fold)
    assert_pairs_as_gensim(vectors, str(path), case_insensitive=fold, restrict=100)


def test_pairs_may_be_given_and_correlate_or_not() -> None:
    vectors = WordVectors(["a", "b", "c", "d"], np.array([[1, 0], [1, 0.1], [1, 1], [0, 1]], np.float32))
    result = word_pairs(vectors, [("a", "B", 3.0), ("a", "c", 2.5), ("a", "d", 2.4), ("a", "nowhere", 1.0)])
    assert (result.spearman, result.seen, result.skipped) == (pytest.approx(1.0), 3, 1)
    assert 0 < result.pearson < 1
    assert math.isnan(word_pairs(vectors, [("a", "b", 0.1), ("a", "c", 0.1), ("a", "d", 0.1)]).pearson)
    with pytest.raises(DataError, match=naming(2, 1)):
        word_pairs(vectors, [("a", "b", 1.0), ("x", "y", 2.0)])


def test_pairs_of_other_files_are_read(tmp_path: Path) -> None:
    """SimLex's own file has a heading and more columns; blanks may separate; a name may be two words."""
    path = tmp_path / "pairs.txt"
    path.write_text(
        "word1\tword2\tPOS\tSimLex999\nold\tnew\tA\t1.58\t2.7\nbig large 9.5\nNew York\tRome\t3\nx\ty\tnan\n"
    )
    assert read_pairs(path) == [("old", "new", 1.58), ("big", "large", 9.5), ("New York", "Rome", 3.0)]
    path.write_text("a\tb\n")
    with pytest.raises(DataError, match=naming("pairs.txt")):
        read_pairs(path)


def test_questions_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    path = tmp_path / "questions"
    path.write_text("\n: capitals  of Asia \na b c d\ntoo few\none too many here now\n\n: empty\n")
    assert read_questions(path) == [
        AnalogySection("capitals  of Asia", [("a", "b", "c", "d")]),
        AnalogySection("empty"),
    ]
    path.write_text("a b c d\n")
    with pytest.raises(DataError, match=naming("questions", "line 1", "'a b c d'")):
        read_questions(path)
    path.write_text(": empty\n")
    with pytest.raises(DataError, match=naming(path)):
        read_questions(path)
    path.write_bytes(b": x\n\xff\xfe\n")
    with pytest.raises(DataError, match=naming(path)):
        read_questions(path)
    with pytest.raises(DataError, match="No such file"):
        read_questions(tmp_path / "nowhere")


def test_restrict_must_leave_words() -> None:
    vectors = WordVectors(["a"], np.ones((1, 2), np.float32))
    with pytest.raises(DataError, match=naming("restrict=0")):
        analogies(vectors, [], 0)
    assert analogies(vectors, [AnalogySection("s", [("a", "b", "c", "d")])], None).total.skipped == 1
    assert analogies(vectors, []).total.accuracy == 0.0


# The command line


def evaluate(*arguments: object) -> str:
    """What it prints, run in this process."""
    out, before = io.StringIO(), sys.argv
    sys.argv = ["evaluate.py", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(EVALUATE), run_name="__main__")
    finally:
        sys.argv = before
    return out.getvalue()


def refused(*arguments: object) -> str:
    """The error's one line."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        evaluate(*arguments)
    code = ended.value.code
    assert code not in (0, None)
    return str(code) if isinstance(code, str) else err.getvalue().splitlines()[-1]


FAMILY = ["man", "woman", "king", "queen", "boy", "girl", "france", "paris", "italy", "rome", "spain", "madrid"]


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """Vectors in which women are men plus one thing, and capitals are countries plus another; questions; pairs."""
    kinds = np.eye(8, dtype=np.float32)
    rows = [kinds[i // 2] + kinds[6 if i < 6 else 7] * (i % 2) for i in range(len(FAMILY))]
    WordVectors(FAMILY, np.array(rows)).save_text(tmp_path / "vectors.txt")
    (tmp_path / "questions.txt").write_text(
        ": family\nMan Woman King Queen\nman woman boy girl\nman woman uncle aunt\n: wrong\nman woman france king\n"
    )
    (tmp_path / "pairs.tsv").write_text("# one\ttwo\tscore\nman\twoman\t7\nking\tqueen\t6\nking\tparis\t1\nx\ty\t0\n")
    return tmp_path


def test_the_command_line_judges_and_shows(family: Path) -> None:
    printed = evaluate(
        *("--vectors", family / "vectors.txt", "--questions", family / "questions.txt"),
        *("--pairs", family / "pairs.tsv", family / "pairs.tsv", "--similar", "king", "paris", "--count", 2),
    )
    lines = printed.splitlines()
    assert names(lines[0], 12, 8)
    assert lines[1:4] == ["family  100.0 %  2 of 2", "wrong     0.0 %  0 of 1", "total    66.7 %  2 of 3"]
    assert names(lines[4], 1, "30,000")
    assert lines[5] == lines[6]
    assert lines[5].startswith("pairs.tsv  Pearson 0.9")
    assert lines[5].endswith("Spearman 0.8660  3 of 4 pairs")
    assert lines[7:9] == ["king:", "  0.7071  queen"]
    assert lines[10:12] == ["paris:", "  0.7071  france"]
    restricted = evaluate("--vectors", family / "vectors.txt", "--questions", family / "questions.txt", "--restrict", 4)
    assert "total   100.0 %  1 of 1" in restricted


@pytest.mark.parametrize("words", [[], ["--words", "king", "queen", "man", "king"]])
def test_words_are_drawn(words: list[str], family: Path) -> None:
    picture = family / "words.png"
    printed = evaluate("--vectors", family / "vectors.txt", "--plot", picture, *words)
    assert names(printed.splitlines()[-1], 3 if words else 6, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_saved_model_is_judged_with_its_dictionary(tmp_path: Path) -> None:
    spec = TableSpec("emb", dim=3, rule=Rule("sgd", lr=0.1))
    with in_process(2) as fleet:
        client = fleet.client()
        client.create_table(spec)
        client.assign("emb", np.array([2, 0, 1]), np.array([[1, 0, 0], [0, 1, 0], [1, 0.5, 0]], np.float32))
        save(client, [spec], str(tmp_path / "model"))
    Vocabulary(["<UNK>", "king", "queen", "never"], [9, 8, 7, 6]).save(tmp_path / "dict")
    model = ("--vectors", tmp_path / "model", "--similar", "king")
    lines = evaluate(*model, "--dictionary", tmp_path / "dict").splitlines()
    assert names(lines[0], 2, 3)
    assert lines[1:] == ["king:", "  0.8944  queen"]
    assert "--dictionary" in refused(*model)
    assert names(refused(*model, "--dictionary", tmp_path / "dict", "--table", "other"), "'other'", "emb")


def test_mistakes_on_the_command_line_are_told_in_one_line(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = ("--vectors", family / "vectors.txt")
    told = refused(*vectors)
    assert all(option in told for option in ("--questions", "--pairs", "--similar", "--plot"))
    assert "--plot" in refused(*vectors, "--words", "king")
    assert names(refused(*vectors, "--similar", "king", "--restrict", "-1"), "-1", 10)
    assert names(refused(*vectors, "--similar", "king", "Quen"), "'Quen'", 12, "queen")
    assert names(refused(*vectors, "--plot", family / "x.png", "--words", "kings", "queen"), "'kings'", "king")
    assert names(refused(*vectors, "--plot", family / "x.png", "--words", "king", "king"), 1)
    assert names(refused(*vectors, "--plot", family / "nowhere" / "x.png"), family / "nowhere" / "x.png")
    assert names(refused("--vectors", family / "nowhere", "--similar", "king"), family / "nowhere")
    assert "pairs.tsv" in refused(*vectors, "--questions", family / "pairs.tsv")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in refused(*vectors, "--plot", family / "x.png")
