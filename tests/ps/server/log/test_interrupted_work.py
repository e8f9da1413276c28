"""A server that dies in the middle of a save, a delta save or a shrink: the next one does the whole of it, once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.extras import Late
from support.logged_work import MemorySink

from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import reserve
from torchfleet.ps.net.transport import InProcess, InProcessChannel
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log.log_entry import decode_entry
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.saves import table_saving
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

safetensors = Late("safetensors.numpy")

NUM_ROWS = 40_000
SPEC = TableSpec("rows", dim=2, rule=Rule("adagrad"), initializer=Initializer("constant", 0.0))
KEYS = np.arange(NUM_ROWS, dtype=np.uint64)


class Mortal(InProcess):
    """A server that dies after a number of calls, as often as `deaths` says; the next one goes on from its entries."""

    def __init__(self, deaths: Sequence[int]) -> None:
        self.sink = MemorySink()
        super().__init__(self._logged(Server(), 0))
        self.deaths = list(deaths)
        self.calls: int | None = None  # that are left to live

    @property
    def server(self) -> Server:
        assert isinstance(self._server, LoggedServer)
        return self._server.server

    def doom(self) -> None:
        self.calls = self.deaths.pop(0) if self.deaths else None

    def call(self, channel: InProcessChannel, frames: Sequence[Frame] | None) -> None:
        if self.calls is not None:
            self.calls -= 1
            if self.calls <= 0:
                self._die()
        super().call(channel, frames)

    def _die(self) -> None:
        replay = Replay(Server())
        for entry in self.sink.entries:
            replay.apply(decode_entry(entry))
        replay.finish()
        self.sink = MemorySink()
        self._server = self._logged(replay.server, replay.index)
        self.doom()

    def _logged(self, server: Server, index: int) -> LoggedServer:
        logged = LoggedServer(server, [self.sink], index)
        logged.copy_to(self.sink.append, lambda: True)
        while logged.is_copying:
            logged.work()
        return logged


def begun(deaths: Sequence[int], spec: TableSpec = SPEC) -> tuple[Mortal, Client]:
    mortal = Mortal(deaths)
    client = Client([mortal.connect()], patience=Patience(60.0, pause=0.02))
    client.create_table(spec)
    client.push("rows", KEYS, np.stack([KEYS + 1, KEYS + 2], 1).astype(np.float32)).result()
    return mortal, client


def saved(client: Client, folder: Path, number: int, token: int, parent: int = 0) -> dict[int, bytes]:
    """Make a save; the rows in its files."""
    storage, found = Storage(str(folder)), {}
    with reserve(storage, number, token) as held:
        (made,) = client.save(storage.path, held.folder, True, 60.0, token=token, parent=parent, delta=bool(parent))
        for part in made.parts:
            arrays = safetensors.load_file(folder / held.folder / part.file)
            if "rows" in arrays:  # else keys that lost theirs
                assert not found.keys() & arrays["keys"].tolist(), "a row is there twice"
                found |= {
                    key: row.tobytes() for key, row in zip(arrays["keys"].tolist(), arrays["rows"][:, :2], strict=True)
                }
        held.release()
    return found


@pytest.mark.parametrize("deaths", [(8, 5), (2, 2, 2, 12)], ids=str)
def test_a_save_is_whole_although_servers_die_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: tuple[int, ...]
) -> None:
    monkeypatch.setattr(table_saving, "SLICE", 1 << 11)  # twenty slices
    mortal, client = begun(deaths)
    tokens = [secrets.randbits(62) + 1 for _ in range(2)]
    mortal.doom()
    rows = saved(client, tmp_path, 1, tokens[0])
    assert not mortal.deaths, "it was over before the last server died"
    values = client.pull("rows", KEYS).result()
    assert rows == {key: values[key].tobytes() for key in range(NUM_ROWS)}
    changed = np.arange(100, 30_000, 7, dtype=np.uint64)
    client.push("rows", changed, np.ones((len(changed), 2), np.float32)).result()
    mortal.deaths = list(deaths)
    mortal.doom()
    delta = saved(client, tmp_path, 2, tokens[1], tokens[0])
    values = client.pull("rows", KEYS).result()
    assert {key: values[key].tobytes() for key in changed.tolist()}.items() <= delta.items()
    assert delta.items() <= {key: values[key].tobytes() for key in range(NUM_ROWS)}.items()


def test_a_shrink_drops_as_much_as_it_would_have_dropped_although_servers_die_in_it() -> None:
    mortal, client = begun((2, 2, 2), TableSpec("rows", dim=2, shrink=Shrink(max_rows=1_000_000)))
    mortal.doom()
    dropped = client.shrink("rows", Shrink(max_rows=1000, max_share=1.0))
    assert len(mortal.deaths) < 2, "it was over before a server died"
    assert dropped == {"rows": NUM_ROWS - 1000}
    assert client.stats()[0]["tables"]["rows"]["rows"] == 1000
