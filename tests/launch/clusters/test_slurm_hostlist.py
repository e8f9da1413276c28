"""Slurm's lists of hosts, held against scontrol where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.slurm_hostlist import expand_hostlist

NUMBERS = st.integers(0, 120).flatmap(
    lambda first: st.tuples(st.sampled_from(["", "0", "00"]), st.integers(0, 9)).map(
        lambda rest: f"{rest[0]}{first}" if not rest[1] else f"{rest[0]}{first}-{first + rest[1]}"
    )
)
INSIDE = st.lists(NUMBERS, min_size=1, max_size=3).map(",".join)
PREFIX = st.from_regex(r"[a-z][a-z-]{0,3}", fullmatch=True).filter(lambda text: not text.endswith("-"))
ITEMS = st.one_of(PREFIX, st.tuples(PREFIX, INSIDE).map(lambda item: f"{item[0]}[{item[1]}]"))
LISTS = st.lists(ITEMS, min_size=1, max_size=4).map(",".join)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[01-03,7],m5", ["n01", "n02", "n03", "n7", "m5"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu-a[1-2].site,b", ["gpu-a1.site", "gpu-a2.site", "b"]),
    ],
)
def test_names_are_written_out(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["", ",", "n[1-2", "n]1[", "n[]", "n[3-1]", "n[1-x]", "n[[1]]", "n[0-9999999]", "a,"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(RoleError, match=r"hosts|brackets"):
        expand_hostlist(text)


def test_a_list_of_too_many_is_refused_before_it_is_made() -> None:
    with pytest.raises(RoleError, match="more than 65,536"):
        expand_hostlist("n[0-60000][0-60000][0-60000][0-60000]")


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment for it: it wants a configuration, and asks no daemon."""
    if shutil.which("scontrol") is None:
        pytest.skip("needs Slurm (apt-get install slurm-client)")
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=any\nSlurmctldHost=localhost\nNodeName=localhost\n")
    return {**os.environ, "SLURM_CONF": str(path)}


@settings(max_examples=60, deadline=None)
@given(LISTS)
def test_scontrol_writes_out_the_same(scontrol: dict[str, str], text: str) -> None:
    command = ["scontrol", "show", "hostnames", text]
    told = subprocess.run(command, env=scontrol, capture_output=True, text=True, check=True)
    assert expand_hostlist(text) == told.stdout.split()
