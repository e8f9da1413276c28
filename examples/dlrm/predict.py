"""Predict with a saved DLRM in one plain process: no server, no fleetrun.

python examples/dlrm/predict.py --model model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import torchfleet as fleet
from torchfleet.options import HelpFormatter

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.columns import auc, predicted, split
from examples.dlrm.model import DLRM
from examples.wide_deep.data import add_options, clicks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", required=True, help="the folder that train.py --save wrote to")
    parser.add_argument("--dim", type=int, default=8, help="as given to train.py")
    parser.add_argument("--seed", type=int, default=0, help="as given to train.py")
    add_options(parser)
    options = parser.parse_args()
    model = fleet.load_inference_model(options.model, DLRM(options.dim))
    _, held_out = split(clicks(options))
    scores = predicted(model, held_out)
    for chance, clicked in zip(torch.sigmoid(scores[:5]).tolist(), held_out["label"][:5].tolist(), strict=True):
        print(f"predicted {chance:.4f}, clicked {clicked:.0f}")
    print(f"AUC {auc(scores, held_out['label']):.4f} on {len(scores):,} held-out rows, from {options.model}")


if __name__ == "__main__":
    main()
