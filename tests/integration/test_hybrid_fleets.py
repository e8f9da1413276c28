"""Several workers in hybrid mode, as processes: against DistributedDataParallel and a serial replay; uneven data, a
loop without fleet.prefetch, and a worker that is killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import lines_naming
from support.paths import SCRIPTS
from support.scripts.hybrid_job import BATCH, DIM, NUM_IDS, STEPS, Model, batches
from support.scripts.launching import Started, forked_fleetrun

from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.embedding.initializers import Uniform

SCRIPT = str(SCRIPTS / "hybrid_job.py")
NUM_WORKERS = 2
HYBRID = {"hybrid": True}
THROUGH_SERVERS = {**HYBRID, "exchange": "servers"}
LEASE = 15.0  # seconds without a sign of life, after which a worker counts as lost


ADAM, SGD = Rule("adam", 0.05, 1e-8, 0.9, 0.999), Rule("sgd", 0.05)


def started(
    folder: Path,
    *options: str,
    launch: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    **settings: Any,
) -> Started:
    fleet = ("--server_num", "1", "--worker_num", str(NUM_WORKERS), *launch)
    arguments = ("--out", str(folder), "--settings", json.dumps(settings), *options)
    return forked_fleetrun(folder / "log", *fleet, SCRIPT, *arguments, **(environment or {}))


def notes(folder: Path) -> tuple[list[Any], Any]:
    """What the workers, and the server, wrote down."""
    return [np.load(folder / f"worker-{i}.npz") for i in range(NUM_WORKERS)], np.load(folder / "server.npz")


def log(folder: Path, worker: int) -> str:
    return (folder / "log" / "latest" / f"workerlog.{worker}").read_text()


def replayed_rows(folder: Path, order: Any, rule: Rule = ADAM) -> Any:
    """The pushes that the workers wrote down, one after another in this order, on a table of our own.

    A worker that was started again is another client: of each the server has got the first pushes, in their order.
    """
    spec = TableSpec("items", dim=DIM, rule=rule, initializer=Uniform(-0.05, 0.05))
    table = SparseTable(spec, 1 << 22)
    table.pull(np.arange(NUM_IDS, dtype=np.uint64))  # first values, which depend on the key alone
    num_done: Counter[tuple[int, int]] = Counter()
    for worker, client in order.tolist():
        clients = list(dict.fromkeys(each for number, each in order.tolist() if number == worker))
        push = np.load(folder / f"push-{worker}-{clients.index(client)}-{num_done[worker, client]}.npz")
        table.push(push["keys"], push["grads"], 0.05)
        num_done[worker, client] += 1
    return table.pull(np.arange(NUM_IDS, dtype=np.uint64))


def trained_by_torch(workers: list[Any]) -> dict[str, torch.Tensor]:
    """The network on the rows that each worker saw, its gradients averaged over the workers as torch's DDP does."""
    tower = Model().tower
    tower.load_state_dict({name: torch.from_numpy(workers[0][f"before.{name}"]) for name in tower.state_dict()})
    optimizer = torch.optim.Adam(tower.parameters(), lr=0.05)
    for step in range(STEPS):
        losses = []
        for number, worker in enumerate(workers):
            rows, y = torch.from_numpy(worker[f"rows.{step}"]), batches(number, STEPS)[step][1]
            losses.append((tower(rows.flatten(1)).squeeze(1) - y).square().mean())
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in tower.named_parameters()}


@pytest.mark.parametrize(
    ("options", "settings"),
    [(["--parts"], {}), ([], {"sharding": True}), ([], {"a_sync_configs": THROUGH_SERVERS})],
    ids=["by parts", "sharding", "through the servers"],
)
def test_rows_equal_a_replay_of_the_pushes_and_the_network_equals_data_parallelism(
    options: list[str], settings: dict[str, Any], tmp_path: Path
) -> None:
    """By ranks worker 1 has two batches more than worker 0: both end after those that both have, and it says what is
    left."""
    more = 0 if settings.get("a_sync_configs") == THROUGH_SERVERS else 2
    with started(tmp_path, "--more", str(more), *options, **settings) as job:
        assert job.wait() == 0, job.output
    workers, server = notes(tmp_path)
    np.testing.assert_array_equal(server["rows"], replayed_rows(tmp_path, server["order"]))
    assert Counter(server["order"][:, 0].tolist()) == {0: STEPS, 1: STEPS}
    for name, value in trained_by_torch(workers).items():
        for worker in workers:
            torch.testing.assert_close(torch.from_numpy(worker[f"after.{name}"]), value, rtol=1e-5, atol=1e-6)
    assert not more or lines_naming(log(tmp_path, 1), STEPS, "worker 0", more)
    assert lines_naming(job.output, "hybrid", STEPS, STEPS * BATCH)


@pytest.mark.gpu
def test_networks_on_a_gpu_equal_data_parallelism(tmp_path: Path) -> None:
    """Two workers share the GPU, which NCCL does not do: gloo carries their gradients."""
    with started(tmp_path, "--device", "cuda", environment={"FLEET_DIST_BACKEND": "gloo"}) as job:
        assert job.wait() == 0, job.output
    workers, server = notes(tmp_path)
    np.testing.assert_array_equal(server["rows"], replayed_rows(tmp_path, server["order"]))
    for name, value in trained_by_torch(workers).items():
        for worker in workers:
            torch.testing.assert_close(torch.from_numpy(worker[f"after.{name}"]), value, rtol=1e-4, atol=1e-5)


