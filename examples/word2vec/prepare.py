"""From a text, or from none, to a dictionary and a corpus of ids: done once, by the first worker, for all of them."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import zlib
from pathlib import Path

from generate import write_questions, write_text

import torchfleet as fleet
from torchfleet.errors import DataError
from torchfleet.word2vec import DESCRIPTION, build_dictionary, filter_corpus, input_files, resplit

GENERATED_WORDS = 1_200_000
NUM_PARTS = 32
_PATIENCE = 1800.0  # seconds that others wait for the first worker


def prepare(options: argparse.Namespace) -> None:
    """Set options.dictionary, options.corpus (and options.questions, for a generated text) if they are not given."""
    if (options.corpus is None) != (options.dictionary is None):
        raise DataError("give both --corpus and --dictionary, as preprocess.py has made them; or --text; or nothing")
    if options.corpus is not None:
        if options.text is not None or options.max_bytes is not None:
            raise DataError("--text and --max_bytes are for a text, and --corpus is one of ids already: leave them out")
        return
    folder = folder_of(options)
    if options.text is None:
        options.questions = options.questions or str(folder / "questions.txt")
    options.dictionary, options.corpus = str(folder / "dictionary"), str(folder / "parts")
    done = folder / "parts" / DESCRIPTION
    if fleet.is_first_worker():
        if not done.exists():
            make(options, folder)
    else:
        wait_for(done)


def folder_of(options: argparse.Namespace) -> Path:
    """Another text, or other options, have another folder."""
    what = f"{GENERATED_WORDS} {options.seed}"
    if options.text is not None:
        try:
            os.stat(options.text)
            found = [(path, os.stat(path)) for path in input_files(options.text)]
        except OSError as error:
            raise DataError(f"--text {options.text}: {error.strerror}") from None
        what = " ".join(f"{os.path.abspath(path)} {stat.st_size} {stat.st_mtime_ns}" for path, stat in found)
    name = Path(options.text).stem if options.text is not None else "generated"
    key = f"{what} {options.max_bytes} {options.min_count}"
    return Path(options.work) / f"{name}-{zlib.crc32(key.encode(errors='surrogateescape')):08x}"


def make(options: argparse.Namespace, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("ids", "parts"):  # of a run that was stopped
            shutil.rmtree(folder / name, ignore_errors=True)
    except OSError as error:
        raise DataError(f"--work {options.work}: cannot be written to ({error})") from None
    text = options.text
    if text is None:
        print(f"no --text and no --corpus: {GENERATED_WORDS:,} words of a made-up language", flush=True)
        text = str(folder / "text")
        write_text(Path(text), GENERATED_WORDS, options.seed)
        write_questions(folder / "questions.txt")
    facts = build_dictionary(text, options.dictionary, options.min_count, options.max_bytes)
    print(f"{facts.num_words:,} words, {facts.num_kept:,} of them in the dictionary", flush=True)
    ids = str(folder / "ids")
    filter_corpus(text, options.dictionary, ids, options.min_count, downsample=0, max_bytes=options.max_bytes)
    resplit(ids, options.corpus, min(NUM_PARTS, facts.num_words))


def wait_for(done: Path) -> None:
    start = reported = time.monotonic()
    while not done.exists():
        time.sleep(0.1)
        if time.monotonic() - start > _PATIENCE:
            raise DataError(
                f"worker 0 has not made {done.parent} in {_PATIENCE:g} s. On several machines without a common folder, "
                "run preprocess.py on each of them and give --corpus and --dictionary."
            )
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            print(f"waiting for worker 0 to make {done.parent} ({reported - start:.0f} s)", file=sys.stderr, flush=True)
