"""Bag-of-words semantic matching with its words on parameter servers: which title belongs to a query?

python examples/matching/train.py                                                one process
fleetrun --server_num 2 --worker_num 2 examples/matching/train.py                servers and workers on this machine
fleetrun --server_num 2 --worker_num 2 examples/matching/train.py --mode hybrid  another mode
... --data pairs.tsv                                                             lines of a query, a tab and a title
... --save model                                                                 then: predict.py --model model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import torchfleet as fleet

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.columns import predicted
from examples.flags import optimizer_of, parsed, parser_of, strategy_of
from examples.loop import save, train
from examples.matching.data import generated, read
from examples.matching.model import Matching, hinge, in_order


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    fleet.init()
    model = fleet.distributed_model(Matching(options.dim))
    optimizer = fleet.distributed_optimizer(optimizer_of(model, options), strategy_of(options))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    source = read(options.data, options.seed) if options.data else None
    pairs, held_out = source or generated(options.pairs, options.films, options.seed)
    train(lambda batch: hinge(model(batch), options.margin), optimizer, pairs, options)
    if fleet.is_first_worker():
        model.eval()
        found = in_order(predicted(model, held_out))
        print(f"in order {found:.4f} of {len(held_out['query']):,} held-out pairs", flush=True)
        save(options)
    fleet.stop_worker()


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, epochs=2, batch_size=128, lr=0.1, geo_lr=5.0)
    parser.add_argument("--dim", type=int, default=16, help="numbers in a vector")
    parser.add_argument("--margin", type=float, default=0.3, help="by how much the right title must be nearer")
    parser.add_argument("--data", help="a file of pairs, in place of made-up ones")
    parser.add_argument("--pairs", type=int, default=40_000, help="pairs to make up")
    parser.add_argument("--films", type=int, default=1000, help="titles to make up; a fifth of them is held out")
    return parsed(parser)


if __name__ == "__main__":
    main()
