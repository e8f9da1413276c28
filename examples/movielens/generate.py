"""Ratings of films, made up, of the shape of MovieLens: for examples and tests where the real ones cannot ship.

python examples/movielens/generate.py --out ratings                writes ratings/ratings.csv and ratings/movies.csv

- Films: a few are rated very often, most of them rarely. Each is of a genre and of a kind within it. Its place
  in a space of tastes is that of its kind, and a bit of its own.
- Users: some rate much, most little. Each has two tastes, two genres of the same space, and comes across films that
  are popular, or to one of the two tastes.
- Stars: the better a film goes with the nearer of the two tastes, the more; and some chance.
- Titles: words of the film's kind, and words that are in titles of all kinds. `queries` asks for films with words of
  their kind that need not be in the title.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from torchfleet.options import HelpFormatter

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.movielens.data import Ratings, read, write

NUM_GENRES, KINDS_OF_GENRE, DIM = 12, 4, 8
WORDS_OF_KIND, COMMON_WORDS = 30, 100
START, YEAR = 1_577_836_800, 365 * 86_400  # the first of January 2020, in seconds; times are of this year
_OFFERED = 6  # films that a user comes across and chooses one of
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def generated(num_users: int = 2000, num_films: int = 1000, num_ratings: int = 100_000, seed: int = 0) -> Ratings:
    """The same ratings for the same numbers. No user rates a film twice, so there are somewhat fewer of them."""
    rng = np.random.default_rng(seed)
    genre_places = rng.normal(size=(NUM_GENRES, DIM))
    kind_places = np.repeat(genre_places, KINDS_OF_GENRE, axis=0) + 0.5 * rng.normal(size=(num_kinds(), DIM))
    kinds = rng.integers(0, num_kinds(), num_films)
    places = kind_places[kinds] + 0.3 * rng.normal(size=(num_films, DIM))
    tastes = genre_places[rng.integers(0, NUM_GENRES, (num_users, 2))] + 0.3 * rng.normal(size=(num_users, 2, DIM))

    active = rng.lognormal(0, 1, num_users)
    users = rng.choice(num_users, num_ratings, p=active / active.sum())
    popular = 1 / (np.arange(num_films) + 10.0) ** 0.9
    offered = rng.choice(num_films, (num_ratings, _OFFERED), p=popular / popular.sum())
    fit = np.einsum("ntd,nod->nto", tastes[users], places[offered]).max(axis=1) / DIM  # to the nearer taste
    chosen = (3 * fit + rng.gumbel(size=fit.shape)).argmax(axis=1)[:, None]
    films, fit = np.take_along_axis(offered, chosen, 1)[:, 0], np.take_along_axis(fit, chosen, 1)[:, 0]
    stars = np.clip(np.round(2.0 + 2.5 * fit + 0.7 * rng.normal(size=num_ratings)), 1, 5)
    joined = rng.random(num_users) * 0.7  # when in the year a user rates for the first time
    times = START + (YEAR * (joined[users] + (1 - joined[users]) * rng.random(num_ratings))).astype(np.int64)

    _, kept = np.unique(users * num_films + films, return_index=True)
    kept = kept[np.argsort(times[kept], kind="stable")]
    titles = [
        "",
        *(f"{title} ({year})" for title, year in zip(_titles(kinds, rng), _years(num_films, rng), strict=True)),
    ]
    names = ["", *(_word(number).capitalize() for number in range(NUM_GENRES))]
    genres = np.append(0, kinds // KINDS_OF_GENRE + 1)
    columns = (users[kept] + 1, films[kept] + 1, stars[kept], times[kept])
    return Ratings(*columns, genres, titles, names, np.append(-1, kinds))


def queries(kinds: np.ndarray, rng: np.random.Generator) -> list[str]:
    """A text for each of these kinds of film, as somebody might ask for one: words of the kind, seldom a common one."""
    return _texts(kinds, 2, 4, 0.1, rng)


def num_kinds() -> int:
    return NUM_GENRES * KINDS_OF_GENRE


def _titles(kinds: np.ndarray, rng: np.random.Generator) -> list[str]:
    return [text.title() for text in _texts(kinds, 2, 5, 0.3, rng)]


def _texts(kinds: np.ndarray, shortest: int, longest: int, common: float, rng: np.random.Generator) -> list[str]:
    """`shortest` to `longest` words each; of the words of a kind some are used more than others."""
    shape = (len(kinds), longest)
    rank = np.minimum(rng.geometric(0.1, shape) - 1, WORDS_OF_KIND - 1)
    words = np.where(
        rng.random(shape) < common,
        num_kinds() * WORDS_OF_KIND + rng.integers(0, COMMON_WORDS, shape),
        kinds[:, None] * WORDS_OF_KIND + rank,
    )
    lengths = rng.integers(shortest, longest + 1, len(kinds)).tolist()
    return [" ".join(map(_word, row[:num])) for row, num in zip(words.tolist(), lengths, strict=True)]


def _years(num: int, rng: np.random.Generator) -> list[int]:
    found: list[int] = (2020 - np.minimum(rng.geometric(0.06, num), 90)).tolist()
    return found


def _word(number: int) -> str:
    """A word of three syllables, another one for each number."""
    base = len(_SYLLABLES)
    spread = (number * 7919 + 12_345) % base**3  # 7919 shares no factor with 70³
    return "".join(_SYLLABLES[spread // base**place % base] for place in range(3))


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--users", type=int, default=2000, help="users to make up")
    parser.add_argument("--films", type=int, default=1000, help="films to make up")
    parser.add_argument("--ratings", type=int, default=100_000, help="ratings to make up")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the ratings of an example come from, as flags."""
    parser.add_argument(
        "--data", help="a folder of MovieLens (100K, 1M, 10M, latest, 25M, 32M), in place of made-up ratings"
    )
    add_sizes(parser)


def ratings_of(options: argparse.Namespace) -> Ratings:
    """The ratings that these flags name."""
    if options.data:
        return read(options.data)
    return generated(options.users, options.films, options.ratings, options.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--out", default="ratings", help="a folder for ratings.csv and movies.csv")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is made up")
    add_sizes(parser)
    options = parser.parse_args()
    if min(options.users, options.films, options.ratings) < 1:
        parser.error("--users, --films and --ratings must be at least 1")
    found = generated(options.users, options.films, options.ratings, options.seed)
    write(found, options.out)
    print(f"{len(found.users):,} ratings of {found.num_films:,} films by {found.num_users:,} users in {options.out}")


if __name__ == "__main__":
    main()
