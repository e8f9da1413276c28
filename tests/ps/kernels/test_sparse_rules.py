"""Kernels of momentum SGD, row-wise Adagrad, RMSprop, FTRL and Lion on rows: bit-equal to their numpy twins.

That they are the formulas of torch, FBGEMM and the papers is tested in tests/ps/tables/test_rules.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support import twins
from support.cases import each_of

from torchfleet.ps.kernels import sparse_rules

DIMS = [1, 2, 3, 7, 8, 10, 16, 33]
NO_BOUNDS = (-math.inf, math.inf)
Update = tuple[Any, Any, tuple[Any, ...], int, int]  # kernel, twin, settings, states per value, states per row
UPDATES: dict[str, Update] = {
    "momentum": (sparse_rules.momentum_sgd, twins.row_momentum_sgd, (0.1, 0.9, 0.0, False), 1, 0),
    "nesterov": (sparse_rules.momentum_sgd, twins.row_momentum_sgd, (0.1, 0.9, 0.0, True), 1, 0),
    "dampened": (sparse_rules.momentum_sgd, twins.row_momentum_sgd, (0.1, 0.9, 0.4, False), 1, 0),
    "rowwise": (sparse_rules.rowwise_adagrad, twins.row_rowwise_adagrad, (0.1, 1e-8, 0.0), 0, 1),
    "rowwise momentum": (sparse_rules.rowwise_adagrad, twins.row_rowwise_adagrad, (0.1, 1e-8, 0.9), 1, 1),
    "rmsprop": (sparse_rules.rmsprop, twins.row_rmsprop, (0.01, 0.9, 1e-8, False, 0.0), 1, 0),
    "rmsprop centered": (sparse_rules.rmsprop, twins.row_rmsprop, (0.01, 0.9, 1e-8, True, 0.0), 2, 0),
    "rmsprop momentum": (sparse_rules.rmsprop, twins.row_rmsprop, (0.01, 0.9, 1e-8, False, 0.9), 2, 0),
    "rmsprop both": (sparse_rules.rmsprop, twins.row_rmsprop, (0.01, 0.9, 1e-8, True, 0.9), 3, 0),
    "ftrl": (sparse_rules.ftrl, twins.row_ftrl, (0.1, 0.5, 0.1, 1.0, 0.5), 2, 0),
    "lion": (sparse_rules.lion, twins.row_lion, (0.01, 0.9, 0.99), 1, 0),
}


def make_store(rng: np.random.Generator, update: Update, dim: int, offset: int) -> Any:
    """Rows of random values, with a state of zeros."""
    width = offset + dim * (1 + update[3]) + update[4]
    store = np.zeros((30, width), np.float32)
    store[:, : offset + dim] = rng.standard_normal((30, offset + dim), np.float32)
    return store


@each_of("bounds", [NO_BOUNDS, (-0.5, 0.25)])
@each_of("offset", [0, 2])
@each_of("dim", DIMS)
@each_of("name", UPDATES)
def test_an_update_equals_its_numpy_twin_to_the_bit(name: str, dim: int, offset: int, bounds: Any) -> None:
    kernel, twin, settings, *_ = UPDATES[name]
    rng = np.random.default_rng(dim)
    store = make_store(rng, UPDATES[name], dim, offset)
    if name == "dampened":
        store[:, offset + dim :] = -0.0  # rows that were never updated
    expected, before = store.copy(), store.copy()
    at = rng.permutation(30)[:13]
    for _ in range(4):
        grads = rng.standard_normal((13, dim), np.float32)
        twin(expected, offset, at, grads, *settings, *bounds)
        kernel(store.reshape(-1), store.shape[1], offset, at, grads, *settings, *bounds)
    assert twins.same_bits(store, expected)
    others = np.setdiff1d(np.arange(30), at)
    assert twins.same_bits(store[others], before[others])
    assert (store[at] != before[at]).any(axis=1).all()


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_of_no_rows_changes_nothing(name: str) -> None:
    kernel, _, settings, *_ = UPDATES[name]
    store = make_store(np.random.default_rng(0), UPDATES[name], 4, 2)
    before = store.copy()
    no_rows, no_grads = np.empty(0, np.int64), np.empty((0, 4), np.float32)
    kernel(store.reshape(-1), store.shape[1], 2, no_rows, no_grads, *settings, *NO_BOUNDS)
    assert twins.same_bits(store, before)


@pytest.mark.parametrize("power", [0.0, 0.25, 1.0])
def test_ftrl_with_another_power_is_numpys(power: float) -> None:
    """Libraries may round a power differently in the last bit."""
    rng = np.random.default_rng(3)
    store = make_store(rng, UPDATES["ftrl"], 5, 2)
    expected, at = store.copy(), np.arange(30)
    for _ in range(4):
        grads = rng.standard_normal((30, 5), np.float32)
        twins.row_ftrl(expected, 2, at, grads, 0.1, 0.2, 0.1, 1.0, power)
        sparse_rules.ftrl(store.reshape(-1), store.shape[1], 2, at, grads, 0.1, 0.2, 0.1, 1.0, power, *NO_BOUNDS)
    np.testing.assert_allclose(store, expected, rtol=1e-4, atol=1e-5)


def test_ftrl_with_a_rate_of_zero_changes_nothing() -> None:
    store = make_store(np.random.default_rng(0), UPDATES["ftrl"], 4, 2)
    before = store.copy()
    grads = np.ones((30, 4), np.float32)
    sparse_rules.ftrl(store.reshape(-1), store.shape[1], 2, np.arange(30), grads, 0.0, 1, 1, 1, 0.5, *NO_BOUNDS)
    assert twins.same_bits(store, before)
