"""Table specs: a description that is made is a good one; every refusal names the field and what was found."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import naming

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.spec import (
    MAX_DIM,
    MAX_SHARDS,
    MAX_SIZE,
    Initializer,
    Rule,
    TableSpec,
    shard_range,
    table_number,
)

NOT_A_NUMBER_FROM_0 = [-1.0, -1e-300, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", NOT_A_NUMBER_FROM_0)
@pytest.mark.parametrize("field", ["lr", "eps", "lr_decay", "initial_accumulator", "weight_decay"])
def test_a_rule_takes_no_negative_or_infinite_number(field, bad):
    with pytest.raises(TableError, match=naming(f"rule.{field}", 0, bad)):
        Rule("adagrad", **{field: bad})


@pytest.mark.parametrize("bad", [*NOT_A_NUMBER_FROM_0, 1.0, 1.5])
@pytest.mark.parametrize("field", ["beta1", "beta2", "momentum"])
def test_a_rules_averages_forget(field, bad):
    with pytest.raises(TableError, match=naming(f"rule.{field}", 0, 1, bad)):
        Rule("adam", **{field: bad})


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.nan), (math.inf,) * 2])
def test_a_rules_bounds_leave_room(low, high):
    with pytest.raises(TableError, match=naming("rule.low", "rule.high")):
        Rule(low=low, high=high)


def test_nesterov_needs_momentum():
    with pytest.raises(TableError, match=naming("rule.nesterov", "rule.momentum", 0)):
        Rule(nesterov=True)
    Rule(nesterov=True, momentum=0.9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["a", "b"])
def test_an_initializer_needs_finite_numbers(field, bad):
    with pytest.raises(TableError, match="finite"):
        Initializer("uniform", **{field: bad})


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [("constant", 1e39, 0.0), ("uniform", -1e39, 1e39), ("normal", 0.0, 1e39), ("truncated_normal", -1e39, 1.0)],
)
def test_an_initializer_needs_numbers_that_are_finite_in_float32(name, a, b):
    """A row's first value would be infinite, which no push and no assign may bring in."""
    with pytest.raises(TableError, match="finite"):
        Initializer(name, a, b)


@pytest.mark.parametrize("field", ["lr", "eps", "initial_accumulator", "weight_decay"])
def test_a_rule_needs_numbers_that_are_finite_in_float32(field):
    with pytest.raises(TableError, match=field):
        Rule("adagrad", **{field: 1e39})


def test_a_uniform_initializer_needs_low_up_to_high():
    with pytest.raises(TableError, match=naming("uniform", "low", "high", "1.0", "0.5")):
        Initializer("uniform", 1.0, 0.5)
    Initializer("uniform", 0.5, 0.5)


@pytest.mark.parametrize("name", ["normal", "truncated_normal"])
def test_a_normal_initializer_needs_a_deviation(name):
    with pytest.raises(TableError, match=naming(name, 0, "-1.0")):
        Initializer(name, 0.0, -1.0)
    Initializer(name, -1.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"name": ""}, "1 200 0"),
        ({"name": "x" * 201}, "1 200 201"),
        ({"dim": 0}, f"dim 1 {MAX_DIM} 0"),
        ({"dim": MAX_DIM + 1}, f"dim {MAX_DIM + 1}"),
        ({"seed": -1}, "seed 0"),
        ({"seed": 1 << 63}, "seed 0"),
        ({"num_shards": 0}, "num_shards 1"),
        ({"num_shards": MAX_SHARDS + 1}, "num_shards 1"),
        ({"shard": 2, "num_shards": 2}, "shard num_shards 2"),
        ({"shard": -1}, "shard num_shards -1"),
        ({"size": 5}, "size kind='array'"),
        ({"kind": "array"}, "kind='array' size 1 2^48 0"),
        ({"kind": "array", "size": MAX_SIZE + 1}, "size 1 2^48"),
        ({"kind": "dense"}, "kind='dense' size 1 2^48 0"),
        ({"kind": "dense", "size": 5, "dim": 2}, "dim 1 2"),
        ({"kind": "dense", "size": 5, "rule": Rule(low=0.0)}, "rule.low/high"),
        ({"kind": "dense", "size": 5, "rule": Rule(high=0.0)}, "rule.low/high"),
        ({"kind": "dense", "size": 5, "initializer": Initializer("constant", 1.0)}, "zeros"),
        ({"rule": Rule("adam", momentum=0.5)}, "rule.momentum 't'"),
        ({"kind": "array", "size": 5, "rule": Rule("adagrad", momentum=0.5)}, "rule.momentum"),
    ],
)
def test_a_contradiction_is_refused_and_named(fields, match):
    with pytest.raises(TableError, match=naming(*match.split())):
        TableSpec(**({"name": "t"} | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "x" * 200, "dim": MAX_DIM, "seed": (1 << 63) - 1},
        {"kind": "array", "size": MAX_SIZE, "shard": MAX_SHARDS - 1, "num_shards": MAX_SHARDS},
        {"kind": "dense", "size": 1, "rule": Rule(momentum=0.9, nesterov=True, weight_decay=0.1)},
        {"rule": Rule(weight_decay=0.1)},
    ],
)
def test_the_limits_themselves_are_allowed(fields):
    TableSpec(**({"name": "t"} | fields))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rule("nadam"),
        lambda: Initializer("xavier"),
        lambda: TableSpec("t", kind="hash"),
    ],
    ids=["rule", "initializer", "table"],
)
def test_an_unknown_name_is_refused_when_the_description_is_made(make):
    """Not only when a server decodes it: "Checked when it is made"."""
    with pytest.raises(TableError):
        make()


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec("t", dim=8, rule=Rule("adam", lr=0.1, low=-1.0), initializer=Initializer("normal", 0.0, 0.1), seed=3),
        TableSpec("ids", "array", dim=2, size=100, shard=1, num_shards=3),
        TableSpec("w", "dense", size=100, rule=Rule("sgd", momentum=0.9, nesterov=True)),
    ],
    ids=lambda spec: spec.kind,
)
def test_a_description_is_the_same_after_a_journey(spec):
    """Infinite bounds included."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=TableSpec) == spec


@pytest.mark.parametrize(
    "change", [{"dim": 0}, {"kind": "hash"}, {"rule": {"name": "nadam"}}, {"rule": {"lr": -1.0}}, {"colour": "red"}]
)
def test_a_bad_description_from_elsewhere_is_refused_too(change):
    body = msgspec.msgpack.encode({"name": "t"} | change)
    with pytest.raises((msgspec.ValidationError, TableError)):
        msgspec.msgpack.decode(body, type=TableSpec)


def test_a_tables_number_is_the_same_in_every_process():
    # Recorded on purpose: clients and servers of different releases must agree on it.
    assert (table_number("user"), table_number("item")) == (0x8D93D649, 0x1F1B251E)
    assert TableSpec("user").number == table_number("user")


@given(st.integers(1, 1 << 48), st.integers(1, 1 << 10))
def test_shards_cover_a_dense_table_evenly_and_in_order(size, num_shards):
    ranges = [shard_range(size, shard, num_shards) for shard in range(num_shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 1000), st.integers(1, 20))
def test_a_shards_number_of_elements_is_the_length_of_its_range(size, num_shards):
    shards = [TableSpec("w", "dense", size=size, shard=shard, num_shards=num_shards) for shard in range(num_shards)]
    assert sum(shard.num_elements for shard in shards) == size
