"""Rows on the network in fewer bits: what a client gets, what a server takes, in how many bytes; and what is no row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.fleets import Talk, assert_ok, in_process, refusal

from torchfleet.ps.net.wire import Array, Command
from torchfleet.ps.server import sliced_pull
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.policy import AdmissionEntry
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec

BYTES = 1 << 26
KEYS = np.arange(40, dtype=np.uint64)
UNIFORM = Initializer("uniform", -1.0, 1.0)
PULLED = {"float32": 64, "bfloat16": 32, "float16": 32, "int8": 20}  # bytes of a row of 16


def spec_of(dim: int = 16, entry: AdmissionEntry | None = None, **row_format: Any) -> TableSpec:
    more = {} if entry is None else {"entry": entry}
    made = RowFormat(**row_format)
    return TableSpec("t", dim=dim, rule=Rule("sgd", lr=1.0), initializer=UNIFORM, format=made, **more)


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("wire", ["", "float32", "bfloat16", "float16", "int8"])
def test_a_client_gets_the_values_that_servers_have(dtype: str, wire: str, num_servers: int) -> None:
    spec = spec_of(dtype=dtype, wire=wire)
    with in_process(num_servers) as fleet:
        client = fleet.client()
        client.create_table(spec)
        found = client.pull("t", KEYS).result()
        exact = np.zeros_like(found)
        for server in fleet.servers:
            for keys, wide, _ in server.state.tables[spec.number].chunks():
                exact[keys.astype(np.int64)] = wide[:, :16]
        if wire in ("", dtype, "float32") or (dtype, wire) == ("int8", "float32"):
            assert np.array_equal(found, exact)
        gap = {"bfloat16": np.abs(exact) / 256, "float16": np.abs(exact) / 2048 + 2.0**-25}
        most = np.abs(exact).max(axis=1, keepdims=True) / 254
        assert (np.abs(found - exact) <= 1.001 * gap.get(wire, most)).all()
        assert np.array_equal(client.pull("t", KEYS).result(), found)
        assert not client.pull("t", [999], create=False).result().any()


@pytest.mark.parametrize("dtype", list(PULLED))
def test_a_reply_has_the_bytes_of_its_type(dtype: str) -> None:
    talk = Talk(Server(BYTES))
    for spec in (spec_of(dtype=dtype), spec_of(wire=dtype)):
        server = Server(BYTES)
        talk = Talk(server)
        talk.create(spec)
        reply = talk.ask(Command.PULL, Array(spec.number, KEYS))
        assert_ok(reply)
        assert reply.arrays[0].data.nbytes == len(KEYS) * PULLED[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_pull_in_slices_is_the_same(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, keys = spec_of(dtype=dtype), np.arange(5000, dtype=np.uint64)
    found = []
    for whole in (1 << 17, 100):
        monkeypatch.setattr(sliced_pull, "NEW_WHOLE", whole)
        monkeypatch.setattr(sliced_pull, "WHOLE", whole)
        with in_process(1) as fleet:
            client = fleet.client()
            client.create_table(spec)
            found.append(client.pull("t", keys).result())
    assert np.array_equal(*found)


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_gradients_arrive_unbiased_and_in_fewer_bytes(wire: str, num_servers: int) -> None:
    """The mean of 400 pushes is that of the gradients within five standard deviations, also where one is a thousandth
    of the largest of its row.
    """
    num, sent = 400, []
    row = np.array([1.0, -0.3, 0.001, 1e-6], np.float32)
    spec = TableSpec("t", dim=4, rule=Rule("sgd", lr=1.0), format=RowFormat(wire=wire))
    with in_process(num_servers) as fleet:
        client = fleet.client()
        client.create_table(spec)
        table = client._tables["t"]
        sent = [pair[1].data for pair in table.shard_gradients((KEYS, np.tile(row, (40, 1))), False)]
        for _ in range(num):
            client.push("t", KEYS, np.tile(row, (40, 1))).result()
        rows = np.concatenate([w[:, :4] for s in fleet.servers for _, w, _ in s.state.tables[spec.number].chunks()])
    assert sum(data.nbytes for data in sent) == 40 * 8  # of 16
    assert all(data.dtype == np.uint8 for data in sent)
    gap = np.full(4, 1 / 127) if wire == "int8" else np.abs(row) / 128
    assert (np.abs(-rows.mean(axis=0) / num - row) <= 5 * gap / 2 / np.sqrt(num * 40) + 1e-6 * np.abs(row)).all()


def test_shows_and_clicks_stay_exact() -> None:
    spec = spec_of(4, AdmissionEntry(show="s", click="c"), wire="int8")
    with in_process(1) as fleet:
        client = fleet.client()
        client.create_table(spec)
        client.pull("t", KEYS).result()
        grads = np.concatenate([np.ones((40, 4)), np.full((40, 3), [1001.0, 333.0, 123457.0])], axis=1)
        client.push("t", KEYS, grads.astype(np.float32)).result()
        columns = next(columns for _, _, columns in fleet.servers[0].state.tables[spec.number].chunks())
    assert set(columns["show"].tolist()) == {1001.0}
    assert set(columns["click"].tolist()) == {333.0}


def test_a_server_takes_float32_gradients_too_and_refuses_other_bytes() -> None:
    server, spec = Server(BYTES), spec_of(4, wire="bfloat16")
    talk = Talk(server)
    talk.create(spec)
    assert_ok(talk.push(spec, KEYS[:2], np.ones((2, 4), np.float32)))
    rates = Array(0, np.array([[np.nan]]))
    keys = Array(spec.number, KEYS[:2])
    before = talk.ask(Command.PULL, keys).arrays[0].data.copy()
    wrong = [np.zeros((2, 7), np.uint8), np.zeros((1, 8), np.uint8), np.zeros((2, 20), np.uint8), np.zeros((2, 4))]
    for data in wrong:
        assert refusal(talk.ask(Command.PUSH, rates, keys, Array(spec.number, data), once=True))
    infinite = np.full((2, 4), 0x7F80, np.uint16).view(np.uint8)
    assert refusal(talk.ask(Command.PUSH, rates, keys, Array(spec.number, infinite), once=True))[0] == "TableError"
    plain = TableSpec("plain", dim=4)
    talk.create(plain)
    bytes_of = Array(plain.number, np.zeros((2, 8), np.uint8))
    assert refusal(talk.ask(Command.PUSH, rates, Array(plain.number, KEYS[:2]), bytes_of, once=True))[0] == "WireError"
    assert np.array_equal(talk.ask(Command.PULL, keys).arrays[0].data, before)
