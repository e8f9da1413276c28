"""Find titles for a query with a saved matching model, in one plain process: no server, no fleetrun.

python examples/matching/predict.py --model model                      for some queries that are made up
python examples/matching/predict.py --model model --query "words ..."  for a query of your own
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

import torchfleet as fleet
from torchfleet.options import HelpFormatter

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.columns import predicted
from examples.matching.data import bags_of, generated
from examples.matching.model import Matching, in_order
from examples.movielens.generate import generated as generated_films
from examples.movielens.generate import queries


@torch.no_grad()
def best(model: Matching, query: str, titles: list[str], num: int = 3) -> list[tuple[float, str]]:
    """The nearest titles, nearest first, each with its cosine."""
    cosines = model.title_vectors(bags_of(titles)) @ model.query_vectors(bags_of([query]))[0]
    found = cosines.topk(min(num, len(titles)))
    return [
        (cosine, titles[place]) for cosine, place in zip(found.values.tolist(), found.indices.tolist(), strict=True)
    ]


def main() -> None:
    options = parse()
    model = fleet.load_inference_model(options.model, Matching(options.dim))
    films = generated_films(num_users=1, num_films=options.films, num_ratings=1, seed=options.seed)
    asked = [options.query] if options.query else queries(films.kinds[1:4], np.random.default_rng(options.seed))
    for query in asked:
        print(f"{query}:")
        for cosine, title in best(model, query, films.titles[1:]):
            print(f"  {cosine:.3f} {title}")
    _, held_out = generated(options.pairs, options.films, options.seed)
    found = in_order(predicted(model, held_out))
    print(f"in order {found:.4f} of {len(held_out['query']):,} held-out pairs, from {options.model}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", required=True, help="the folder that train.py --save wrote to")
    parser.add_argument("--query", help="a text to find titles for")
    for name, default in (("dim", 16), ("pairs", 40_000), ("films", 1000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help="as given to train.py")
    return parser.parse_args()


if __name__ == "__main__":
    main()
