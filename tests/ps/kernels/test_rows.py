"""Kernels of sparse rows: bit-equal to their numpy twins, which do the same float32 operations in the same order; and
close to torch.optim on a sparse embedding, which sums and divides in another order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import twins
from support.cases import each_of

from torchfleet.ps.kernels import rows
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

DIMS = [1, 2, 3, 7, 10, 16, 33]
STATES = {"sgd": 0, "adagrad": 1, "adam": 2}
NO_BOUNDS = (-math.inf, math.inf)


def make_store(rng, num_rows: int, dim: int, num_states: int, offset: int) -> np.ndarray:
    store = rng.standard_normal((num_rows, offset + dim * (1 + num_states)), np.float32)
    store[:, offset + dim :] = np.abs(store[:, offset + dim :])  # accumulators are sums of squares
    return store


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("dim", DIMS)
def test_gather_copies_rows_out_and_gives_zeros_for_missing_ones(dim, offset):
    rng = np.random.default_rng(dim)
    store = make_store(rng, 20, dim, 1, offset)
    at = rng.permutation(np.append(rng.integers(0, 20, 45), [-1] * 5))
    for num_words in (dim, 2 * dim):
        out = np.full((50, num_words), np.nan, np.float32)
        rows.gather(store.reshape(-1), store.shape[1], offset, at, out)
        assert twins.same_bits(out, twins.gather(store, offset, at, num_words))


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("dim", DIMS)
def test_scatter_writes_these_rows_and_no_other_word(dim, offset):
    rng = np.random.default_rng(dim)
    store = make_store(rng, 20, dim, 1, offset)
    for num_words in (dim, 2 * dim):
        expected, at = store.copy(), rng.permutation(20)[:9]
        values = rng.standard_normal((9, num_words), np.float32)
        twins.scatter(expected, offset, at, values)
        rows.scatter(store.reshape(-1), store.shape[1], offset, at, values)
        assert twins.same_bits(store, expected)


def test_scatter_of_a_repeated_row_leaves_the_last():
    store = np.zeros(4, np.float32)
    rows.scatter(store, 2, 0, np.array([1, 1]), np.array([[1, 2], [3, 4]], np.float32))
    assert store.tolist() == [0, 0, 3, 4]


def test_copies_keep_every_bit_even_of_a_nan():
    store = np.array([0x7FC12345, 0xFF800001, 0x80000000, 1], np.uint32).view(np.float32)
    out = np.empty((1, 4), np.float32)
    rows.gather(store, 4, 0, np.array([0]), out)
    back = np.zeros(4, np.float32)
    rows.scatter(back, 4, 0, np.array([0]), out)
    assert back.view(np.uint32).tolist() == store.view(np.uint32).tolist()


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF])))
def test_all_finite_is_numpys_for_every_bit_pattern(bits):
    bits = np.array(bits, np.uint32)
    assert rows.all_finite(bits) == np.isfinite(bits.view(np.float32)).all()


@each_of("bad", [np.nan, -np.nan, np.inf, -np.inf])
@each_of("place", [0, 15, 16, 99])
def test_all_finite_sees_one_bad_number_anywhere(bad, place):
    values = np.full(100, np.finfo(np.float32).max, np.float32)
    assert rows.all_finite(values.view(np.uint32))
    values[place] = bad
    assert not rows.all_finite(values.view(np.uint32))


UPDATES = {
    "sgd": (rows.sgd, twins.row_sgd, (0.1,)),
    "adagrad": (rows.adagrad, twins.row_adagrad, (0.1, 1e-10)),
    "adam": (rows.adam, twins.row_adam, (0.01, 0.9, 0.999, 1e-8, 3)),
}


@each_of("bounds", [NO_BOUNDS, (-0.5, 0.25), (-0.5, math.inf), (-math.inf, 0.25)])
@each_of("offset", [0, 2])
@each_of("dim", DIMS)
@each_of("name", UPDATES)
def test_an_update_equals_its_numpy_twin_to_the_bit(name, dim, offset, bounds):
    kernel, twin, settings = UPDATES[name]
    rng = np.random.default_rng(dim)
    store = make_store(rng, 30, dim, STATES[name], offset)
    expected, at = store.copy(), rng.permutation(30)[:13]
    for _ in range(3):
        grads = rng.standard_normal((13, dim), np.float32)
        twin(expected, offset, at, grads, *settings, *bounds)
        kernel(store.reshape(-1), store.shape[1], offset, at, grads, *settings, *bounds)
    assert twins.same_bits(store, expected)
    assert bounds[0] <= store[at, offset : offset + dim].min()
    assert store[at, offset : offset + dim].max() <= bounds[1]


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("dim", DIMS)
def test_decay_is_numpys_to_the_bit_and_touches_the_values_of_these_rows_alone(dim, offset):
    rng = np.random.default_rng(dim)
    store = make_store(rng, 30, dim, 1, offset)
    before, at, grads = store.copy(), rng.permutation(30)[:13], rng.standard_normal((13, dim), np.float32)
    values, found = slice(offset, offset + dim), np.empty_like(grads)
    rows.add_decay(store.reshape(-1), store.shape[1], offset, at, grads, 0.3, found)
    assert twins.same_bits(found, grads + np.float32(0.3) * before[at, values])
    assert twins.same_bits(store, before)
    rows.shrink(store.reshape(-1), store.shape[1], offset, at, dim, 0.9)
    before[at, values] *= np.float32(0.9)
    assert twins.same_bits(store, before)


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_of_no_rows_changes_nothing(name):
    kernel, _, settings = UPDATES[name]
    store = make_store(np.random.default_rng(0), 5, 4, STATES[name], 2)
    before = store.copy()
    no_rows, no_grads = np.empty(0, np.int64), np.empty((0, 4), np.float32)
    kernel(store.reshape(-1), store.shape[1], 2, no_rows, no_grads, *settings, *NO_BOUNDS)
    assert twins.same_bits(store, before)


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_a_division_by_zero_is_ieees_and_does_not_stop_an_update_half_way(name):
    """eps = 0 is allowed, and a gradient of zero is common. torch and numpy give NaN for 0 / 0 and go on."""
    kernel, twin, settings = UPDATES[name]
    settings = tuple(0.0 if setting in (1e-10, 1e-8) else setting for setting in settings)
    store = np.ones((3, 2 + 2 * (1 + STATES[name])), np.float32)
    store[:, 4:] = 0
    expected, at = store.copy(), np.arange(3)
    grads = np.array([[1, 2], [0, 3], [4, 5]], np.float32)
    with np.errstate(invalid="ignore"):
        twin(expected, 2, at, grads, *settings)
    kernel(store.reshape(-1), store.shape[1], 2, at, grads, *settings, *NO_BOUNDS)
    assert twins.same_bits(store, expected)


OPTIMIZERS = {
    "sgd": (Rule("sgd", lr=0.1), lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "adagrad": (
        Rule("adagrad", lr=0.1, initial_accumulator=0.1),
        lambda weights: torch.optim.Adagrad(weights, lr=0.1, initial_accumulator_value=0.1),
    ),
    "adagrad with decay": (
        Rule("adagrad", lr=0.1, lr_decay=0.05, eps=1e-6),
        lambda weights: torch.optim.Adagrad(weights, lr=0.1, lr_decay=0.05, eps=1e-6),
    ),
    "adam": (
        Rule("adam", lr=0.01, eps=1e-8),
        lambda weights: torch.optim.SparseAdam(weights, lr=0.01),
    ),
    "adam with betas": (
        Rule("adam", lr=0.01, beta1=0.5, beta2=0.9, eps=1e-3),
        lambda weights: torch.optim.SparseAdam(weights, lr=0.01, betas=(0.5, 0.9), eps=1e-3),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@each_of("dim", DIMS)
@each_of("name", OPTIMIZERS)
def test_rows_are_trained_like_a_sparse_embedding_of_torch(name, dim):
    """Tolerance 1e-6: weights are below 4, where one float32 step is 2.4e-7; torch may add the gradients of a
    repeated id in another order and rounds its step size once more, which makes a few such steps in ten updates."""
    rule, make = OPTIMIZERS[name]
    torch.manual_seed(dim)
    embedding = torch.nn.Embedding(40, dim, sparse=True)
    optimizer = make(list(embedding.parameters()))
    table = SparseTable(TableSpec("t", dim=dim, rule=rule), 1 << 20)
    ids = torch.arange(40)
    table.assign(ids.numpy().view(np.uint64), embedding.weight.detach().numpy())
    for _ in range(10):
        batch = torch.randint(0, 40, (25,))  # with repeats, and never all ids
        factors = torch.randn(25, dim)
        optimizer.zero_grad()
        (embedding(batch) * factors).sum().backward()
        optimizer.step()
        table.push(batch.numpy().view(np.uint64), factors.numpy())
    found = table.pull(ids.numpy().view(np.uint64), create=False)
    np.testing.assert_allclose(found, embedding.weight.detach().numpy(), rtol=0, atol=1e-6)
