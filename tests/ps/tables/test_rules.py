"""The rules on rows, against their oracles: torch's optimizers on one small parameter per row, stepped when the row is
touched; FBGEMM's formula; those of the papers on FTRL and Lion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support import logged_work
from support.fleets import in_process

import torchfleet as fleet
from torchfleet.base.errors import TableError
from torchfleet.base.storage import Storage
from torchfleet.observe.commands.inspect_saved import SavedModel
from torchfleet.ps.checkpoint.export import export_table
from torchfleet.ps.checkpoint.manifest import Manifest, described, write_manifest
from torchfleet.ps.server.log.log_entry import decode_entry
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.saves.table_loading import load_model
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.dense_table import DenseTable
from torchfleet.ps.tables.rules.decay import decays
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import RULES, Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

BYTES = 1 << 22
DIMS = [1, 3, 16]
NUM = 20
Row = dict[str, Any]


def fbgemm(row: Row, g: Any, rule: Rule) -> None:
    """FBGEMM's EXACT_ROWWISE_ADAGRAD; with momentum, scaled gradients go through a velocity."""
    row["s"] = row.get("s", rule.initial_accumulator) + (g * g).mean()
    scaled = g / (np.sqrt(row["s"]) + rule.eps)
    row["u"] = rule.momentum * row.get("u", 0.0) + scaled
    row["w"] = row["w"] - rule.lr * row["u"]


def ftrl(row: Row, g: Any, rule: Rule) -> None:
    """McMahan et al. 2013, algorithm 1."""
    l1, l2, beta, p = (rule.option(name) for name in ("l1", "l2", "beta", "lr_power"))
    n = row.get("n", np.zeros_like(g))
    sigma = ((n + g * g) ** -p - n**-p) / rule.lr
    z = row["z"] = row.get("z", 0.0) + g - sigma * row["w"]
    n = row["n"] = n + g * g
    row["w"] = np.where(np.abs(z) <= l1, 0.0, -(z - np.sign(z) * l1) / ((beta + n**-p) / rule.lr + l2))


def lion(row: Row, g: Any, rule: Rule) -> None:
    """Chen et al. 2023, algorithm 2, without its decay, which acts before."""
    m = row.get("m", 0.0)
    row["w"] = row["w"] - rule.lr * np.sign(rule.beta1 * m + (1 - rule.beta1) * g)
    row["m"] = rule.beta2 * m + (1 - rule.beta2) * g


def of_torch(make: Callable[..., torch.optim.Optimizer]) -> Callable[[Row, Any, Rule], None]:
    """A parameter per row, with an optimizer of its own."""

    def step(row: Row, g: Any, rule: Rule) -> None:
        if "optimizer" not in row:
            row["parameter"] = torch.nn.Parameter(torch.from_numpy(row["w"].copy()))
            row["optimizer"] = make([row["parameter"]])
        with torch.no_grad():
            row["parameter"].copy_(torch.from_numpy(row["w"]))
        row["parameter"].grad = torch.from_numpy(g)
        row["optimizer"].step()
        row["w"] = row["parameter"].detach().numpy().copy()

    return step


def sgd(**options: Any) -> Callable[[Row, Any, Rule], None]:
    return of_torch(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, **options))


def rmsprop(**options: Any) -> Callable[[Row, Any, Rule], None]:
    return of_torch(lambda p: torch.optim.RMSprop(p, lr=0.01, **options))


