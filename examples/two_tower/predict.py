"""Retrieve with a saved two-tower model in one plain process, each tower by itself: no server, no fleetrun.

python examples/two_tower/predict.py --model model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import torchfleet as fleet

sys.path.insert(0, str(Path(__file__).parent))
from data import NUM_TASTES, generated
from model import TwoTower

_CHUNK = 1024  # users or items at once


@torch.no_grad()
def item_vectors(model: TwoTower, num_items: int) -> torch.Tensor:
    """What a search index would be built from: the item tower alone, over all items."""
    parts = torch.arange(num_items).split(_CHUNK)
    return torch.cat([model.item(items, items % NUM_TASTES) for items in parts])


@torch.no_grad()
def retrieve(model: TwoTower, users: torch.Tensor, vectors: torch.Tensor, num: int = 20) -> torch.Tensor:
    """The `num` nearest items of each user, nearest first: the user tower alone."""
    parts = [(model.user(some) @ vectors.T).topk(num).indices for some in users.split(_CHUNK)]
    return torch.cat(parts)


def recall(model: TwoTower, users: torch.Tensor, items: torch.Tensor, vectors: torch.Tensor, num: int = 20) -> float:
    """Of which part of the users the liked item is among the `num` that are retrieved."""
    return float((retrieve(model, users, vectors, num) == items.unsqueeze(1)).any(dim=1).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder that train.py --save wrote to")
    for name, default in (("dim", 16), ("users", 2000), ("items", 300), ("likes", 60_000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help="as given to train.py")
    options = parser.parse_args()
    model = fleet.load_inference_model(options.model, TwoTower(options.users, options.items, options.dim))
    _, held_out = generated(options.users, options.items, options.likes, options.seed)
    vectors = item_vectors(model, options.items)
    for user, items in enumerate(retrieve(model, torch.arange(min(3, options.users)), vectors, 5).tolist()):
        print(f"user {user}: items {', '.join(map(str, items))}")
    found = recall(model, held_out["users"], held_out["items"], vectors)
    print(f"recall@20 {found:.4f} of {options.users:,} held-out likes, from {options.model}")


if __name__ == "__main__":
    main()
