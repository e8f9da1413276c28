"""The end of training in words."""

from __future__ import annotations

from torchfleet.job.printing import summary


def test_the_summary_adds_up_the_staleness_of_all_servers():
    worker = {"steps": 1200, "samples": 5, "lookups": 9, "unforeseen_lookups": 2}
    servers = [
        {
            "tables": {
                "deep": {"kind": "sparse", "staleness": {0: 3, 2: 1}},
                "dense.0": {"kind": "dense", "staleness": {}},
            }
        },
        {
            "tables": {
                "deep": {"kind": "sparse", "staleness": {0: 4, 16: 2}},
                "dense.0": {"kind": "dense", "staleness": {}},
            }
        },
    ]
    ages = {"staleness_dense": {}, "staleness_sparse": {0: 7, 2: 1, 16: 2}, "dropped": 0}
    first, *tables = summary({"mode": "async", "worker": worker, "servers": servers, **ages}).splitlines()
    assert first == (
        "async: 1,200 steps, 5 samples on this worker; 2 of 9 lookups unforeseen (pulled one by one, as their ids were "
        "not known before the model was called)"
    )
    assert len(tables) == 1  # a table that nothing is known of is left out
    assert tables[0].startswith("staleness of 'deep' (rows;")
    assert tables[0].endswith("0: 7, 2: 1, 16: 2")


def test_many_tables_share_a_line():
    worker = {"steps": 9, "samples": 9, "lookups": 9, "unforeseen_lookups": 0}
    tables = {f"C{i}": {"kind": "array", "staleness": {0: 1, i: 2}} for i in range(1, 5)}
    tables["dense.0"] = {"kind": "dense", "staleness": {1: 3}}
    ages = {"staleness_dense": {}, "staleness_sparse": {}, "dropped": 0}
    _, *lines = summary({"mode": "async", "worker": worker, "servers": [{"tables": tables}] * 2, **ages}).splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["staleness of 4 tables", "staleness of 'dense.0'"]
    assert lines[0].endswith("0: 8, 1: 4, 2: 4, 3: 4, 4: 4")


def test_the_summary_tells_the_network_apart_and_says_what_its_age_does():
    worker = {"steps": 9, "samples": 9, "lookups": 9, "unforeseen_lookups": 0}
    dense = {"kind": "dense", "staleness": {4: 10, 5: 1}}
    stats = {"mode": "async", "worker": worker, "servers": [{"tables": {"dense.0": dense}}], "dropped": 0}
    ages = {"staleness_dense": {4: 10, 5: 1}, "staleness_sparse": {}}
    assert "hybrid" not in summary({**stats, **ages})
    ages["staleness_dense"] = {4: 10, 9: 11}
    _, table, advice = summary({**stats, **ages, "dropped": 3}).replace("\n3 grad", " 3 grad").splitlines()
    assert table.startswith("staleness of 'dense.0' (the network;")
    assert "9 updates old" in advice
    assert "a_sync_configs={'hybrid': True}" in advice
