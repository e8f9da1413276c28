"""Judge and look at word vectors: analogy questions, pairs of words, neighbours, a picture. One plain process.

python examples/word2vec/evaluate.py --vectors vectors.txt --questions questions-words.txt --pairs wordsim353.tsv
python examples/word2vec/evaluate.py --vectors vectors.bin --similar king paris --plot words.png
python examples/word2vec/evaluate.py --vectors model --dictionary dict.txt --similar king     a saved model's folder
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import numpy as np

from torchfleet.errors import DataError, FleetError
from torchfleet.word2vec import SectionResult, Vocabulary, WordVectors, analogies, read_questions, word_pairs

# What --plot shows when no --words are given, of those that are known: each country beside its capital.
CAPITALS = (
    ("france", "paris"), ("germany", "berlin"), ("italy", "rome"), ("spain", "madrid"), ("england", "london"),
    ("russia", "moscow"), ("china", "beijing"), ("japan", "tokyo"), ("greece", "athens"), ("egypt", "cairo"),
    ("poland", "warsaw"), ("portugal", "lisbon"), ("sweden", "stockholm"), ("turkey", "ankara"), ("iran", "tehran"),
)  # fmt: skip
PAIR_COLUMNS = "columns separated by tabs: the first two are the words, the first number behind them is the score"


def main() -> None:
    options = arguments()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # words need not be proper text
    try:
        vectors = load(options)
        for word in [*options.similar, *options.words]:
            vectors[word]  # an unknown word is an error before the work begins
        if options.questions:
            print_analogies(vectors, options.questions, options.restrict or None)
        for path in options.pairs:
            print_pairs(vectors, path)
        for word in options.similar:
            print_neighbours(vectors, word, options.count)
        if options.plot:
            plot(vectors, options.plot, options.words)
    except FleetError as error:
        raise SystemExit(f"evaluate.py: {error}") from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", required=True, help="a file of vectors, text or binary, or a saved model's folder")
    parser.add_argument("--dictionary", help="for a saved model: the dictionary that it was trained with")
    parser.add_argument("--table", default="emb", help="for a saved model: the table of the vectors")
    parser.add_argument("--questions", help="a file of analogy questions: `: section` lines, and lines of four words")
    parser.add_argument("--restrict", type=int, default=30_000, help="questions: of the first N words alone; 0: of all")
    parser.add_argument("--pairs", nargs="+", default=[], metavar="FILE", help=f"pairs of words; {PAIR_COLUMNS}")
    parser.add_argument("--similar", nargs="+", default=[], metavar="WORD", help="show each word's nearest neighbours")
    parser.add_argument("--count", type=int, default=10, help="how many neighbours")
    parser.add_argument("--plot", metavar="FILE.png", help="draw words in two dimensions, by principal components")
    parser.add_argument("--words", nargs="+", default=[], metavar="WORD", help="which; if not given, capitals")
    options = parser.parse_args()
    if options.words and not options.plot:
        parser.error("--words are those to be drawn: give --plot FILE.png as well, or --similar for neighbours")
    if not (options.questions or options.pairs or options.similar or options.plot):
        parser.error("nothing to do: give --questions FILE, --pairs FILE ..., --similar WORD ... or --plot FILE.png")
    if options.restrict < 0 or options.count < 1:
        parser.error(
            f"expected --restrict of 0 or more and --count of 1 or more, found {options.restrict} and {options.count}"
        )
    return options


def load(options: argparse.Namespace) -> WordVectors:
    start = time.perf_counter()
    if not os.path.isdir(options.vectors):
        vectors = WordVectors.load(options.vectors)
    elif options.dictionary:
        vectors = WordVectors.load_checkpoint(options.vectors, Vocabulary.load(options.dictionary), options.table)
    else:
        raise DataError(
            f"{options.vectors} is a folder, a saved model: which words its rows are says --dictionary FILE"
        )
    print(f"{len(vectors):,} words of {vectors.dim} numbers, {time.perf_counter() - start:.1f} s")
    return vectors


def print_analogies(vectors: WordVectors, path: str, restrict: int | None) -> None:
    result = analogies(vectors, read_questions(path), restrict)
    width = max(len(section.name) for section in result.sections)
    for section in result.sections:
        print_section(section, width)
    total = result.total
    print_section(total, width)
    print(f"{total.skipped:,} questions skipped: not all words among the first {restrict or len(vectors):,}")


def print_section(section: SectionResult, width: int) -> None:
    print(f"{section.name:{width}}  {100 * section.accuracy:5.1f} %  {section.correct:,} of {section.seen:,}")


def print_pairs(vectors: WordVectors, path: str) -> None:
    result = word_pairs(vectors, path)
    num = f"{result.seen} of {result.seen + result.skipped} pairs"
    print(f"{os.path.basename(path)}  Pearson {result.pearson:.4f}  Spearman {result.spearman:.4f}  {num}")


def print_neighbours(vectors: WordVectors, word: str, count: int) -> None:
    print(f"{word}:")
    for neighbour, cosine in vectors.most_similar(word, count):
        print(f"  {cosine:.4f}  {neighbour}")


def plot(vectors: WordVectors, path: str, words: list[str]) -> None:
    """Two words at least; without any, countries and capitals, each pair joined by a line."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError("--plot needs matplotlib: pip install matplotlib") from None
    pairs = [] if words else known_capitals(vectors)
    words = list(dict.fromkeys(words)) or [word for pair in pairs for word in pair]
    if len(words) < 2:
        raise DataError(f"--plot: expected two words or more, found {len(words)}: name them with --words WORD WORD ...")
    places, shares = principal_components(np.stack([vectors[word] for word in words]))
    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(f"first principal component ({shares[0]:.0%} of the variance)")
    axes.set_ylabel(f"second principal component ({shares[1]:.0%})")
    axes.margins(0.1)
    for i in range(0, 2 * len(pairs), 2):
        axes.plot(*places[i : i + 2].T, color="0.8", linewidth=1, zorder=1)
    axes.scatter(*places.T, s=14, zorder=2)
    add_labels(figure, axes, places, words)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}") from None
    print(f"{len(words)} words drawn in {path}")


