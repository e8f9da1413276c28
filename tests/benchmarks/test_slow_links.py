"""The benchmarks of slow networks: links are held at their rate and taken down again, figures are what they say."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import pytest
from support import processes
from support.extras import needs
from support.grids import first_of
from support.messages import naming
from support.paths import ROOT
from support.ranks import Ranks
from support.scripts.launching import SOON, START

from benchmarks import dgc_accuracy, dgc_accuracy_worker, slow_links
from benchmarks.links import Link, LinkError, link
from benchmarks.rank_jobs import results, run_ranks
from examples.ctr_dnn.prepare import generated

pytestmark = pytest.mark.xdist_group("slow_links")


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips where none can be made: without root, without iproute2, in a container that may not."""
    try:
        with link() as joined:
            joined.limit(100)
    except LinkError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")


def existing() -> list[str]:
    """Namespaces of benchmarks, of any process."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith("fleet-")]


def held(joined: Link, rate: float, least: float) -> float:
    """The first transfer at this rate that both ends had a core for."""
    for _ in range(20):
        with contextlib.suppress(LinkError):
            if (found := slow_links.held(joined, rate)) > least:
                return found
    raise AssertionError(f"20 transfers were not held at {rate}")


@pytest.mark.usefixtures("namespaces")
class TestLinks:
    def test_a_link_is_held_at_its_rate_and_set_free_again(self) -> None:
        with link() as joined:
            assert held(joined, 50, 40) == pytest.approx(50, rel=0.2)  # headers count towards the 50
            held(joined, 0, 200)
            with pytest.raises(LinkError, match=naming("5 Mbit/s")):
                slow_links.held(Unlimited(joined), 5)

    def test_nothing_is_left_when_a_block_fails(self) -> None:
        def fail() -> None:
            with link() as joined:
                names.extend(joined.namespaces)
                assert set(names) <= set(existing())
                raise KeyboardInterrupt

        names: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            fail()
        assert len(names) == 2
        assert not set(names) & set(existing())

    def test_two_links_at_once_have_different_names(self) -> None:
        with link() as one, link() as other:
            assert len({*one.namespaces, *other.namespaces}) == 4
            assert len({*one.devices, *other.devices}) == 4

    @pytest.mark.parametrize("how", first_of([signal.SIGINT, signal.SIGTERM]))
    def test_nothing_is_left_when_the_benchmark_is_interrupted(self, how: signal.Signals) -> None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.slow_links",
            "--size",
            "small",
            "--rates",
            "0",
            "--strategies",
            "plain",
        ]
        with processes.interruptible():
            job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        mine, deadline = f"fleet-{job.pid:x}", time.monotonic() + START
        try:
            while not workers(job.pid):
                assert time.monotonic() < deadline
                assert job.poll() is None
                time.sleep(0.05)
            started = workers(job.pid)
            assert any(name.startswith(mine) for name in existing())
            job.send_signal(how)
            assert job.wait(SOON) != 0
        finally:
            job.kill()
            job.wait(SOON)
        _, left = psutil.wait_procs(started, timeout=60)
        assert not left
        assert not any(name.startswith(mine) for name in existing())

    @pytest.mark.long
    def test_figures_of_a_slow_link(self) -> None:
        """DGC sends next to nothing; plain needs its gradient's bits over the rate, whatever the cores do."""
        chosen = slow_links.options(["--size", "small", "--rates", "20", "--strategies", "plain", "dgc"])
        found = slow_links.measure(chosen)
        plain, dgc = (found["mb_per_step"]["20"][name] for name in ("plain", "dgc"))
        assert found["gradient_mb"] == pytest.approx(256 * 256 * 6 * 4 / 1e6)
        assert found["gradient_mb"] <= plain <= 1.2 * found["gradient_mb"]
        assert dgc < 0.02 * plain
        assert found["steps_per_s"]["20"]["plain"] <= 1.15 * 20 / (8 * plain)
        assert found["ratio"]["20"]["plain"] == 1.0
        rates = found["steps_per_s"]["20"]
        assert found["ratio"]["20"]["dgc"] == pytest.approx(rates["dgc"] / rates["plain"])
        assert found["ratio"]["20"]["dgc"] > 2
        assert "dgc" in slow_links.table(found)


class Unlimited(Link):
    """A link on which a limit has no effect."""

    def __init__(self, joined: Link) -> None:
        self.__dict__.update(joined.__dict__)

    def limit(self, mbit: float) -> None:
        pass


def workers(pid: int, argument: str = "train") -> list[psutil.Process]:
    """The ranks that a benchmark has started, by an argument of theirs."""
    try:
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if argument in child.cmdline()]
    except psutil.Error:
        return []


SLEEPS = "import time; time.sleep(600)"


