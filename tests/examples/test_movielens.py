"""Made-up ratings have the shape that examples need: a long tail, an order of time, histories, titles, tastes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.example_scripts import printed
from support.messages import naming

from examples.movielens.data import LIKED, Ratings, liked_before, read
from examples.movielens.generate import COMMON_WORDS, WORDS_OF_KIND, _word, generated, num_kinds, queries


@pytest.fixture(scope="module")
def ratings() -> Ratings:
    return generated(300, 200, 10_000, seed=1)


def test_the_same_seed_makes_the_same_ratings_and_another_one_others(ratings: Ratings) -> None:
    again, other = generated(300, 200, 10_000, seed=1), generated(300, 200, 10_000, seed=2)
    for name in ("users", "films", "stars", "times", "genres"):
        assert np.array_equal(getattr(ratings, name), getattr(again, name)), name
    assert ratings.titles == again.titles
    assert not np.array_equal(ratings.films[:100], other.films[:100])


def test_few_films_have_most_of_the_ratings_and_time_goes_on(ratings: Ratings) -> None:
    counts = np.sort(np.bincount(ratings.films, minlength=201)[1:])[::-1]
    assert counts[:20].sum() > 3 * counts[-100:].sum() / 5, "a tenth has more than three times its share of the tail"
    assert (np.diff(ratings.times) >= 0).all()
    pairs = ratings.users * 1000 + ratings.films
    assert len(np.unique(pairs)) == len(pairs)
    assert set(np.unique(ratings.stars)) == {1, 2, 3, 4, 5}
    assert 0.3 < (ratings.stars >= LIKED).mean() < 0.7


def test_users_have_tastes(ratings: Ratings) -> None:
    """The share of likes of a user differs from genre to genre more than chance would make it."""
    liked, genres = ratings.stars >= LIKED, ratings.genres[ratings.films]

    def spread(like: np.ndarray) -> float:
        sums, nums = np.zeros((301, 13)), np.zeros((301, 13))
        np.add.at(sums, (ratings.users, genres), like)
        np.add.at(nums, (ratings.users, genres), 1)
        return float((sums / np.maximum(nums, 1))[nums >= 5].std())

    assert spread(liked) > 1.3 * spread(np.random.default_rng(0).permutation(liked))


def test_a_history_is_what_the_user_had_liked_until_then(ratings: Ratings) -> None:
    found = liked_before(ratings.users, ratings.films, ratings.stars >= LIKED, 4)
    likes: dict[int, list[int]] = {}
    for row, (user, film, stars) in enumerate(zip(ratings.users, ratings.films, ratings.stars, strict=True)):
        before = likes.setdefault(user, [])
        assert found[row].tolist() == [*before[::-1], 0, 0, 0, 0][:4]
        if stars >= LIKED:
            before.append(film)


def test_words_are_all_different_and_queries_have_words_of_their_kind() -> None:
    words = [_word(number) for number in range(num_kinds() * WORDS_OF_KIND + COMMON_WORDS)]
    assert len(set(words)) == len(words)
    own = set(words[3 * WORDS_OF_KIND : 4 * WORDS_OF_KIND]) | set(words[-COMMON_WORDS:])
    for text in queries(np.full(50, 3), np.random.default_rng(0)):
        assert set(text.split()) <= own


def test_files_have_the_columns_of_movielens_and_are_read_again(ratings: Ratings, tmp_path: Path) -> None:
    sizes = ["--users", 300, "--films", 200, "--ratings", 10_000, "--seed", 1]
    assert f"{len(ratings.users):,}" in printed("movielens/generate.py", "--out", tmp_path, *sizes)
    found = read(tmp_path)
    assert (tmp_path / "ratings.csv").read_text().startswith("userId,movieId,rating,timestamp\n")
    for name in ("films", "stars", "times"):
        assert np.array_equal(getattr(found, name), getattr(ratings, name)), name
    first, numbers = np.unique(ratings.users, return_index=True)[0], {}
    for user in ratings.users.tolist():
        numbers.setdefault(user, len(numbers) + 1)  # users are numbered in the order in which they come
    assert len(first) == found.num_users
    assert found.users.tolist() == [numbers[user] for user in ratings.users.tolist()]
    assert found.titles == ratings.titles
    names = [found.genre_names[genre] for genre in found.genres]
    assert names == [ratings.genre_names[genre] for genre in ratings.genres]
    with pytest.raises(SystemExit, match=naming("ratings.csv", "MovieLens")):
        read(tmp_path / "nowhere")


FILMS, RATED = ["Toy Story (1995)", "Amélie (2001)"], [("9", "1", 5, 10), ("7", "2", 3, 5), ("9", "2", 4, 7)]


def as_dat(folder: Path, encoding: str) -> None:
    (folder / "movies.dat").write_text(f"1::{FILMS[0]}::Animation|Comedy\n2::{FILMS[1]}::Comedy\n", encoding)
    (folder / "ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in RATED))


def as_u(folder: Path, encoding: str) -> None:
    flags = ["0|0|0|1|0|1" + "|0" * 13, "0|0|0|0|0|1" + "|0" * 13]
    films = [f"{i}|{title}|01-Jan-1995||http://x|{flags[i - 1]}\n" for i, title in enumerate(FILMS, 1)]
    (folder / "u.item").write_text("".join(films), encoding)
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in RATED))


@pytest.mark.parametrize(("write", "encoding"), [(as_dat, "latin-1"), (as_dat, "utf-8"), (as_u, "latin-1")])
def test_older_downloads_of_movielens_are_read(
    write: Callable[[Path, str], None], encoding: str, tmp_path: Path
) -> None:
    write(tmp_path, encoding)
    found = read(tmp_path)
    assert found.titles == ["", *FILMS]
    assert [found.genre_names[genre] for genre in found.genres] == ["", "Animation", "Comedy"]
    assert found.users.tolist() == [2, 1, 1]  # numbered as they come, in the order of time
    assert (found.films.tolist(), found.stars.tolist(), found.times.tolist()) == ([2, 2, 1], [3, 4, 5], [5, 7, 10])
