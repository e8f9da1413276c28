"""Splits a corpus of ids into a given number of files with equal numbers of words."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.apps.word2vec.corpus import MAX_IDS, Description, count_words, read_description, read_ids
from torchfleet.apps.word2vec.textfiles import input_files
from torchfleet.apps.word2vec.writing import NewCorpus
from torchfleet.base.errors import DataError
from torchfleet.base.monitor.progress import Progress

_WORDS_AT_ONCE = 1 << 20
_FAR = 20  # a cut moves by at most 1 / _FAR of a file


def resplit(source: str, output: str, num_files: int = 1024) -> dict[str, int]:
    """Cut a folder of id files into exactly `num_files`, `part-00000` and so on; returns the words in each.

    The numbers of words differ by at most one; but a cut moves on to the end of the line if that is at most 5 % of a
    file away. The order of words stays. Three passes over the text: how many words, where lines end, writing.
    """
    if num_files < 1:
        raise DataError(f"num_files must be at least 1, found {num_files}")
    old = read_description(source) if os.path.isdir(source) else None
    paths = input_files(source)
    num_ids = MAX_IDS if old is None or old.num_ids is None else old.num_ids
    with NewCorpus(output) as folder:
        total = _checked_total(source, paths, num_ids, old)
        if num_files > total:
            raise DataError(f"{num_files:,} files cannot be made of {total:,} words in {source}: give a smaller number")
        sizes = np.diff(_ends_of_parts(paths, num_ids, total, num_files), prepend=0).tolist()
        written = {f"part-{number:05}": size for number, size in enumerate(sizes)}
        _write_parts(paths, num_ids, written, folder)
        known = old if old is not None else Description(1, None, None, None, 0, None, None, {})
        folder.finish(msgspec.structs.replace(known, words=total, files=written))
    return written


def _checked_total(source: str, paths: Sequence[str], num_ids: int, described: Description | None) -> int:
    """Count all words. Raises DataError if there are no words, or if a file's count differs from the description."""
    expected = {} if described is None else {path: described.files[os.path.basename(path)] for path in paths}
    words_of = count_words(paths, num_ids, expected)
    if not any(words_of.values()):
        raise DataError(f"{source} has no words: expected files of ids")
    return sum(words_of.values())


def _ends_of_parts(paths: Sequence[str], num_ids: int, total: int, num_files: int) -> npt.NDArray[np.int64]:
    """Where each new file ends, in words: after an equal share, or at the end of a line soon after."""
    even = np.array([total * (number + 1) // num_files for number in range(num_files)], np.int64)
    next_line = np.empty_like(even)
    num_words = num_found = 0
    progress = Progress("looking for the ends of lines")
    for ids in read_ids(paths, _WORDS_AT_ONCE, num_ids):
        is_word = ids >= 0
        ends = num_words + np.cumsum(is_word)[~is_word]
        if len(ends):
            num_now = int(np.searchsorted(even, ends[-1], side="right"))
            next_line[num_found:num_now] = ends[np.searchsorted(ends, even[num_found:num_now])]
            num_found = num_now
        num_words += int(np.count_nonzero(is_word))
        progress.show(f"{num_words:,} of {total:,} words")
    assert num_found == num_files, "every file ends with a line's end"
    return np.where((next_line - even) * _FAR * num_files <= total, next_line, even)


def _write_parts(paths: Sequence[str], num_ids: int, sizes: dict[str, int], folder: NewCorpus) -> None:
    blocks = read_ids(paths, _WORDS_AT_ONCE, num_ids)
    ids, at = np.empty(0, np.int32), 0
    progress = Progress("writing")
    for number, (name, size) in enumerate(sizes.items()):
        with folder.writer(name) as writer:
            while writer.num_words < size:
                if at == len(ids):
                    ids, at = next(blocks), 0
                at = writer.write(ids, at, size - writer.num_words)
        progress.show(f"{number + 1:,} of {len(sizes):,} files")
