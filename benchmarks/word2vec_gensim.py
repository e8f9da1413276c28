"""gensim's skip-gram on a text file, two workers: started by benchmarks.word2vec."""

from __future__ import annotations

import argparse
import time

from gensim.models import Word2Vec


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("vectors")
    for name in ("--dim", "--epochs", "--seed"):
        parser.add_argument(name, type=int, required=True)
    chosen = parser.parse_args()
    model = Word2Vec(
        vector_size=chosen.dim, window=5, negative=5, sg=1, sample=1e-4, min_count=5, workers=2, seed=chosen.seed
    )
    model.build_vocab(corpus_file=chosen.text)
    start = time.perf_counter()
    model.train(
        corpus_file=chosen.text,
        total_words=model.corpus_total_words,
        total_examples=model.corpus_count,
        epochs=chosen.epochs,
    )
    seconds = time.perf_counter() - start
    words = chosen.epochs * model.corpus_total_words
    model.wv.save_word2vec_format(chosen.vectors, binary=True)
    print(f"{words:,} words in {seconds:.3f} s: {words / seconds:,.0f} words/s")


if __name__ == "__main__":
    main()
