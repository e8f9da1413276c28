"""set_filelist(dynamic=True): every sample of every file is trained, by whichever worker has time; once, if nobody
dies. Workers are threads of this process, and real processes that are killed, stopped and started again."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.jobs import Part, in_threads
from support.messages import lines_naming
from support.paths import SCRIPTS
from support.scripts.launching import START, Started, forked_fleetrun, wait_until

from torchfleet.api.training import Report, as_step, train
from torchfleet.base.errors import DataError
from torchfleet.data import Slot
from torchfleet.data.dataset import DatasetPass, WorkerGroup
from torchfleet.data.feed import Feed
from torchfleet.data.queue_dataset import QueueDataset
from torchfleet.nn import SparseEmbedding

SHARDED = str(SCRIPTS / "sharded.py")
WAIT = 60.0
LONG = "120"  # seconds of a lease that does not end while a busy machine keeps a worker from its signs of life
HANGS = 60.0  # seconds after which something that should return at once is said to hang


def write_files(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Sample j of file i has number 1000 * i + j."""
    paths = []
    for i, size in enumerate(sizes):
        path = folder / f"part-{i:03d}"
        path.write_text("".join(f"1 {1000 * i + j} 2 {j % 7} {i % 5}\n" for j in range(size)))
        paths.append(str(path))
    return paths


def numbers(sizes: Sequence[int]) -> list[int]:
    return [1000 * i + j for i, size in enumerate(sizes) for j in range(size)]


# Workers as threads of this process


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = SparseEmbedding(2, name="words")
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.linear(self.embedding(batch["word"])).squeeze(1)