def test_ranks_end_with_a_benchmark_that_is_killed() -> None:
    rank = f"[sys.executable, '-c', {SLEEPS!r}]"
    code = f"import sys\nfrom benchmarks.rank_jobs import run_ranks\nrun_ranks([{rank}] * 2, 600)"
    job, deadline = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT), time.monotonic() + START
    try:
        while len(started := [one for one in workers(job.pid, SLEEPS) if "prctl" not in str(one.cmdline())]) < 2:
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.05)
    finally:
        job.kill()
        job.wait(SOON)
    assert not psutil.wait_procs(started, timeout=SOON)[1]


class TestCommandLine:
    def test_root_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(sys, "argv", ["slow_links"])
        with pytest.raises(SystemExit, match=naming("slow_links", "root")):
            slow_links.main()

    def test_iproute2_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda tool: None)
        with pytest.raises(LinkError, match="iproute2"), link():
            pass

    @pytest.mark.parametrize(
        ("flags", "word"), [("--rates -1", "--rates"), ("--rounds 0", "--rounds"), ("--strategies dgc", "plain")]
    )
    def test_mistakes_are_named(self, flags: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            slow_links.options(flags.split())
        assert word in capsys.readouterr().err

    def test_small_is_less_of_everything(self) -> None:
        usual, small = slow_links.options([]), slow_links.options(["--size", "small"])
        assert usual.rates == [0, 1000, 100]
        assert small.seconds < usual.seconds
        assert small.rounds < usual.rounds

    def test_the_table_stands_beside_paddles(self) -> None:
        one = {"plain": 1.0, "dgc": 3.0}
        result = {
            "steps_per_s": {"1000": one, "0": one},
            "ratio": {"1000": one, "0": one},
            "mb_per_step": {"1000": one, "0": one},
        }
        lines = slow_links.table(result).splitlines()
        assert [line.endswith("6.5 ×") for line in lines] == [False, False, True, False, False]
        assert "no limit" in lines[-1]


class TestRanks:
    def test_results_come_in_the_order_of_ranks(self) -> None:
        script = (
            "import os, json; print('RESULT', json.dumps({name: os.environ[name] for name in ('RANK', 'WORLD_SIZE')}))"
        )
        found = run_ranks([[sys.executable, "-c", script]] * 2, 30)
        assert found == [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}]

    def test_a_rank_that_fails_ends_the_others(self) -> None:
        waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
        failing = [sys.executable, "-c", "print('no such thing'); raise SystemExit(3)"]
        start = time.monotonic()
        with pytest.raises(SystemExit, match=naming("rank 1", "no such thing")):
            run_ranks([waiting, failing], 50)
        assert time.monotonic() - start < 30
        assert not [child for child in psutil.Process().children() if "time.sleep(60)" in " ".join(child.cmdline())]

    def test_ranks_that_take_too_long_are_ended(self) -> None:
        with pytest.raises(SystemExit, match=naming("0.2")):
            run_ranks([[sys.executable, "-c", "import time; time.sleep(60)"]], 0.2)


class TestAccuracy:
    def test_rows_of_clicks_keep_their_last_tenth_back(self) -> None:
        train, test = dgc_accuracy.criteo(list(generated(200, seed=0)))
        assert [len(train[name]) for name in ("ids", "dense", "label")] == [180] * 3
        assert (test["ids"].shape, test["dense"].shape) == ((20, 26), (20, 13))
        assert train["ids"].max() < dgc_accuracy.HASH_SIZE

    def test_digits_keep_every_fifth_image_back(self) -> None:
        needs("sklearn")
        train, test = dgc_accuracy.digits()
        assert (len(train["label"]), len(test["label"])) == (1438, 359)
        assert float(np.max(train["dense"])) == 1.0

    def test_dense_and_compressed_runs_are_compared(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        needs("sklearn")
        found: dict[str, Any] = {}

        def forked(commands: list[list[str]], seconds: float) -> list[dict[str, Any]]:
            return ranks.run(accuracy_rank, len(commands), arguments=commands[0][1:])

        monkeypatch.setattr(sys, "argv", ["dgc_accuracy", "--quick", "--json"])
        monkeypatch.setattr(dgc_accuracy, "run_ranks", forked)
        monkeypatch.setattr(dgc_accuracy, "report", lambda result, as_json: found.update(result))
        dgc_accuracy.main()
        assert found["difference"] == pytest.approx(found["dgc_points"] - found["dense_points"])
        assert found["difference_at_dense_best"] == found["difference"]  # of one epoch
        assert found["best_epochs"] == {"dense": [1], "dgc": [1]}
        assert found["parameters"] > 1_000_000
        assert found["runs"]["dense"] != found["runs"]["dgc"]
        assert found["dense_points"] > 50  # of ten classes, after one epoch


def accuracy_rank(arguments: list[str]) -> dict[str, Any]:
    """What a rank of benchmarks.dgc_accuracy prints as its result."""
    out, sys.argv = io.StringIO(), arguments
    with contextlib.redirect_stdout(out):
        dgc_accuracy_worker.main()
    (found,) = results(out.getvalue())
    return found
