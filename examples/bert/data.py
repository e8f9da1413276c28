"""Words of a text as batches with some of them masked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.data.reading.streams import chunks, open_file

UNKNOWN, MASK, START, NUM_SPECIAL = 0, 1, 2, 3
MASKED_SHARE = 0.15

Batch = dict[str, torch.Tensor]


class Text(NamedTuple):
    ids: npt.NDArray[np.int32]
    vocab_size: int


def read_text(path: str | Path, vocab_size: int, max_bytes: int | None = None) -> Text:
    """The words of a file (.xz, .gz, ... are read as they are); all but the `vocab_size` most frequent are UNKNOWN."""
    path = str(path)
    parts, size = [], 0
    for chunk in chunks(open_file(path), path):
        parts.append(chunk)
        size += len(chunk)
        if max_bytes is not None and size >= max_bytes:
            break
    words = b"".join(parts)[:max_bytes].split()
    known = [word for word, _ in Counter(words).most_common(vocab_size - NUM_SPECIAL)]
    number = {word: place + NUM_SPECIAL for place, word in enumerate(known)}
    ids = np.fromiter((number.get(word, UNKNOWN) for word in words), np.int32, len(words))
    return Text(ids, len(known) + NUM_SPECIAL)


def generated(num_words: int, vocab_size: int, seed: int = 0) -> Text:
    """Passages of 60 words about one topic each; a topic has ten words, its first as frequent as the other nine.

    So the words around a masked one tell the topic, and it is told half of the time by one who knows the topics: the
    loss falls from ln(vocabulary) to about 1.8.
    """
    rng = np.random.default_rng(seed)
    num_topics = max(1, (vocab_size - NUM_SPECIAL) // 10)
    words = NUM_SPECIAL + rng.permutation(num_topics * 10).reshape(num_topics, 10)
    topics = np.repeat(rng.integers(0, num_topics, -(-num_words // 60)), 60)[:num_words]
    ranks = np.where(rng.random(num_words) < 0.5, 0, rng.integers(1, 10, num_words))
    return Text(words[topics, ranks].astype(np.int32), NUM_SPECIAL + num_topics * 10)


class Batches:
    """Batches of this reader, one of `num_readers`, by the number of the step: a job can go on from any.

    Every sequence begins with START. Of its other words 15 % are to be told: 80 % of these are replaced by MASK, 10 %
    by some word, 10 % are left.
    """

    def __init__(self, text: Text, batch_size: int, length: int, seed: int, reader: int = 0, num_readers: int = 1):
        num = len(text.ids) // (length - 1)
        if num < batch_size * num_readers:
            raise ValueError(
                f"{len(text.ids):,} words are {num:,} sequences of {length}, less than a batch of {batch_size} for "
                f"each of {num_readers} readers: give a longer text, or a smaller --batch_size"
            )
        self._sequences = text.ids[: num * (length - 1)].reshape(num, length - 1)
        self._vocab_size, self._batch_size, self._seed = text.vocab_size, batch_size, seed
        self._reader, self._num_readers = reader, num_readers
        self.steps_per_epoch = num // (batch_size * num_readers)
        self.num_masked = max(1, round(MASKED_SHARE * (length - 1)))
        self._epoch, self._order = -1, np.arange(num)

    def __call__(self, first: int, end: int) -> Iterator[Batch]:
        """Those of the steps from `first` to before `end`."""
        for step in range(first, end):
            yield self.at(step)

    def at(self, step: int) -> Batch:
        """input_ids (batch, length); positions and labels (batch, number of masked words)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, rng = epoch, np.random.default_rng([self._seed, epoch])
            self._order = rng.permutation(len(self._sequences))
        start = (place * self._num_readers + self._reader) * self._batch_size
        words = self._sequences[self._order[start : start + self._batch_size]]
        return self._masked(words, np.random.default_rng([self._seed, step, self._reader]))

    def _masked(self, words: npt.NDArray[np.int32], rng: np.random.Generator) -> Batch:
        ids = np.concatenate([np.full((len(words), 1), START), words], axis=1).astype(np.int64)
        positions = 1 + np.sort(rng.random(words.shape).argsort(axis=1)[:, : self.num_masked], axis=1)
        labels = np.take_along_axis(ids, positions, axis=1)
        kind = rng.random(positions.shape)
        other = rng.integers(NUM_SPECIAL, self._vocab_size, positions.shape)
        shown = np.where(kind < 0.8, MASK, np.where(kind < 0.9, other, labels))
        np.put_along_axis(ids, positions, shown, axis=1)
        named = {"input_ids": ids, "positions": positions, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in named.items()}
