"""Training by the fused kernel: in one process, or in geo."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

import torchfleet as fleet
from torchfleet.base.monitor.progress import Progress
from torchfleet.word2vec import Corpus, Schedule, SkipGramOptions, Trainer, TrainingProgress, Vocabulary


def train_fused(
    vocabulary: Vocabulary, corpus: Corpus, files: Sequence[str], schedule: Schedule, options: argparse.Namespace
) -> np.ndarray:
    """The words' vectors, all workers' progress in them."""
    # Two copies' differences may be sent whole; those of more, summed up, would go too far (docs/word2vec.md).
    share = options.share or (1.0 if fleet.worker_num() <= 2 else None)
    replica = fleet.whole_tables(share, shared=options.copies == "machine")
    line = Progress("training")
    trainer = Trainer(
        replica,
        vocabulary,
        SkipGramOptions(
            window=options.window,
            num_negatives=options.negatives,
            sample=options.sample,
            train_unknown=options.train_unknown,
            shared_negatives=options.shared_negatives,
            seed=options.seed,
        ),
        worker=fleet.worker_index(),
        num_workers=fleet.worker_num(),
        tell=lambda progress: show(progress, line),
    )
    fleet.barrier_worker()
    start = time.perf_counter()
    progress = trainer.train(corpus, files, options.epochs, schedule, options.threads)
    replica.finish()
    fleet.barrier_worker()
    replica.flush()  # what the others have learned
    seconds = time.perf_counter() - start
    line.end(text_of(progress))
    if fleet.is_first_worker():
        words = options.epochs * corpus.raw_words
        print(
            f"{words:,} words in {seconds:.2f} s: {words / seconds:,.0f} words/s, loss {progress.loss:.4f}", flush=True
        )
    return replica.values["emb"][:, : options.dim]


def show(progress: TrainingProgress, line: Progress) -> None:
    line.show(text_of(progress))
    fleet.report(words_per_s=progress.words_per_s, loss=progress.loss)


def text_of(progress: TrainingProgress) -> str:
    share = progress.words / progress.num_words
    return f"{share:.0%}, {progress.words_per_s:,.0f} words/s, loss {progress.loss:.4f}, rate {progress.rate:.5f}"
