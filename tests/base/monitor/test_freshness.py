"""Ages of values over all servers: added up, and judged by their median."""

from __future__ import annotations

import json

from support.cases import each_of

from torchfleet.base.monitor.freshness import OLD_NETWORK, advice, ages_by_kind, median, summed


def test_ages_of_the_network_and_of_rows_are_added_up_apart() -> None:
    servers = [
        {
            "dense.0": {"kind": "dense", "is_dense": True, "staleness": {1: 2}},
            "ids": {"kind": "array", "is_dense": False, "staleness": {0: 1}},
        },
        {
            "dense.0": {"kind": "dense", "is_dense": True, "staleness": {1: 1, 16: 5}},
            "deep": {"kind": "sparse", "is_dense": False, "staleness": {0: 3, 2: 1}},
        },
    ]
    found = ages_by_kind(table for server in servers for table in server.values())
    assert found == {"staleness_dense": {1: 3, 16: 5}, "staleness_sparse": {0: 4, 2: 1}}


def test_histograms_of_status_files_have_texts_as_keys() -> None:
    read = json.loads(json.dumps({4: 2, 16: 1}))
    assert summed([read, {4: 1}, {}]) == {4: 3, 16: 1}


@each_of(("ages", "expected"), [({}, None), ({3: 1}, 3), ({0: 5, 9: 5}, 0), ({0: 5, 9: 6}, 9), ({9: 1, 2: 1, 4: 1}, 4)])
def test_the_median_is_the_age_that_half_of_the_pushes_do_not_exceed(
    ages: dict[int, int], expected: int | None
) -> None:
    assert median(ages) == expected


def test_a_network_that_is_old_in_the_median_leads_to_advice() -> None:
    assert OLD_NETWORK == 2  # two async workers of the examples are there
    assert advice({}) == advice({OLD_NETWORK - 1: 6, 99: 5}) == ""
    told = advice({OLD_NETWORK - 1: 5, OLD_NETWORK: 6})
    assert "a_sync_configs={'hybrid': True}" in told
    assert "%" in told  # of the speed: what hybrid costs
