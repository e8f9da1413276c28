"""The end of training in words."""

from __future__ import annotations

from dataclasses import replace

from torchfleet.api.job.printing import configuration, summary
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy

WORKER = {"steps": 1200, "samples": 5, "lookups": 9, "unforeseen_lookups": 0}


def told(dense: dict[int, int], sparse: dict[int, int], dropped: int = 0, **worker: int) -> list[str]:
    ages = {"staleness_dense": dense, "staleness_sparse": sparse, "dropped": dropped}
    return summary({"mode": "async", "worker": {**WORKER, **worker}, "servers": [], **ages}).splitlines()


def test_the_summary_has_one_line_of_staleness_over_all_tables():
    sparse = {0: 7, 2: 10, 16: 3}  # half of 20 are 2 updates old at most, and 19 of them 16
    assert told({1: 99, 3: 1}, sparse) == [
        "async: 1,200 steps, 5 samples on this worker",
        "staleness in updates, median: network 1 (95 %: 1), rows 2 (95 %: 16)",
    ]
    assert told({}, {0: 4})[1:] == ["staleness in updates, median: rows 0 (95 %: 0)"]
    assert told({}, {}) == ["async: 1,200 steps, 5 samples on this worker"]  # nothing is known: nothing is told


def test_the_summary_tells_of_lookups_that_were_not_foreseen():
    assert told({}, {}, unforeseen_lookups=2) == [
        "async: 1,200 steps, 5 samples on this worker; 2 of 9 lookups unforeseen (pulled one by one, as their ids were "
        "not known before the model was called)"
    ]


def test_the_summary_says_what_an_old_network_does():
    assert "hybrid" not in "".join(told({4: 10, 5: 1}, {}))
    _, table, dropped, advice = told({4: 10, 9: 11}, {}, dropped=3)
    assert "network 9" in table
    assert dropped.startswith("3 gradients")
    assert "9 updates old" in advice
    assert "a_sync_configs={'hybrid': True}" in advice


def test_the_settings_are_one_line_of_what_differs_or_a_table_of_all():
    info = RoleInfo(worker_index=1, num_workers=2, server_endpoints=("a:1", "b:1"), key_dir="keys")
    strategy = DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 7}, rpc_timeout=5.0)
    line = "torchfleet worker 1: 2 servers, 2 workers (keys), geo, a_sync_configs.k_steps=7, rpc_timeout=5.0"
    assert set(configuration(info, strategy).split(", ")) == set(line.split(", "))
    assert configuration(info, DistributedStrategy()) == "torchfleet worker 1: 2 servers, 2 workers (keys), sync"
    alone = RoleInfo(num_workers=1, server_endpoints=("a:1",), key_dir="keys")
    assert configuration(alone, DistributedStrategy()) == "torchfleet worker 0: 1 server, 1 worker (keys), sync"
    whole = configuration(replace(info, verbose=True), strategy)
    for name in ("rpc_retry_times", "a_sync_configs.send_queue_size", "k_steps"):
        assert name in whole
