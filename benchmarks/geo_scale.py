"""Word vectors by many workers: words/s and analogies of one process, and of W one-thread workers with their servers.

python -m benchmarks.geo_scale --text8 text8.xz --questions questions-words.txt --workers 1 2 4 8 --json
python -m benchmarks.geo_scale --workers 1 2 --json                  on a generated text
python -m benchmarks.geo_scale --quick --json                        to see that it works

Ways to train with W workers, `--ways`:
  machine   the workers of a machine train one copy of the tables (fleet.whole_tables(shared=True)); the default
  worker    a copy for every worker; what is sent of a difference goes by how often its row was changed
  even      a copy for every worker; every 30 steps 2 / W of every difference is sent (1 from two workers)
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.timing import log, report
from benchmarks.word2vec import ROOT, Bench
from torchfleet.apps.word2vec.evaluation import analogies, read_questions
from torchfleet.apps.word2vec.vectors import WordVectors

_TRAIN = ROOT / "examples" / "word2vec" / "train.py"
_WAYS = ("machine", "worker", "even")
_SECONDS = 600  # no run is longer


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.geo_scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text8", "--corpus", dest="corpus", type=Path, help="a text; .xz .gz .zst .bz2 are read as they are")
    add("--questions", type=Path, help="analogy questions; default: those of the generated text")
    add("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--servers", type=int, default=2)
    add("--ways", nargs="+", choices=_WAYS, default=["machine", "worker"])
    add("--threads", type=int, help="of the one process; default: as many as the most workers")
    add("--dim", type=int, default=100)
    add("--epochs", type=int, default=3)
    add("--k_steps", type=int, help="steps of 10,000 words between exchanges; default: the example's")
    add("--rounds", type=int, default=1, help="each with another seed")
    add("--quick", action="store_true", help="a short text, one epoch, two workers")
    add("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    for path in filter(None, (chosen.corpus, chosen.questions)):
        if not path.is_file():
            parser.error(f"{path}: no such file")
    if chosen.corpus is not None and chosen.questions is None:
        parser.error("--text8 needs --questions: the quality of word vectors is judged by them")
    if not all(1 <= num <= 16 for num in chosen.workers):
        parser.error(f"--workers must be 1 to 16, as many as the text has parts; found {chosen.workers}")
    if chosen.quick:
        chosen.epochs, chosen.workers = 1, [2]
    chosen.threads = chosen.threads or max(chosen.workers)
    return chosen


def command(folder: Path, chosen: argparse.Namespace, way: str, num_workers: int, seed: int) -> list[str]:
    """Of one training; `way` local: in one process."""
    train = [str(_TRAIN), "--corpus", str(folder / "parts"), "--dictionary", str(folder / "dictionary")]
    train += ["--dim", str(chosen.dim), "--epochs", str(chosen.epochs), "--seed", str(seed)]
    train += ["--vectors", str(folder / "vectors.bin")]
    if way == "local":
        return [*train, "--mode", "local", "--threads", str(num_workers)]
    train += ["--mode", "geo", "--threads", "1", "--copies", "machine" if way == "machine" else "worker"]
    train += ["--share", str(min(1.0, 2.0 / num_workers))] if way == "even" else []
    k_steps = chosen.k_steps or (30 if way == "even" else None)
    train += ["--k_steps", str(k_steps)] if k_steps else []
    fleetrun = ["-m", "torchfleet.launch", "--server_num", str(chosen.servers), "--worker_num", str(num_workers)]
    return [*fleetrun, "--log_dir", str(folder / "log"), *train]


def measured(bench: Bench, chosen: argparse.Namespace, way: str, num_workers: int, seed: int) -> dict[str, Any]:
    """Words per second of training, and the part of the questions that the vectors answer, in percent."""
    line = [sys.executable, *command(bench.folder, chosen, way, num_workers, seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment, cwd=bench.folder
    )
    found = re.search(r"in ([0-9.]+) s: [0-9,]+ words/s", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"{way} with {num_workers} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    questions = chosen.questions or bench.folder / "questions-words.txt"
    judged = analogies(WordVectors.load(bench.folder / "vectors.bin"), read_questions(questions))
    speed = bench.num_words * chosen.epochs / float(found[1])
    return {
        "way": way,
        "workers": num_workers,
        "seed": seed,
        "words_per_s": speed,
        "analogy": 100 * judged.total.accuracy,
    }


def runs_of(chosen: argparse.Namespace) -> list[tuple[str, int]]:
    """One process first: the others are held against it."""
    return [("local", chosen.threads), *((way, num) for num in chosen.workers for way in chosen.ways)]


def main() -> None:
    chosen = options()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), chosen)
        for seed in range(1, chosen.rounds + 1):
            for way, num_workers in runs_of(chosen):
                runs.append(run := measured(bench, chosen, way, num_workers, seed))
                of_local = run["words_per_s"] / runs[0]["words_per_s"]
                log(
                    f"{way:>8} {num_workers:>3}   {run['words_per_s']:>12,.0f} words/s ({of_local:.2f})"
                    f"   {run['analogy']:5.1f} % of the analogies"
                )
    settings = {name: getattr(chosen, name) for name in ("servers", "dim", "epochs", "k_steps", "rounds")}
    report({"runs": runs, "words": bench.num_words, **settings}, chosen.json)


if __name__ == "__main__":
    main()