class PartDataset(QueueDataset):
    """As fleet.QueueDataset, of one of several workers in this process."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._part = part

    def workers(self) -> WorkerGroup:
        return self._part.worker.workers()

    def settle(self) -> None:
        self._part.worker.communicator.settle()


def slow_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return jobs.sgd(model, lr=0.01)


def make(part: Part, files: Sequence[str], lease: float = 600.0, **options: Any) -> PartDataset:
    """By default the lease is longer than a test may take: who waits for its end hangs."""
    dataset = PartDataset(part)
    dataset.init(**{"batch_size": 4, "use_var": [Slot("id", dim=1), Slot("word")], **options})
    dataset.set_filelist(files, dynamic=True, lease=lease)
    return dataset


def loop(part: Part, dataset: QueueDataset, after: Callable[[list[int]], Any] = lambda seen: None) -> list[int]:
    """An ordinary loop; returns the numbers of the samples that were trained on, which `after` sees at every step."""
    seen: list[int] = []
    for batch in part.prefetch(dataset):
        part.model(batch).square().mean().backward()
        part.optimizer.step()
        part.optimizer.zero_grad()
        seen += batch["id"].reshape(-1).tolist()
        after(seen)
    return seen


def trained(part: Part, dataset: QueueDataset, num_threads: int = 1) -> list[int]:
    """As fleet.train_from_dataset does it."""
    seen: list[int] = []

    def step(batch: Any) -> torch.Tensor:
        seen.extend(batch["id"].reshape(-1).tolist())
        return part.model(batch).square().mean()

    report = Report("train", None, 0, None)
    if num_threads > 1:
        part.worker.allow_threads()
    train(as_step(step, None), dataset, [part.optimizer], part.worker.engine, num_threads, report)
    return seen


def run(body: Callable[[Part], Any], num_workers: int = 2, mode: str = "async", num_servers: int = 2) -> list[Any]:
    return jobs.run(body, Tiny, slow_sgd, mode=mode, num_workers=num_workers, num_servers=num_servers).results


def with_timeout(work: Callable[[], Any], what: str) -> Any:
    """The result, or an error if it hangs."""
    result: list[Any] = []

    def guarded() -> None:
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(HANGS)
    assert result, f"{what} hangs"
    return result[0]


class TestThreads:
    @pytest.mark.parametrize("how", [loop, trained])
    @pytest.mark.parametrize("mode", ["async", "half_async", "geo"])
    def test_every_sample_is_trained_once_in_every_epoch(self, tmp_path: Path, mode: str, how: Callable) -> None:
        sizes = [5, 0, 8, 13, 1, 4, 4, 7]
        files = write_files(tmp_path, sizes)

        def body(part: Part) -> list[list[int]]:
            dataset = make(part, files)
            return [how(part, dataset) for _ in range(3)]

        for shares in zip(*run(body, 3, mode), strict=True):
            assert Counter(itertools.chain(*shares)) == Counter(numbers(sizes))

    @pytest.mark.parametrize("balance", [False, True])
    @pytest.mark.parametrize(("how", "num_readers"), [(loop, 1), (trained, 2)])
    def test_in_hybrid_mode_workers_without_a_file_do_not_hold_up_the_others(
        self, tmp_path: Path, how: Callable, num_readers: int, balance: bool
    ) -> None:
        sizes = [16, 0, 9, 16, 21]
        files = write_files(tmp_path, sizes)

        def body(part: Part) -> tuple[list[list[int]], list[torch.Tensor]]:
            dataset = make(part, files, thread_num=num_readers)
            passes = [how(part, dataset) for _ in range(3)]
            return passes, [value.detach().clone() for value in part.model.linear.parameters()]

        config = {"exchange": "servers", "balance": balance}
        results = jobs.run(body, Tiny, slow_sgd, mode="hybrid", num_workers=3, num_servers=2, **config).results
        for shares in zip(*(passes for passes, _ in results), strict=True):
            assert Counter(itertools.chain(*shares)) == Counter(numbers(sizes))
        for _, network in results[1:]:
            torch.testing.assert_close(network, results[0][1], rtol=0, atol=0)

    @pytest.mark.parametrize(("num_readers", "num_threads"), [(3, 1), (1, 3), (3, 3)])
    def test_threads_that_read_and_threads_that_train_share_files_too(
        self, tmp_path: Path, num_readers: int, num_threads: int
    ) -> None:
        sizes = [9, 3, 12, 5, 6, 1, 1, 8]
        files = write_files(tmp_path, sizes)

        def body(part: Part) -> list[list[int]]:
            dataset = make(part, files, thread_num=num_readers)
            return [trained(part, dataset, num_threads) for _ in range(5)]

        for shares in zip(*run(body), strict=True):
            assert Counter(itertools.chain(*shares)) == Counter(numbers(sizes))

    @pytest.mark.parametrize("sizes", [[], [5], [0], [4], [0, 0, 0], [1, 1]], ids=str)
    def test_a_pass_ends_with_fewer_files_than_workers(self, tmp_path: Path, sizes: list[int]) -> None:
        files = write_files(tmp_path, sizes)

        def body(part: Part) -> list[list[int]]:
            dataset = make(part, files)
            return [loop(part, dataset) for _ in range(2)]

        for shares in zip(*run(body, 3), strict=True):
            assert Counter(itertools.chain(*shares)) == Counter(numbers(sizes))

    def test_a_worker_alone_takes_all(self, tmp_path: Path) -> None:
        files = write_files(tmp_path, [3, 4])
        assert run(lambda part: loop(part, make(part, files)), 1, num_servers=1) == [numbers([3, 4])]

    def test_who_is_faster_takes_more_files(self, tmp_path: Path) -> None:
        sizes = [8] * 12
        files = write_files(tmp_path, sizes)
        began, most_are_taken = threading.Event(), threading.Event()

        def slowly(seen: list[int]) -> None:
            began.set()
            assert most_are_taken.wait(WAIT)

        def fast_beside_it(seen: list[int]) -> None:
            assert began.wait(WAIT)
            if len(seen) >= 56:
                most_are_taken.set()

        def body(part: Part) -> list[int]:
            return loop(part, make(part, files, queue_batches=1), slowly if part.index else fast_beside_it)

        fast, slow = run(body)
        assert Counter(fast + slow) == Counter(numbers(sizes))
        assert len(fast) >= 56 > len(slow) > 0

    def test_a_dataset_made_anew_for_every_epoch_has_its_samples_every_time(self, tmp_path: Path) -> None:
        """Every iteration is a pass of its own, whichever object it is over."""
        files = write_files(tmp_path, [5, 6])
        seen = run(lambda part: [loop(part, make(part, files)) for _ in range(2)], 1, num_servers=1)[0]
        assert [sorted(epoch) for epoch in seen] == [numbers([5, 6])] * 2

    def test_another_dataset_with_other_files_has_its_samples_or_is_refused(self, tmp_path: Path) -> None:
        files = write_files(tmp_path, [5, 6])

        def body(part: Part) -> list[int]:
            loop(part, make(part, files[:1]))
            return loop(part, make(part, files[1:]))

        try:
            (seen,) = run(body, 1, num_servers=1)
        except DataError:
            return
        assert sorted(seen) == [1000 + j for j in range(6)]

    def test_new_files_for_the_same_dataset_are_a_new_pass(self, tmp_path: Path) -> None:
        files = write_files(tmp_path, [5, 6, 3])

        def body(part: Part) -> list[list[int]]:
            dataset = make(part, files[:1])
            seen = [loop(part, dataset)]
            dataset.set_filelist(files[1:], dynamic=True)
            return [*seen, loop(part, dataset)]

        first, second = zip(*run(body), strict=True)
        assert sorted(itertools.chain(*first)) == numbers([5])
        assert sorted(itertools.chain(*second)) == numbers([5, 6, 3])[5:]

    def test_lists_that_differ_are_an_error_for_one_of_them(self, tmp_path: Path) -> None:
        files = write_files(tmp_path, [5, 6])
        one_was_refused = threading.Event()

        def body(part: Part) -> None:
            try:
                loop(part, make(part, files[: 1 + part.index]), lambda seen: one_was_refused.wait(WAIT))
            except DataError:
                one_was_refused.set()
                raise

        with pytest.raises(DataError):
            run(body)

    @pytest.mark.parametrize("num_taken", [1, 2, 5])
    def test_a_pass_can_be_left_in_the_middle(self, tmp_path: Path, num_taken: int) -> None:
        """Also when all has been read, and only waits to be trained on."""
        files = write_files(tmp_path, [20])

        def body(part: Part) -> int:
            batches = iter(make(part, files, queue_batches=8))
            for _ in range(num_taken):
                next(batches)
            time.sleep(0.5)  # by now everything is read
            with_timeout(batches.close, "leaving a pass in the middle")
            return num_taken

        assert run(body, 1, num_servers=1) == [num_taken]

    def test_an_error_in_the_step_is_raised_at_once(self, tmp_path: Path) -> None:
        files = write_files(tmp_path, [8])

        def body(part: Part) -> Any:
            def fail(batch: Any) -> torch.Tensor:
                time.sleep(0.5)
                raise ValueError("in the step")

            report = Report("train", None, 0, None)
            dataset = make(part, files)
            step = as_step(fail, None)
            return with_timeout(
                lambda: train(step, dataset, [part.optimizer], part.worker.engine, 1, report), "an error in the step"
            )

        (error,) = run(body, 1, num_servers=1)
        assert isinstance(error, ValueError)

    def test_a_malformed_file_is_an_error_and_no_hanging(self, tmp_path: Path) -> None:
        files = write_files(tmp_path, [8, 8])
        Path(files[0]).write_text("1 x 0\n")

        def body(part: Part) -> Any:
            dataset = make(part, files, thread_num=2)
            return with_timeout(lambda: loop(part, dataset), "a malformed file")

        (error,) = run(body, 1, num_servers=1)
        assert isinstance(error, DataError)

    def test_what_a_worker_left_goes_to_the_other_after_the_lease(self, tmp_path: Path) -> None:
        sizes = [4] * 6
        files = write_files(tmp_path, sizes)
        has_taken = threading.Event()

        def body(part: Part) -> list[int]:
            dataset = make(part, files, lease=3.0 if part.index else 600.0, queue_batches=1)
            if part.index == 0:
                assert has_taken.wait(WAIT)
                return loop(part, dataset)
            batches = iter(dataset)
            next(batches)  # and never trained on
            has_taken.set()
            batches.close()
            return []

        seen, _ = run(body)
        assert Counter(seen) == Counter(numbers(sizes))

    def test_a_file_is_not_done_before_its_gradients_are_applied(self, tmp_path: Path) -> None:
        files = write_files(tmp_path, [4, 4, 4])
        servers = jobs.Servers(1, 1)
        states: list[int] = []

        def done() -> int:
            current = servers.servers[0].state.meetings.files._passes["files", 0]
            return 3 if current is None else current.num_done

        def body(part: Part) -> None:
            batches = iter(make(part, files))
            first = next(batches)
            part.model(first).square().mean().backward()
            servers.hold_pushes()
            part.optimizer.step()
            taken = threading.Thread(target=lambda: next(batches), daemon=True)
            taken.start()
            taken.join(0.5)
            states.append(done())
            servers.release_pushes()
            taken.join(WAIT)
            states.append(done())
            batches.close()

        guarded = lambda part: with_timeout(lambda: body(part), "the pass")  # noqa: E731
        jobs.run(
            guarded, Tiny, slow_sgd, mode="async", servers=servers, max_staleness=0
        )  # a step leaves its push behind
        assert states == [0, 1]


def test_who_looks_ahead_does_not_wait_for_a_batch_that_another_thread_has_taken() -> None:
    """Many threads see that one batch is there; all but one must go on with what they have. If one waited, nobody would
    ever train on its batch, its file would never be done, and the pass would never end."""
    num, num_rounds, over = 4, 300, threading.Event()
    made = threading.Semaphore(1)

    def make_one_at_a_time(put: Callable[[Any], None]) -> None:
        while made.acquire() and not over.is_set():
            put(object())

    feed: Feed[Any] = Feed([make_one_at_a_time], 1)
    one_pass = DatasetPass(feed, lambda: None, lambda: None)
    together = threading.Barrier(num, timeout=HANGS)

    def work(index: int) -> int:
        num_found = 0
        for _ in range(num_rounds):
            together.wait()
            deadline = time.monotonic() + 0.001
            found = False
            while not found and time.monotonic() < deadline:
                found = one_pass.take_ready() is not None
            num_found += found
            together.wait()
            if found:
                made.release()
        return num_found

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads come in between each other wherever they can
    try:
        assert sum(in_threads(work, num)) > 0
    finally:
        sys.setswitchinterval(before)
        over.set()
        made.release()
        feed.close()


# Real processes


class Sharded:
    """A job of tests/support/scripts/sharded.py, and what its workers have written down."""

    def __init__(self, folder: Path, sizes: Sequence[int], *options: str, servers: int = 1, workers: int = 2) -> None:
        self.sizes, self.folder = sizes, folder
        self._options = [*options, "--out", str(folder), "--files", *write_files(folder, sizes)]
        self._servers, self._workers = servers, workers

    def start(self, *arguments: str) -> Started:
        numbers_of_processes = ("--server_num", str(self._servers), "--worker_num", str(self._workers))
        return forked_fleetrun(self.folder, *numbers_of_processes, *arguments, SHARDED, *self._options)

    def seen(self, worker: int | str = "*") -> list[tuple[int, int]]:
        """(epoch, number of the sample), in the order of training."""
        found = []
        for path in sorted(self.folder.glob(f"seen.{worker}.*"), key=lambda path: path.stat().st_ctime):
            lines = path.read_text().splitlines()
            found += [(int(epoch), int(number)) for epoch, number in (line.split() for line in lines)]
        return found

    def wait_for_samples(self, job: Started, worker: int, num: int) -> None:
        wait_until(lambda: len(self.seen(worker)) >= num or job.process.poll() is not None, START, "samples")
        assert job.process.poll() is None, job.output

    def wait_until_held(self, job: Started) -> None:
        """Until the worker of --hold stays where it is."""
        held = self.folder / "held"
        wait_until(lambda: held.exists() or job.process.poll() is not None, START, "worker that is held")
        assert job.process.poll() is None, job.output

    def let_go_on(self) -> None:
        (self.folder / "go_on").touch()

    def expected(self, epochs: int = 1) -> Counter[tuple[int, int]]:
        return Counter((epoch, number) for epoch in range(epochs) for number in numbers(self.sizes))

    def assert_nothing_lost(self, dead: int, most_files: int) -> None:
        """All samples once; again only some of the files that the dead worker had begun, which are few."""
        found = Counter(self.seen())
        assert found.keys() == self.expected().keys()
        assert max(found.values()) <= 2
        repeated = {number for (_, number), count in found.items() if count > 1}
        assert repeated <= {number for _, number in self.seen(dead)}
        assert len({number // 1000 for number in repeated}) <= most_files, sorted(repeated)


@pytest.mark.slow
class TestProcesses:
    @pytest.mark.parametrize(("mode", "how", "servers", "workers"), [("async", "train", 2, 3)])
    def test_every_sample_once_per_epoch_and_more_files_for_faster_workers(
        self, tmp_path: Path, mode: str, how: str, servers: int, workers: int
    ) -> None:
        options = ("--mode", mode, "--loop", how, "--epochs", "2", "--pauses", "0.01", "0.15", "0.01", "--lease", LONG)
        job = Sharded(tmp_path, [8] * 16 + [5, 0, 1], *options, servers=servers, workers=workers)
        with job.start() as started:
            assert started.wait() == 0, started.output
        assert Counter(job.seen()) == job.expected(epochs=2)
        counts = [len(job.seen(i)) for i in range(workers)]
        assert counts[1] < max(counts[0], counts[2]), counts

    def test_a_killed_worker_loses_nothing(self, tmp_path: Path) -> None:
        job = Sharded(tmp_path, [8] * 14, "--pauses", "0.08", "--lease", LONG, "--hold", "1", "16")
        with job.start() as started:
            job.wait_until_held(started)
            os.kill(started.pid("WORKER", 1), signal.SIGKILL)
            assert started.wait() == 1
        assert lines_naming(started.output, "worker 1")
        # It had trained on at most two batches that were not settled: they are from two files.
        job.assert_nothing_lost(dead=1, most_files=2)

    def test_a_worker_that_was_killed_and_started_again_takes_part_again(self, tmp_path: Path) -> None:
        job = Sharded(tmp_path, [8] * 50, "--pauses", "0.08", "--loop", "plain", "--lease", LONG)
        with job.start("--max_restart", "1") as started:
            job.wait_for_samples(started, 1, 8)
            os.kill(started.pid("WORKER", 1), signal.SIGKILL)
            assert started.wait() == 0, started.output
        assert len(list(tmp_path.glob("seen.1.*"))) == 2
        job.assert_nothing_lost(dead=1, most_files=2)

    def test_a_worker_that_falls_silent_is_given_up_after_the_lease(self, tmp_path: Path) -> None:
        job = Sharded(tmp_path, [8] * 8, "--pauses", "0.05", "--hold", "1", "4")
        with job.start() as started:
            job.wait_until_held(started)
            job.wait_for_samples(started, 0, 4)
            pid = started.pid("WORKER", 1)
            os.kill(pid, signal.SIGSTOP)
            try:
                started.wait_for("worker 0 is through with epoch 0", START)
            finally:
                job.let_go_on()
                os.kill(pid, signal.SIGCONT)
            assert started.wait() == 0, started.output
        found = Counter(job.seen())
        assert found.keys() == job.expected().keys()
