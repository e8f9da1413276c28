"""A server of a job without the job's script: it waits for its tables, loads, and serves as one with a script does."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.fleets import LEAST_PATIENCE, WAIT
from support.jobs import Clicks, make_part, sgd, strategy
from support.messages import naming

from torchfleet.api.job.worker_start import wait_for_servers
from torchfleet.base.errors import CheckpointError, RoleError
from torchfleet.base.role.role_info import SERVER, RoleInfo
from torchfleet.launch.roles import free_ports
from torchfleet.ps.server.job import bare_server
from torchfleet.ps.server.job.bare_server import BareServer
from torchfleet.ps.server.job.given_tables import NO_TABLES, ModelChoice
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.model_saving import save_model


class Job:
    """One bare server in a thread of this process, and a client of it."""

    def __init__(self, choice: ModelChoice) -> None:
        place = f"127.0.0.1:{free_ports(1)[0]}"
        info = RoleInfo(SERVER, 0, 1, 0, (place,))
        self.server, self.plan = BareServer(info), make_part(Clicks, sgd, strategy(), info).job.plan
        self.client = Client.connect([f"tcp://{place}"], patience=LEAST_PATIENCE)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(choice,), daemon=True)
        self._thread.start()

    def _serve(self, choice: ModelChoice) -> None:
        try:
            self.server.begin(choice)
            self.server.run()
        except BaseException as error:
            self.error = error
            self.server.close()

    def begin(self, dirname: str | None = None) -> None:
        """As worker 0 begins."""
        wait_for_servers(self.client, WAIT, lambda names: self.give(names, dirname))
        for spec in self.plan.specs:
            self.client.attach(spec)

    def give(self, names: Collection[str], dirname: str | None = None) -> None:
        self.client.give_tables(names, self.plan.specs, self.plan.layouts, dirname)

    def join(self) -> None:
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.server.end()
        self.client.close()
        self.join()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(ModelChoice())
    yield made
    made.begin()
    made.close()


def test_a_server_waits_for_its_tables_and_then_serves_them(job: Job) -> None:
    while list(job.client.unready(WAIT).values()) != [NO_TABLES]:
        pass
    job.begin()
    assert set(job.client.stats()[0]["tables"]) == {spec.name for spec in job.plan.specs}
    (table,) = job.plan.sparse
    before = job.client.pull(table, [1, 2]).result()
    job.client.push(table, [1, 2], np.ones_like(before), lr=0.25).result()
    np.testing.assert_array_equal(job.client.pull(table, [1, 2]).result(), before - 0.25)


def test_a_model_is_loaded_as_the_launcher_or_worker_0_names_it(tmp_path: Path) -> None:
    first = Job(ModelChoice())
    first.begin()
    (table,), (dense,) = first.plan.sparse, first.plan.dense
    rows = first.client.pull(table, [1, 2, 3]).result() + 1
    first.client.assign(table, [1, 2, 3], rows)
    first.client.set_dense(dense.spec.name, block := np.arange(dense.spec.size, dtype=np.float32))
    save_model(first.client, first.plan, str(tmp_path), WAIT)
    first.close()
    for choice, told in ((ModelChoice(str(tmp_path)), None), (ModelChoice(by_worker=True), str(tmp_path))):
        loaded = Job(choice)
        loaded.begin(told)
        assert loaded.client.stats()[0]["model"] == str(tmp_path)
        np.testing.assert_array_equal(loaded.client.pull(table, [1, 2, 3]).result(), rows)
        np.testing.assert_array_equal(loaded.client.pull_dense(dense.spec.name).result(), block)
        loaded.close()


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    job = Job(ModelChoice(str(tmp_path / "nowhere")))
    while NO_TABLES not in (found := job.client.unready(WAIT)).values():
        pass
    job.give(found)
    job.join()
    assert isinstance(job.error, CheckpointError)
    job.client.close()


def test_only_the_environment_of_a_server_makes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert bare_server.main([]) == 1
    assert "FLEET_ROLE=SERVER" in capsys.readouterr().err
    with pytest.raises(RoleError, match=naming("--of_job")):
        bare_server._run(ModelChoice())
