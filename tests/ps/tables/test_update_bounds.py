"""A push of finite numbers that would leave NaN or infinity is refused whole; every other one is taken."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleets import Talk, assert_ok, keys_of, refusal, values_of
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels.rows import largest
from torchfleet.ps.net.wire import DELTA, SYNC, Array, Command
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.dense_table import NO_KEYS, DenseTable
from torchfleet.ps.tables.settings.policy import ShowClickEntry
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

BYTES = 1 << 22
MAX = float(np.finfo(np.float32).max)
FLOATS = st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 1e-3, 1.0, 1e9, 1e15, 2e18, 1.8e19, 1e20, 1e30, 1e38, 3.4e38])
SIGNED = st.builds(math.copysign, FLOATS, st.sampled_from([-1.0, 1.0]))
KINDS: list[dict[str, Any]] = [
    *({"name": name} for name in ("sgd", "adagrad", "adam", "rowwise_adagrad", "ftrl", "rmsprop", "lion")),
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd", "momentum": 0.9, "nesterov": True, "options": (("dampening", 0.0),)},
    {"name": "sgd", "momentum": 0.99999999, "options": (("dampening", 0.5),)},
    {"name": "rowwise_adagrad", "momentum": 0.9},
    {"name": "ftrl", "options": (("l1", 1.0), ("l2", 1e30), ("beta", 1e-6), ("lr_power", -1.0))},
    {"name": "ftrl", "options": (("lr_power", 0.0),)},
    {"name": "rmsprop", "momentum": 0.9},
    {"name": "rmsprop", "options": (("alpha", 1.0),)},
    {"name": "rmsprop", "options": (("alpha", 0.0), ("centered", 1.0))},
    {"name": "rmsprop", "momentum": 0.5, "options": (("alpha", 0.9), ("centered", 1.0))},
]
SETTINGS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-3, 1.0, 1e10, 3e38, 1e-40]),
        "eps": st.sampled_from([1e-10, 1e-8, 1e-30, 0.0, 1e-46]),
        "beta1": st.sampled_from([0.9, 0.0, 0.999999]),
        "beta2": st.sampled_from([0.999, 0.1]),
    }
)
RULES = st.builds(lambda kind, settings: Rule(**kind, **settings), st.sampled_from(KINDS), SETTINGS)
DECAYS = st.fixed_dictionaries({"weight_decay": st.sampled_from([0.0, 0.01, 3.0]), "decoupled_decay": st.booleans()})


def numbers_of(table: Any) -> np.ndarray:
    if isinstance(table, DenseTable):
        return table.block()
    found = {key: row for keys, rows, _ in table.chunks() for key, row in zip(keys.tolist(), rows, strict=True)}
    return np.array([found[key] for key in sorted(found)], np.float32)


def after(table: Any, keys: Any, grads: Any, rate: float | None) -> np.ndarray:
    """What the update itself makes of a table, unchecked."""
    with np.errstate(all="ignore"):
        table.update(keys, grads, rate)
    return numbers_of(table)


@given(RULES, st.lists(st.lists(st.tuples(st.integers(0, 2), SIGNED, SIGNED), min_size=1, max_size=4), max_size=6))
@settings(max_examples=examples(50))
def test_rows_take_every_push_that_leaves_them_finite_and_no_other(rule: Rule, pushes: Any) -> None:
    spec = TableSpec("t", dim=2, rule=rule, initializer=Initializer("constant", 1.0))
    table = SparseTable(spec, BYTES)
    for push in pushes:
        keys = np.array([key for key, *_ in push], np.uint64)
        grads = np.array([values for _, *values in push], np.float32)
        twin = SparseTable(spec, BYTES)  # the same rows, unguarded
        for held, rows, _ in table.chunks():
            twin.load(held, rows)
        twin.step = table.step
        before = numbers_of(table).tobytes()
        is_finite = bool(np.isfinite(after(twin, keys, grads, None)).all())
        if is_finite:
            table.push(keys, grads)
            assert numbers_of(table).tobytes() == numbers_of(twin).tobytes()
        else:
            with pytest.raises(TableError, match=naming("'t'", "NaN")):
                table.push(keys, grads)
            assert numbers_of(table).tobytes() == before
    assert np.isfinite(numbers_of(table)).all()


@given(RULES, DECAYS, st.lists(st.lists(SIGNED, min_size=2, max_size=2), max_size=8))
@settings(max_examples=examples(50))
def test_blocks_take_every_push_that_leaves_them_finite_and_no_other(rule: Rule, decays: Any, pushes: Any) -> None:
    decayed = rule if rule.name == "ftrl" else msgspec.structs.replace(rule, **decays)
    spec = TableSpec("t", "dense", size=2, rule=decayed)
    table = DenseTable(spec, BYTES)
    table.set(0, np.array([1.0, -1.0], np.float32))
    for push in pushes:
        grads, twin = np.array(push, np.float32), DenseTable(spec, BYTES)
        twin.load(0, table.block())
        twin.step = table.step
        before = table.block().tobytes()
        if np.isfinite(after(twin, NO_KEYS, grads, None)).all():
            table.push(grads)
            assert table.block().tobytes() == twin.block().tobytes()
        else:
            with pytest.raises(TableError, match=naming("'t'", "NaN")):
                table.push(grads)
            assert table.block().tobytes() == before


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
@settings(max_examples=examples(50))
def test_the_largest_magnitude_is_numpys(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    expected = float(np.abs(values).max())
    found = largest(values)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


# By message


SGD = TableSpec("rows", dim=1, rule=Rule("sgd", lr=1.0))
DENSE = TableSpec("dense", "dense", size=2, rule=Rule("sgd", lr=1.0))


@pytest.fixture
def talk() -> Talk:
    made = Talk(Server(BYTES, num_workers=2))
    for spec in (SGD, DENSE):
        made.create(spec)
    return made


def state_of(talk: Talk) -> list[bytes]:
    return [numbers_of(table).tobytes() for table in talk.server.state.tables.values()]


def sections(rate: float, keys: list[int], grads: list[float], dense: list[float] = [1.0, 1.0]) -> list[Array]:  # noqa: B006
    rates = np.array([[1.0], [rate]])
    arrays = [keys_of(DENSE, []), values_of(DENSE, np.array(dense).reshape(-1, 1))]
    return [Array(0, rates), *arrays, keys_of(SGD, keys), values_of(SGD, np.array(grads).reshape(-1, 1))]


@pytest.mark.parametrize(
    ("rate", "keys", "grads"),
    [(1.0, [7, 7], [3.4e38, 3.4e38]), (3e38, [7, 8], [1.0, 2.0]), (1e30, [8, 7], [0.0, -1e30])],
    ids=["equal keys", "a learning rate", "their product"],
)
@pytest.mark.parametrize("flags", [0, DELTA])
def test_a_push_of_several_tables_is_refused_whole(
    talk: Talk, rate: float, keys: list[int], grads: list[float], flags: int
) -> None:
    assert_ok(talk.ask(Command.PUSH, *sections(1.0, [7], [1.0]), once=True))
    before = state_of(talk)
    if flags and len(set(keys)) == len(keys):
        keys, grads = sorted(keys), [MAX, -MAX]
        assert_ok(talk.ask(Command.PUSH, *sections(1.0, [7, 8], [-MAX / 2, MAX / 2]), once=True, flags=DELTA))
        before = state_of(talk)
    reply = talk.ask(Command.PUSH, *sections(rate, keys, [-g if flags else g for g in grads]), once=True, flags=flags)
    kind, text = refusal(reply)
    assert (kind, "'rows'" in text) == ("TableError", True)
    assert state_of(talk) == before
    assert_ok(talk.ask(Command.PUSH, *sections(1.0, [7], [1.0]), once=True))


def test_a_step_whose_mean_overflows_is_refused_whole_for_all(talk: Talk) -> None:
    """Each push alone could be taken; the rate of a step is that of its first worker."""
    other = Talk(talk.server, client=8, worker=1)
    assert_ok(talk.ask(Command.PUSH, *sections(1.0, [7], [1.0]), once=True))
    before = state_of(talk)
    assert talk.send(talk.message(Command.PUSH, *sections(1e30, [7], [1.0]), once=True, flags=SYNC)) == []
    replies = other.send(other.message(Command.PUSH, *sections(1.0, [7], [1e20]), once=True, flags=SYNC))
    assert len(replies) == 2
    for reply in replies:
        assert "'rows'" in refusal(reply)[1]
    assert state_of(talk) == before


def test_shows_that_nobody_can_have_seen_are_refused() -> None:
    spec = TableSpec("t", dim=1, rule=Rule("sgd"), entry=ShowClickEntry("show", "click"))
    table = SparseTable(spec, BYTES)
    for shows in (3.4e38, 1e16):
        with pytest.raises(TableError, match="clicks"):
            table.push(np.array([1, 1], np.uint64), np.array([[1, shows, 0, 0], [1, shows, 0, 0]], np.float32))
    table.push(np.array([1, 1], np.uint64), np.array([[1, 3, 1, 0], [1, 1, 1, 0]], np.float32))


@pytest.mark.parametrize(
    ("name", "a", "b"), [("normal", 0.0, 3e38), ("normal", 3.4e38, 1e37), ("truncated_normal", 0.0, 3e38)]
)
def test_first_values_that_may_be_infinite_are_refused(name: str, a: float, b: float) -> None:
    with pytest.raises(TableError, match="finite"):
        Initializer(name, a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_state_that_has_no_root_is_refused(name: str) -> None:
    table = SparseTable(TableSpec("t", dim=1, rule=Rule(name)), BYTES)
    row = np.full((1, table.num_words), -1, np.float32)
    with pytest.raises(TableError, match="squares"):
        table.assign(np.array([1], np.uint64), row)
    dense = DenseTable(TableSpec("t", "dense", size=1, rule=Rule(name)), BYTES)
    with pytest.raises(TableError, match="squares"):
        dense.load(0, np.full((1 + dense.num_states, 1), -1, np.float32))
