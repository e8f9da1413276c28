"""A corpus of word ids: a folder of text files with lines of numbers, and a description of how it was made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.apps.word2vec.textfiles import Bytes, input_files, whole_words
from torchfleet.apps.word2vec.vocabulary import Vocabulary
from torchfleet.base.errors import DataError
from torchfleet.base.monitor.progress import Progress
from torchfleet.base.prepared_types import prepared
from torchfleet.data.reading import streams
from torchfleet.ps.kernels import words

DESCRIPTION, UNFINISHED = "_corpus.json", "_unfinished"
MAX_IDS = 1 << 31
_COUNTED_AT_ONCE = 1 << 20  # words
_SHOWN = 40

Ids = npt.NDArray[np.int32]


class Description(msgspec.Struct, forbid_unknown_fields=False):
    """The contents of `_corpus.json`. None means unknown."""

    format: int
    dictionary: int | None  # the vocabulary's fingerprint
    num_ids: int | None
    raw_words: int | None  # before words were dropped
    words: int
    downsample: float | None
    seed: int | None
    files: dict[str, int]  # words in each


def read_description(folder: str) -> Description | None:
    """Read the description; returns None if the folder has no description. Raises DataError for an unfinished folder,
    and for files that are not in the description, or in it only.
    """
    try:
        with open(os.path.join(folder, DESCRIPTION), "rb") as file:
            found = msgspec.json.decode(file.read(), type=prepared(Description))
    except FileNotFoundError:
        if os.path.exists(os.path.join(folder, UNFINISHED)):
            raise DataError(
                f"{folder} is not complete, whatever wrote it was stopped: remove it and run that again"
            ) from None
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{folder}/{DESCRIPTION}: expected the description of a corpus; {error}") from error
    if found.format != 1:
        raise DataError(f"{folder}/{DESCRIPTION}: expected format 1, found {found.format}; use a newer torchfleet")
    present = {os.path.basename(path) for path in input_files(folder)}
    if strange := sorted(present.symmetric_difference(found.files)):
        where = "is not in its description" if strange[0] in present else f"is in {DESCRIPTION}, but not there"
        raise DataError(f"{folder}: {strange[0]} {where}; was a file added or removed?")
    return found


class Corpus:
    """The ids of a folder. The constructor checks it against the vocabulary; reading checks each id.

    `files` are paths; `words_of[path]` is the number of words in one. Without a description the words are counted by
    reading all files once. `downsample` is the threshold above which words were dropped; 0 if unknown or not used.
    """

    def __init__(self, path: str | os.PathLike[str], vocabulary: Vocabulary) -> None:
        self.path = os.fspath(path)
        if not os.path.isdir(self.path):
            raise DataError(
                f"no folder at {self.path}: expected one of id files, as preprocess.py --filter_corpus makes"
            )
        self._num_ids = len(vocabulary)
        described = read_description(self.path)
        self.files = input_files(self.path)
        self._is_described = described is not None
        if described is None:
            self.words_of = count_words(self.files, self._num_ids)
        else:
            self._check(described, vocabulary)
            self.words_of = {path: described.files[os.path.basename(path)] for path in self.files}
        self.downsample = (described.downsample if described is not None else None) or 0.0
        self.words = sum(self.words_of.values())
        self.raw_words = self.words if described is None or described.raw_words is None else described.raw_words

    def blocks(self, files: Sequence[str], words_per_block: int) -> Iterator[Ids]:
        """Yield the ids of these files, one file after another, with -1 after every line, in new arrays.

        An array has at most `words_per_block` elements and ends at the end of a line. Only if a line alone is longer,
        the array does not end with -1, and the line continues in the next array. Together the arrays hold all ids and
        line ends in order. Raises DataError for text that is not an id, and for a file whose number of words differs
        from the description.
        """
        return read_ids(files, words_per_block, self._num_ids, self.words_of if self._is_described else {})

    def _check(self, described: Description, vocabulary: Vocabulary) -> None:
        expected = (described.num_ids, described.dictionary)
        found = (len(vocabulary), vocabulary.fingerprint)
        for what, needed, given in zip(("ids", "fingerprint"), expected, found, strict=True):
            if needed is not None and needed != given:
                raise DataError(
                    f"{self.path} was made with another dictionary ({what}: {needed}) than this ({what}: {given}): "
                    "give the one that it was made with, or run --filter_corpus again with this one"
                )


def count_words(
    paths: Sequence[str], num_ids: int = MAX_IDS, words_of: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Count the words in each file of ids. Raises DataError if a file's number differs from `words_of`."""
    progress, found, total = Progress("counting words"), {}, 0
    for path in paths:
        found[path] = 0
        for ids in read_ids([path], _COUNTED_AT_ONCE, num_ids, words_of):
            found[path] += int(np.count_nonzero(ids >= 0))
            progress.show(f"{total + found[path]:,} words, {len(found)} of {len(paths)} files")
        total += found[path]
    progress.end(f"{total:,} words in {len(paths)} files")
    return found


def read_ids(
    paths: Sequence[str], words_per_block: int, num_ids: int = MAX_IDS, words_of: Mapping[str, int] | None = None
) -> Iterator[Ids]:
    """Yield the ids of these files like Corpus.blocks. `words_of`: the number of words that a file must have."""
    if words_per_block < 1:
        raise DataError(f"words_per_block must be at least 1, found {words_per_block}")
    ids, state = np.empty(words_per_block, np.int32), np.zeros(words.READER_STATE_SIZE, np.int64)
    for path in paths:
        before, num_bytes = int(state[words.IDS_READ]), 0
        for text in whole_words(streams.chunks(streams.open_file(path), path), path):
            at, end = 0, len(text) - len(words.PADDING)
            while at < end:
                at = int(words.parse_ids(text, at, end, num_ids, ids, state))
                if state[words.REASON] != words.FINE:
                    raise DataError(_refusal(path, num_bytes, text, num_ids, state))
                if at < end:
                    cut = int(state[words.WHOLE_LINES]) or words_per_block
                    yield ids[:cut]
                    ids = _with_rest(ids, cut, state)
            num_bytes += end
        num_read = int(state[words.IDS_READ]) - before
        if words_of and words_of.get(path, num_read) != num_read:
            raise DataError(
                f"{path}: expected {words_of[path]:,} words, found {num_read:,}; was it changed or cut off?"
            )
    if state[words.NUM_IDS]:
        yield ids[: state[words.NUM_IDS]]


def _with_rest(ids: Ids, cut: int, state: npt.NDArray[np.int64]) -> Ids:
    """A new array that begins with the ids after the cut."""
    fresh, num_left = np.empty_like(ids), len(ids) - cut
    fresh[:num_left] = ids[cut:]
    state[words.NUM_IDS], state[words.WHOLE_LINES] = num_left, 0
    return fresh


def _refusal(path: str, num_bytes: int, text: Bytes, num_ids: int, state: npt.NDArray[np.int64]) -> str:
    place = int(state[words.PLACE])
    token = text[place : place + 4 * _SHOWN].tobytes().split(None, 1)[0].decode(errors="replace")
    where, shown = f"{path}, byte {num_bytes + place}", token if len(token) <= _SHOWN else token[:_SHOWN] + "..."
    if state[words.REASON] == words.NO_ID:
        return f"{where}: expected an id, a number from 0 on, found {shown!r}; is this a folder of id files?"
    if num_ids == MAX_IDS:
        return f"{where}: id {shown} is not below {num_ids}, the most that a corpus can have"
    belongs = "the size of the dictionary; is this the dictionary of this corpus?"
    return f"{where}: id {shown} is not below {num_ids}, {belongs}"
