"""The files of prepare.py as Parquet: numbers scaled and categories hashed already, nothing left to parse in training.

python examples/ctr_dnn/to_parquet.py                               ./ctr_data becomes ./ctr_parquet
python examples/ctr_dnn/train.py --data ctr_parquet --reader parquet
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import torchfleet as fleet
from torchfleet.options import HelpFormatter

sys.path.insert(0, str(Path(__file__).parent))
from model import NUM_DENSE, SLOTS, slots

ROWS = 10_000  # of a row group
_SCALE = b"log_scale"  # in the metadata of a file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--data", default="ctr_data", help="the folder that prepare.py made")
    parser.add_argument("--out", default="ctr_parquet", help="a folder for the files")
    parser.add_argument(
        "--log_scale", action=argparse.BooleanOptionalAction, default=True, help="numbers as log(1 + x) (default: yes)"
    )
    options = parser.parse_args()
    files = sorted(Path(options.data).glob("*/part-*"))
    if not files:
        parser.error(f"no part-* files below {options.data}: run prepare.py first")
    for file in files:
        target = Path(options.out) / file.parent.name / f"{file.name}.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(str(file), target, options.log_scale)
    print(f"{len(files)} files in {options.out}")


def write_file(source: str, target: Path, log_scale: bool) -> None:
    pieces = tables(source, log_scale)
    first = next(pieces)
    schema = first.schema.with_metadata({_SCALE: b"1" if log_scale else b"0"})
    with pq.ParquetWriter(target, schema) as writer:
        for table in (first, *pieces):
            writer.write_table(table.cast(schema))


def log_scale_in(file: str) -> bool | None:
    """Whether numbers in the file are log(1 + x); None: it does not say."""
    found = (pq.read_schema(file).metadata or {}).get(_SCALE)
    return None if found is None else bool(found == b"1")


def tables(file: str, log_scale: bool) -> Iterator[Any]:
    """The rows of a file as tables of Arrow."""
    dataset = fleet.QueueDataset()
    dataset.init(ROWS, use_var=slots(), data_format=fleet.CriteoFormat(log_scale=log_scale))
    dataset.set_filelist([file])
    for batch in dataset:
        numbers = pa.array(batch["dense_input"].flatten().numpy())
        columns = {"dense_input": pa.FixedSizeListArray.from_arrays(numbers, NUM_DENSE)}
        columns |= {name: pa.array(batch[name].flatten().numpy()) for name in (*SLOTS, "label")}
        yield pa.table(columns)


if __name__ == "__main__":
    main()
