"""The end of training in words."""

from __future__ import annotations

from torchfleet.job.printing import summary


def test_the_summary_adds_up_the_staleness_of_all_servers():
    worker = {"steps": 1200, "samples": 5, "lookups": 9, "unforeseen_lookups": 2}
    servers = [
        {"tables": {"deep": {"staleness": {0: 3, 2: 1}}, "dense.0": {"staleness": {}}}},
        {"tables": {"deep": {"staleness": {0: 4, 16: 2}}, "dense.0": {"staleness": {}}}},
    ]
    first, *tables = summary({"mode": "async", "worker": worker, "servers": servers}).splitlines()
    assert first == "async: 1,200 steps, 5 samples on this worker, 2 of 9 lookups unforeseen"
    assert len(tables) == 1  # a table that nothing is known of is left out
    assert tables[0].startswith("staleness of 'deep'")
    assert tables[0].endswith("0: 7, 2: 1, 16: 2")
