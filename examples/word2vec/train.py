"""Word vectors: train, save, judge.

python examples/word2vec/train.py                                        local, on a generated text
python examples/word2vec/train.py --text text8 --vectors vectors.bin     local, on a text; all cores
python examples/word2vec/train.py --corpus ids --dictionary dict.txt     ... on what preprocess.py has made
fleetrun --server_num 2 --worker_num 2 examples/word2vec/train.py --text text8 --questions questions-words.txt
fleetrun --server_num 2 --worker_num 2 examples/word2vec/train.py --mode sync    also async, half_async

In one process, and in geo, a fused kernel trains whole copies of the tables (`--engine kernel`). In the other modes the
same model is an ordinary module, trained by autograd (`--engine torch`), which can also be had locally and in geo;
`--reader pipe` lets it read through `python reader.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

import torchfleet as fleet

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from autograd import train_by_autograd
from evaluate import print_analogies, print_pairs
from fused import train_fused
from prepare import prepare

from torchfleet.data.reading.streams import is_local
from torchfleet.errors import FleetError
from torchfleet.options import HelpFormatter
from torchfleet.word2vec import (
    Corpus,
    LinearDecay,
    Schedule,
    SkipGram,
    StaircaseDecay,
    Vocabulary,
    WordVectors,
    read_questions,
)

MODES = ("local", "sync", "half_async", "async", "geo")


def main() -> None:
    options = arguments()
    fleet.init()
    choose(options)
    prepare(options)
    vocabulary = Vocabulary.load(options.dictionary)
    model = fleet.distributed_model(SkipGram(len(vocabulary), options.dim, options.negatives, options.seed))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=options.rate), strategy_of(options))
    if fleet.is_server():
        fleet.init_server(options.init_model)
        fleet.run_server()
        return
    corpus = Corpus(options.corpus, vocabulary)
    files = fleet.split_files(corpus.files)
    if not files:
        raise FleetError(
            f"{corpus.path} has {len(corpus.files)} files for {fleet.worker_num()} workers: cut it with "
            "`preprocess.py --data_resplit`"
        )
    options.sample = options.sample if options.sample is not None else 0.0 if corpus.downsample else 1e-4
    fleet.init_worker(options.init_model)
    schedule = schedule_of(options, corpus)
    if options.engine == "kernel":
        rows = train_fused(vocabulary, corpus, files, schedule, options)
    else:
        rows = train_by_autograd(model, optimizer, vocabulary, corpus, files, schedule, options)
    if fleet.is_first_worker():
        known = [i for i in range(len(vocabulary)) if options.train_unknown or i != vocabulary.unknown]
        save_and_judge(WordVectors([vocabulary.words[i] for i in known], rows[known]), options)
    fleet.stop_worker()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--mode", choices=MODES, help="default: local in one process, geo under fleetrun")
    add("--engine", choices=("kernel", "torch"), help="default: kernel in one process and in geo, torch otherwise")
    data = parser.add_argument_group("what to train on; nothing: a generated text")
    data.add_argument("--text", help="a text, or a folder of texts; .xz .gz .zst .bz2 are read as they are")
    data.add_argument("--max_bytes", type=int, help="of the text, only so much of its beginning")
    data.add_argument("--min_count", type=int, default=5, help="words seen less often become <UNK>")
    data.add_argument("--work", default="word2vec_work", help="folder for the ids of a text; kept for the next time")
    data.add_argument("--corpus", help="a folder of ids, made by preprocess.py")
    data.add_argument("--dictionary", help="the dictionary that they were made with")
    data.add_argument("--reader", choices=("fast", "pipe"), default="fast", help="pipe: `python reader.py` (torch)")
    how = parser.add_argument_group("how")
    how.add_argument("--dim", type=int, default=100, help="numbers per word")
    how.add_argument("--window", type=int, default=5, help="words to each side, drawn from 1 to this for every word")
    how.add_argument("--negatives", type=int, default=5, help="negative words that a pair counts")
    how.add_argument(
        "--shared_negatives", type=int, help="how many are drawn for a step, for all its pairs; default 32"
    )
    how.add_argument(
        "--sample",
        type=float,
        help="leave out words more frequent than this by lot; 0: none; default 1e-4, or 0 if preprocess.py did so",
    )
    how.add_argument("--train_unknown", action="store_true", help="train <UNK> like a word; default: leave it out")
    how.add_argument("--epochs", type=int, default=3, help="passes over the data")
    how.add_argument("--rate", type=float, default=0.025, help="learning rate, of the sum of a step's losses")
    how.add_argument("--schedule", choices=("linear", "staircase"), default="linear", help="how the rate falls")
    how.add_argument("--decay_rate", type=float, help="staircase: times this (default 0.5) ...")
    how.add_argument("--decay_words", type=float, help="... after every N words; default: an epoch")
    how.add_argument("--threads", type=int, help="default: all cores in one process, one per worker under fleetrun")
    how.add_argument(
        "--k_steps", type=int, help="geo: steps between exchanges; default 30, of many copies 2 to 5; torch: 400"
    )
    how.add_argument(
        "--copies",
        choices=("machine", "worker"),
        help="geo: tables that the workers of a machine train together (default), or a copy for every worker",
    )
    how.add_argument("--share", type=float, help="geo: the part of a difference that is sent; default: by its changes")
    how.add_argument("--batch_size", type=int, help="pairs of a step (torch); default 1000")
    how.add_argument("--seed", type=int, default=0, help="of first values and of the order of samples")
    out = parser.add_argument_group("what for")
    out.add_argument("--init_model", help="go on from a saved model")
    out.add_argument("--save", help="folder for the model: tables to go on from")
    out.add_argument("--vectors", nargs="+", default=[], help="files for the vectors: .txt for text, .bin for binary")
    out.add_argument("--questions", help="analogy questions to judge the vectors by")
    out.add_argument("--pairs", nargs="+", default=[], help="word pairs with human judgements, to compare with")
    out.add_argument("--restrict", type=int, default=30_000, help="questions: of the first N words alone; 0: of all")
    return parser.parse_args()


def choose(options: argparse.Namespace) -> None:
    """Defaults that depend on each other, and what does not go together."""
    is_alone = not fleet.server_endpoints()
    options.mode = options.mode or ("local" if is_alone else "geo")
    if is_alone != (options.mode == "local"):
        way = "fleetrun --server_num 2 --worker_num 2 examples/word2vec/train.py ..."
        raise FleetError(
            f"--mode {options.mode} " + (f"needs servers: {way}" if is_alone else "is one process: leave fleetrun out")
        )
    is_fused = options.mode in ("local", "geo")
    options.engine = options.engine or ("kernel" if is_fused and options.reader == "fast" else "torch")
    if options.engine == "kernel" and (not is_fused or options.reader == "pipe"):
        raise FleetError("--engine kernel is for --mode local and geo, with --reader fast: use --engine torch")
    refuse_idle_options(options)
    refuse_wrong_numbers(options)
    options.threads = options.threads or ((os.cpu_count() or 1) if is_alone and options.engine == "kernel" else 1)
    options.copies = options.copies or "machine"
    num_copies = fleet.worker_num() if options.copies == "worker" else 1
    by_kernel = 30 if num_copies <= 2 else max(2, 16 // num_copies)  # many copies: as often as the servers can
    options.k_steps = options.k_steps or (by_kernel if options.engine == "kernel" else 400)
    options.batch_size = options.batch_size or 1000
    options.shared_negatives = options.shared_negatives or 32
    options.decay_rate = options.decay_rate or 0.5
    for path in options.vectors:
        if not path.endswith((".txt", ".bin")):
            raise FleetError(f"--vectors {path}: expected a name that ends in .txt (text) or .bin (binary)")
    if fleet.is_worker() and fleet.is_first_worker():
        check_files(options)


def check_files(options: argparse.Namespace) -> None:
    """What would otherwise be found out when all is trained. Only the first worker needs these files."""
    for path in options.vectors:
        if not Path(path).parent.is_dir():
            raise FleetError(f"--vectors {path}: there is no folder {Path(path).parent}")
        if Path(path).is_dir():
            raise FleetError(f"--vectors {path}: it is a folder")
    if options.save and is_local(options.save):
        place = Path(options.save).absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise FleetError(f"--save {options.save}: {place} is no folder that can be written to")
    for path in filter(None, [options.questions, *options.pairs]):
        if not Path(path).is_file():
            raise FleetError(f"{path}: no such file")
    if options.questions:
        read_questions(options.questions)


def refuse_idle_options(options: argparse.Namespace) -> None:
    """What would have no effect is not taken."""
    idle = {
        "--engine torch (its own threads: OMP_NUM_THREADS)": (options.engine == "torch", ["threads"]),
        "--engine kernel": (options.engine == "kernel", ["batch_size"]),
        f"--mode {options.mode}": (options.mode != "geo", ["k_steps", "copies", "share"]),
        "--engine torch": (options.engine == "torch", ["copies", "share"]),
        "--schedule linear": (options.schedule == "linear", ["decay_rate", "decay_words"]),
        "--reader pipe": (options.reader == "pipe", ["sample", "shared_negatives", "train_unknown"]),
    }
    for with_what, (is_idle, names) in idle.items():
        for name in names:
            if is_idle and getattr(options, name) not in (None, False):
                raise FleetError(f"--{name} has no effect with {with_what}: leave it out")


def refuse_wrong_numbers(options: argparse.Namespace) -> None:
    for name in ("dim", "window", "negatives", "epochs", "min_count"):
        if getattr(options, name) < 1:
            raise FleetError(f"--{name} must be at least 1, found {getattr(options, name)}")
    for name in ("threads", "k_steps", "batch_size", "shared_negatives", "max_bytes"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise FleetError(f"--{name} must be at least 1, found {getattr(options, name)}")
    for name in ("rate", "decay_rate", "decay_words"):
        if getattr(options, name) is not None and not 0 < getattr(options, name) < float("inf"):
            raise FleetError(f"--{name} must be above 0, found {getattr(options, name)}")
    if options.share is not None and not 0 < options.share <= 1:
        raise FleetError(f"--share must be above 0 and at most 1, found {options.share}")
    if options.sample is not None and not 0 <= options.sample < 1:
        raise FleetError(f"--sample must be from 0 (leave no word out) up to 1, found {options.sample}")
    if options.restrict < 0:
        raise FleetError(f"--restrict must be 0 (all words) or more, found {options.restrict}")
    if not 0 <= options.seed < 1 << 63:
        raise FleetError(f"--seed must be 0 to 2^63 - 1, found {options.seed}")


def strategy_of(options: argparse.Namespace) -> fleet.DistributedStrategy:
    if options.mode in ("local", "sync"):
        return fleet.DistributedStrategy()
    configs = {"geo": {"k_steps": options.k_steps}, "half_async": {"half_async": True}, "async": {}}[options.mode]
    return fleet.DistributedStrategy(a_sync=True, a_sync_configs=configs)


def schedule_of(options: argparse.Namespace, corpus: Corpus) -> Schedule:
    """By the words of all workers together: a worker's own count is multiplied by their number."""
    if options.schedule == "linear":
        return LinearDecay(options.rate, min(1e-4, options.rate), options.epochs * corpus.raw_words)
    return StaircaseDecay(options.rate, options.decay_rate, options.decay_words or corpus.raw_words)


def save_and_judge(vectors: WordVectors, options: argparse.Namespace) -> None:
    if options.save:
        fleet.save_persistables(options.save)
        print(f"model saved in {options.save}", flush=True)
    for path in options.vectors:
        vectors.save_text(path) if path.endswith(".txt") else vectors.save_binary(path)
        print(f"{len(vectors):,} vectors saved in {path}", flush=True)
    if options.questions:
        print_analogies(vectors, options.questions, options.restrict or None)
    for path in options.pairs:
        print_pairs(vectors, path)


if __name__ == "__main__":
    try:
        main()
    except FleetError as error:
        raise SystemExit(f"train.py: {error}") from None
    except KeyboardInterrupt:
        print("train.py: interrupted, nothing saved", file=sys.stderr)
        raise SystemExit(130) from None
