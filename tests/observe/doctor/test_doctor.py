"""fleet doctor: facts of a made-up machine lead to the findings that they should, sorted, each with what to do."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.cases import each_of
from support.messages import names

from torchfleet.launch.roles import free_ports
from torchfleet.observe.commands import command
from torchfleet.observe.doctor.finding import NOTE, SLOWS, STOPS, Finding, ordered, will_hurt
from torchfleet.observe.doctor.link import LinkFacts
from torchfleet.observe.doctor.link_check import check_link, check_others
from torchfleet.observe.doctor.machine_check import check_fit, check_machine, check_ports, check_software, row_bytes
from torchfleet.observe.doctor.machine_facts import MachineFacts, machine_facts
from torchfleet.observe.doctor.software_facts import software_facts, unmet

GB = 1 << 30
WELL = MachineFacts(
    "well", "6.1", "a processor", 16, 16, None, 0.5, 64 * GB, 60 * GB, None, 0, 8 * GB, 50 * GB, 65536, 60000, -1,
    4096, 6 << 20, 4 << 20, 28000, 0, "performance", "madvise", True,
)  # fmt: skip
FILES = {
    "proc/meminfo": "MemTotal:       16384 kB\nMemAvailable:    2048 kB\nSwapTotal:  8192 kB\nSwapFree:   1024 kB\n",
    "proc/loadavg": "7.50 3.00 1.00 1/100 1000\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n",
    "proc/sys/net/core/somaxconn": "128\n",
    "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t262144\n",
    "proc/sys/net/ipv4/tcp_wmem": "4096 16384 4194304\n",
    "proc/sys/net/ipv4/ip_local_port_range": "32768\t33000\n",
    "proc/sys/vm/overcommit_memory": "2\n",
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/job/memory.max": "1048576\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t Some GPU\nIRQ: 1\n",
}


def test_facts_are_read_from_the_files_of_a_machine(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    facts = machine_facts(tmp_path)
    assert (facts.memory, facts.memory_left, facts.memory_limit) == (16384 << 10, 2048 << 10, 1 << 20)
    assert (facts.swap_used, facts.load, facts.cpu_limit, facts.num_cores) == (7168 << 10, 7.5, 1.5, 1)
    assert (facts.somaxconn, facts.tcp_read_most, facts.tcp_write_most, facts.num_ports) == (128, 1 << 18, 1 << 22, 233)
    assert (facts.overcommit, facts.huge_pages, facts.governor) == (2, "never", "powersave")
    assert (facts.processor, facts.gpus) == ("Some CPU @ 3 GHz", ["Some GPU"])
    found = [finding.what for finding in check_machine(facts)]
    for part in ("memory", "swap", "overcommit", "huge", "cores", "one core", "governor",
                 "somaxconn", "tcp_rmem", "233 ports", "1.5 of"):  # fmt: skip
        assert any(part in what for what in found), part


def test_a_machine_that_tells_nothing_is_no_error_and_nothing_is_made_up(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)
    assert (facts.memory, facts.memory_left, facts.overcommit, facts.governor) == (None, None, None, None)
    assert not any("memory" in finding.what for finding in check_machine(facts))


def test_nothing_is_found_on_a_machine_that_is_well() -> None:
    assert list(check_machine(WELL)) == []


@each_of(
    ("change", "kind", "part"),
    [
        ({"memory_left": GB // 2}, STOPS, "537 MB of memory are left"),
        ({"swap_used": 10 * GB}, SLOWS, "11 GB of memory are swapped out"),
        ({"shared_memory_free": 32 << 20}, STOPS, "/dev/shm has 34 MB"),
        ({"shared_memory_free": 128 << 20}, SLOWS, "/dev/shm has 134 MB"),
        ({"open_files": 1024}, SLOWS, "1,024 files"),
        ({"processes": 100}, STOPS, "100 processes"),
        ({"gpus": ["G"], "locked_memory": 65536}, SLOWS, "66 kB of memory may be locked"),
        ({"is_synchronized": False}, NOTE, "clock"),
    ],
)
def test_one_thing_that_is_wrong_is_one_finding(change: dict[str, object], kind: str, part: str) -> None:
    (found,) = check_machine(msgspec.structs.replace(WELL, **change))
    assert found.kind == kind
    assert part in found.what
    assert found.to_do


def test_what_hurts_most_comes_first_and_notes_do_not_hurt() -> None:
    mixed = [
        Finding(NOTE, "n", "", 99),
        Finding(SLOWS, "s", "", 1),
        Finding(STOPS, "a", "", 1),
        Finding(STOPS, "b", "", 2),
    ]
    assert [finding.what for finding in ordered(mixed)] == ["b", "a", "s", "n"]
    assert will_hurt(mixed)
    assert not will_hurt(mixed[:1])


def test_rows_are_counted_as_servers_hold_them() -> None:
    """84 bytes were measured for dim 8 with Adagrad (benchmarks/README.md); the count is a little above."""
    assert 84 <= row_bytes(8, "adagrad") <= 84 * 1.1
    fits = list(check_fit(WELL, 4, 8, 1e8, 16, "adagrad"))
    assert [finding.kind for finding in fits] == [NOTE]
    too_many = list(check_fit(WELL, 8, 16, 1e9, 16, "adam"))
    assert [finding.kind for finding in too_many] == [STOPS, SLOWS]  # memory, and 24 processes on 16 cores
    needed = 1e9 * row_bytes(16, "adam") + 8 * 250e6 + 16 * 600e6
    assert f"use {-(-needed // (60 * GB)):.0f} machines" in too_many[0].to_do


def test_a_port_in_use_is_found() -> None:
    (port,) = free_ports(1)  # claimed, and none that the system gives to connections
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        (found,) = check_ports([port])
    assert f"port {port}" in found.what
    assert not list(check_ports([port]))


@each_of(
    ("requirement", "part"),
    [
        ("numpy>=1.26", ""),
        ("numpy>=99", "numpy is"),
        ("torch>=2.6,<2.7", "torch is"),
        ("torch>=2.6,<99", ""),
        ("no-such-package>=1", "not installed"),
        ("no-such-package>=1; extra == 'ray'", ""),
    ],
)
def test_requirements_are_held_against_what_is_installed(requirement: str, part: str) -> None:
    found = unmet(requirement)
    assert part in found if part else found == ""


def test_software_that_cannot_work_here_is_found() -> None:
    facts = msgspec.structs.replace(
        software_facts(), packages={"torch": "2.9.0+cpu"}, kernel_folder="", unmet=["x is 1"]
    )
    found = {finding.what: finding.kind for finding in check_software(facts, ["G"])}
    assert found["x is 1"] == STOPS
    assert any(names(what, "torch 2.9.0+cpu", "GPUs") and kind == STOPS for what, kind in found.items())
    assert any("kernels" in what and kind == SLOWS for what, kind in found.items())


def test_slow_links_and_other_releases_are_found() -> None:
    link = LinkFacts("b:1", False, 0.2, 0.4, 1e9, 1e9, 0.1, 0.1, {})
    assert list(check_link(link)) == []
    slow = msgspec.structs.replace(link, p50_ms=20.0, p99_ms=30.0, from_bytes_s=5e6, clock_ahead_ms=-5000.0)
    kinds = [finding.kind for finding in check_link(slow)]
    assert kinds == [SLOWS, SLOWS, NOTE]
    own = {
        "software": {"torchfleet": "1", "python": "3.10.1", "packages": {"torch": "2"}},
        "machine": {"overcommit": 0},
    }
    assert not list(check_others(own, own, "b:1"))
    other = {
        "software": {"torchfleet": "2", "python": "3.10.9", "packages": {"torch": "3"}},
        "machine": {"overcommit": 2},
    }
    assert [finding.kind for finding in check_others(own, other, "b:1")] == [STOPS, NOTE, NOTE]


@pytest.mark.slow
def test_a_real_run_ends_with_a_status_that_its_findings_explain() -> None:
    run = [sys.executable, "-m", "torchfleet.observe.commands", "doctor", "--json", "--rows", "1e14", "127.0.0.1:1"]
    found = subprocess.run(run, capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 1, found.stderr
    document = json.loads(found.stdout)
    assert document["machine"]["host"] == socket.gethostname()
    assert document["software"]["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    kinds = [finding["kind"] for finding in document["findings"]]
    assert kinds == sorted(kinds, key=[STOPS, SLOWS, NOTE].index)
    texts = " ".join(finding["what"] for finding in document["findings"])
    assert names(texts, "127.0.0.1:1")
    assert names(texts, "100,000,000,000,000")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere"],
        ["--ports", "0"],
        ["--rows", "many"],
        ["--serve", "x"],
        ["--serve", "0.0.0.0:7100"],
        ["--serve", "7100", "b:1"],
        ["--serve", "7100", "--rows", "1e9"],
        ["b:1", "--seconds", "0"],
        ["--insecure"],
        ["--rows", "1", "--rule", "none"],
        ["--dim", "64"],
        ["--seconds", "2"],
    ],
)
def test_a_mistake_of_the_command_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["doctor", *arguments])
    assert ended.value.code == 2
    assert "expected" in (said := capsys.readouterr().err) or "keys" in said or "--serve" in said or "rule" in said
