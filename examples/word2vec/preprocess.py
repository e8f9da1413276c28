"""From text to what word2vec is trained on: a dictionary, lines of word ids, files of equal size.

python examples/word2vec/preprocess.py --build_dict --build_dict_corpus_dir TEXT --dict_path DICT
python examples/word2vec/preprocess.py --filter_corpus --dict_path DICT --input_corpus_dir TEXT --output_corpus_dir IDS
python examples/word2vec/preprocess.py --data_resplit --input_corpus_dir IDS --output_corpus_dir PARTS

TEXT is a file or a folder of files, plain or compressed (.xz, .gz, .zst, .bz2).
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from torchfleet.errors import DataError, FleetError
from torchfleet.word2vec import build_dictionary, filter_corpus, resplit

# For each action what it must be given and what it may be given.
OPTIONS = {
    "build_dict": (("build_dict_corpus_dir", "dict_path"), ("min_count", "max_bytes")),
    "filter_corpus": (
        ("dict_path", "input_corpus_dir", "output_corpus_dir"),
        ("min_count", "downsample", "seed", "max_bytes"),
    ),
    "data_resplit": (("input_corpus_dir", "output_corpus_dir"), ("num_files",)),
}


def main() -> int:
    options = parse()
    start = time.perf_counter()
    try:
        action, needed, optional = chosen(options)
        print(ACTIONS[action](*needed, **optional) + f", {time.perf_counter() - start:.1f} s")
    except FleetError as error:
        print(f"preprocess.py: {error}", file=sys.stderr)
        return 1
    return 0


def chosen(options: argparse.Namespace) -> tuple[str, list[str], dict[str, Any]]:
    """(action, what it needs, what else was given). Raises DataError for what does not go together."""
    actions = [action for action in OPTIONS if getattr(options, action)]
    if len(actions) != 1:
        found = " and ".join(f"--{action}" for action in actions) or "none"
        raise DataError(f"expected one of {', '.join(f'--{action}' for action in OPTIONS)}; found {found}")
    needed, optional = OPTIONS[actions[0]]
    given = {name: value for name, value in vars(options).items() if name not in OPTIONS and value is not None}
    for name in needed:
        if not given.get(name):
            raise DataError(f"--{actions[0]} needs --{name}")
    for name in given:
        if name not in needed + optional:
            takes = ", ".join(f"--{known}" for known in needed + optional)
            raise DataError(f"--{name} does not go with --{actions[0]}, which takes {takes}")
    return actions[0], [given[name] for name in needed], {name: given[name] for name in optional if name in given}


def build(corpus: str, dictionary: str, **options: Any) -> str:
    facts = build_dictionary(corpus, dictionary, **options)
    return (
        f"{facts.num_words:,} words, {facts.num_distinct:,} distinct, {facts.num_kept:,} kept, "
        f"{facts.num_unknown:,} as <UNK>"
    )


def encode(dictionary: str, corpus: str, output: str, **options: Any) -> str:
    facts = filter_corpus(corpus, dictionary, output, **options)
    share = facts.num_written / facts.num_read
    return f"{facts.num_read:,} words, {facts.num_unknown:,} unknown, {facts.num_written:,} written ({share:.1%})"


def cut(corpus: str, output: str, **options: Any) -> str:
    parts = resplit(corpus, output, **options)
    sizes = parts.values()
    return f"{sum(sizes):,} words in {len(parts):,} files, {min(sizes):,} to {max(sizes):,} in each"


ACTIONS = {"build_dict": build, "filter_corpus": encode, "data_resplit": cut}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build_dict", action="store_true", help="count words, write the dictionary")
    parser.add_argument(
        "--filter_corpus", action="store_true", help="write ids in place of words, fewer of frequent ones"
    )
    parser.add_argument("--data_resplit", action="store_true", help="cut id files into parts of equal size")
    parser.add_argument("--build_dict_corpus_dir", help="file or folder of text")
    parser.add_argument("--dict_path", help="lines of `word count`; a word's id is its line's number, from 0")
    parser.add_argument("--input_corpus_dir", help="file or folder: of text to filter, of ids to split")
    parser.add_argument("--output_corpus_dir", help="a folder that is empty or not there")
    parser.add_argument("--min_count", type=int, help="rarer words become <UNK> (5)")
    parser.add_argument(
        "--downsample",
        type=float,
        help="about this share and more of all words: left out now and then; 0: none (0.001)",
    )
    parser.add_argument("--seed", type=int, help="of the words that are left out (0)")
    parser.add_argument("--num_files", type=int, help="parts to split into (1024)")
    parser.add_argument("--max_bytes", type=int, help="read only so much of the text")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
