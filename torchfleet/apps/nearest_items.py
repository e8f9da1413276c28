"""An index of nearest items: made from a saved table or from any vectors, searched in a plain process.

An index is a folder with `index.json`, `ids.npy` (int64) and `vectors.npy` (float32, one row per id), and for the kinds
that other libraries search, `faiss.index` or `hnswlib.index`. The exact kind compares a query with every item.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api.util import as_array
from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.extras import required
from torchfleet.base.prepared_types import prepared
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.chain import live_rows
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.worker.batch.string_ids import are_strings, hash_strings

Kind = Literal["exact", "faiss", "hnswlib"]
Metric = Literal["ip", "cosine", "l2"]
Ids = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Search = Callable[[Vectors, int], tuple[npt.NDArray[Any], npt.NDArray[Any]]]  # positions and scores, best first

KINDS: tuple[Kind, ...] = ("exact", "faiss", "hnswlib")
METRICS: tuple[Metric, ...] = ("ip", "cosine", "l2")
_CHUNK = 1 << 16  # items that a query is compared with at a time
_LINKS, _BREADTH = 32, 200  # graphs of faiss and hnswlib: neighbours of an item, candidates in building and searching


class IndexFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of index.json. `table`: the table that the vectors are from, or "" if the caller gave them."""

    kind: Kind
    metric: Metric
    num: int
    dim: int
    table: str = ""
    format: Literal[1] = 1


class Found(NamedTuple):
    """Per query, ids and scores, the nearest first. If there are too few items, the last places have id -1, score -inf.

    A score is the inner product, the cosine, or minus the squared distance: a higher score is nearer.
    """

    ids: Ids
    scores: Vectors


def index_of_table(model: str, table: str, folder: str, kind: Kind = "exact", metric: Metric = "cosine") -> int:
    """Make an index of all rows of a saved table, which must fit into memory; returns the number of rows."""
    storage = Storage(model)
    manifest = read_manifest(storage)
    dim = manifest.table(table).dim
    parts = [
        (keys.view(np.int64).copy(), arrays["rows"][:, :dim].copy())
        for keys, arrays in live_rows(storage, manifest, table)
    ]
    ids = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in parts)])
    vectors = np.concatenate([np.empty((0, dim), np.float32), *(rows for _, rows in parts)])
    return build_index(folder, ids, vectors, kind, metric, table)