SPARSE = (("l1", 0.5), ("l2", 0.1))
CASES: dict[str, tuple[Rule, Callable[[Row, Any, Rule], None]]] = {
    "momentum": (Rule("sgd", 0.1, momentum=0.9), sgd()),
    "nesterov": (Rule("sgd", 0.1, momentum=0.9, nesterov=True), sgd(nesterov=True)),
    "dampening": (Rule("sgd", 0.1, momentum=0.9, options=(("dampening", 0.4),)), sgd(dampening=0.4)),
    "rowwise": (Rule("rowwise_adagrad", 0.1, eps=1e-8), fbgemm),
    "rowwise from 0.1": (Rule("rowwise_adagrad", 0.1, eps=1e-8, initial_accumulator=0.1), fbgemm),
    "rowwise momentum": (Rule("rowwise_adagrad", 0.1, eps=1e-8, momentum=0.9), fbgemm),
    "ftrl": (Rule("ftrl", 0.1), ftrl),
    "ftrl l1 l2": (Rule("ftrl", 0.1, options=SPARSE), ftrl),
    "ftrl power": (Rule("ftrl", 0.1, options=(*SPARSE, ("beta", 0.5), ("lr_power", -0.25))), ftrl),
    "rmsprop": (Rule("rmsprop", 0.01, eps=1e-8), rmsprop()),
    "rmsprop alpha": (Rule("rmsprop", 0.01, eps=1e-3, options=(("alpha", 0.5),)), rmsprop(alpha=0.5, eps=1e-3)),
    "rmsprop momentum": (Rule("rmsprop", 0.01, eps=1e-8, momentum=0.9), rmsprop(momentum=0.9)),
    "rmsprop both": (
        Rule("rmsprop", 0.01, eps=1e-2, momentum=0.9, options=(("alpha", 0.9), ("centered", 1.0))),
        rmsprop(momentum=0.9, centered=True, alpha=0.9, eps=1e-2),
    ),
    "lion": (Rule("lion", 0.01, beta1=0.9, beta2=0.99), lion),
}
DECAYED = ("momentum", "rowwise", "rmsprop", "lion")
WAYS = [(name, "none") for name in CASES] + [(name, way) for name in DECAYED for way in ("coupled", "decoupled")]


def pushes(dim: int) -> list[tuple[Any, Any]]:
    """Keys, which repeat within a push, and gradients."""
    rng = np.random.default_rng(dim)
    return [(rng.integers(0, NUM, 12), rng.standard_normal((12, dim)).astype(np.float32)) for _ in range(10)]


def expected(rule: Rule, step: Any, start: Any, given: list[tuple[Any, Any]], dtype: Any) -> Any:
    rows: list[Row] = [{"w": values.astype(dtype)} for values in start]
    decay, factor = decays(rule, rule.lr)
    for keys, grads in given:
        for key in np.unique(keys):
            row, g = rows[key], grads[keys == key].sum(axis=0).astype(dtype)
            row["w"] = (row["w"] * factor).astype(dtype)
            step(row, (g + decay * row["w"]).astype(dtype), rule)
    return np.array([row["w"] for row in rows])


def trained(spec: TableSpec) -> tuple[SparseTable, Any]:
    """A table after the pushes, and the rows that it began with."""
    table = SparseTable(spec, BYTES)
    keys = np.arange(NUM, dtype=np.uint64)
    start = table.pull(keys)
    for ids, grads in pushes(spec.dim):
        table.push(ids.astype(np.uint64), grads)
    return table, start


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("name", "decay"), WAYS)
def test_rows_are_trained_as_by_the_oracle(name: str, decay: str, dim: int) -> None:
    """float32 beside float64 or torch's float32: values are below 4, and ten updates round a few times each."""
    rule, step = CASES[name]
    if decay != "none":
        rule = msgspec.structs.replace(rule, weight_decay=0.2, decoupled_decay=decay == "decoupled")
    spec = TableSpec("t", dim=dim, rule=rule, initializer=Initializer("uniform", -1.0, 1.0))
    table, start = trained(spec)
    dtype = np.float64 if step in (fbgemm, ftrl, lion) else np.float32
    wanted = expected(rule, step, start, pushes(dim), dtype)
    found = table.pull(np.arange(NUM, dtype=np.uint64), create=False)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_block_is_trained_as_a_row_of_one_value(name: str) -> None:
    """Every value of a block is touched at every step."""
    rule, step = CASES[name]
    rng = np.random.default_rng(1)
    table = DenseTable(TableSpec("t", "dense", size=9, rule=rule), BYTES)
    start = rng.standard_normal(9).astype(np.float32)
    table.set(0, start)
    given = [(np.arange(9), rng.standard_normal((9, 1)).astype(np.float32)) for _ in range(10)]
    for _, grads in given:
        table.push(grads)
    dtype = np.float64 if step in (fbgemm, ftrl, lion) else np.float32
    wanted = expected(rule, step, start[:, None], given, dtype)[:, 0]
    np.testing.assert_allclose(table.get(0, 9), wanted, rtol=0, atol=2e-5)