def known_capitals(vectors: WordVectors) -> list[tuple[str, str]]:
    """In small letters, and with a capital one, as the vectors have them."""
    spellings = [pair for low in CAPITALS for pair in (low, tuple(map(str.capitalize, low)))]
    return [(country, capital) for country, capital in spellings if country in vectors and capital in vectors]


def principal_components(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row's place along the two directions in which the rows differ most, and these directions' shares."""
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    left, sizes = (np.pad(found, [(0, 0)] * (found.ndim - 1) + [(0, 2)]) for found in (left, sizes))  # dim 1 has one
    return left[:, :2] * sizes[:2], sizes[:2] ** 2 / max((sizes**2).sum(), 1e-300)


def add_labels(figure: Any, axes: Any, places: np.ndarray, words: list[str]) -> None:
    """Each word beside its point, where it covers no other word and few points, if there is such a place."""
    sides = [(5, 0, "left", "center"), (-5, 0, "right", "center"), (0, 5, "center", "bottom"), (0, -5, "center", "top")]
    sides += [(x, y, "left" if x > 0 else "right", "bottom" if y > 0 else "top") for x in (4, -4) for y in (4, -4)]
    figure.draw_without_rendering()  # so that points have their places on the page
    points = axes.transData.transform(places)
    taken: list[Any] = []

    def covered(label: Any) -> int:
        box = label.get_window_extent()
        return 10 * box.count_overlaps(taken) + int(box.count_contains(points))

    for word, place in zip(words, places, strict=True):
        choices = []
        for x, y, across, along in sides:
            label = axes.annotate(word, place, (x, y), textcoords="offset points", ha=across, va=along, fontsize=9)
            choices.append((covered(label), len(choices), label))
        best = min(choices)[2]
        for _, _, label in choices:
            if label is not best:
                label.remove()
        taken.append(best.get_window_extent())


if __name__ == "__main__":
    main()
