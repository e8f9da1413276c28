"""The skip-gram reader: its lines, against windows counted by hand, and the same in a pipe and in the process."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support import processes
from support.messages import names, naming
from support.paths import ROOT

import torchfleet as fleet
from examples.word2vec.reader import SkipGramReader
from torchfleet.data.queue_dataset import QueueDataset

SCRIPT = ROOT / "examples" / "word2vec" / "reader.py"
SLOTS = [fleet.Slot("input_word", dim=1), fleet.Slot("true_label", dim=1), fleet.Slot("neg_label", dim=5)]
COUNTS = np.arange(1, 31)[::-1].copy()


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[str, str]:
    """(a file of ids, its dictionary)."""
    rng = np.random.default_rng(3)
    lines = [" ".join(map(str, rng.integers(0, 30, size))) for size in (1, 2, 7, 40, 200)]
    (tmp_path / "ids").write_text("\n".join(lines) + "\n")
    (tmp_path / "words").write_text("".join(f"w{i} {count}\n" for i, count in enumerate(COUNTS)))
    return str(tmp_path / "ids"), str(tmp_path / "words")


def samples(path: str, command: object) -> list[tuple[int, int, tuple[int, ...]]]:
    dataset = QueueDataset()
    dataset.init(batch_size=64, use_var=SLOTS, pipe_command=command)
    dataset.set_filelist([path])
    found = []
    for batch in dataset:
        for word, true, negatives in zip(*(batch[slot.name].tolist() for slot in SLOTS), strict=True):
            found.append((word[0], true[0], tuple(negatives)))
    return found


@pytest.mark.long
def test_a_pipe_and_the_process_read_the_same(corpus: tuple[str, str]) -> None:
    path, dictionary = corpus
    in_process = samples(path, SkipGramReader(COUNTS))
    assert in_process == samples(path, f"{sys.executable} {SCRIPT} --dictionary {dictionary}")
    assert len(in_process) > 200


def test_windows_are_one_to_five_words_on_both_sides(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(" ".join(map(str, range(30))) + "\n")
    found = samples(str(tmp_path / "ids"), SkipGramReader(COUNTS))
    reaches = [max(abs(true - word) for word, true, _ in found if word == centre) for centre in range(5, 25)]
    assert set(reaches) == {1, 2, 3, 4, 5}
    for centre, reach in zip(range(5, 25), reaches, strict=True):
        expected = {centre + step for step in range(-reach, reach + 1) if step}
        assert [true for word, true, _ in found if word == centre] == sorted(expected)


def test_negatives_are_shared_by_a_batch_and_follow_the_counts(corpus: tuple[str, str]) -> None:
    found = samples(corpus[0], SkipGramReader(COUNTS, batch=10))
    for start in range(0, len(found), 10):
        assert len({negatives for _, _, negatives in found[start : start + 10]}) == 1
    reader = SkipGramReader(COUNTS, batch=1, num_negatives=5)
    drawn = Counter(word for _ in range(4000) for word in reader._drawn())
    expected = COUNTS**0.75 / (COUNTS**0.75).sum() * 20_000
    chi_square = sum((drawn[i] - expected[i]) ** 2 / expected[i] for i in range(30))
    assert chi_square < 58.3  # 29 degrees of freedom: one in a thousand


def test_ids_beyond_the_dictionary_and_broken_dictionaries_are_named(corpus: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("1 2 99\n")
    with pytest.raises(fleet.FleetError, match=naming("line 1", "SkipGramReader", "ValueError", 30)):
        samples(str(tmp_path / "wrong"), SkipGramReader(COUNTS))
    (tmp_path / "broken").write_text("a 3\nb\n")
    command = [sys.executable, str(SCRIPT), "--dictionary", str(tmp_path / "broken")]
    with (tmp_path / "wrong").open() as ids:
        done = processes.run(command, stdin=ids, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1
    assert names(done.stderr, "line 2", "'b'")
