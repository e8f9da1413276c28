"""A two-tower model for retrieval, with its embeddings on parameter servers.

python examples/two_tower/train.py                                              one process
fleetrun --server_num 2 --worker_num 2 examples/two_tower/train.py              servers and workers on this machine
fleetrun --server_num 2 --worker_num 2 examples/two_tower/train.py --mode geo   another mode
... --data ml-latest-small                                                      ratings of MovieLens, not made-up ones
... --save model                                                                then: predict.py --model model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import torchfleet as fleet

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.flags import optimizer_of, parsed, parser_of, strategy_of
from examples.loop import train
from examples.movielens.generate import add_options, ratings_of
from examples.two_tower.data import likes_of
from examples.two_tower.model import TwoTower, loss_of
from examples.two_tower.predict import recall


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    ratings = ratings_of(options)
    fleet.init()
    shape = ratings.num_users, ratings.num_films, len(ratings.genre_names) - 1
    model = fleet.distributed_model(TwoTower(*shape, options.dim))
    optimizer = fleet.distributed_optimizer(optimizer_of(model, options), strategy_of(options))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    likes = likes_of(ratings)
    train(lambda batch: loss_of(model, batch, options.log_q), optimizer, likes.training, options)
    if fleet.is_first_worker():
        model.eval()
        found, num = recall(model, likes), len(likes.held_out["user"])
        print(f"recall@20 {found:.4f} of {num:,} held-out likes, among {ratings.num_films:,} films", flush=True)
        if options.save:
            fleet.save_inference_model(options.save)
            print(f"saved to {options.save}; predict with predict.py --model {options.save}")
    fleet.stop_worker()


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, epochs=2, batch_size=256, lr=0.2, geo_lr=100.0, is_batch_shared=False)
    parser.add_argument("--dim", type=int, default=16, help="numbers in a vector")
    parser.add_argument(
        "--log_q",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="correct scores for how often a film is a negative",
    )
    add_options(parser)
    return parsed(parser)


if __name__ == "__main__":
    main()
