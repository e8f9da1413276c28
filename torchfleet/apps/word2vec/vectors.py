"""Word vectors: loaded from files or from a saved model, saved, and compared by cosine."""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchfleet.apps.word2vec.vector_files import Vectors, read_vectors, write_binary, write_text
from torchfleet.base.errors import CheckpointError, DataError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.chain import live_rows
from torchfleet.ps.checkpoint.manifest import read_manifest

if TYPE_CHECKING:
    from torchfleet.apps.word2vec.vocabulary import Vocabulary

_BLANK = re.compile(r"[ \t\n\r\v\f]")  # separates words in a corpus; other white space may be part of a word
_SPELLINGS = 100_000  # words that are searched for a similar spelling


class WordVectors:
    """Words, best sorted by frequency, and a float32 row for each. Neither is changed afterwards.

    `words` and `vectors` are as given (converted and copied only if necessary); `index` has the row of each word.
    """

    def __init__(self, words: Sequence[str], vectors: npt.NDArray[np.float32]) -> None:
        self.words = list(words)
        self.vectors: Vectors = np.ascontiguousarray(vectors, np.float32)
        self.index: dict[str, int] = {}
        if self.vectors.ndim != 2 or not self.vectors.size or len(self.words) != len(self.vectors):
            raise DataError(
                f"expected a word for every row, and at least one, found {len(self.words):,} words and vectors of "
                f"shape {self.vectors.shape}"
            )
        for i, word in enumerate(self.words):
            if not word or _BLANK.search(word):
                raise DataError(f"word {i + 1:,}, {word!r}: a word is not empty and has no white space in it")
            if self.index.setdefault(word, i) != i:
                raise DataError(f"word {i + 1:,}, '{word}', occurs twice: expected each word once")
        is_finite = np.isfinite(self.vectors).all(axis=1)
        if not is_finite.all():
            word = self.words[int(np.argmin(is_finite))]
            num = len(self.words) - int(is_finite.sum())
            raise DataError(
                f"{num:,} words, the first of them '{word}', have vectors with infinite or NaN values. Did the "
                "training diverge? Try a smaller learning rate."
            )

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])

    @functools.cached_property
    def norms(self) -> Vectors:
        """The length of every vector."""
        return np.asarray(np.linalg.norm(self.vectors, axis=1))

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self.index

    def __getitem__(self, word: str) -> Vectors:
        """The word's row, not a copy. An unknown word raises DataError with the nearest spellings."""
        return np.asarray(self.vectors[self._position(word)])

    def _position(self, word: str) -> int:
        if word not in self.index:
            near = difflib.get_close_matches(word.lower(), self.words[:_SPELLINGS])
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            raise DataError(f"'{word}' is not among the {len(self):,} words.{meant}")
        return self.index[word]

    def most_similar(
        self, word: str | npt.NDArray[np.float32], count: int = 10, restrict: int | None = None
    ) -> list[tuple[str, float]]:
        """The words nearest to a word or vector, with cosines, best first, of the first `restrict` words (None: all).

        The word itself and words with a zero vector, which have no cosine, are excluded.
        """
        check_restrict(restrict)
        own = self._position(word) if isinstance(word, str) else -1
        with np.errstate(invalid="ignore", divide="ignore"):
            vector = self.vectors[own] / self.norms[own] if isinstance(word, str) else np.asarray(word, np.float32)
        if vector.shape != (self.dim,):
            raise DataError(f"expected a vector of {self.dim} numbers, found one of shape {vector.shape}")
        cosines = self.cosines(to_unit(vector.astype(np.float64)), restrict)
        count = max(0, count)
        best = highest(cosines, count + (own >= 0))
        return [(self.words[i], float(cosines[i])) for i in best if i != own and cosines[i] == cosines[i]][:count]

    def cosines(self, unit: Vectors, restrict: int | None = None) -> Vectors:
        """Cosines between a vector of length 1 and the first `restrict` words; nan for a word whose vector is zero."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.dot(self.vectors[:restrict], unit) / self.norms[:restrict])

    def save_text(self, path: str | os.PathLike[str]) -> None:
        """Write a line `V D`, then lines `word v1 .. vD`. `load` reads them. The file appears when complete."""
        write_text(os.fspath(path), self.words, self.vectors)

    def save_binary(self, path: str | os.PathLike[str]) -> None:
        """Write word2vec's binary format: a line `V D`; then each word, a blank, D float32 numbers and a newline."""
        write_binary(os.fspath(path), self.words, self.vectors)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WordVectors:
        """Load a file of save_text or save_binary, or of another program in one of these formats.

        If a word occurs more than once, the first one counts.
        """
        words, vectors = read_vectors(os.fspath(path))
        first: dict[str, int] = {}
        for i, word in enumerate(words):
            first.setdefault(word, i)
        if len(first) < len(words):
            words, vectors = list(first), vectors[list(first.values())]
        try:
            return cls(words, vectors)
        except DataError as error:
            raise DataError(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def load_checkpoint(cls, folder: str | os.PathLike[str], vocabulary: Vocabulary, table: str = "emb") -> WordVectors:
        """Load a folder of save_persistables or save_inference_model. The table's keys must be the dictionary's ids.

        Words without a row were never trained; they are dropped, as is <UNK>.
        """
        keys, rows = _saved_rows(os.fspath(folder), table, len(vocabulary.words))
        order = np.argsort(keys)
        if vocabulary.unknown is not None:
            order = order[keys[order] != vocabulary.unknown]
        if not len(order):
            raise CheckpointError(f"{os.fspath(folder)}: table '{table}' has no row of a word. Was it saved too early?")
        return cls([vocabulary.words[key] for key in keys[order].tolist()], rows[order])


def _saved_rows(folder: str, name: str, num_words: int) -> tuple[npt.NDArray[np.int64], Vectors]:
    """Keys and values of a saved table, in file order. Raises CheckpointError for a key that is not an id of the
    dictionary.
    """
    storage = Storage(folder)
    manifest = read_manifest(storage)
    table = manifest.table(name)
    if table.is_dense:
        raise CheckpointError(f"{folder}: '{name}' is dense: expected a table with a row for every word")
    found = list(live_rows(storage, manifest, name))
    keys = np.concatenate([keys.view(np.int64) for keys, _ in found] or [np.empty(0, np.int64)])
    rows = np.concatenate([arrays["rows"][:, : table.dim] for _, arrays in found] or [np.empty((0, table.dim))])
    beyond = keys[(keys < 0) | (keys >= num_words)]
    if len(beyond) or (table.spec().has_size and table.size != num_words):
        contents = f"id {beyond[0]}" if len(beyond) else f"{table.size:,} rows"
        raise CheckpointError(
            f"{folder}: table '{name}' has {contents}, and the dictionary has {num_words:,} words. Is it the "
            "dictionary that the model was trained with?"
        )
    return keys, rows


def check_restrict(restrict: int | None) -> None:
    if restrict is not None and restrict < 1:
        raise DataError(f"restrict={restrict}: expected how many of the first words take part, or None for all")


def to_unit(rows: npt.NDArray[np.float64]) -> Vectors:
    """Rows scaled to length 1, as float32; rows of length zero stay as they are."""
    # More precise than float64, like BLAS's dnrm2, which gensim uses: the last bit can decide between two words.
    lengths = np.sqrt(np.square(rows, dtype=np.longdouble).sum(axis=-1, keepdims=True)).astype(np.float64)
    scale = np.divide(1.0, lengths, out=np.ones_like(lengths), where=lengths > 0)
    return np.asarray((rows * scale).astype(np.float32))


def highest(values: Vectors, count: int) -> npt.NDArray[np.intp]:
    """The indices of the `count` highest values, best first; nan is lowest. Ties are in gensim's order, which is
    numpy's.
    """
    down = -values
    if count >= len(down):
        return np.asarray(np.argsort(down))
    some = np.argpartition(down, count)[:count]
    return np.asarray(some[np.argsort(down[some])])
