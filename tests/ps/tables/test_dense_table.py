"""Dense tables: the rules are torch.optim's, a shard is a range, and what is refused leaves no trace."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.messages import naming

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.dense_table import NO_KEYS, DenseTable
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

ROOM = 1 << 20

OPTIMIZERS = {
    "sgd": (Rule("sgd", lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    "sgd, weight decay": (
        Rule("sgd", lr=0.1, weight_decay=0.05),
        torch.optim.SGD,
        {"lr": 0.1, "weight_decay": 0.05},
    ),
    "sgd, momentum": (Rule("sgd", lr=0.1, momentum=0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd, momentum, weight decay": (
        Rule("sgd", lr=0.1, momentum=0.9, weight_decay=0.05),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    ),
    "sgd, nesterov, weight decay": (
        Rule("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    ),
    "adagrad": (Rule("adagrad", lr=0.1), torch.optim.Adagrad, {"lr": 0.1}),
    "adagrad, everything": (
        Rule("adagrad", lr=0.1, lr_decay=0.1, weight_decay=0.05, initial_accumulator=0.2, eps=1e-6),
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.05, "initial_accumulator_value": 0.2, "eps": 1e-6},
    ),
    "adam": (Rule("adam", lr=0.01, eps=1e-8), torch.optim.Adam, {"lr": 0.01}),
    "adam, betas, weight decay": (
        Rule("adam", lr=0.01, beta1=0.8, beta2=0.95, eps=1e-4, weight_decay=0.05),
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.05},
    ),
    "adamw": (
        Rule("adam", lr=0.01, eps=1e-8, weight_decay=0.1, decoupled_decay=True),
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1},
    ),
}


def make_table(size: int = 10, max_bytes: int = ROOM, **fields) -> DenseTable:
    return DenseTable(TableSpec("w", "dense", size=size, **fields), max_bytes)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eight_updates_are_those_of_torch(name, num_shards):
    """Tolerance 1e-6: weights are below 4, where one float32 step is 2.4e-7, and torch computes the same formulas
    with other roundings (its own sums of two products, a step size that is folded in elsewhere)."""
    rule, optimizer_class, arguments = OPTIMIZERS[name]
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(101))
    optimizer = optimizer_class([weights], **arguments)
    tables = [make_table(101, rule=rule, shard=shard, num_shards=num_shards) for shard in range(num_shards)]
    cuts = np.cumsum([table.size for table in tables])[:-1]
    for table, piece in zip(tables, np.split(weights.detach().numpy(), cuts), strict=True):
        table.set(0, piece)
    for _ in range(8):
        weights.grad = torch.randn(101)
        weights.grad[:7] = 0  # parameters that a batch did not touch
        for table, piece in zip(tables, np.split(weights.grad.numpy(), cuts), strict=True):
            table.push(piece)
        optimizer.step()
    found = np.concatenate([table.get(0, table.size) for table in tables])
    np.testing.assert_allclose(found, weights.detach().numpy(), rtol=0, atol=1e-6)
    assert [table.step for table in tables] == [8] * num_shards


def test_a_table_starts_as_zeros():
    assert make_table().get(0, 10).tolist() == [0] * 10


def test_get_gives_a_copy_of_a_range():
    table = make_table()
    table.set(0, np.arange(10, dtype=np.float32))
    found = table.get(3, 6)
    assert found.tolist() == [3, 4, 5]
    found[:] = 99
    assert table.get(3, 6).tolist() == [3, 4, 5]
    assert table.get(10, 10).tolist() == []


def test_set_overwrites_a_range_and_leaves_state_and_step():
    table = make_table(4, rule=Rule("sgd", lr=1.0, momentum=0.5))
    table.push(np.ones(4, np.float32))
    table.set(1, np.array([[5], [6]], np.float32))
    assert table.get(0, 4).tolist() == [-1, 5, 6, -1]
    table.push(np.zeros(4, np.float32))  # velocity is 0.5 from the first push
    assert table.get(0, 4).tolist() == [-1.5, 4.5, 5.5, -1.5]
    assert table.step == 2


def test_state_and_steps_can_be_set_and_an_update_goes_on_from_them():
    rule = OPTIMIZERS["adam"][0]
    trained, other = (DenseTable(TableSpec("d", "dense", size=3, rule=rule), ROOM) for _ in range(2))
    for table in (trained, trained, other):
        table.push(np.array([1, -2, 3], np.float32))
    place = np.array([0, trained.step, 1], np.uint64)
    other.assign(place, trained.pull(np.array([0, 3, 1], np.uint64), False, None))
    for table in (trained, other):
        table.push(np.array([-1, 0.5, 2], np.float32))
    np.testing.assert_array_equal(other.block(), trained.block())
    assert other.step == trained.step == 3


def test_state_that_does_not_fit_is_refused():
    table = DenseTable(TableSpec("d", "dense", size=3, rule=OPTIMIZERS["adam"][0]), ROOM)
    for start, num in ((0, 3), (0, 10), (1, 9)):
        with pytest.raises(TableError, match=naming(3, 2)):
            table.check_assign(np.array([start, 5, 1], np.uint64), np.zeros(num, np.float32))


def test_the_rate_of_a_push_goes_before_the_tables_own():
    table = make_table(1, rule=Rule("sgd", lr=1.0))
    table.push(np.ones(1, np.float32), lr=0.25)
    table.push(np.ones(1, np.float32))
    assert table.get(0, 1).tolist() == [-1.25]


def test_add_moves_the_weights_by_a_difference_and_no_rule_is_applied():
    table = make_table(3, rule=Rule("adam"))
    table.add(NO_KEYS, np.array([1, 2, 3], np.float32))
    table.add(NO_KEYS, np.array([[1], [1], [1]], np.float32))
    assert table.get(0, 3).tolist() == [2, 3, 4]
    assert not table._states.any()
    assert table.step == 2
    refused(table, naming("NaN", 1), lambda: table.check_add(NO_KEYS, np.array([0, np.nan, 0], np.float32)))
    refused(table, naming(3, 4), lambda: table.check_add(NO_KEYS, np.ones(4, np.float32)))


def test_gradients_over_a_messages_memory_are_taken():
    grads = np.ones((10, 1), np.float32)
    grads.flags.writeable = False
    table = make_table(rule=Rule("adam", lr=0.5))
    table.push(grads)
    assert table.get(0, 10) == pytest.approx(-0.5)


def test_a_shard_without_elements_works_too():
    table = make_table(2, shard=0, num_shards=3, rule=Rule("adam"))
    assert table.size == 0
    table.push(np.empty(0, np.float32))
    table.set(0, np.empty(0, np.float32))
    assert table.get(0, 0).tolist() == []
    assert table.stats()["rows"] == 0


@pytest.mark.parametrize(
    ("rule", "num_blocks"),
    [(Rule("sgd"), 1), (Rule("sgd", momentum=0.9), 2), (Rule("adagrad"), 2), (Rule("adam"), 3)],
    ids=lambda value: getattr(value, "name", value),
)
def test_stats_count_weights_and_state(rule, num_blocks):
    table = make_table(100, rule=rule)
    table.push(np.ones(100, np.float32))
    assert table.stats().items() >= {"rows": 100, "bytes": 400 * num_blocks, "load_factor": 1.0, "step": 1}.items()


def test_a_table_that_does_not_fit_is_refused_at_once():
    with pytest.raises(TableError, match=naming("'w'", "1,200", "max_table_bytes", "1,199")):
        make_table(100, 1199, rule=Rule("adam"))
    make_table(100, 1200, rule=Rule("adam"))


def refused(table: DenseTable, match: str, act) -> None:
    before = table.get(0, table.size).tolist(), table._states.tolist(), table.step
    with pytest.raises(TableError, match=match):
        act()
    assert (table.get(0, table.size).tolist(), table._states.tolist(), table.step) == before


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 11), (11, 11), (6, 5), (2**63, 2**63 + 1)])
def test_a_range_outside_the_shard_is_refused(start, stop):
    table = make_table()
    refused(table, naming(0, 10), lambda: table.get(start, stop))


@pytest.mark.parametrize("start", [-1, 8, 2**63])
def test_values_outside_the_shard_are_refused(start):
    table = make_table()
    refused(table, naming(0, 10), lambda: table.set(start, np.ones(3, np.float32)))


@pytest.mark.parametrize("num", [0, 9, 11])
def test_a_push_of_the_wrong_length_is_refused(num):
    table = make_table(rule=Rule("adam"))
    refused(table, naming("'w'", 10, num), lambda: table.push(np.ones(num, np.float32)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_and_their_place_is_named(bad):
    table = make_table(rule=Rule("adam"))
    table.push(np.ones(10, np.float32))
    block = np.ones(10, np.float32)
    block[7] = bad
    refused(table, naming("'w'", "NaN", 7), lambda: table.push(block))
    refused(table, naming("'w'", "NaN", 7), lambda: table.set(0, block))


# 1e39 is a finite Python float, but infinity in float32
@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0, 1e39])
def test_a_push_at_an_unusable_rate_is_refused(lr):
    table = make_table()
    refused(table, "learning rate", lambda: table.push(np.ones(10, np.float32), lr=lr))
