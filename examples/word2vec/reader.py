"""Skip-gram samples from lines of word ids: `1 in 1 true 5 n1 n2 n3 n4 n5`, one per word and context word.

cat ids-0 | python examples/word2vec/reader.py --dictionary words.txt

`words.txt` has lines of `word count`; the word's id is its line number. Negative words are drawn with probability
count^0.75 and shared by `--batch` samples; the window is drawn from 1 to `--window` for every word.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import torchfleet as fleet
from torchfleet.word2vec import Vocabulary


class SkipGramReader(fleet.MultiSlotDataGenerator):
    """From a line of ids to samples of (input word, true word, negative words)."""

    def __init__(
        self, counts: np.ndarray, window: int = 5, num_negatives: int = 5, batch: int = 100, seed: int = 0
    ) -> None:
        if not len(counts) or (counts <= 0).any():
            raise ValueError("the dictionary must have words, each with a count above 0")
        self._cumulative = np.cumsum(counts.astype(np.float64) ** 0.75)
        self._window, self._num_negatives, self._samples_per_draw = window, num_negatives, batch
        self._rng = np.random.default_rng(seed)
        self._num_samples = 0
        self._negatives: list[int] = []

    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Any]]:
        def samples() -> Iterator[Any]:
            assert line is not None
            words = [int(word) for word in line.split()]
            if words and not 0 <= min(words) <= max(words) < len(self._cumulative):
                raise ValueError(
                    f"ids must be below {len(self._cumulative)}, the size of the dictionary; found {words}"
                )
            for place, word in enumerate(words):
                reach = int(self._rng.integers(1, self._window + 1))
                for other in (*words[max(0, place - reach) : place], *words[place + 1 : place + 1 + reach]):
                    yield [("input_word", [word]), ("true_label", [other]), ("neg_label", self._drawn())]

        return samples

    def _drawn(self) -> list[int]:
        if self._num_samples % self._samples_per_draw == 0:
            marks = self._rng.random(self._num_negatives) * self._cumulative[-1]
            self._negatives = np.searchsorted(self._cumulative, marks, side="right").tolist()
        self._num_samples += 1
        return self._negatives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dictionary", required=True, help="lines of `word count`")
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--num_negatives", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100, help="samples that share their negative words")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        counts = Vocabulary.load(options.dictionary).counts
    except fleet.FleetError as error:
        raise SystemExit(str(error)) from None
    SkipGramReader(counts, options.window, options.num_negatives, options.batch, options.seed).run_from_stdin()


if __name__ == "__main__":
    main()
