"""Kernels of dense tables: bit-equal to their numpy twins, which do the same float32 operations in the same order.

That they are torch's formulas is tested in test_dense_table.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import twins
from support.cases import each_of

from torchfleet.ps.kernels import dense_rules

SIZES = [0, 1, 2, 3, 7, 16, 33, 1000]
DECAYS = [(0.0, 1.0), (0.1, 1.0), (0.0, 0.999)]  # (decay, shrink): none, added to the gradient, AdamW's


def run_both(kernel, twin, size: int, num_states: int, *settings, with_step: bool) -> None:
    rng = np.random.default_rng(size)
    arrays = [rng.standard_normal(size, np.float32), *(np.zeros(size, np.float32) for _ in range(num_states))]
    expected = [array.copy() for array in arrays]
    for step in range(1, 6):
        grads = rng.standard_normal(size, np.float32)
        last = (step,) if with_step else ()
        kernel(*arrays, grads, *settings, *last)
        twin(*expected, grads, *settings, *last)
        for found, wanted in zip(arrays, expected, strict=True):
            assert twins.same_bits(found, wanted)


@each_of("size", SIZES)
@each_of(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.0, True), (0.9, 0.4, False)]
)
@each_of(("decay", "shrink"), DECAYS)
def test_sgd_equals_its_numpy_twin_to_the_bit(size, momentum, dampening, nesterov, decay, shrink):
    how = momentum, dampening, nesterov, decay, shrink
    run_both(dense_rules.sgd, twins.dense_sgd, size, 1, 0.1, *how, with_step=True)


@each_of("size", SIZES)
@each_of(("decay", "shrink"), DECAYS)
def test_adagrad_equals_its_numpy_twin_to_the_bit(size, decay, shrink):
    run_both(dense_rules.adagrad, twins.dense_adagrad, size, 1, 0.1, 1e-10, decay, shrink, with_step=False)


@each_of("size", SIZES)
@each_of(("decay", "shrink"), DECAYS)
def test_adam_equals_its_numpy_twin_to_the_bit(size, decay, shrink):
    run_both(dense_rules.adam, twins.dense_adam, size, 2, 0.01, 0.9, 0.999, 1e-8, decay, shrink, with_step=True)


@each_of("size", SIZES)
@each_of(("decay", "shrink"), DECAYS)
def test_scaled_momentum_equals_its_numpy_twin_to_the_bit(size, decay, shrink):
    how = 0.1, 1e-8, 0.9, decay, shrink
    run_both(dense_rules.scaled_momentum, twins.dense_scaled_momentum, size, 2, *how, with_step=False)


@each_of("size", SIZES)
@each_of("momentum", [0.0, 0.9])
@each_of("centered", [False, True])
@each_of(("decay", "shrink"), DECAYS)
def test_rmsprop_equals_its_numpy_twin_to_the_bit(size, centered, momentum, decay, shrink):
    how = 0.01, 0.9, 1e-8, centered, momentum, decay, shrink
    run_both(dense_rules.rmsprop, twins.dense_rmsprop, size, 3, *how, with_step=False)


@each_of("size", SIZES)
@each_of(("l1", "l2"), [(0.0, 0.0), (1.0, 0.0), (0.5, 0.1)])
def test_ftrl_equals_its_numpy_twin_to_the_bit(size, l1, l2):
    run_both(dense_rules.ftrl, twins.dense_ftrl, size, 2, 0.1, l1, l2, 1.0, 0.5, with_step=False)


@each_of("size", SIZES)
@each_of(("decay", "shrink"), DECAYS)
def test_lion_equals_its_numpy_twin_to_the_bit(size, decay, shrink):
    run_both(dense_rules.lion, twins.dense_lion, size, 1, 0.1, 0.9, 0.99, decay, shrink, with_step=False)


def test_sgd_without_momentum_leaves_the_velocity_alone():
    """The table passes the weights themselves where there is no velocity."""
    weights = np.ones(4, np.float32)
    dense_rules.sgd(weights, weights, np.full(4, 2, np.float32), 0.5, 0.0, 0.0, False, 0.0, 1.0, 1)
    assert weights.tolist() == [0.0] * 4


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_a_division_by_zero_is_ieees_and_does_not_stop_an_update_half_way(name):
    """eps = 0 is allowed, and a gradient of zero is common. torch and numpy give NaN for 0 / 0 and go on."""
    kernel, twin, num_states, settings = {
        "adagrad": (dense_rules.adagrad, twins.dense_adagrad, 1, (0.1, 0.0, 0.0, 1.0)),
        "adam": (dense_rules.adam, twins.dense_adam, 2, (0.1, 0.9, 0.999, 0.0, 0.0, 1.0, 1)),
    }[name]
    arrays = [np.ones(3, np.float32), *(np.zeros(3, np.float32) for _ in range(num_states))]
    expected, grads = [array.copy() for array in arrays], np.array([1, 0, 2], np.float32)
    with np.errstate(invalid="ignore"):
        twin(*expected, grads, *settings)
    kernel(*arrays, grads, *settings)
    assert all(itertools.starmap(twins.same_bits, zip(arrays, expected, strict=True)))
