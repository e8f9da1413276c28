"""fleet.data.negatives: items that do not belong to a sample, for models that learn to tell its own item from others.

`Uniform` and `Popularity` draw items; `in_batch` takes the items of the other samples, of all workers if asked to. The
scores of negatives that are not drawn uniformly are corrected by the logarithm of their probability (logQ).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api import process_role
from torchfleet.api.util import as_array
from torchfleet.api.worker_arrays import gathered, gathered_rows
from torchfleet.base.errors import DataError
from torchfleet.ps.worker.batch.string_ids import are_strings, hash_strings

Ids = npt.NDArray[np.int64]
_MOST_ROUNDS = 1000  # of drawing again in the place of excluded items


class Drawn(NamedTuple):
    """Negatives, and the logarithm of the probability with which each was drawn, of the same shape."""

    ids: torch.Tensor
    log_q: torch.Tensor


class Popularity:
    """Draws items with probabilities that grow with how often they occur: `count ** power`.

    `ids` and `counts`: the items, which may be strings, and how often each occurs. `power` 1 draws them as they occur,
    0 uniformly; 0.75 is word2vec's. With `seed`, each worker draws a sequence of its own, the same in every run.
    """

    def __init__(self, ids: Any, counts: Any, power: float = 0.75, seed: int | None = None) -> None:
        found, weights = _ids(ids), as_array(counts).astype(np.float64).reshape(-1)
        if len(found) != len(weights) or not len(found) or len(np.unique(found)) != len(found):
            raise DataError(
                f"negatives: expected a count for each of several ids, found {len(found)} and {len(weights)}"
            )
        if not (np.isfinite(weights) & (weights > 0)).all() or not math.isfinite(power):
            raise DataError("negatives: expected counts above 0 and a finite power; leave items without a count out")
        order = np.argsort(found)
        self.ids: Ids = found[order]
        weights = weights[order] ** power
        self._log_q = np.log(weights / weights.sum())
        self._log_unseen = -math.log(weights.sum())  # that of an item with the count 1
        self._ends = np.cumsum(weights) / weights.sum()
        self._ends[-1] = 1.0  # rounding must leave no gap behind the last
        worker = process_role.worker_index() if process_role.is_set_up() else 0
        self._random = np.random.default_rng(None if seed is None else [seed, worker])

    @classmethod
    def of(
        cls, occurrences: Any, power: float = 0.75, seed: int | None = None, across_workers: bool = False
    ) -> Popularity:
        """Count how often each id occurs in `occurrences`, or in those of all workers, who must all call it."""
        ids, counts = np.unique(_ids(occurrences), return_counts=True)
        if across_workers:
            every = np.concatenate(gathered("negatives", np.stack([ids, counts], 1).astype(np.int64)))
            ids, places = np.unique(every[:, 0], return_inverse=True)
            counts = np.bincount(places, every[:, 1])
        return cls(ids, counts, power, seed)

    def draw(self, num: int, exclude: Any = None) -> Drawn:
        """`num` items; with `exclude`, one id per sample: (samples, num) items, none of them the sample's own."""
        if not isinstance(num, int) or num < 1:
            raise DataError(f"negatives: expected a number of items from 1, found {num!r}")
        own = None if exclude is None else _ids(exclude)
        if own is not None and len(self.ids) == 1 and (own == self.ids[0]).any():
            raise DataError(f"negatives: the one item that can be drawn, {self.ids[0]}, is excluded")
        shape = (num,) if own is None else (len(own), num)
        at = self._places(shape)
        for _ in range(_MOST_ROUNDS):
            again = np.zeros(shape, np.bool_) if own is None else self.ids[at] == own[:, None]
            if not again.any():
                return Drawn(torch.from_numpy(self.ids[at]), torch.from_numpy(self._log_q[at].astype(np.float32)))
            at[again] = self._places((int(again.sum()),))
        raise DataError(
            f"negatives: after {_MOST_ROUNDS} draws there are still only excluded items: a few have nearly all counts. "
            "Choose a smaller power."
        )

    def log_q(self, ids: Any) -> torch.Tensor:
        """The logarithm of the probability of each id. An id without a count is taken for an item that occurs once."""
        wanted = as_array(ids) if not are_strings(ids) else hash_strings(ids)
        at = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        found = np.where(self.ids[at] == wanted, self._log_q[at], self._log_unseen)
        return torch.from_numpy(found.astype(np.float32))

    def _places(self, shape: tuple[int, ...]) -> Ids:
        return np.searchsorted(self._ends, self._random.random(shape), side="right")


class Uniform(Popularity):
    """Draws items with equal probabilities. `items`: their ids, which may be strings, or a number n: 0 to n - 1."""

    def __init__(self, items: Any, seed: int | None = None) -> None:
        ids = np.arange(items) if isinstance(items, int) else items
        super().__init__(ids, np.ones(len(ids)), 0.0, seed)


class InBatch(NamedTuple):
    """The result of `in_batch`: `loss = torch.nn.functional.cross_entropy(*in_batch(...))`."""

    logits: torch.Tensor  # (samples, candidates); -inf where a candidate is the sample's own item again
    targets: torch.Tensor  # (samples,): the place of each sample's own item


def in_batch(
    users: torch.Tensor,
    items: torch.Tensor,
    ids: Any,
    log_q: torch.Tensor | None = None,
    temperature: float = 1.0,
    across_workers: bool = False,
) -> InBatch:
    """Scores of each sample's user vector with the item vectors of all samples, its own among them.

    `users`, `items`: (samples, dim). `ids`: of the items; the same item in another sample is not a negative. `log_q`:
    by item, the logarithm of its probability in a batch, from Popularity.log_q with power=1. It is subtracted from the
    scores: the softmax over a batch then estimates the softmax over all items. `across_workers`: the candidates are the
    items of all workers' samples, and gradients flow back to them: the mean of the workers' losses is the loss of one
    process with all samples. All workers must call it, and backward, equally often. Items travel through the servers.
    """
    own = torch.from_numpy(_ids(ids)).to(users.device)
    if users.shape != items.shape or users.dim() != 2 or len(own) != len(users):
        raise DataError(
            f"in_batch: expected users and items (samples, dim) and an id per sample, found {tuple(users.shape)}, "
            f"{tuple(items.shape)} and {len(own)} ids"
        )
    if log_q is not None and log_q.shape != own.shape:
        raise DataError(f"in_batch: expected log_q for each of {len(own)} items, found {tuple(log_q.shape)}")
    begin, candidates, shift = 0, own, log_q
    if across_workers:
        items, begin = gathered_rows("in_batch", items)
        candidates = torch.from_numpy(np.concatenate(gathered("in_batch", own.cpu().numpy()))).to(users.device)
        if log_q is not None:
            shift = torch.from_numpy(np.concatenate(gathered("in_batch", as_array(log_q)))).to(users.device)
    logits = users @ items.T / temperature
    if shift is not None:
        logits = logits - shift.to(logits)
    targets = torch.arange(begin, begin + len(own), device=users.device)
    is_same = candidates.unsqueeze(0) == own.unsqueeze(1)
    is_same[torch.arange(len(own), device=users.device), targets] = False
    return InBatch(logits.masked_fill(is_same, -torch.inf), targets)


def _ids(given: Any) -> Ids:
    found = hash_strings(given) if are_strings(given) else as_array(given)
    if found.dtype.kind not in "iu":
        raise DataError(f"negatives: expected ids, whole numbers or strings, found {found.dtype}")
    return found.astype(np.int64).reshape(-1)
