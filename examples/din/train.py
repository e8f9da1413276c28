"""DIN with its embeddings on parameter servers: will the user like the film, given what the user has liked before?

python examples/din/train.py                                                one process
fleetrun --server_num 2 --worker_num 2 examples/din/train.py                servers and workers on this machine
fleetrun --server_num 2 --worker_num 2 examples/din/train.py --mode hybrid  another mode
... --data ml-latest-small                                                  ratings of MovieLens instead of made-up ones
... --save model                                                            then: predict.py --model model
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
from examples.din.model import DIN
from examples.flags import optimizer_of, parsed, parser_of, strategy_of
from examples.loop import save, train
from examples.movielens.data import Ratings
from examples.movielens.generate import add_options, ratings_of


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    ratings = ratings_of(options)
    fleet.init()
    model = fleet.distributed_model(model_of(ratings, options))
    optimizer = fleet.distributed_optimizer(optimizer_of(model, options), strategy_of(options))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    samples, held_out = split(ratings.columns(options.history))  # the newest ratings are held out
    train(lambda batch: F.binary_cross_entropy_with_logits(model(batch), batch["label"]), optimizer, samples, options)
    if fleet.is_first_worker():
        model.eval()
        found = auc(predicted(model, held_out), held_out["label"])
        print(f"AUC {found:.4f} on {len(held_out['label']):,} held-out ratings", flush=True)
        save(options)
    fleet.stop_worker()


def model_of(ratings: Ratings, options: argparse.Namespace) -> DIN:
    return DIN(ratings.num_users, ratings.num_films, len(ratings.genre_names) - 1, options.dim)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dim", type=int, default=8, help="numbers in a vector")
    parser.add_argument("--history", type=int, default=10, help="liked films that are looked back at")


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, epochs=2, batch_size=256, lr=0.1, geo_lr=1.0)
    add_model_options(parser)
    add_options(parser)
    return parsed(parser)


if __name__ == "__main__":
    main()
