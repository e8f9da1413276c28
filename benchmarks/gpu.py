"""Tables in GPU memory: find, gather and insert, whole steps on repeated ids, steps of many tables, and CTR-DNN beside
torch's own embedding.

python -m benchmarks.gpu --json                                  all parts, about two minutes on an H200
python -m benchmarks.gpu --parts step,ctr --sizes 4096 --json    some of them
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from benchmarks.gpu_ctr import measure_ctr
from benchmarks.gpu_joined import measure_tables
from benchmarks.gpu_tables import STEP_IDS, STEP_ROWS, free_memory, measure_find, measure_insert, measure_step
from benchmarks.timing import report

PARTS = ("find", "insert", "step", "tables", "ctr")
VARIANTS = "eager,graph,compiled_graph,torch,tower_graph"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rows", type=int, default=100_000_000, help="rows of the tables of find and insert")
    parser.add_argument("--step-rows", type=int, default=STEP_ROWS)
    parser.add_argument("--step-ids", type=int, default=STEP_IDS)
    parser.add_argument("--ctr-rows", type=int, default=10_000_000)
    parser.add_argument("--sizes", default="4096,16384,65536", help="batch sizes of ctr")
    parser.add_argument("--variants", default=VARIANTS, help="of ctr; also compiled and tower")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: expected an NVIDIA GPU, and torch sees none")
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **vars(chosen)}
    parts = chosen.parts.split(",")
    if "find" in parts:
        result |= measure_find(chosen.rows)
    if "insert" in parts:
        result |= measure_insert(chosen.rows // 2)
    if "step" in parts:
        result |= measure_step(chosen.step_rows, chosen.step_ids)
    free_memory()
    if "tables" in parts:
        result |= measure_tables()
    if "ctr" in parts:
        sizes = [int(size) for size in chosen.sizes.split(",")]
        found = measure_ctr(sizes, chosen.ctr_rows, chosen.variants.split(","))
        result["ctr"] = found
        for size in sizes:
            ours = [rate for name, rate in found.items() if name.split("_")[0] not in ("torch", "tower")
                    and name.endswith(f"_{size}")]  # fmt: skip
            result[f"ctr_samples_per_s_{size}"] = max(ours, default=0.0)
    report(result, chosen.json)


if __name__ == "__main__":
    main()
