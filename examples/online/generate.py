"""Hourly parts of made-up clicks that drift: every hour new items appear, and old ones are forgotten.

python examples/online/generate.py --out clicks --hours 48                 all at once
python examples/online/generate.py --out clicks --hours 48 --every 5       one every 5 seconds, for a job that watches

A part is a folder clicks/20261115/07 with files of the multi-slot format (click, show, user, item, tags), and a file
_SUCCESS that is written last. Whether a user clicks depends on hidden weights of user, item and tags, and on how well
they go together: there is nothing to learn but embeddings.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np

NUM_USERS, NUM_TAGS, TAGS_PER_ITEM = 3000, 200, 2
LIFE = 48  # hours that an item is shown at most
USER, ITEM, TAG = 1 << 40, 2 << 40, 3 << 40  # where ids of a kind begin


def main() -> None:
    options = parse()
    for name in hours(options.start, options.hours):
        write_part(Path(options.out), name, options.rows, options.new_items, options.parts, options.seed)
        print(f"{options.out}/{name}", flush=True)
        time.sleep(options.every)


def hours(start: str, num: int) -> Iterator[str]:
    """Names of parts, "20261115/00" and on."""
    first = datetime.strptime(start, "%Y%m%d").replace(tzinfo=timezone.utc)
    for i in range(num):
        yield (first + timedelta(hours=i)).strftime("%Y%m%d/%H")


def write_part(out: Path, name: str, num_rows: int, new_items: int, num_files: int, seed: int) -> None:
    """One hour; nothing is done if it is there already."""
    folder = out / name
    if (folder / "_SUCCESS").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = rows(name, num_rows, new_items, seed)
    for i in range(num_files):
        (folder / f"part-{i}").write_text("".join(lines[i::num_files]))
    (folder / "_SUCCESS").touch()


def rows(name: str, num: int, new_items: int, seed: int) -> list[str]:
    """The lines of an hour; the same whenever they are asked for."""
    hour = int(datetime.strptime(name, "%Y%m%d/%H").replace(tzinfo=timezone.utc).timestamp()) // 3600
    rng = np.random.default_rng([seed, hour])
    users = np.minimum(rng.zipf(1.2, num), NUM_USERS) - 1
    ages = np.minimum(rng.geometric(0.1, num) - 1, LIFE - 1)  # most of what is shown is new
    items = (hour - ages) * new_items + np.minimum(rng.zipf(1.3, num), new_items) - 1
    tags = np.stack([mixed(items, 10 + i) % NUM_TAGS for i in range(TAGS_PER_ITEM)], axis=1)
    signal = 1.2 * weight(items, 1) + 0.8 * weight(users, 2) + 0.4 * weight(tags, 3).sum(axis=1)
    signal = signal + sum(weight(users, 20 + i) * weight(items, 30 + i) for i in range(2))
    clicked = rng.random(num) < 1 / (1 + np.exp(-1.5 * (signal - 1)))
    columns = np.column_stack([clicked, users + USER, items + ITEM, tags.astype(np.int64) + TAG]).tolist()
    return [
        f"1 {click} 1 1 1 {user} 1 {item} {len(of)} {' '.join(map(str, of))}\n" for click, user, item, *of in columns
    ]


def weight(ids: np.ndarray, salt: int) -> np.ndarray:
    """A fixed number between -1 and 1 for each id."""
    return mixed(ids, salt).astype(np.float64) / 2**31 - 1


def mixed(ids: np.ndarray, salt: int) -> np.ndarray:
    """32 bits that look like chance."""
    found = (ids.astype(np.uint64) + np.uint64(salt * 7919)) * np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return found >> np.uint64(32)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of the generator that train.py has as well."""
    parser.add_argument("--start", default="20261115", help="the first day")
    parser.add_argument("--hours", type=int, default=48, help="to make up; train.py --data: to train, 0 for ever")
    parser.add_argument("--rows", type=int, default=5000, help="samples per hour")
    parser.add_argument("--new_items", type=int, default=60, help="per hour")
    parser.add_argument("--parts", type=int, default=4, help="files per hour; at least as many as workers")
    parser.add_argument("--seed", type=int, default=0, help="of the generated hours")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="online_data")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two parts")
    add_options(parser)
    options = parser.parse_args()
    if min(options.hours, options.rows, options.new_items, options.parts) < 1:
        parser.error("--hours, --rows, --new_items and --parts must be at least 1")
    return options


if __name__ == "__main__":
    main()
