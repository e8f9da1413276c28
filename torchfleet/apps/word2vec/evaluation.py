"""Evaluates word vectors: by analogy questions (a is to b as c is to d), and by human judgements of word pairs.

The results equal those of gensim's KeyedVectors.evaluate_word_analogies and evaluate_word_pairs, to the last question.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchfleet.apps.word2vec.vectors import WordVectors, check_restrict, highest, to_unit
from torchfleet.base.errors import DataError

_BLOCK = 1 << 22  # scores at a time: 16 MB
_TOP = 5  # best candidates; the answer is the first that is not a word of the question in other upper or lower case

Question = tuple[str, str, str, str]
Pair = tuple[str, str, float]
Ids = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AnalogySection:
    """Questions of one kind: a is to b as c is to d."""

    name: str
    questions: list[Question] = field(default_factory=list)


@dataclass(frozen=True)
class SectionResult:
    """`seen` questions were asked; `skipped` questions contain a word that is unknown or not among the first."""

    name: str
    correct: int
    seen: int
    skipped: int

    @property
    def accuracy(self) -> float:
        """The share of correct answers; 0 if no question was asked."""
        return self.correct / self.seen if self.seen else 0.0


@dataclass(frozen=True)
class AnalogyResult:
    sections: list[SectionResult]

    @property
    def total(self) -> SectionResult:
        sums = [sum(getattr(each, name) for each in self.sections) for name in ("correct", "seen", "skipped")]
        return SectionResult("total", *sums)


@dataclass(frozen=True)
class PairsResult:
    """Correlations are nan if one side is constant."""

    pearson: float
    spearman: float
    seen: int
    skipped: int


def read_questions(path: str | os.PathLike[str]) -> list[AnalogySection]:
    """Sections of a file in the format of questions-words.txt: `: name` lines, and below each, lines of four words.

    Lines of more or fewer words are left out, as gensim does.
    """
    sections: list[AnalogySection] = []
    for number, line in enumerate(_lines(path), 1):
        if line.startswith(":"):
            sections.append(AnalogySection(line.lstrip(": ").strip()))
            continue
        words = line.split()
        if words and not sections:
            raise DataError(
                f"{os.fspath(path)}, line {number}: expected a section, `: name`, found {line.strip()[:40]!r}"
            )
        if len(words) == 4:
            sections[-1].questions.append((words[0], words[1], words[2], words[3]))
    if not any(section.questions for section in sections):
        raise DataError(f"{os.fspath(path)} has no questions: expected lines of four words below `: name`")
    return sections


def read_pairs(path: str | os.PathLike[str]) -> list[Pair]:
    """Pairs of words and their similarity: the first two columns, and the first number after them.

    Columns are separated by tabs or, in a line without one, by blanks. Lines that begin with # are left out, and so
    are lines without a number: headings.
    """
    pairs = []
    for line in _lines(path):
        columns = [column.strip() for column in (line.split("\t") if "\t" in line else line.split())]
        score = next(filter(math.isfinite, map(_number, columns[2:])), None)
        if score is not None and not line.startswith("#"):
            pairs.append((columns[0], columns[1], score))
    if not pairs:
        raise DataError(f"{os.fspath(path)} has no pairs: expected lines of two words and a number, separated by tabs")
    return pairs


def _lines(path: str | os.PathLike[str]) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{os.fspath(path)} cannot be read as text: {error}") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class _Lookup:
    """Positions of words among the first `restrict`, with or without regard to case.

    Of words that differ in case only, the first stands for all: `first` has its position, for each position.
    """

    def __init__(self, vectors: WordVectors, restrict: int | None, case_insensitive: bool) -> None:
        check_restrict(restrict)
        self._fold = str.upper if case_insensitive else str
        self._index: dict[str, int] = {}
        words = map(self._fold, vectors.words[:restrict])
        self.first: Ids = np.array([self._index.setdefault(word, i) for i, word in enumerate(words)], np.intp)

    def find(self, words: Sequence[str]) -> list[int] | None:
        """The positions of the words; None if one is unknown."""
        found = [self._index.get(self._fold(word), -1) for word in words]
        return None if -1 in found else found


def analogies(
    vectors: WordVectors,
    sections: Sequence[AnalogySection],
    restrict: int | None = 30_000,
    case_insensitive: bool = True,
) -> AnalogyResult:
    """How many questions are answered by the word nearest to b + c - a, other than the question's own words.

    Only the `restrict` first words take part, as question or as answer (None: all).
    """
    lookup = _Lookup(vectors, restrict, case_insensitive)
    known = [[ids for ids in map(lookup.find, section.questions) if ids] for section in sections]
    questions = np.array([ids for section in known for ids in section], np.intp).reshape(-1, 4)
    is_correct = _answers(vectors, questions, lookup.first) == questions[:, 3]
    results, at = [], 0
    for section, ids in zip(sections, known, strict=True):
        num_correct = int(is_correct[at : at + len(ids)].sum())
        results.append(SectionResult(section.name, num_correct, len(ids), len(section.questions) - len(ids)))
        at += len(ids)
    return AnalogyResult(results)


def _answers(vectors: WordVectors, questions: Ids, first: Ids) -> Ids:
    """The answer to each question a, b, c: the position of the word, in its first spelling."""
    num = len(first)
    norms = vectors.norms[:num, None]
    units = np.divide(vectors.vectors[:num], norms, out=np.zeros((num, vectors.dim), np.float32), where=norms > 0)
    without_length = np.flatnonzero(norms == 0)
    # Twice the rounding of two sums of `dim` products: scores further apart than this are in the same order however
    # they are computed. Closer ones are computed again as gensim does, with the same calls, for the same last bit.
    unclear = 2 * (vectors.dim + 8) * float(np.finfo(np.float32).eps)
    answers = np.empty(len(questions), np.intp)
    step = max(1, _BLOCK // num)
    for at in range(0, len(questions), step):
        asked = questions[at : at + step, :3]
        targets = _targets(vectors, asked)
        scores = targets @ units.T
        scores[:, without_length] = -np.inf
        np.put_along_axis(scores, asked, -np.inf, axis=1)
        best, lead = _best(scores)
        answers[at : at + step] = first[best]
        is_own = (first[best][:, None] == asked).any(axis=1)
        for row in np.flatnonzero(is_own | ~(lead > unclear)):
            answers[at + row] = _answer(vectors, targets[row], asked[row].tolist(), first)
    return answers


def _best(scores: npt.NDArray[np.float32]) -> tuple[Ids, npt.NDArray[np.float32]]:
    """The column of each row's highest score, and its lead over the second; nan if both are -inf. Changes `scores`."""
    rows = np.arange(len(scores))
    best = scores.argmax(axis=1)
    top = scores[rows, best]
    scores[rows, best] = -np.inf
    with np.errstate(invalid="ignore"):
        return best, top - scores.max(axis=1)


