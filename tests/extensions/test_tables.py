"""What torchfleet is made of can be added to from a file outside it, with one line: here a row rule, a kind of table
and a transport, each in a module of its own, and each used as the built-in ones are."""

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
from support.fleets import in_process
from support.messages import naming

from torchfleet.base.errors import FleetError, TableError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Manifest, described, write_manifest
from torchfleet.ps.net.addresses import TRANSPORTS, connect, listen
from torchfleet.ps.net.wire import DENSE_BACK, Role
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.table_loading import load_model
from torchfleet.ps.tables.settings.spec import KINDS, RULES, Initializer, Rule, TableKind, TableSpec
from torchfleet.ps.worker.client.client import Client

ROOM = 1 << 24

SIGN_RULE = '''
import numpy as np
from torchfleet.ps.tables.settings.spec import RowRule

class SignSgd(RowRule):
    """w ← w - lr · sign(g); the state counts updates."""

    num_states = 1

    def initial_state(self, rule):
        return 100.0

    def apply_to_rows(self, rule, store, layout, at, grads, rate, step):
        width, offset = layout
        rows = store[: len(store) // width * width].reshape(-1, width)
        dim = grads.shape[1]
        rows[at, offset : offset + dim] -= np.float32(rate) * np.sign(grads)
        rows[at, offset + dim : offset + 2 * dim] += 1

    def apply_to_block(self, rule, weights, states, grads, rate, step):
        weights -= np.float32(rate) * np.sign(grads)
        states[0] += 1
'''

