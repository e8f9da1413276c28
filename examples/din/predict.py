"""Predict with a saved DIN in one plain process, no server, no fleetrun; and show what its attention looks at.

python examples/din/predict.py --model model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import torchfleet as fleet
from torchfleet.options import HelpFormatter

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.columns import Columns, auc, predicted, split
from examples.din.model import DIN
from examples.din.train import add_model_options, model_of
from examples.movielens.data import Ratings
from examples.movielens.generate import add_options, ratings_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", required=True, help="the folder that train.py --save wrote to")
    parser.add_argument("--seed", type=int, default=0, help="as given to train.py")
    add_model_options(parser)
    add_options(parser)
    options = parser.parse_args()
    ratings = ratings_of(options)
    model = fleet.load_inference_model(options.model, model_of(ratings, options))
    _, held_out = split(ratings.columns(options.history))
    explain(model, ratings, held_out)
    scores = predicted(model, held_out)
    print(f"AUC {auc(scores, held_out['label']):.4f} on {len(scores):,} held-out ratings, from {options.model}")


@torch.no_grad()
def explain(model: DIN, ratings: Ratings, samples: Columns, num: int = 2) -> None:
    """For the first samples with a whole history: the chance of a like, and the weight of each film of the history."""
    whole = torch.nonzero((samples["liked"] > 0).all(dim=1)).flatten()[:num]
    batch = {name: column[whole] for name, column in samples.items()}
    weights: list[torch.Tensor] = []
    watching = model.attention.weigh.register_forward_hook(lambda module, given, found: weights.append(found))
    chances = torch.sigmoid(model(batch)).tolist()
    watching.remove()
    for row, chance in enumerate(chances):
        print(
            f"{named(ratings, batch['film'][row])}: predicted {chance:.3f}, liked {batch['label'][row]:.0f}, because of"
        )
        for film, weight in zip(batch["liked"][row], weights[0][row, :, 0].tolist(), strict=True):
            print(f"  {weight:6.2f} {named(ratings, film)}")


def named(ratings: Ratings, film: torch.Tensor) -> str:
    return f"{ratings.titles[film]} [{ratings.genre_names[ratings.genres[film]]}]"


if __name__ == "__main__":
    main()