def test_a_dampened_first_gradient_of_zero_counts_as_the_first() -> None:
    """As in torch, whose velocity exists from then on."""
    table = SparseTable(TableSpec("t", dim=1, rule=CASES["dampening"][0]), BYTES)
    key, row = np.zeros(1, np.uint64), {"w": np.zeros(1, np.float32)}
    for g in (np.array([-0.0], np.float32), np.array([1.0], np.float32)):
        table.push(key, g[None])
        CASES["dampening"][1](row, g, table.spec.rule)
    assert table.pull(key)[0, 0] == row["w"][0] != 0


def test_a_later_rate_acts_from_then_on() -> None:
    for name, (rule, _) in CASES.items():
        table = SparseTable(TableSpec("t", dim=2, rule=rule, initializer=Initializer("constant", 1.0)), BYTES)
        key = np.zeros(1, np.uint64)
        before = table.pull(key)
        table.push(key, np.ones((1, 2), np.float32), 0.0)
        assert np.array_equal(table.pull(key), before), name
        table.push(key, np.ones((1, 2), np.float32), 0.01)
        assert not np.array_equal(table.pull(key), before), name


WORDS = {"sgd": 0, "adagrad": 16, "adam": 32, "rowwise_adagrad": 1, "ftrl": 32, "rmsprop": 16, "lion": 16}


def test_every_rule_says_how_many_numbers_a_row_keeps() -> None:
    """docs/rows.md has these."""
    assert {name: TableSpec("t", dim=16, rule=Rule(name)).num_words - 16 for name in RULES} == WORDS
    more = {"sgd": 16, "rowwise_adagrad": 17, "rmsprop": 32}
    found = {name: TableSpec("t", dim=16, rule=Rule(name, momentum=0.9)).num_words - 16 for name in more}
    assert found == more


