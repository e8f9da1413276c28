"""DeepFM with its embeddings on parameter servers: clicks on generated or real Criteo rows.

python examples/deepfm/train.py                                              one process
fleetrun --server_num 2 --worker_num 2 examples/deepfm/train.py              servers and workers on this machine
fleetrun --server_num 2 --worker_num 2 examples/deepfm/train.py --mode sync  another mode
... --data kaggle.txt.xz                                                     raw rows of the Criteo challenge
... --save model                                                             then: predict.py --model model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import torchfleet as fleet

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.columns import auc, predicted, split
from examples.deepfm.model import DeepFM
from examples.flags import optimizer_of, parsed, parser_of, strategy_of
from examples.loop import train
from examples.wide_deep.data import add_options, clicks


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    fleet.init()
    model = fleet.distributed_model(DeepFM(options.dim))
    optimizer = fleet.distributed_optimizer(optimizer_of(model, options), strategy_of(options))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    rows, held_out = split(clicks(options))
    train(lambda batch: F.binary_cross_entropy_with_logits(model(batch), batch["label"]), optimizer, rows, options)
    if fleet.is_first_worker():
        model.eval()
        found = auc(predicted(model, held_out), held_out["label"])
        print(f"AUC {found:.4f} on {len(held_out['label']):,} held-out rows", flush=True)
        if options.save:
            fleet.save_persistables(options.save)
            print(f"saved to {options.save}; predict with predict.py --model {options.save}")
    fleet.stop_worker()


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, epochs=1, batch_size=256, lr=0.05, geo_lr=0.5)
    parser.add_argument("--dim", type=int, default=8, help="numbers in a vector")
    add_options(parser)
    return parsed(parser)


if __name__ == "__main__":
    main()
