"""GAUC in one process, against scikit-learn's AUC of every group."""

from __future__ import annotations

import numpy as np
import pytest
from support.extras import Late
from support.messages import naming

from torchfleet.base.errors import FleetError
from torchfleet.metrics import GAUC

oracle = Late("sklearn.metrics")


def samples(seed: int, num: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, 20, num) / 4.0,
        rng.integers(0, 2, num),
        rng.integers(-(2**63), 2**63 - 1, 30)[rng.integers(0, 30, num)],
    )


def by_groups(scores: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> float:
    total, num = 0.0, 0
    for group in np.unique(groups):
        own = groups == group
        if len(set(labels[own].tolist())) == 2:
            total += oracle.roc_auc_score(labels[own], scores[own]) * own.sum()
            num += own.sum()
    return total / num


def test_it_is_the_mean_of_the_groups_areas_weighted_by_their_samples() -> None:
    scores, labels, groups = samples(0)
    labels[groups == groups[0]] = 1  # a group with one kind of label
    meter = GAUC()
    for part in np.array_split(np.arange(len(scores)), 5):
        meter.update(scores[part], labels[part], groups[part])
    assert meter.compute() == pytest.approx(by_groups(scores, labels, groups), abs=1e-12)
    assert meter.compute(all_workers=True) == meter.compute()
    meter.reset()
    assert meter.compute() == 0.5


def test_groups_may_be_strings() -> None:
    scores, labels, groups = samples(1)
    numbers, texts = GAUC(), GAUC()
    numbers.update(scores, labels, groups)
    texts.update(scores, labels, groups.astype("U"))
    assert texts.compute() == pytest.approx(numbers.compute(), abs=1e-12)


def test_groups_that_are_no_ids_are_an_error() -> None:
    for groups in ([0.5, 1.0], [1]):
        with pytest.raises(FleetError, match=naming("GAUC", 2)):
            GAUC().update([0.1, 0.2], [0, 1], groups)
