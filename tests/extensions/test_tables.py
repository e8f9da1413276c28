"""What torchfleet is made of can be added to from a file outside it, with one line: here a row rule, a kind of table
and a transport, each in a module of its own, and each used as the built-in ones are: by a model that is trained, by
servers behind sockets, in hybrid mode, by saves, loads and inspection, in warm-up and in a server's log."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs, logged_work
from support.fleets import endpoints, in_process, in_threads
from support.messages import naming

from torchfleet.base.errors import FleetError, ModelError, TableError
from torchfleet.base.storage import Storage
from torchfleet.nn import Constant, SparseEmbedding
from torchfleet.observe.commands.inspect_saved import SavedModel
from torchfleet.ps.checkpoint.manifest import Manifest, described, write_manifest
from torchfleet.ps.net.addresses import TRANSPORTS, connect, listen
from torchfleet.ps.net.wire import DENSE_BACK, Role
from torchfleet.ps.server.job.warm import warm_up
from torchfleet.ps.server.log.log_entry import decode_entry
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.saves.table_loading import load_model
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import KINDS, RULES, Initializer, Rule, TableKind, TableSpec
from torchfleet.ps.worker.client.client import Client

ROOM = 1 << 24

SIGN_RULE = '''
import numpy as np
import torch
from torchfleet.ps.tables.settings.rule import RowRule

class SignSgd(RowRule):
    """w ← w - scale · lr · sign(g); the state counts updates, from 100 on."""

    num_states = 1
    options = {"scale": 1.0}
    optimizers = ("sign_rule.Sign",)
    torch_states = ("count",)
    counts_steps = False

    def initial_state(self, rule):
        return 100.0

    def settings(self, optimizer, group):
        return {"options": (("scale", group["scale"]),)}

    def apply_to_rows(self, rule, store, layout, at, grads, rate, step):
        width, offset = layout
        rows = store[: len(store) // width * width].reshape(-1, width)
        dim = grads.shape[1]
        rows[at, offset : offset + dim] -= np.float32(rate * rule.option("scale")) * np.sign(grads)
        rows[at, offset + dim : offset + 2 * dim] += 1

    def apply_to_block(self, rule, weights, states, grads, rate, step):
        weights -= np.float32(rate * rule.option("scale")) * np.sign(grads)
        states[0] += 1

class Sign(torch.optim.Optimizer):
    """The same, in plain torch."""

    def __init__(self, parameters, lr, scale=1.0):
        super().__init__(parameters, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["count"] = torch.full_like(parameter, 100.0)
                    grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    parameter -= np.float32(group["lr"] * group["scale"]) * grad.sign()
                    state["count"] += 1
'''

DICT_TABLE = '''
import numpy as np
from torchfleet.base.errors import TableError
from torchfleet.ps.tables.table import SavedSlice, Table

class DictTable(Table):
    """Rows of zeros in a Python dict, under SGD."""

    def __init__(self, spec, max_bytes, clock):
        super().__init__(spec)
        self.rows = {}

    @property
    def num_rows(self):
        return len(self.rows)

    num_words = property(lambda self: self.spec.dim)

    def check_pull(self, keys, create):
        return 4 * len(keys) * self.spec.dim

    def pull(self, keys, create, worker):
        zeros = np.zeros(self.spec.dim, np.float32)
        if create:
            for key in keys.tolist():
                self.rows.setdefault(key, zeros)
        found = [self.rows.get(key, zeros) for key in keys.tolist()]
        return np.array(found, np.float32).reshape(len(keys), self.spec.dim)

    def check_values(self, keys, values):
        if values.shape != (len(keys), self.spec.dim) or not np.isfinite(values).all():
            raise TableError(f"'{self.spec.name}' expects {self.spec.dim} numbers per key, found {values.shape}")

    check_assign = check_add = check_values

    def check_push(self, keys, grads, lr):
        self.check_values(keys, grads)

    def update(self, keys, grads, lr):
        self.add(keys, grads * np.float32(-(self.spec.rule.lr if lr is None else lr)))

    def add(self, keys, deltas):
        self.step += 1
        for key, delta in zip(keys.tolist(), deltas):
            self.rows[key] = self.rows.get(key, 0) + delta

    def assign(self, keys, values):
        self.rows.update(zip(keys.tolist(), values.copy()))

    def check_erase(self, keys):
        pass

    def erase(self, keys):
        return sum(self.rows.pop(key, None) is not None for key in keys.tolist())

    def walk(self, cursor, num_rows):
        keys = np.array(list(self.rows), np.uint64)
        return keys, self.pull(keys, False, None), 0

    def summarize(self, summary, num_rows):
        keys, values, _ = self.walk(0, num_rows)
        summary.add(keys, values, {})
        yield

    def save_slices(self, mode, num_rows):
        keys, values, _ = self.walk(0, num_rows)
        yield SavedSlice("rows", {"keys": keys, "rows": values})

    def restore(self, model):
        model.load_rows(self)

    def reserve(self, num_rows):
        pass

    def load_slice(self, saved):
        self.assign(saved.arrays["keys"], saved.arrays["rows"])

    def note_loaded(self):
        self.num_loaded = len(self.rows)
        return self.num_loaded

    def stats(self):
        return {"bytes": 4 * self.spec.dim * len(self.rows)}
'''

QUEUES = '''
import queue
import time

class Queues:
    """Servers and clients of one process that meet by name, and talk through queues."""

    def __init__(self):
        self.servers = {}

    def listen(self, endpoint, keys, insecure):
        self.servers[endpoint] = QueueSocket(endpoint)
        return self.servers[endpoint]

    def connect(self, endpoint, keys, role):
        return QueueChannel(self.servers[endpoint], role)

class QueueSocket:
    def __init__(self, endpoint):
        self.endpoint, self.requests = endpoint, queue.Queue()

    def serve(self, handler, is_over):
        while not is_over():
            try:
                peer, frames = self.requests.get(timeout=0.01)
                self.reply(handler.handle(peer, frames, peer.role))
            except queue.Empty:
                pass
            handler.work()
            self.reply(handler.tick(time.monotonic()))

    def reply(self, replies):
        for peer, frames in replies:
            peer.replies.put(frames)

    def close(self):
        pass

class QueueChannel:
    def __init__(self, socket, role):
        self.socket, self.role, self.replies = socket, role, queue.Queue()

    def send(self, frames):
        self.socket.requests.put((self, [bytes(memoryview(frame)) for frame in frames]))
        return True

    def receive(self, timeout):
        try:
            return self.replies.get(timeout=timeout) if timeout > 0 else self.replies.get_nowait()
        except queue.Empty:
            return None

    def reconnect(self):
        pass

    def close(self):
        pass

    def now(self):
        return time.monotonic()
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ModuleType]:
    """Write a module and import it, as a user would have it beside the training script."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, code: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return make