def test_l1_makes_rows_of_zeros_which_a_shrink_drops() -> None:
    rule = Rule("ftrl", 0.1, options=(("l1", 2.0),))
    table, _ = trained(TableSpec("t", dim=3, rule=rule))
    keys = np.arange(NUM, dtype=np.uint64)
    values = table.pull(keys, create=False)
    is_zero = (values == 0).all(axis=1)
    assert 0 < is_zero.sum() < NUM
    assert sum(table.shrink(Shrink(where="norm == 0", max_share=1.0))) == is_zero.sum()
    assert table.num_rows == NUM - is_zero.sum()
    assert np.array_equal(table.pull(keys, create=False), values)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rule("ftrl", options=(("l1", -1.0),)), "'l1' 'ftrl' 0"),
        (lambda: Rule("ftrl", options=(("lr_power", 0.5),)), "'lr_power' -1 0.5"),
        (lambda: Rule("ftrl", options=(("beta", 0.0),)), "'beta' 1e-06"),
        (lambda: Rule("ftrl", weight_decay=0.1), "weight_decay 'l2'"),
        (lambda: Rule("rmsprop", options=(("alpha", 1.5),)), "'alpha' 1.5"),
        (lambda: Rule("sgd", options=(("dampening", float("nan")),)), "'dampening' nan"),
        (lambda: Rule("rowwise_adagrad", momentum=0.9, initial_accumulator=0.1), "momentum initial_accumulator"),
        (lambda: TableSpec("t", rule=Rule("adam", momentum=0.9)), "'t' momentum 'adam'"),
    ],
)
def test_wrong_settings_are_named_with_their_range(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(TableError) as found:
        make()
    assert all(word in str(found.value) for word in words.split())


@pytest.mark.parametrize("name", ["rowwise", "rowwise momentum", "ftrl l1 l2", "rmsprop both", "lion", "dampening"])
def test_rows_are_saved_with_state_by_two_servers_and_loaded_by_three(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_SAVE_ROOTS", str(tmp_path))
    spec = TableSpec("t", dim=3, rule=CASES[name][0], initializer=Initializer("uniform", -1.0, 1.0))
    with in_process(2) as servers:
        client = servers.client()
        client.create_table(spec)
        for ids, grads in pushes(3):
            client.push("t", ids, grads).result()
        parts = [part for saved in client.save(str(tmp_path / "m"), "save-1", True, 60.0) for part in saved.parts]
        for ids, grads in pushes(3):
            client.push("t", ids, grads).result()
        wanted = client.pull("t", range(NUM)).result()
    manifest = Manifest("save-1", 1, "full", 2, [described(spec, True, 10, NUM, [])], parts, num_files=len(parts))
    write_manifest(Storage(str(tmp_path / "m")), manifest)
    found = np.zeros_like(wanted)
    for shard in range(3):
        server = Server(BYTES)
        server.state.add_table(spec.for_shard(shard, 3))
        load_model(server.state, str(tmp_path / "m"), None)
        table: Any = server.state.table(spec.number)
        own = np.concatenate([keys for keys, _, _ in table.chunks()])
        for ids, grads in pushes(3):
            mine = np.isin(ids, own)
            table.push(ids[mine].astype(np.uint64), grads[mine])
        found[own.astype(np.int64)] = table.pull(own)
    assert np.array_equal(found, wanted)
    told = SavedModel(str(tmp_path / "m")).describe()["tables"][0]
    assert (told["rule"]["name"], told["num_row_states"]) == (spec.rule.name, spec.num_row_states)
    assert SavedModel(str(tmp_path / "m")).check() == len(parts)
    assert export_table(str(tmp_path / "m"), "t", str(tmp_path / "rows.txt"), "text", with_state=True) == NUM
    assert len((tmp_path / "rows.txt").read_text().split("\n")[0].split()) == 1 + spec.num_words


def test_state_of_another_meaning_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """RMSprop with momentum and centered RMSprop keep equally many numbers."""
    monkeypatch.setenv("FLEET_SAVE_ROOTS", str(tmp_path))
    spec = TableSpec("t", dim=3, rule=Rule("rmsprop", eps=1e-8, momentum=0.9))
    with in_process(1) as servers:
        client = servers.client()
        client.create_table(spec)
        for ids, grads in pushes(3):
            client.push("t", ids, grads).result()
        parts = [part for saved in client.save(str(tmp_path / "m"), "save-1", True, 60.0) for part in saved.parts]
        wanted = client.pull("t", range(NUM)).result()
    write_manifest(
        Storage(str(tmp_path / "m")),
        Manifest("save-1", 1, "full", 1, [described(spec, True, 10, NUM, [])], parts, num_files=len(parts)),
    )
    server = Server(BYTES)
    other = TableSpec("t", dim=3, rule=Rule("rmsprop", eps=1e-8, options=(("centered", 1.0),)))
    server.state.add_table(other)
    load_model(server.state, str(tmp_path / "m"), None)
    table: Any = server.state.table(spec.number)
    keys, rows, _ = next(table.chunks())
    assert np.array_equal(rows[:, :3], wanted[keys.astype(np.int64)])
    assert not rows[:, 3:].any()
    assert "'t'" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["rowwise momentum", "ftrl l1 l2", "rmsprop both", "lion", "dampening"])
def test_changes_are_logged_and_replayed_bit_by_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = list(logged_work.SPECS)
    specs[1] = TableSpec("wide", dim=16, rule=CASES[name][0])
    specs[5] = TableSpec("dense", "dense", size=7, rule=CASES[name][0])
    monkeypatch.setattr(logged_work, "SPECS", specs)
    server, sink = logged_work.make_server(), logged_work.MemorySink()
    handler = LoggedServer(server, [sink], clock=lambda: 0.0)
    handler.copy_to(sink.append, lambda: True)
    while handler.is_copying:
        handler.work()
    work = logged_work.Work(handler, 7)
    handler._clock = lambda: work.now
    work.steps(60)
    replay = Replay(logged_work.make_server())
    for frames in sink.entries:
        replay.apply(decode_entry(frames))
    replay.finish()
    assert logged_work.whole_state(replay.server, False) == logged_work.whole_state(server, False)


def test_a_row_with_a_negative_sum_of_squares_is_refused() -> None:
    for name in ("rowwise", "rowwise momentum", "ftrl", "rmsprop both"):
        spec = TableSpec("t", dim=2, rule=CASES[name][0])
        table = SparseTable(spec, BYTES)
        row = np.ones((1, spec.num_words), np.float32)
        row[0, {"rowwise": 2, "rowwise momentum": 4, "ftrl": 5, "rmsprop both": 3}[name]] = -1
        with pytest.raises(TableError, match="squares"):
            table.assign(np.zeros(1, np.uint64), row)
        table.assign(np.zeros(1, np.uint64), np.abs(row))


def test_the_names_of_fleet_optim_are_those_of_the_rules() -> None:
    own = {name for rule in RULES.values() for name in rule.optimizers if name.startswith("torchfleet.")}
    for name in own:
        kind = getattr(fleet.optim, name.rpartition(".")[2])
        assert f"{kind.__module__}.{kind.__qualname__}" == name