def build_index(
    folder: str, ids: Any, vectors: Any, kind: Kind = "exact", metric: Metric = "cosine", table: str = ""
) -> int:
    """Make an index of items in a new folder on this machine; returns the number of items.

    `ids` may be strings; `vectors`: (items, dim). `kind`: "exact", "faiss" or "hnswlib". `metric`: "cosine", "ip" (the
    inner product) or "l2". `table`: a name to keep in index.json. The folder appears when it is complete.
    """
    if kind not in KINDS or metric not in METRICS:
        raise FleetError(f"index: kind is one of {KINDS} and metric one of {METRICS}, found {kind!r} and {metric!r}")
    keys, rows = _ids(ids), np.ascontiguousarray(as_array(vectors), np.float32)
    if rows.ndim != 2 or len(rows) != len(keys) or not len(keys):
        raise FleetError(
            f"index: expected vectors (items, dim) and an id for each, found {rows.shape}, {len(keys)} ids"
        )
    if not np.isfinite(rows).all():
        raise FleetError("index: expected finite numbers in all vectors, found nan or inf")
    order = np.argsort(keys, kind="stable")
    keys, rows = keys[order], _prepared(rows[order], metric)
    if (keys[1:] == keys[:-1]).any():
        raise FleetError("index: expected each id once, found one twice")
    target = Storage(folder)
    if not target.is_local or (os.path.exists(target.path) and os.listdir(target.path)):
        raise CheckpointError(f"index in {folder}: expected a new folder on this machine")
    made = Path(tempfile.mkdtemp(prefix=".index-", dir=_parent(target.path)))
    try:
        np.save(made / "ids.npy", keys)
        np.save(made / "vectors.npy", rows)
        if kind != "exact":
            _WRITERS[kind](rows, metric, str(made / f"{kind}.index"))
        (made / "index.json").write_bytes(msgspec.json.encode(IndexFile(kind, metric, len(rows), rows.shape[1], table)))
        made.chmod(0o755)
        os.replace(made, target.path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return len(keys)


class NearestItems:
    """An open index. Its vectors stay in their file, and are read through the page cache."""

    def __init__(self, folder: str) -> None:
        place = Path(folder)
        try:
            self.file = msgspec.json.decode((place / "index.json").read_bytes(), type=prepared(IndexFile))
            self.ids: Ids = np.load(place / "ids.npy", mmap_mode="r", allow_pickle=False)
            self.vectors: Vectors = np.load(place / "vectors.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"{folder}: expected an index of fleet export --index; {error}") from error
        is_whole = self.ids.shape == (self.file.num,) and self.vectors.shape == (self.file.num, self.file.dim)
        if not is_whole or self.ids.dtype != np.int64 or self.vectors.dtype != np.float32:
            raise CheckpointError(f"{folder}: expected {self.file.num} ids and vectors, found {self.vectors.shape}")
        kind = self.file.kind
        own = str(place / f"{kind}.index")
        self._search: Search = self._exact if kind == "exact" else _READERS[kind](own, self.file)

    def search(self, vectors: Any, k: int = 10) -> Found:
        """The `k` items that are nearest to each vector (queries, dim)."""
        queries = np.ascontiguousarray(as_array(vectors), np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.file.dim or not np.isfinite(queries).all():
            raise FleetError(f"index: expected finite vectors (queries, {self.file.dim}), found {queries.shape}")
        if not isinstance(k, int) or k < 1:
            raise FleetError(f"index: expected a number of items from 1, found {k!r}")
        num = min(k, self.file.num)
        places, scores = self._search(_prepared(queries, self.file.metric), num)
        found = Found(np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), -np.inf, np.float32))
        found.ids[:, :num] = np.where(places >= 0, self.ids[places], -1)
        found.scores[:, :num] = np.where(places >= 0, scores, -np.inf)
        return found

    def vectors_of(self, ids: Any) -> Vectors:
        """The vectors of items. Raises FleetError for an id that is not in the index."""
        wanted = _ids(ids)
        at = np.minimum(np.searchsorted(self.ids, wanted), self.file.num - 1)
        missing = np.flatnonzero(self.ids[at] != wanted)
        if len(missing):
            given = np.asarray(ids).reshape(-1)[missing[0]]
            name = f"{str(given)!r}, with the id " if isinstance(given, str) else ""
            raise FleetError(f"index: expected ids of its {self.file.num:,} items, found {name}{wanted[missing[0]]}")
        return np.asarray(self.vectors[at])

    def neighbours(self, ids: Any, k: int = 10) -> Found:
        """The `k` items that are nearest to each of these items, without the item itself."""
        wanted = _ids(ids)
        found = self.search(self.vectors_of(ids), k + 1)
        own = found.ids == wanted[:, None]
        # An approximate search may miss the item itself. Its id may be -1, as that of the fillers, which come last.
        left_out = np.where(own.any(axis=1), own.argmax(axis=1), k)
        others = np.arange(k + 1) != left_out[:, None]
        return Found(found.ids[others].reshape(-1, k), found.scores[others].reshape(-1, k))

    def _exact(self, queries: Vectors, k: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        asked = torch.from_numpy(queries)
        scores, places = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        for start in range(0, self.file.num, _CHUNK):
            items = torch.from_numpy(np.array(self.vectors[start : start + _CHUNK]))
            here = asked @ items.T
            if self.file.metric == "l2":
                here = 2 * here - (items * items).sum(1) - (asked * asked).sum(1, keepdim=True)
            scores = torch.cat([scores, here], 1)
            places = torch.cat([places, torch.arange(start, start + len(items)).expand(len(queries), -1)], 1)
            scores, best = scores.topk(min(k, scores.shape[1]), dim=1)
            places = places.gather(1, best)
        return places.numpy(), scores.numpy()


def load_index(folder: str) -> NearestItems:
    """Open the index that `fleet export --index` or `fleet.build_index` made in `folder`. faiss and hnswlib parse
    their own files in it: open only indexes that you made.
    """
    return NearestItems(folder)


def _write_faiss(rows: Vectors, metric: Metric, path: str) -> None:
    faiss = required("faiss", "an index of kind faiss", "index")
    kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexHNSWFlat(rows.shape[1], _LINKS, kind)
    index.hnsw.efConstruction = _BREADTH
    index.add(rows)
    faiss.write_index(index, path)


def _read_faiss(path: str, file: IndexFile) -> Search:
    index = required("faiss", "an index of kind faiss", "index").read_index(path)

    def search(queries: Vectors, k: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        index.hnsw.efSearch = max(_BREADTH, k)
        scores, places = index.search(queries, k)
        return places, -scores if file.metric == "l2" else scores

    return search


def _write_hnswlib(rows: Vectors, metric: Metric, path: str) -> None:
    index = _hnswlib(metric, rows.shape[1])
    index.init_index(len(rows), ef_construction=_BREADTH, M=_LINKS)
    index.add_items(rows, np.arange(len(rows)))
    index.save_index(path)


def _read_hnswlib(path: str, file: IndexFile) -> Search:
    index = _hnswlib(file.metric, file.dim)
    index.load_index(path, max_elements=file.num)

    def search(queries: Vectors, k: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        index.set_ef(max(_BREADTH, k))
        places, distances = index.knn_query(queries, k)
        return places.astype(np.int64), -distances if file.metric == "l2" else 1 - distances

    return search


def _hnswlib(metric: Metric, dim: int) -> Any:
    hnswlib = required(
        "hnswlib", "an index of kind hnswlib", "index", ", and pip install hnswlib, which needs a compiler"
    )
    return hnswlib.Index("l2" if metric == "l2" else "ip", dim)


_WRITERS: dict[str, Callable[[Vectors, Metric, str], None]] = {"faiss": _write_faiss, "hnswlib": _write_hnswlib}
_READERS: dict[str, Callable[[str, IndexFile], Search]] = {"faiss": _read_faiss, "hnswlib": _read_hnswlib}


def _prepared(rows: Vectors, metric: Metric) -> Vectors:
    """For cosines, the rows scaled to length 1, where rows of zeros stay as they are; otherwise, `rows` itself."""
    if metric != "cosine":
        return rows
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1), np.float32)


def _ids(given: Any) -> Ids:
    found = hash_strings(given) if are_strings(given) else as_array(given)
    if found.dtype.kind not in "iu":
        raise FleetError(f"index: expected ids, whole numbers or strings, found {found.dtype}")
    return found.astype(np.int64).reshape(-1)


def _parent(path: str) -> Path:
    parent = Path(path).parent
    if not parent.is_dir():
        raise CheckpointError(f"index in {path}: expected a folder {parent}, found none. Make it first.")
    return parent
