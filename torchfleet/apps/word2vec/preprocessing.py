"""Preprocessing: builds the dictionary of a text, and writes the text as lines of ids (docs/word2vec.md)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchfleet.apps.word2vec.corpus import Description
from torchfleet.apps.word2vec.textfiles import Bytes, Texts
from torchfleet.apps.word2vec.vocabulary import UNKNOWN, Vocabulary, decoded
from torchfleet.apps.word2vec.wordmap import WordMap
from torchfleet.apps.word2vec.writing import IdWriter, NewCorpus
from torchfleet.base.errors import DataError
from torchfleet.data.reading import streams
from torchfleet.ps.kernels import words


@dataclass(frozen=True)
class DictionaryFacts:
    """The result of build_dictionary: all words, distinct words, words with an id, and occurrences of all others."""

    num_words: int
    num_distinct: int
    num_kept: int
    num_unknown: int


@dataclass(frozen=True)
class CorpusFacts:
    """The words that filter_corpus read, wrote, and did not know; `files`: the words written to each file."""

    num_read: int
    num_written: int
    num_unknown: int
    files: dict[str, int] = field(repr=False)


def build_dictionary(source: str, dict_path: str, min_count: int = 5, max_bytes: int | None = None) -> DictionaryFacts:
    """Count the words of a text or a folder of texts, and write those with at least `min_count` occurrences."""
    _check_at_least("min_count", min_count, 1)
    texts = Texts(source, "build_dict", max_bytes)
    texts.check_apart(dict_path)
    found = WordMap.of([UNKNOWN.encode()])
    found.counts[0] = 0
    for path in texts.paths():
        for piece in texts.pieces(path):
            found.count(piece)
    counts = found.counts
    total = int(counts.sum())
    if not total:
        raise DataError(f"{source} has no words: expected a text")
    kept = np.flatnonzero(counts >= min_count)
    kept = kept[kept > 0]  # number 0 is <UNK>, which never counts as a known word
    num_unknown = total - int(counts[kept].sum())
    lines = [(-int(counts[number]), found.word(number)) for number in kept.tolist()]
    lines += [(-num_unknown, UNKNOWN.encode())] if num_unknown else []
    lines.sort()
    vocabulary = Vocabulary([decoded(word) for _, word in lines], [-count for count, _ in lines])
    vocabulary.save(dict_path)
    return DictionaryFacts(total, len(found) - 1, len(kept), num_unknown)


def keep_probabilities(vocabulary: Vocabulary, downsample: float) -> npt.NDArray[np.float64]:
    """For each id, min(1, (sqrt(c / (t N)) + 1) t N / c): c its count, N all counts, t = downsample; 0 keeps all.

    The code uses the expanded product, in which no quotient can become infinite.
    """
    if not downsample >= 0 or math.isinf(downsample):
        raise DataError(f"downsample must be at least 0 (0 keeps all words), found {downsample}")
    if downsample == 0:
        return np.ones(len(vocabulary))
    ratio = downsample * vocabulary.total / vocabulary.counts
    chances: npt.NDArray[np.float64] = np.minimum(1.0, np.sqrt(ratio) + ratio)
    return chances


def filter_corpus(
    source: str,
    dict_path: str,
    output: str,
    min_count: int = 5,
    downsample: float = 0.001,
    seed: int = 0,
    max_bytes: int | None = None,
) -> CorpusFacts:
    """Write the texts as lines of ids to the folder `output`, without the words that downsampling drops.

    Also writes `{dict_path}_word_to_id_`. Whether a word is dropped depends on the seed and on its place in all texts.
    """
    _check_at_least("min_count", min_count, 1)
    if not 0 <= seed < 1 << 63:
        raise DataError(f"seed must be at least 0 and below 2^63, found {seed}")
    vocabulary = Vocabulary.load(dict_path)
    encoder = _Encoder(vocabulary, min_count, downsample, seed)
    texts = Texts(source, "filter_corpus", max_bytes)
    texts.check_apart(dict_path, f"{dict_path}_word_to_id_")
    written: dict[str, int] = {}
    with NewCorpus(output) as folder:
        for path in texts.paths():
            name = output_name(path)
            if name in written:
                raise DataError(f"two files of {source} would become '{name}' in {output}: rename one of them")
            with folder.writer(name) as writer:
                for piece in texts.pieces(path):
                    encoder.encode(piece, writer)
            written[name] = writer.num_words
        facts = CorpusFacts(encoder.num_read, sum(written.values()), encoder.num_unknown, written)
        encoder.check(facts, source, dict_path)
        vocabulary.save_ids(f"{dict_path}_word_to_id_")
        folder.finish(
            Description(
                1, vocabulary.fingerprint, len(vocabulary), facts.num_read, facts.num_written, downsample, seed, written
            )
        )
    return facts


def output_name(path: str) -> str:
    """The file's name without its compression suffix, and never a name that a corpus ignores."""
    name = os.path.basename(path)
    return name.removesuffix(streams.compression(path) or "\0").lstrip("_.") or "text"


class _Encoder:
    """Maps words to ids, and counts the words so far."""

    def __init__(self, vocabulary: Vocabulary, min_count: int, downsample: float, seed: int) -> None:
        self._map = WordMap.of(vocabulary.encoded())
        assert len(self._map) == len(vocabulary)
        self._unknown = -1 if vocabulary.unknown is None else vocabulary.unknown
        self._seed = np.uint64(seed)
        # The last element is for all words that are not in the dictionary.
        ids = np.where(vocabulary.counts >= min_count, np.arange(len(vocabulary)), self._unknown)
        self._ids = np.append(ids, self._unknown).astype(np.int32)
        if vocabulary.unknown is not None:
            self._ids[vocabulary.unknown] = vocabulary.unknown
        chances = keep_probabilities(vocabulary, downsample)[self._ids]  # what index -1 gives is not used
        self._keep = np.ceil(chances * 2.0**53).astype(np.uint64)
        known = vocabulary.counts[self._ids[:-1] != self._unknown].sum()
        self._share_unknown = 1 - int(known) / vocabulary.total
        self.num_read = self.num_unknown = 0

    def encode(self, text: Bytes, writer: IdWriter) -> None:
        found, at, end = self._map, 0, len(text) - len(words.PADDING)
        writer.state[words.NUM_READ], writer.state[words.NUM_UNKNOWN] = self.num_read, self.num_unknown
        while at < end:
            at = int(words.encode_words(
                text, at, end, found.slots, found.entries, found.arena, found.state, self._ids, self._keep,
                self._unknown, self._seed, writer.buffer, writer.state,
            ))  # fmt: skip
            if at < end:
                writer.make_room()
        self.num_read, self.num_unknown = writer.state[[words.NUM_READ, words.NUM_UNKNOWN]].tolist()

    def check(self, facts: CorpusFacts, source: str, dict_path: str) -> None:
        """Raise DataError if the dictionary lacks more than half of the words that it should have."""
        if not facts.num_read:
            raise DataError(f"{source} has no words: expected a text")
        if 2 * (facts.num_read - facts.num_unknown) < (1 - self._share_unknown) * facts.num_read:
            raise DataError(
                f"{facts.num_unknown:,} of {facts.num_read:,} words of {source} are not in {dict_path}: is this the "
                "dictionary of this corpus? Build one with --build_dict."
            )


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise DataError(f"{name} must be at least {least}, found {value}")