def test_a_worker_that_goes_on_alone_is_named_with_the_way_out(tmp_path: Path) -> None:
    with started(tmp_path, "--more", "1", "--no_prefetch") as job:
        assert job.wait() == 1
    text = f"worker 1 waits in step {STEPS + 1}, and worker 0 is in fleet.barrier_worker() after {STEPS} steps"
    assert text in job.output
    assert "fleet.prefetch(loader)" in job.output


def test_when_a_worker_is_killed_all_start_again_from_the_network_that_the_servers_keep(tmp_path: Path) -> None:
    configs = {**HYBRID, "hybrid_keep_seconds": 0.0}
    with started(tmp_path, "--die", "1", launch=("--max_restart", "1"), a_sync_configs=configs) as job:
        assert job.wait() == 0, job.output
    assert lines_naming(job.output, "worker 1", "SIGKILL")
    _, server = notes(tmp_path)
    np.testing.assert_array_equal(server["rows"], replayed_rows(tmp_path, server["order"]))
    after = [sorted(tmp_path.glob(f"push-{worker}-1-*")) for worker in range(NUM_WORKERS)]
    assert [len(pushes) for pushes in after] == [STEPS, STEPS]
    torch.manual_seed(0)
    first = Model().tower[0].weight.sum().item()
    again = [float(log(tmp_path, i).split("starts again with ")[1].split()[0]) for i in range(NUM_WORKERS)]
    assert again[0] == again[1]
    assert again[0] != pytest.approx(first, abs=1e-4)


def test_through_the_servers_the_others_go_on_and_the_killed_worker_comes_back_to_their_network(tmp_path: Path) -> None:
    """Worker 1 is killed behind the third round. Worker 0 makes the other three alone, and leaves its network with the
    servers; worker 1 begins with that when it is started again."""
    launch = ("--max_restart", "1", "--on_worker_loss", "go_on")
    environment = {"FLEET_WORKER_TIMEOUT": str(LEASE)}
    options = ("--die", "1", "--optimizer", "sgd", "--one_by_one")
    with started(tmp_path, *options, launch=launch, environment=environment, a_sync_configs=THROUGH_SERVERS) as job:
        assert job.wait() == 0, job.output
    assert lines_naming(job.output, "worker 1", "starting it again")
    assert not lines_naming(job.output, "starting all workers again")
    workers, server = notes(tmp_path)
    np.testing.assert_array_equal(server["rows"], replayed_rows(tmp_path, server["order"], SGD))
    assert [len(sorted(tmp_path.glob(f"push-{worker}-0-*"))) for worker in range(NUM_WORKERS)] == [STEPS, 2]
    tower = Model().tower
    tower.load_state_dict({name: torch.from_numpy(workers[0][f"after.{name}"]) for name in tower.state_dict()})
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.05)
    for step, (_, y) in enumerate(batches(1, STEPS)):
        rows = torch.from_numpy(workers[1][f"rows.{step}"])
        (tower(rows.flatten(1)).squeeze(1) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in tower.named_parameters():
        torch.testing.assert_close(torch.from_numpy(workers[1][f"after.{name}"]), value.detach(), rtol=1e-5, atol=1e-6)


def test_without_restarts_the_one_that_was_killed_is_named(tmp_path: Path) -> None:
    with started(tmp_path, "--die", "1") as job:
        assert job.wait() == 1
    assert lines_naming(job.output, "worker 1", "SIGKILL")


SIZES = (40, 3, 70, 0, 21)  # lines of files, of which worker 0 gets every second one: 131 and 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configs", "dynamic"),
    [
        ({"exchange": "servers"}, False),
        ({"exchange": "servers", "balance": True}, True),
        ({"exchange": "ranks"}, False),
    ],
    ids=["servers", "shared files", "ranks"],
)
def test_uneven_files_are_trained_or_counted(tmp_path: Path, configs: dict[str, Any], dynamic: bool) -> None:
    for i, size in enumerate(SIZES):
        (tmp_path / f"part-{i}").write_text("".join(f"1 {100 * i + j}\n" for j in range(size)))
    arguments = (str(SCRIPTS / "uneven_hybrid.py"), str(tmp_path), json.dumps(configs), *["--dynamic"] * dynamic)
    with forked_fleetrun(tmp_path / "log", "--server_num", "1", "--worker_num", "2", *arguments) as job:
        assert job.wait() == 0, job.output
    written = [json.loads((tmp_path / f"worker-{i}.json").read_text()) for i in range(2)]
    assert written[0]["network"] == written[1]["network"]
    for passed in zip(*(each["passes"] for each in written), strict=True):
        assert sum(own["samples"] + own["unused"] for own in passed) == sum(SIZES)
        if configs["exchange"] == "ranks":
            assert [own["samples"] + own["unused"] for own in passed] == [131, 3]
            assert [own["steps"] for own in passed] == [1, 1]
        elif not dynamic:
            assert [own["samples"] for own in passed] == [131, 3]
            assert [own["steps"] for own in passed] == [33, 1]
        else:
            assert [own["unused"] for own in passed] == [0, 0]


@pytest.mark.slow
def test_ranks_refuse_files_that_workers_share(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text("1 1\n")
    arguments = (str(SCRIPTS / "uneven_hybrid.py"), str(tmp_path), '{"exchange": "ranks"}', "--dynamic")
    with forked_fleetrun(tmp_path / "log", "--server_num", "1", "--worker_num", "2", *arguments) as job:
        assert job.wait() != 0
    assert lines_naming(log(tmp_path, 0) + log(tmp_path, 1), "DataError", "dynamic", "exchange", "servers")
