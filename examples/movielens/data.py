"""Who rated which film when: ratings in time order, films with titles and genres; read and written as MovieLens does.

Users and films are numbered from 1 on, so that 0 can stand for "nothing" in a history.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

LIKED = 4.0  # stars from which on a rating counts as a like


@dataclass(frozen=True)
class Ratings:
    """A row of `users`, `films`, `stars` and `times` is a rating; they are in the order of time.

    `genres[film]` and `titles[film]` are those of a film; film 0 is no film. `kinds` groups films more finely than
    genres do, where that is known: generated films of one kind share the words of their titles.
    """

    users: np.ndarray
    films: np.ndarray
    stars: np.ndarray
    times: np.ndarray
    genres: np.ndarray
    titles: list[str]
    genre_names: list[str]
    kinds: np.ndarray | None = None

    @property
    def num_users(self) -> int:
        """Users are numbered from 1 to this."""
        return int(self.users.max())

    @property
    def num_films(self) -> int:
        return len(self.genres) - 1

    def columns(self, history: int = 0) -> dict[str, torch.Tensor]:
        """A sample per rating: `user`, `film`, `genre`, and whether it was a like, `label`.

        With `history` also the last `history` films that the user had liked before, `liked` (N, history), with the
        newest first and 0 where there are fewer, and their genres, `liked_genres`.
        """
        found = {"user": self.users, "film": self.films, "genre": self.genres[self.films]}
        if history:
            found["liked"] = liked_before(self.users, self.films, self.stars >= LIKED, history)
            found["liked_genres"] = self.genres[found["liked"]]
        found["label"] = (self.stars >= LIKED).astype(np.float32)
        return {name: torch.from_numpy(column) for name, column in found.items()}


def liked_before(users: np.ndarray, films: np.ndarray, is_like: np.ndarray, length: int) -> np.ndarray:
    """Per rating, the last `length` films that its user had liked until then, newest first; 0 where none is left."""
    likes = np.flatnonzero(is_like)
    by_user = likes[np.argsort(users[likes], kind="stable")]  # likes of a user together, in the order of time
    key = users.astype(np.int64) * (len(users) + 1)
    first = np.searchsorted(key[by_user], key)  # where the likes of the rating's user begin
    end = np.searchsorted(key[by_user] + by_user, key + np.arange(len(users)))  # those before the rating
    places = end[:, None] - 1 - np.arange(length)
    padded = np.append(films[by_user], 0)
    return padded[np.where(places >= first[:, None], places, len(by_user))]


Film = tuple[str, str, str]  # id, title, first genre
Rating = tuple[str, str, str, str]  # user, film, stars, time


def read(folder: str | Path) -> Ratings:
    """The files of a MovieLens download, or of `write`. Only first genres are kept.

    `ratings.csv` and `movies.csv` (latest, 20M, 25M, 32M), `ratings.dat` and `movies.dat` (1M, 10M), or `u.data` and
    `u.item` (100K).
    """
    place = Path(folder)
    for names, reader in _FORMATS.items():
        if all((place / name).is_file() for name in names):
            return _numbered(*reader(*(place / name for name in names)))
    known = "; ".join(" and ".join(names) for names in _FORMATS)
    raise SystemExit(
        f"no ratings in {folder}: expected a folder of MovieLens or of examples/movielens/generate.py, with {known}"
    )


def _csv(ratings: Path, films: Path) -> tuple[list[Film], list[Rating]]:
    with films.open(newline="", encoding="utf-8") as lines:
        known = [(row["movieId"], row["title"], row["genres"].split("|")[0]) for row in csv.DictReader(lines)]
    with ratings.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        return known, [(row["userId"], row["movieId"], row["rating"], row["timestamp"]) for row in rows]


def _dat(ratings: Path, films: Path) -> tuple[list[Film], list[Rating]]:
    known = [line.split("::") for line in _text(films)]
    rated = (line.split("::") for line in _text(ratings))
    return [(film, title, genres.split("|")[0]) for film, title, genres in known], [tuple(row) for row in rated]


def _u(ratings: Path, films: Path) -> tuple[list[Film], list[Rating]]:
    """Films have a 0 or 1 for each of 19 genres, in the order of u.genre, behind five other columns."""
    known = []
    for line in _text(films):
        fields = line.split("|")
        first = fields.index("1", 5) - 5
        known.append((fields[0], fields[1], _GENRES[first]))
    return known, [tuple(line.split("\t")) for line in _text(ratings)]


def _text(path: Path) -> list[str]:
    """The lines of a file in UTF-8 or, as older downloads are, in Latin-1."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return data.decode("latin-1").splitlines()


_FORMATS = {
    ("ratings.csv", "movies.csv"): _csv,
    ("ratings.dat", "movies.dat"): _dat,
    ("u.data", "u.item"): _u,
}
# fmt: off
_GENRES = [
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
]
# fmt: on


def _numbered(known: list[Film], rated: list[Rating]) -> Ratings:
    """Users and films numbered from 1, ratings in the order of time."""
    films = {film: number for number, (film, _, _) in enumerate(known, 1)}
    users: dict[str, int] = {}
    rows = [
        (users.setdefault(user, len(users) + 1), films[film], float(stars), int(time))
        for user, film, stars, time in rated
    ]
    table = np.array(rows, np.float64)
    table = table[np.argsort(table[:, 3], kind="stable")]
    names, numbers = np.unique(["", *(genre for _, _, genre in known)], return_inverse=True)  # "": film 0, genre 0
    whole = table[:, [0, 1, 3]].astype(np.int64)
    titles = ["", *(title for _, title, _ in known)]
    return Ratings(whole[:, 0], whole[:, 1], table[:, 2], whole[:, 2], numbers, titles, names.tolist())


def write(ratings: Ratings, folder: str | Path) -> None:
    """As the files that `read` reads."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "movies.csv").open("w", newline="", encoding="utf-8") as file:
        films = csv.writer(file, lineterminator="\n")
        films.writerow(["movieId", "title", "genres"])
        for film in range(1, ratings.num_films + 1):
            films.writerow([film, ratings.titles[film], ratings.genre_names[ratings.genres[film]]])
    with (Path(folder) / "ratings.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["userId", "movieId", "rating", "timestamp"])
        columns = (ratings.users, ratings.films, ratings.stars, ratings.times)
        rows.writerows(zip(*(column.tolist() for column in columns), strict=True))
