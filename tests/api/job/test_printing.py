"""The end of training in words."""

from __future__ import annotations

from dataclasses import replace

from support.messages import names

from torchfleet.api.job.printing import configuration, summary
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy

WORKER = {"steps": 1200, "samples": 5, "lookups": 9, "unforeseen_lookups": 0, "unforeseen_wait": 0.0}


def told(dense: dict[int, int], sparse: dict[int, int], dropped: int = 0, **worker: float) -> list[str]:
    ages = {"staleness_dense": dense, "staleness_sparse": sparse, "dropped": dropped}
    return summary({"mode": "async", "worker": {**WORKER, **worker}, "servers": [], **ages}).splitlines()


def test_the_summary_has_one_line_of_staleness_over_all_tables():
    sparse = {0: 7, 2: 10, 16: 3}  # half of 20 are 2 updates old at most, and 19 of them 16
    steps, ages = told({1: 99, 3: 1}, sparse)
    assert names(steps, "async", "1,200 steps", "5 samples")
    assert names(ages, "network 1 (95 %: 1)", "rows 2 (95 %: 16)")
    (ages,) = told({}, {0: 4})[1:]
    assert names(ages, "rows 0 (95 %: 0)")
    assert "network" not in ages
    assert told({}, {}) == [steps]  # nothing is known: nothing is told


def test_the_summary_tells_of_lookups_that_were_not_foreseen_if_they_took_time():
    (line,) = told({}, {}, unforeseen_lookups=2, unforeseen_wait=0.12)
    assert names(line, "1,200 steps", "5 samples", "2 of 9 lookups", "12 %")
    (line,) = told({}, {}, unforeseen_lookups=2, unforeseen_wait=0.001)
    assert "lookups" not in line


def test_the_summary_says_what_an_old_network_does():
    assert "hybrid" not in "".join(told({1: 10, 2: 1}, {}))
    _, table, dropped, advice = told({4: 10, 9: 11}, {}, dropped=3)
    assert "network 9" in table
    assert dropped.startswith("3 gradients")
    assert names(advice, 9)
    assert "a_sync_configs={'hybrid': True}" in advice


def test_the_summary_counts_the_samples_of_rounds_with_a_quorum():
    ages = {"staleness_dense": {}, "staleness_sparse": {}, "dropped": 0}
    counts = {"on_time": 880, "late": 90, "dropped": 20, "waiting": 10}
    stats = {"mode": "hybrid", "worker": WORKER, "servers": [], **ages}
    quorum = {"quorum": 7, "gradients": dict.fromkeys(counts, 1), "samples": counts}
    _, line = summary({**stats, "quorum": quorum}).splitlines()
    assert names(line, "quorum 7", "1,000 samples", 100, "10.0%", 20, "2.0%")
    _, line = summary({**stats, "quorum": {**quorum, "samples": dict.fromkeys(counts, 0.0)}}).splitlines()
    assert names(line, "4 gradients", 2, 1)


def test_the_settings_are_one_line_of_what_differs_or_a_table_of_all():
    info = RoleInfo(worker_index=1, num_workers=2, server_endpoints=("a:1", "b:1"), key_dir="keys")
    strategy = DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 7}, rpc_timeout=5.0)
    line = configuration(info, strategy)
    assert names(line, "worker 1", "2 servers", "2 workers", "keys", "geo")
    assert sorted(field for field in line.split(", ") if "=" in field) == [
        "a_sync_configs.k_steps=7",
        "rpc_timeout=5.0",
    ]
    assert names(configuration(info, DistributedStrategy()), "worker 1", "2 servers", "2 workers", "keys", "sync")
    alone = RoleInfo(num_workers=1, server_endpoints=("a:1",), key_dir="keys")
    assert names(configuration(alone, DistributedStrategy()), "worker 0", "1 server", "1 worker", "keys", "sync")
    whole = configuration(replace(info, verbose=True), strategy)
    for name in ("rpc_retry_times", "a_sync_configs.send_queue_size", "k_steps"):
        assert name in whole