def _targets(vectors: WordVectors, asked: Ids) -> npt.NDArray[np.float32]:
    """The unit vectors that answers should be near to, with gensim's order of sums and roundings."""
    with np.errstate(invalid="ignore", divide="ignore"):
        a, b, c = (vectors.vectors[ids] / vectors.norms[ids, None] for ids in asked.T)
        return to_unit((b + c - a).astype(np.float64) / 3.0)


def _answer(vectors: WordVectors, target: npt.NDArray[np.float32], asked: list[int], first: Ids) -> int:
    """The best word that is not in the question, whatever its case; the fifth best if the best five all are; -1 if no
    word is left.
    """
    best = highest(vectors.cosines(target, len(first)), _TOP + len(asked))
    others = [int(first[i]) for i in best if i not in asked][:_TOP]
    return next((i for i in others if i not in asked), others[-1] if others else -1)


def word_pairs(
    vectors: WordVectors,
    pairs: str | os.PathLike[str] | Sequence[Pair],
    restrict: int | None = 300_000,
    case_insensitive: bool = True,
) -> PairsResult:
    """Correlations of cosines with given similarities, over the pairs (or a file's) whose words are both known."""
    lookup = _Lookup(vectors, restrict, case_insensitive)
    given = read_pairs(pairs) if isinstance(pairs, (str, os.PathLike)) else pairs
    known = [(ids, score) for first, second, score in given if (ids := lookup.find((first, second)))]
    if len(known) < 2:
        raise DataError(
            f"of {len(given)} pairs of words, {len(known)} are known: two at least are needed. Are vectors and pairs "
            "in the same language?"
        )
    units = to_unit(vectors.vectors[[ids for ids, _ in known]].astype(np.float64))
    cosines = np.array([np.dot(first, second) for first, second in units], np.float64)
    scores = np.array([score for _, score in known])
    spearman = _correlation(_ranks(scores), _ranks(cosines))
    return PairsResult(_correlation(scores, cosines), spearman, len(known), len(given) - len(known))


def _correlation(x: Floats, y: Floats) -> float:
    """Pearson's correlation; nan if x or y is constant."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return max(-1.0, min(1.0, float(x @ y) / math.sqrt(float(x @ x)) / math.sqrt(float(y @ y))))


def _ranks(values: Floats) -> Floats:
    """Ranks in ascending order, from 1; equal values share their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[which], np.float64)
