"""Word vectors: the fused kernel locally and in geo (1 server, 2 workers), beside gensim, on the same two cores.

python -m benchmarks.word2vec --corpus text8.xz --json     3 rounds with 3 seeds; a quarter of an hour with gensim
python -m benchmarks.word2vec --json                       on a generated text
python -m benchmarks.word2vec --quick --json               to see that it works, under a minute

Words are those of the text, per second of training, all epochs. Questions and pairs are looked for beside the corpus:
questions-words.txt and wordsim353.tsv in its folder, or in ../analogy.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.timing import log, report
from examples.word2vec.generate import write_questions, write_text
from torchfleet.apps.word2vec.evaluation import analogies, read_questions, word_pairs
from torchfleet.apps.word2vec.preprocessing import build_dictionary, filter_corpus
from torchfleet.apps.word2vec.resplitting import resplit
from torchfleet.apps.word2vec.vectors import WordVectors
from torchfleet.data.reading.streams import chunks, open_file

ROOT = Path(__file__).parent.parent
_TRAIN = ROOT / "examples" / "word2vec" / "train.py"
_GENSIM = Path(__file__).with_name("word2vec_gensim.py")
_QUICK_BYTES = 3_000_000
_LINE = 1000  # words; gensim cuts lines at 10,000, and deals lines to its threads


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.word2vec", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, help="a text; .xz .gz .zst .bz2 are read as they are")
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="each with another seed")
    parser.add_argument("--without", nargs="+", default=[], choices=("local", "geo", "gensim"), help="leave these out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.corpus is not None and not chosen.corpus.is_file():
        parser.error(f"--corpus {chosen.corpus}: no such file")
    if chosen.quick:
        chosen.rounds, chosen.epochs = 1, 1
    return chosen


class Bench:
    """The corpus in all its forms, in a folder of its own."""

    def __init__(self, folder: Path, chosen: argparse.Namespace) -> None:
        self.folder, self.chosen = folder, chosen
        self.text = self._lines() if chosen.corpus is not None else self._generated()
        log("preprocessing")
        self.num_words = build_dictionary(str(self.text), str(folder / "dictionary"), 5).num_words
        filter_corpus(str(self.text), str(folder / "dictionary"), str(folder / "ids"), 5, downsample=0)
        resplit(str(folder / "ids"), str(folder / "parts"), 16)

    def _generated(self) -> Path:
        log("writing a text")
        write_text(self.folder / "text", 500_000 if self.chosen.quick else 5_000_000)
        write_questions(self.folder / "questions-words.txt")
        return self.folder / "text"

    def _lines(self) -> Path:
        """The corpus in lines of 1,000 words, which gensim needs to divide it among its threads."""
        path = os.fspath(self.chosen.corpus)
        text = b"".join(chunks(open_file(path), path))
        words = text[: _QUICK_BYTES if self.chosen.quick else None].split()
        lines = (b" ".join(words[at : at + _LINE]) + b"\n" for at in range(0, len(words), _LINE))
        (self.folder / "text").write_bytes(b"".join(lines))
        return self.folder / "text"

    def beside(self, name: str) -> Path | None:
        near = self.chosen.corpus.parent if self.chosen.corpus is not None else self.folder
        return next((path for path in (near / name, near.parent / "analogy" / name) if path.exists()), None)

    def run(self, what: str, seed: int) -> tuple[float, WordVectors]:
        """(words per second, vectors) of one training."""
        vectors = self.folder / f"{what}.bin"
        shared = ["--dim", str(self.chosen.dim), "--epochs", str(self.chosen.epochs), "--seed", str(seed)]
        ours = [str(_TRAIN), "--corpus", str(self.folder / "parts"), "--dictionary", str(self.folder / "dictionary")]
        ours += ["--vectors", str(vectors), *shared]
        fleetrun = ["-m", "torchfleet.launch", "--server_num", "1", "--worker_num", "2"]
        command = {
            "local": [*ours, "--mode", "local", "--threads", "2"],
            "geo": [*fleetrun, "--log_dir", str(self.folder / "log"), *ours, "--mode", "geo", "--threads", "1"],
            "gensim": [str(_GENSIM), str(self.text), str(vectors), *shared],
        }[what]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=3600, check=False, env=environment
        )
        found = re.search(r"in ([0-9.]+) s: [0-9,]+ words/s", done.stdout)
        if done.returncode or found is None:
            raise SystemExit(f"{what} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return self.num_words * self.chosen.epochs / float(found[1]), WordVectors.load(vectors)

    def judged(self, vectors: WordVectors) -> dict[str, float | None]:
        questions, pairs = self.beside("questions-words.txt"), self.beside("wordsim353.tsv")
        return {
            "analogy": 100 * analogies(vectors, read_questions(questions)).total.accuracy if questions else None,
            "ws353": word_pairs(vectors, pairs).spearman if pairs else None,
        }


def figures(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of speed, means of quality, and what they are beside each other."""
    result: dict[str, Any] = {}
    for name, runs in found.items():
        result[f"{name}_words_per_s"] = statistics.median(run["words_per_s"] for run in runs)
        for figure in ("analogy", "ws353"):
            values = [run[figure] for run in runs if run[figure] is not None]
            result[f"{name}_{figure}"] = statistics.mean(values) if values else None
        result[f"{name}_runs"] = runs
    for name in ("local", "geo"):
        if {name, "gensim"} <= set(found):
            result[f"{name}_ratio"] = result[f"{name}_words_per_s"] / result["gensim_words_per_s"]
    if {"local", "geo"} <= set(found):
        result["geo_to_local"] = result["geo_words_per_s"] / result["local_words_per_s"]
    return result


def main() -> None:
    chosen = options()
    names = [name for name in ("local", "geo", "gensim") if name not in chosen.without]
    if "gensim" in names and importlib.util.find_spec("gensim") is None:
        log("gensim is not installed: without it")
        names.remove("gensim")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), chosen)
        if not chosen.quick:
            bench.chosen = argparse.Namespace(**{**vars(chosen), "epochs": 1})
            bench.run("local", 0)  # compiles the kernels
            bench.chosen = chosen
        for seed in range(1, chosen.rounds + 1):
            for name in names:
                speed, vectors = bench.run(name, seed)
                found[name].append({"words_per_s": speed, **bench.judged(vectors)})
                log(f"  seed {seed}: {name} {found[name][-1]}")
    settings = {"words": bench.num_words, "dim": chosen.dim, "epochs": chosen.epochs, "rounds": chosen.rounds}
    report({**figures(found), **settings, "window": 5, "negatives": 5, "sample": 1e-4, "min_count": 5}, chosen.json)


if __name__ == "__main__":
    main()
