"""Training of the same model as an ordinary module, in any mode."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from torchfleet.base.monitor.progress import Progress
from torchfleet.word2vec import Corpus, PairReader, Pairs, Schedule, SkipGram, Vocabulary, word_chances

_ROWS = 1 << 14


def train_by_autograd(
    model: Any,
    optimizer: Any,
    vocabulary: Vocabulary,
    corpus: Corpus,
    files: Sequence[str],
    schedule: Schedule,
    options: argparse.Namespace,
) -> np.ndarray:
    """The words' vectors, all workers' progress in them."""
    steps = Steps(model, optimizer, schedule, corpus, options)
    if options.reader == "pipe":
        train_through_pipe(steps, files, options)
    else:
        reader = PairReader(
            word_chances(vocabulary, options.sample, options.train_unknown),
            options.window,
            options.shared_negatives,
            options.batch_size * (fleet.worker_num() if options.mode == "sync" else 1),
            seed=options.seed if options.mode == "sync" else options.seed + 1000 * fleet.worker_index(),
        )
        for _ in range(options.epochs):
            for pairs in fleet.prefetch(batches(reader, corpus, files, options)):
                steps.step(pairs.words, pairs.trues, pairs.negatives, pairs.num_read)
    steps.end()
    fleet.flush()
    fleet.barrier_worker()
    model.eval()
    with torch.no_grad():
        chunks = [
            model.emb(torch.arange(at, min(at + _ROWS, len(vocabulary)))) for at in range(0, len(vocabulary), _ROWS)
        ]
    return torch.cat(chunks).numpy()


def batches(reader: PairReader, corpus: Corpus, files: Sequence[str], options: argparse.Namespace) -> Iterator[Pairs]:
    """In sync mode all workers read the same batches, each takes its share of them: all make as many steps."""
    if options.mode != "sync":
        yield from reader.batches(corpus, files)
        return
    mine = slice(fleet.worker_index(), None, fleet.worker_num())
    for pairs in reader.batches(corpus, corpus.files):
        yield Pairs(pairs.words[mine], pairs.trues[mine], pairs.negatives, pairs.num_read)


def train_through_pipe(steps: Steps, files: Sequence[str], options: argparse.Namespace) -> None:
    command = [sys.executable, str(Path(__file__).with_name("reader.py")), "--dictionary", options.dictionary]
    command += ["--window", str(options.window), "--num_negatives", str(options.negatives)]
    dataset = fleet.QueueDataset()
    dataset.init(
        batch_size=options.batch_size,
        thread_num=1,
        pipe_command=shlex.join([*command, "--batch", str(options.batch_size), "--seed", str(options.seed)]),
        use_var=[
            fleet.Slot("input_word", dim=1),
            fleet.Slot("true_label", dim=1),
            fleet.Slot("neg_label", dim=options.negatives),
        ],
    )
    dataset.set_filelist(list(files))
    for _ in range(options.epochs):
        for batch in fleet.prefetch(dataset):
            words, trues = batch["input_word"].view(-1), batch["true_label"].view(-1)
            # A word is read with each of its window's words, window + 1 of them on average.
            steps.step(words, trues, batch["neg_label"], len(words) / (options.window + 1))


class Steps:
    """One step after another, at the rate that the schedule gives, with a line of progress."""

    def __init__(
        self, model: SkipGram, optimizer: Any, schedule: Schedule, corpus: Corpus, options: argparse.Namespace
    ) -> None:
        self._model, self._optimizer, self._schedule, self._options = model, optimizer, schedule, options
        self._raw_per_word = corpus.raw_words / corpus.words
        self._counts_for = 1 if options.mode == "sync" else fleet.worker_num()  # sync: every worker reads everything
        self._line, self._start = Progress("training"), time.perf_counter()
        self._words, self._loss = 0.0, float("nan")

    def step(self, words: torch.Tensor, trues: torch.Tensor, negatives: torch.Tensor, num_read: float) -> None:
        # The kernel's rate is that of a sum of losses; a mean of n has n times as much. Sync takes the mean of workers.
        num = len(words) * (fleet.worker_num() if self._options.mode == "sync" else 1)
        for group in self._optimizer.param_groups:
            group["lr"] = num * self._schedule(self._words * self._counts_for)
        loss = self._model(words, trues, negatives)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._words += num_read * self._raw_per_word
        now = float(loss.detach())
        self._loss = now if np.isnan(self._loss) else 0.99 * self._loss + 0.01 * now
        self._line.show(self._text())
        fleet.report(words_per_s=self._words / (time.perf_counter() - self._start), loss=self._loss)

    def end(self) -> None:
        print(self._text(), flush=True)

    def _text(self) -> str:
        seconds = time.perf_counter() - self._start
        return f"{self._words:,.0f} words, {self._words / seconds:,.0f} words/s, loss {self._loss:.4f}"