@pytest.fixture
def sign(module: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A rule that was added with one line, and the optimizer that it stands for."""
    made: ModuleType = module("sign_rule", SIGN_RULE)
    monkeypatch.setitem(RULES, "sign", made.SignSgd())
    return made


@pytest.fixture
def dict_table(module: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A kind of table that was added with one line."""
    made: ModuleType = module("dict_table", DICT_TABLE)
    monkeypatch.setitem(KINDS, "dict", TableKind(made.DictTable, has_size=False, samples=lambda: [dict_spec()]))
    return made


def dict_spec() -> TableSpec:
    return TableSpec("t", "dict", dim=2, rule=Rule("sgd", lr=1.0))


class Layers(torch.nn.Module):
    """Embeddings of torch, or of ours in the same places, and a tower."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.ids: torch.nn.Module = torch.nn.Embedding(30, 4, sparse=True)
        if options:
            self.ids = SparseEmbedding(4, name="ids", initializer=Constant(0.0), **options)
        self.tower = torch.nn.Linear(8, 1)

    def forward(self, batch: jobs.Batch) -> torch.Tensor:
        return torch.tanh(self.tower(self.ids(batch["items"]).flatten(1))).squeeze(1)


BATCHES = jobs.worker_batches(0, 6)


def plain_values(make_optimizer: Any, start: Any) -> dict[str, torch.Tensor]:
    """What the steps make of a model in plain torch, from the values of another on."""
    model = Layers()
    model.load_state_dict(start)
    optimizer = make_optimizer(model)
    for batch in BATCHES:
        jobs.plain_step(model, [optimizer], batch)
    return jobs.values_of(model)


def start_of(part: jobs.Part) -> dict[str, torch.Tensor]:
    rows = part.worker.client.pull("ids", np.arange(30)).result()
    tower = {f"tower.{name}": value.clone() for name, value in part.model.tower.state_dict().items()}
    return {"ids.weight": torch.from_numpy(rows), **tower}


def trained(part: jobs.Part) -> dict[str, torch.Tensor]:
    start = start_of(part)
    for batch in BATCHES:
        part.step(batch)
        part.flush()
    return start


def replay_of(monkeypatch: pytest.MonkeyPatch, specs: list[TableSpec]) -> None:
    """Random requests, some of them on these tables, through the log and into another server: both are the same."""
    monkeypatch.setattr(logged_work, "SPECS", specs)
    server, sink = logged_work.make_server(), logged_work.MemorySink()
    handler = LoggedServer(server, [sink], clock=lambda: 0.0)
    handler.copy_to(sink.append, lambda: True)
    while handler.is_copying:
        handler.work()
    work = logged_work.Work(handler, 7)
    handler._clock = lambda: work.now
    work.steps(200)
    copy = logged_work.MemorySink()
    handler.copy_to(copy.append, lambda: True)
    while handler.is_copying:
        handler.work()
    for entries in (sink.entries, copy.entries):
        replay = Replay(logged_work.make_server())
        for frames in entries:
            replay.apply(decode_entry(frames))
        replay.finish()
        assert logged_work.whole_state(replay.server, False) == logged_work.whole_state(server, False)
    assert all(table.step for table in server.state.tables.values())


class TestRowRule:
    def test_a_new_rule_trains_rows_and_blocks_through_a_server(self, sign: ModuleType) -> None:
        rule = Rule("sign", lr=0.5)
        rows = TableSpec("rows", dim=2, rule=rule, initializer=Initializer("constant", 3.0))
        dense = TableSpec("dense", "dense", size=3, rule=rule)
        with in_process(2) as fleet:
            client = fleet.client()
            client.create_table(rows)
            client.create_table(dense)
            keys = [7, 8, 7]  # the two gradients of key 7 are summed before the rule sees them
            client.pull("rows", keys).result()
            grads = np.array([[4, -1], [0, 2], [-1, -1]], np.float32)
            block = np.array([-9, 0, 9], np.float32)
            for _ in range(2):
                found = client.push_tables({"rows": (keys, grads), "dense": block}, flags=DENSE_BACK).result()
            assert client.pull("rows", [7, 8]).result().tolist() == [[2, 4], [3, 2]]
            assert found["dense"].tolist() == [1, 0, -1]
            tables = [table for server in fleet.servers for table in server.state.tables.values()]
            states = [row[2:].tolist() for table in tables[::2] for _, part, _ in table.chunks() for row in part]
            assert states == [[102, 102], [102, 102]]

    @pytest.mark.parametrize("mode", ["sync", "hybrid"])
    def test_a_model_is_trained_by_it_as_by_torch(self, sign: ModuleType, mode: str) -> None:
        def make(model: torch.nn.Module) -> Any:
            return sign.Sign(model.parameters(), lr=0.125, scale=2.0)

        with jobs.one_worker(Layers(num_embeddings=30), make, mode=mode, num_servers=2) as part:
            start = trained(part)
            values = {"ids": part.rows("ids", range(30)), **dict(part.model.tower.named_parameters(prefix="tower"))}
            jobs.assert_equal_values(values, plain_values(make, start))

    def test_hybrid_keeps_its_state_on_the_servers(self, sign: ModuleType) -> None:
        servers = jobs.Servers(1)

        def make(model: torch.nn.Module) -> Any:
            return sign.Sign(model.parameters(), lr=0.125)

        with jobs.one_worker(Layers(num_embeddings=30), make, mode="hybrid", servers=servers) as part:
            trained(part)
            hybrid = part.worker._hybrid
            hybrid.put_network()
            weights, counts = servers.table("dense.0").block()
            assert weights.tolist() == [*part.model.tower.weight.flatten().tolist(), part.model.tower.bias.item()]
            assert counts.tolist() == [100.0 + len(BATCHES)] * 9
            optimizer = hybrid._network.optimizer.inner
            optimizer.state.clear()
            hybrid._kept.take(part.worker.client)
            assert optimizer.state[part.model.tower.bias]["count"].tolist() == [100.0 + len(BATCHES)]

    def test_it_is_saved_loaded_and_inspected(
        self, sign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = TableSpec("t", dim=2, rule=Rule("sign", lr=1.0, options=(("scale", 4.0),)))
        loaded = saved_and_loaded(spec, tmp_path, monkeypatch)
        keys, rows, _ = next(loaded.chunks())
        expected = {key: [-4.0 if key else 0.0, -4.0, 101.0, 101.0] for key in range(9)}
        assert dict(zip(keys.tolist(), rows.tolist(), strict=True)) == expected

    def test_its_kernels_are_warmed_up(self, sign: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        used = []
        for name in ("apply_to_rows", "apply_to_block"):
            apply = getattr(sign.SignSgd, name)
            monkeypatch.setattr(sign.SignSgd, name, lambda *args, n=name, f=apply: used.append(n) or f(*args))
        warm_up()
        assert set(used) == {"apply_to_rows", "apply_to_block"}

    def test_its_changes_are_logged_and_replayed(self, sign: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        specs = list(logged_work.SPECS)
        specs[1] = TableSpec("wide", dim=16, rule=Rule("sign"))
        specs[5] = TableSpec("dense", "dense", size=7, rule=Rule("sign"))
        replay_of(monkeypatch, specs)

    def test_a_rule_that_was_not_added_is_refused_with_those_that_were(self) -> None:
        with pytest.raises(TableError, match=naming("rule.name", "'sgd'", "'adagrad'", "'adam'", "'sign'")):
            Rule("sign")

    def test_an_option_that_it_does_not_have_is_refused_with_those_that_it_has(self, sign: ModuleType) -> None:
        with pytest.raises(TableError, match=r"'sign'.*'scale'.*'slope'"):
            Rule("sign", options=(("slope", 1.0),))


def saved_and_loaded(spec: TableSpec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A table after one push of ten rows, of which one is dropped: saved by two servers, loaded by one."""
    monkeypatch.setenv("FLEET_SAVE_ROOTS", str(folder))
    with in_process(2) as fleet:
        client = fleet.client()
        client.create_table(spec)
        assert client.pull("t", range(10)).result().tolist() == [[0, 0]] * 10
        client.push("t", range(10), np.arange(20, dtype=np.float32).reshape(10, 2)).result()
        client.erase("t", [9])
        assert sum(stats["tables"]["t"]["rows"] for stats in client.stats()) == 9
        assert sum(found["rows"] for found in client.inspect("t")) == 9
        saved = client.save(str(folder / "model"), "save-1", True, 60.0)
        parts = [part for answer in saved for part in answer.parts]
    table = described(spec, True, 1, 9, [])
    write_manifest(
        Storage(str(folder / "model")), Manifest("save-1", 1, "full", 2, [table], parts, num_files=len(parts))
    )
    server = Server(ROOM)
    server.state.add_table(spec)
    load_model(server.state, str(folder / "model"), None)
    loaded = server.state.table(spec.number)
    assert (loaded.num_rows, loaded.step) == (9, 1)
    assert SavedModel(str(folder / "model")).describe()["tables"][0]["kind"] == spec.kind
    return loaded


class TestTableKind:
    def test_a_new_kind_is_saved_loaded_and_inspected(
        self, dict_table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded = saved_and_loaded(dict_spec(), tmp_path, monkeypatch)
        expected = [[-2.0 * i, -2.0 * i - 1] for i in range(9)]
        assert loaded.pull(np.arange(9, dtype=np.uint64), False, None).tolist() == expected

    def test_a_layer_that_names_it_is_trained_as_by_torch(self, dict_table: ModuleType) -> None:
        def make(model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.25)

        with jobs.one_worker(Layers(kind="dict"), make, num_servers=2) as part:
            start = trained(part)
            values = {"ids": part.rows("ids", range(30)), **dict(part.model.tower.named_parameters(prefix="tower"))}
            assert part.worker.stats()["servers"][0]["tables"]["ids"]["kind"] == "dict"
        jobs.assert_equal_values(values, plain_values(make, start), 1e-6)

    def test_it_is_served_behind_sockets(self, dict_table: ModuleType, tmp_path: Path) -> None:
        with in_threads(endpoints("ipc", 2, tmp_path)) as fleet:
            client = fleet.client()
            client.create_table(dict_spec())
            client.pull("t", range(10)).result()
            client.push("t", range(10), np.ones((10, 2), np.float32)).result()
            client.assign("t", [3], np.array([[5, 6]], np.float32))
            assert client.pull("t", [2, 3, 77]).result().tolist() == [[-1, -1], [5, 6], [0, 0]]
            with pytest.raises(TableError, match=r"'t'.*'dict'"):
                client.shrink("t", Shrink(max_rows=1))

    def test_it_is_warmed_up(self, dict_table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        used = []
        update = dict_table.DictTable.update
        monkeypatch.setattr(dict_table.DictTable, "update", lambda *args: used.append(args) or update(*args))
        warm_up()
        assert used

    def test_its_changes_are_logged_and_replayed(self, dict_table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        replay_of(monkeypatch, [TableSpec("narrow", "dict", dim=2), *logged_work.SPECS[1:]])

    def test_a_kind_that_was_not_added_is_refused_with_those_that_were(self) -> None:
        with pytest.raises(TableError, match=r"'sparse', 'array', 'dense'.*'dict'"):
            dict_spec()
        with pytest.raises(ModelError, match=r"'sparse'.*'dict'"):
            SparseEmbedding(4, kind="dict")


class TestTransport:
    def test_a_new_transport_carries_requests_and_replies(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(TRANSPORTS, "queue", module("queue_transport", QUEUES).Queues())
        server = Server(ROOM)
        socket = listen("queue://first")
        thread = threading.Thread(target=socket.serve, args=(server, lambda: server.is_stopping), daemon=True)
        thread.start()
        with Client.connect(["queue://first"], role=Role.LAUNCHER) as client:
            client.ping()
            client.create_table(TableSpec("t", dim=2, rule=Rule("sgd", lr=1.0)))
            assert client.pull("t", [1, 2]).result().tolist() == [[0, 0], [0, 0]]
            client.push("t", [2], np.array([[1, 2]], np.float32)).result()
            assert client.pull("t", [1, 2]).result().tolist() == [[0, 0], [-1, -2]]
            client.stop_servers()
        thread.join(60)
        assert not thread.is_alive()
        socket.close()

    def test_an_address_that_no_transport_serves_is_refused_with_those_that_are(self) -> None:
        with pytest.raises(FleetError, match=naming("queue://first", "tcp://", "ipc://")):
            listen("queue://first")
        with pytest.raises(FleetError, match=naming("'queue://first'", "tcp://", "ipc://")):
            connect("queue://first")
