"""A text without data at hand: words of a made-up language that go together in ways that vectors can find.

There are families of words, each with a form for every relation ("f7r2" is family 7 in relation 2, like "paris" is
France as a capital). A sentence is about one such word, among words that go with its family, words that go with its
relation, and words that go with anything. So f1r1 is to f1r2 as f2r1 is to f2r2, which `questions` asks for.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

NUM_FAMILIES, NUM_RELATIONS, NUM_COMPANIONS = 40, 4, 6
_SENTENCE, _AT_ONCE = 12, 20_000


def write_text(path: Path, num_words: int, seed: int = 0, num_others: int = 3000) -> None:
    """Sentences of 12 words, one a line, about `num_words` in all; some words are common and most are rare."""
    rng = np.random.default_rng(seed)
    words = np.array(
        [f"f{f}r{r}" for f in range(NUM_FAMILIES) for r in range(NUM_RELATIONS)]
        + [f"of_f{f}_{c}" for f in range(NUM_FAMILIES) for c in range(NUM_COMPANIONS)]
        + [f"of_r{r}_{c}" for r in range(NUM_RELATIONS) for c in range(NUM_COMPANIONS)]
        + [f"w{n}" for n in range(num_others)]
    )
    first_of_family = NUM_FAMILIES * NUM_RELATIONS
    first_of_relation = first_of_family + NUM_FAMILIES * NUM_COMPANIONS
    first_other = first_of_relation + NUM_RELATIONS * NUM_COMPANIONS
    chances = 1.0 / np.arange(3, num_others + 3)  # Zipf's law
    chances /= chances.sum()
    with path.open("w") as file:
        for num in _pieces(-(-num_words // _SENTENCE)):
            family = rng.integers(NUM_FAMILIES, size=(num, 1))
            relation = rng.integers(NUM_RELATIONS, size=(num, 1))
            places = np.concatenate(
                [
                    family * NUM_RELATIONS + relation,
                    first_of_family + family * NUM_COMPANIONS + rng.integers(NUM_COMPANIONS, size=(num, 3)),
                    first_of_relation + relation * NUM_COMPANIONS + rng.integers(NUM_COMPANIONS, size=(num, 3)),
                    first_other + rng.choice(num_others, size=(num, _SENTENCE - 7), p=chances),
                ],
                axis=1,
            )
            for line in words[rng.permuted(places, axis=1)]:
                file.write(" ".join(line) + "\n")


def write_questions(path: Path, per_section: int = 300, seed: int = 0) -> None:
    """Lines of `a b c d` in sections, one for each pair of relations, as in questions-words.txt."""
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for first, second in itertools.combinations(range(NUM_RELATIONS), 2):
            file.write(f": relation-{first}-to-{second}\n")
            for _ in range(per_section):
                x, y = rng.choice(NUM_FAMILIES, 2, replace=False)
                file.write(f"f{x}r{first} f{x}r{second} f{y}r{first} f{y}r{second}\n")


def _pieces(total: int) -> list[int]:
    return [min(_AT_ONCE, total - start) for start in range(0, total, _AT_ONCE)]