DICT_TABLE = '''
import numpy as np
from torchfleet.base.errors import TableError
from torchfleet.ps.tables.table import Staleness
from torchfleet.ps.tables.table import SavedSlice

class DictTable:
    """Rows in a Python dict, under SGD."""

    def __init__(self, spec, max_bytes, clock):
        self.spec, self.step, self.staleness, self.rows = spec, 0, Staleness(), {}

    @property
    def num_rows(self):
        return len(self.rows)

    def check_pull(self, keys, create):
        return 4 * len(keys) * self.spec.dim

    def pull(self, keys, create, worker):
        zeros = np.zeros(self.spec.dim, np.float32)
        if create:
            for key in keys.tolist():
                self.rows.setdefault(key, zeros)
        return np.array([self.rows.get(key, zeros) for key in keys.tolist()]).reshape(len(keys), self.spec.dim)

    def admit_waiting(self):
        pass

    def whole(self):
        return None

    def check_push(self, keys, grads, lr):
        self.check_values(keys, grads)

    def check_add(self, keys, deltas):
        self.check_values(keys, deltas)

    def update(self, keys, grads, lr):
        self.add(keys, grads * np.float32(-(self.spec.rule.lr if lr is None else lr)))

    def add(self, keys, deltas):
        self.step += 1
        for key, delta in zip(keys.tolist(), deltas):
            self.rows[key] = self.rows.get(key, 0) + delta

    def mean(self, pushes):
        keys, grads = zip(*pushes)
        return np.concatenate(keys), np.concatenate(grads) / np.float32(len(pushes))

    def check_assign(self, keys, values):
        self.check_values(keys, values)

    def assign(self, keys, values):
        self.rows.update(zip(keys.tolist(), values.copy()))

    def check_erase(self, keys):
        pass

    def erase(self, keys):
        return sum(self.rows.pop(key, None) is not None for key in keys.tolist())

    def check_shrink(self, policy):
        raise TableError(f"'{self.spec.name}' has no policies")

    def shrink(self, policy):
        self.check_shrink(policy)

    def walk(self, cursor, num_rows):
        keys = np.array(list(self.rows), np.uint64)
        return keys, self.pull(keys, False, None), 0

    def summarize(self, summary, num_rows):
        keys = np.array(list(self.rows), np.uint64)
        summary.add(keys, self.pull(keys, False, None), {})
        yield

    def begin_save(self, is_committed):
        pass

    def save_slices(self, mode, num_rows):
        keys = np.array(list(self.rows), np.uint64)
        yield SavedSlice("rows", {"keys": keys, "rows": self.pull(keys, False, None)})

    def restore(self, model):
        model.load_rows(self)

    @property
    def num_words(self):
        return self.spec.dim

    def reserve(self, num_rows):
        pass

    def check_values(self, keys, values):
        if values.shape != (len(keys), self.spec.dim):
            raise TableError(f"'{self.spec.name}' expects {self.spec.dim} numbers per key, found {values.shape}")

    def load_slice(self, saved):
        if saved.kind == "rows":
            self.assign(saved.arrays["keys"], saved.arrays["rows"])

    def note_loaded(self):
        return len(self.rows)

    def stats(self):
        return {"rows": len(self.rows), "bytes": 0, "step": self.step, "staleness": self.staleness.counts()}
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


class TestRowRule:
    def test_a_new_rule_trains_rows_and_blocks_through_a_server(
        self, module: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(RULES, "sign", module("sign_rule", SIGN_RULE).SignSgd())
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

    def test_a_rule_that_was_not_added_is_refused_with_those_that_were(self) -> None:
        with pytest.raises(TableError, match=naming("rule.name", "'sgd'", "'adagrad'", "'adam'", "'sign'")):
            Rule("sign")


def dict_spec() -> TableSpec:
    return TableSpec("t", "dict", dim=2, rule=Rule("sgd", lr=1.0))


class TestTableKind:
    def test_a_new_kind_is_served_saved_and_loaded(
        self, module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("FLEET_SAVE_ROOTS", str(tmp_path))
        monkeypatch.setitem(KINDS, "dict", TableKind(module("dict_table", DICT_TABLE).DictTable, has_size=False))
        spec = dict_spec()
        with in_process(2) as fleet:
            client = fleet.client()
            client.create_table(spec)
            assert client.pull("t", range(10)).result().tolist() == [[0, 0]] * 10
            client.push("t", range(10), np.arange(20, dtype=np.float32).reshape(10, 2)).result()
            client.assign("t", [3], np.array([[5, 6]], np.float32))
            client.erase("t", [9])
            expected = [*([-2.0 * i, -2.0 * i - 1] for i in range(3)), [5, 6], [-8, -9]]
            assert client.pull("t", range(5)).result().tolist() == expected
            assert sum(stats["tables"]["t"]["rows"] for stats in client.stats()) == 9
            assert sum(found["rows"] for found in client.inspect("t")) == 9
            saved = client.save(str(tmp_path / "model"), "save-1", True, 60.0)
            parts = [part for answer in saved for part in answer.parts]
        table = described(spec, spec.num_states, 1, 9, [])
        write_manifest(
            Storage(str(tmp_path / "model")), Manifest("save-1", 1, "full", 2, [table], parts, num_files=len(parts))
        )
        server = Server(ROOM)  # one, where two have saved
        server.state.add_table(spec)
        load_model(server.state, str(tmp_path / "model"), None)
        loaded = server.state.table(spec.number)
        assert loaded.num_rows == 9
        assert loaded.step == 1
        assert loaded.pull(np.arange(5, dtype=np.uint64), False, None).tolist() == expected

    def test_a_kind_that_was_not_added_is_refused_with_those_that_were(self) -> None:
        with pytest.raises(TableError, match=naming("kind", "'sparse'", "'array'", "'dense'", "'dict'")):
            dict_spec()


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
        thread.join(10)
        assert not thread.is_alive()
        socket.close()

    def test_an_address_that_no_transport_serves_is_refused_with_those_that_are(self) -> None:
        with pytest.raises(FleetError, match=naming("queue://first", "tcp://", "ipc://")):
            listen("queue://first")
        with pytest.raises(FleetError, match=naming("'queue://first'", "tcp://", "ipc://")):
            connect("queue://first")
