"""Predict with a saved Wide & Deep model in one plain process: no server, no fleetrun.

python examples/wide_deep/predict.py --model model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import torchfleet as fleet

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.columns import auc
from examples.wide_deep.data import generated
from examples.wide_deep.model import WideDeep
from examples.wide_deep.train import split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder that train.py --save wrote to")
    parser.add_argument("--rows", type=int, default=200_000, help="as given to train.py: the last tenth is held out")
    parser.add_argument("--seed", type=int, default=0, help="as given to train.py")
    options = parser.parse_args()
    model = fleet.load_inference_model(options.model, WideDeep())
    _, (ids, dense, label) = split(generated(options.rows, options.seed))
    with torch.no_grad():
        scores = model(ids, dense)
    for score, clicked in zip(torch.sigmoid(scores[:5]).tolist(), label[:5].tolist(), strict=True):
        print(f"predicted {score:.4f}, clicked {clicked:.0f}")
    print(f"AUC {auc(scores, label):.4f} on {len(label):,} held-out rows, from {options.model}")


if __name__ == "__main__":
    main()
