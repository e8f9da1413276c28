"""Trains skip-gram with the fused kernel: several threads, directly on whole tables. In one process, or in geo mode."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchfleet.apps.word2vec.corpus import Corpus, Ids
from torchfleet.apps.word2vec.model import TABLES
from torchfleet.apps.word2vec.sampling import word_chances
from torchfleet.apps.word2vec.vocabulary import Vocabulary
from torchfleet.base.errors import DataError
from torchfleet.ps.kernels.skipgram import Scratch, Tables, skipgram_scratch, train
from torchfleet.ps.kernels.vector_instructions import LANES
from torchfleet.ps.worker.modes.whole_tables import WholeTables

WORDS_PER_STEP = 10_000  # words of the corpus in one step, as k_steps counts them
_SHOW_SECONDS = 1.0

Schedule = Callable[[float], float]  # from the words of all workers so far to the learning rate


@dataclass(frozen=True)
class LinearDecay:
    """Linear decay from `rate` at the first word to `last` at the last word, as in word2vec."""

    rate: float
    last: float
    num_words: float

    def __call__(self, words: float) -> float:
        return max(self.last, self.rate * (1.0 - words / self.num_words))


@dataclass(frozen=True)
class StaircaseDecay:
    """`rate`, times `factor` after every `num_words` words."""

    rate: float
    factor: float
    num_words: float

    def __call__(self, words: float) -> float:
        return float(self.rate * self.factor ** (words // self.num_words))


@dataclass(frozen=True)
class SkipGramOptions:
    window: int = 5
    num_negatives: int = 5
    sample: float = 1e-4
    train_unknown: bool = False
    windows_per_step: int = 24  # words whose windows share negatives and form one step of SGD
    shared_negatives: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "num_negatives", "windows_per_step", "shared_negatives"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} must be at least 1, found {getattr(self, name)}")
        if not 0 <= self.sample < 1:
            raise DataError(f"sample must be from 0 (leave no word out) up to 1, found {self.sample}")


@dataclass
class TrainingProgress:
    """The progress of training. `words` counts words of the text, including those that the corpus drops."""

    words: float = 0.0
    num_words: float = 0.0
    seconds: float = 0.0
    rate: float = 0.0
    losses: list[tuple[float, float]] = field(default_factory=list)  # (words, mean loss of a pair since the last)

    @property
    def words_per_s(self) -> float:
        return self.words / max(self.seconds, 1e-9)

    @property
    def loss(self) -> float:
        return self.losses[-1][1] if self.losses else float("nan")


class Trainer:
    """Trains `replica`, which must have SkipGram's tables. Calls `tell` with progress each second and at the end."""

    def __init__(
        self,
        replica: WholeTables,
        vocabulary: Vocabulary,
        options: SkipGramOptions,
        *,
        worker: int = 0,
        num_workers: int = 1,
        tell: Callable[[TrainingProgress], None] = lambda progress: None,
    ) -> None:
        self._replica, self._options, self._tell = replica, options, tell
        self._words = word_chances(vocabulary, options.sample, options.train_unknown)
        values, changes = replica.values, replica.changes
        self._tables = Tables(
            values["emb"], values["emb_w"], values["emb_b"].reshape(-1), *(changes[name] for name in TABLES)
        )
        _check_sizes(self._tables, vocabulary)
        self._worker, self._num_workers = worker, num_workers
        self._num_calls = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._measured = (0.0, 0.0)  # loss and pairs at the last report
        self._step(np.empty(0, np.int32), 0.0, self._scratch(0))  # compiles the kernel before the clock starts

    def train(
        self, corpus: Corpus, files: Sequence[str], epochs: int, schedule: Schedule, threads: int
    ) -> TrainingProgress:
        """Train for `epochs` passes over these files of the corpus. The result holds the losses, one per second."""
        if epochs < 1 or threads < 1:
            raise DataError(f"epochs and threads must be at least 1, found {epochs} and {threads}")
        own_words = sum(corpus.words_of[path] for path in files)
        if not own_words:
            raise DataError(f"there are no words in the {len(files)} files of this worker in {corpus.path}")
        self._stopping.clear()
        self._error, self._measured = None, (0.0, 0.0)
        self._raw_per_word = corpus.raw_words / corpus.words
        self._schedule = schedule
        self._progress = TrainingProgress(num_words=own_words * epochs * self._raw_per_word)
        self._blocks = (block for _ in range(epochs) for block in corpus.blocks(files, WORDS_PER_STEP))
        scratches = [self._scratch(thread) for thread in range(threads)]
        self._run(
            [threading.Thread(target=self._work, args=(scratch,), daemon=True) for scratch in scratches], scratches
        )
        self._num_calls += 1  # so that the next call draws other random numbers
        return self._progress

    def _run(self, threads: list[threading.Thread], scratches: list[Scratch]) -> None:
        start = reported = time.perf_counter()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.05)
                    self._progress.seconds = time.perf_counter() - start
                    if time.perf_counter() - reported >= _SHOW_SECONDS:
                        reported = time.perf_counter()
                        self._report(scratches)
        finally:
            self._stopping.set()  # an exception here ends the threads too
            for thread in threads:
                if thread.ident is not None:  # it was started
                    thread.join()
            self._progress.seconds = time.perf_counter() - start
        if self._error is not None:
            raise self._error
        self._report(scratches)

    def _report(self, scratches: list[Scratch]) -> None:
        """Report the progress, with the threads' mean loss since the last report."""
        loss, pairs = np.sum([scratch.totals[1:] for scratch in scratches], axis=0)
        before = self._measured
        if pairs > before[1]:
            mean = float((loss - before[0]) / (pairs - before[1]))
            self._progress.losses.append((self._progress.words, mean))
        self._measured = (loss, pairs)
        self._tell(self._progress)

    def _work(self, scratch: Scratch) -> None:
        """One thread: trains on one block of words after another."""
        try:
            while (taken := self._next()) is not None:
                self._step(*taken, scratch)
                self._replica.step_done()
        except BaseException as error:  # `train` raises it
            self._error = self._error or error
            self._stopping.set()

    def _step(self, ids: Ids, rate: float, scratch: Scratch) -> None:
        options = self._options
        train(ids, self._tables, self._words, scratch, options.window, options.num_negatives, np.float32(rate))

    def _next(self) -> tuple[Ids, float] | None:
        with self._lock:
            ids = None if self._stopping.is_set() else next(self._blocks, None)
            if ids is None:
                return None
            progress = self._progress
            progress.rate = self._schedule(progress.words * self._num_workers)
            progress.words += float(np.count_nonzero(ids >= 0)) * self._raw_per_word
            return ids, progress.rate

    def _scratch(self, thread: int) -> Scratch:
        options = self._options
        entropy = [options.seed, self._worker, thread, self._num_calls]
        seed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
        return skipgram_scratch(
            WORDS_PER_STEP,
            self._tables.emb.shape[1],
            options.window,
            options.windows_per_step,
            options.shared_negatives,
            int(seed),
        )


def _check_sizes(tables: Tables, vocabulary: Vocabulary) -> None:
    """Raise DataError for sizes with which the kernel would write outside the tables."""
    num_rows, width = tables.emb.shape
    if num_rows != len(vocabulary):
        raise DataError(
            f"the tables have {num_rows} rows, and the dictionary {len(vocabulary)} words: give the dictionary that "
            "the model was made for"
        )
    if width % LANES:
        raise DataError("the kernel trains vectors of a dim of 2 or more; train a dim of 1 as an ordinary module")
