"""QueueDataset: every sample exactly once per pass, batches as documented, errors with their place, and nothing left
behind by a pass that is not finished."""

from __future__ import annotations

import contextlib
import gc
import gzip
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import jobs, processes
from support.messages import lines_naming, names, naming
from support.searches import examples

import torchfleet as fleet
from torchfleet.base.errors import DataError, FleetError
from torchfleet.data import feed as feed_module
from torchfleet.data.dataset import Dataset
from torchfleet.data.memory_dataset import InMemoryDataset
from torchfleet.data.queue_dataset import QueueDataset

SECONDS = 60.0
SLOTS = [
    fleet.Slot("id", dim=1),
    fleet.Slot("words"),
    fleet.Slot("x", dtype="float32", dim=2),
    fleet.Slot("marks", dtype="float32"),
]
ID = [fleet.Slot("id", dim=1)]

Sample = tuple[int, tuple[int, ...], tuple[float, ...], tuple[float, ...]]


@pytest.fixture(scope="module", autouse=True)
def quick_looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "_LOOK", 0.005)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left(no_old_garbage: None) -> Iterator[None]:
    before, others = set(threading.enumerate()), set(children())  # earlier tests of this process may have started some
    yield
    gc.collect()
    jobs.wait_until(lambda: not set(threading.enumerate()) - before, "all threads have ended", SECONDS)
    jobs.wait_until(lambda: not set(children()) - others, "no child process is left", SECONDS)


@pytest.fixture(autouse=True)
def _reaped() -> None:
    """Processes that earlier tests of this process have killed, and not waited for, are gone."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def children() -> list[psutil.Process]:
    """Processes that a dataset may have started: not the tracker that multiprocessing keeps from an earlier test on."""
    return [child for child in psutil.Process().children(recursive=True) if not is_tracker(child)]


def is_tracker(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def sample(i: int) -> Sample:
    return i, tuple(range(10 * i, 10 * i + i % 4)), (i / 2, -float(i)), (i + 0.25,) * (i % 3)


def line(i: int) -> str:
    return " ".join(f"{len(values)} {' '.join(map(str, values))}".strip() for values in ((i,), *sample(i)[1:])) + "\n"


def samples_of(batch: Any) -> list[Sample]:
    """The batch back as plain Python, with all that its form must fulfil."""
    num = batch.num_samples
    assert list(batch) == ["id", "words", "x", "marks"]
    assert batch["id"].shape == (num, 1)
    assert batch["x"].shape == (num, 2)
    assert [batch["id"].dtype, batch["words"].values.dtype] == [torch.int64] * 2
    assert [batch["x"].dtype, batch["marks"].values.dtype] == [torch.float32] * 2
    assert len(batch["words"].offsets) == len(batch["marks"].offsets) == num
    columns = (
        batch["id"].flatten().tolist(),
        [tuple(part.tolist()) for part in batch["words"].split()],
        [tuple(row) for row in batch["x"].tolist()],
        [tuple(part.tolist()) for part in batch["marks"].split()],
    )
    return list(zip(*columns, strict=True))


def ids(batches: Iterable[Any]) -> list[int]:
    return [i for batch in batches for i in batch["id"].flatten().tolist()]


def write(folder: Path, sizes: Sequence[int], make_line: Callable[[int], str] = line) -> list[str]:
    """Files of these numbers of samples, which are numbered through."""
    serial = itertools.count()
    paths = [folder / f"part-{i}" for i in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_text("".join(make_line(next(serial)) for _ in range(size)))
    return [str(path) for path in paths]


def id_line(i: int) -> str:
    return f"1 {i}\n"


def dataset_of(files: Sequence[str], **options: Any) -> QueueDataset:
    dataset = QueueDataset()
    dataset.init(**{"use_var": ID, **options})
    dataset.set_filelist(files)
    return dataset


# Samples and batches


@settings(max_examples=examples(40))
@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    batch_size=st.integers(1, 50),
    thread_num=st.integers(1, 5),
    drop_last=st.booleans(),
    queue_batches=st.sampled_from([None, 1, 3]),
)
def test_every_sample_comes_once_per_pass_in_batches_of_the_size(
    sizes: list[int], batch_size: int, thread_num: int, drop_last: bool, queue_batches: int | None
) -> None:
    total = sum(sizes)
    with tempfile.TemporaryDirectory() as folder:
        dataset = dataset_of(
            write(Path(folder), sizes),
            use_var=SLOTS,
            batch_size=batch_size,
            thread_num=thread_num,
            drop_last=drop_last,
            queue_batches=queue_batches,
        )
        for _ in range(2):
            batches = list(dataset)
            whole, rest = divmod(total, batch_size)
            expected_sizes = [batch_size] * whole + ([rest] if rest and not drop_last else [])
            assert [batch.num_samples for batch in batches] == expected_sizes
            found = [found_sample for batch in batches for found_sample in samples_of(batch)]
            expected = [sample(i) for i in range(total)]
            if thread_num == 1:
                assert found == expected[: len(found)]
            assert not Counter(found) - Counter(expected)
            assert len(found) == sum(expected_sizes)
            assert dataset.num_skipped == 0


def test_a_file_of_many_chunks_comes_in_order(tmp_path: Path) -> None:
    num = 400_000  # about three chunks
    files = write(tmp_path, [num], id_line)
    assert ids(dataset_of(files, batch_size=999)) == list(range(num))


@pytest.mark.parametrize("thread_num", [1, 3])
def test_a_batch_larger_than_everything_holds_everything(tmp_path: Path, thread_num: int) -> None:
    files = write(tmp_path, [3, 0, 4], id_line)
    (batch,) = dataset_of(files, batch_size=1 << 62, thread_num=thread_num)
    assert sorted(ids([batch])) == list(range(7))
    assert list(dataset_of(files, batch_size=1 << 62, thread_num=thread_num, drop_last=True)) == []


def test_more_threads_than_files_do_no_harm(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    dataset = dataset_of(write(tmp_path, [3, 4], id_line), thread_num=100_000, batch_size=2)
    batches = iter(dataset)
    assert len(set(threading.enumerate()) - before) <= 2
    assert sorted(ids(batches)) == list(range(7))


@pytest.mark.parametrize("thread_num", [1, 3])
def test_empty_files_give_no_samples(tmp_path: Path, thread_num: int) -> None:
    assert list(dataset_of(write(tmp_path, [0, 0, 0]), thread_num=thread_num)) == []


def test_an_empty_list_gives_an_empty_pass() -> None:
    dataset = dataset_of([], thread_num=4)
    assert list(dataset) == []
    assert list(dataset) == []


def test_a_pass_that_is_over_stays_over(tmp_path: Path) -> None:
    batches = iter(dataset_of(write(tmp_path, [3], id_line), batch_size=2))
    assert ids(batches) == [0, 1, 2]
    assert list(batches) == []
    assert next(batches, None) is None


def test_two_passes_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [30, 30], id_line), batch_size=7)
    for one, other in zip(dataset, dataset, strict=True):
        assert ids([one]) == ids([other])


def test_a_batch_stays_as_it_is_when_later_ones_come(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [500], line), use_var=SLOTS, batch_size=3, queue_batches=1)
    kept = list(dataset)
    assert [found_sample for batch in kept for found_sample in samples_of(batch)] == [sample(i) for i in range(500)]


def test_the_files_of_the_last_set_filelist_are_read(tmp_path: Path) -> None:
    files = write(tmp_path, [3, 4], id_line)
    dataset = dataset_of(files[:1], batch_size=10)
    running = iter(dataset)
    dataset.set_filelist(files[1:])
    assert ids(dataset) == [3, 4, 5, 6]
    assert ids(running) == [0, 1, 2]


def test_a_file_may_change_between_passes(tmp_path: Path) -> None:
    files = write(tmp_path, [3], id_line)
    dataset = dataset_of(files)
    assert ids(dataset) == [0, 1, 2]
    Path(files[0]).write_text("1 9\n")
    assert ids(dataset) == [9]


def test_paths_may_be_path_objects_in_any_sequence(tmp_path: Path) -> None:
    files = tuple(Path(path) for path in write(tmp_path, [1, 1], id_line))
    assert ids(dataset_of(files)) == [0, 1]  # type: ignore[arg-type]


def test_several_threads_take_from_one_pass(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [40] * 5, id_line), batch_size=3, thread_num=2)
    batches = dataset.iterate()
    forks = [batches.fork() for _ in range(3)]
    found = jobs.in_threads(lambda i: ids(forks[i]), 3)
    batches.close()
    assert sorted(itertools.chain(*found)) == list(range(200))


def test_only_a_few_batches_are_made_ahead(tmp_path: Path) -> None:
    read: list[int] = []

    class Counting(fleet.MultiSlotDataGenerator):
        def generate_sample(self, line: str | None) -> Callable[[], Iterable[Any]]:
            read.append(1)
            return lambda: [[("id", [int(line or 0)])]]

    path = tmp_path / "a"
    path.write_text("".join(f"{i}\n" for i in range(50_000)))  # parsed some thousands at a time
    dataset = dataset_of([str(path)], batch_size=1, pipe_command=Counting(), queue_batches=2)
    batches = iter(dataset)
    next(batches)
    seen = -1
    while seen != len(read):
        seen = len(read)
        time.sleep(0.05)
    assert len(read) < 25_000, "the whole file was read although only one batch was taken"
    batches.close()


# Lines that are none


def with_bad(i: int) -> str:
    return "1 x\n" if i % 10 == 3 else id_line(i)


GOOD = [i for i in range(45) if i % 10 != 3]


@pytest.mark.parametrize("thread_num", [1, 3])
def test_skipped_lines_are_counted_and_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], thread_num: int
) -> None:
    files = write(tmp_path, [15, 5, 0, 25], with_bad)  # lines 4 and 14; none; none; lines 4 and 14 and 24
    dataset = dataset_of(files, on_bad_line="skip", thread_num=thread_num, batch_size=4)
    for _ in range(2):
        assert sorted(ids(dataset)) == GOOD
        assert dataset.num_skipped == 5
        report = capfd.readouterr().err
        assert "5" in report
        assert names(report, 2, files[0], "line 4", "'id'", "'x'")
        assert names(report, 3, files[3], "line 4", "'id'", "'x'")
        assert files[1] not in report
        assert files[2] not in report


def test_a_pass_without_skipped_lines_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dataset = dataset_of(write(tmp_path, [4], with_bad), on_bad_line="skip")
    list(dataset)
    assert dataset.num_skipped == 1
    capfd.readouterr()
    dataset.set_filelist(write(tmp_path, [3], with_bad))
    list(dataset)
    assert dataset.num_skipped == 0
    assert capfd.readouterr().err == ""


def test_an_abandoned_pass_reports_what_it_has_skipped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dataset = dataset_of(write(tmp_path, [5, 5000], with_bad), on_bad_line="skip", queue_batches=1)
    for batch in dataset:
        if ids([batch]) == [4]:
            break
    del batch
    jobs.wait_until(lambda: dataset.num_skipped > 0, "the pass is over", SECONDS)
    assert lines_naming(capfd.readouterr().err, "part-0", "line 4")


@pytest.mark.parametrize("thread_num", [1, 3])
def test_a_malformed_line_in_a_file_in_the_middle_is_an_error_with_its_place(tmp_path: Path, thread_num: int) -> None:
    files = write(tmp_path, [20, 20, 20, 20], id_line)
    Path(files[2]).write_text("1 7\n1 8\n1 abc\n1 9\n")
    dataset = dataset_of(files, thread_num=thread_num)
    seen: list[int] = []
    with pytest.raises(DataError) as raised:  # noqa: PT012
        for batch in dataset:
            seen += ids([batch])
    assert names(str(raised.value), files[2], "line 3", "'id'", "'abc'")
    if thread_num == 1:
        assert seen == [*range(40), 7, 8]
    Path(files[2]).write_text("1 7\n")
    assert sorted(ids(dataset)) == sorted([*range(40), 7, *range(60, 80)])  # the next pass is a new one


def test_after_an_error_the_same_iterator_does_not_look_finished(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1 1\nbad\n")
    batches = iter(dataset_of([str(path)]))
    next(batches)
    for _ in range(2):
        with pytest.raises(DataError, match=naming("line 2")):
            next(batches)


def test_a_file_that_is_gone_by_the_time_it_is_read_is_named(tmp_path: Path) -> None:
    files = write(tmp_path, [5, 5], id_line)
    dataset = dataset_of(files)
    os.remove(files[1])
    with pytest.raises(DataError, match="part-1"):
        list(dataset)


def test_a_cut_off_compressed_file_is_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.gz", tmp_path / "b.gz"
    good.write_bytes(gzip.compress(b"1 1\n1 2\n"))
    bad.write_bytes(gzip.compress(os.urandom(5000).hex().encode())[:-200])
    with pytest.raises(DataError, match=r"b\.gz"):
        list(dataset_of([str(good), str(bad)]))


def test_a_pipe_command_that_fails_in_the_middle_is_an_error_with_all_it_says(tmp_path: Path) -> None:
    files = write(tmp_path, [5, 5, 5], id_line)
    command = "cat; case $(readlink /proc/$$/fd/0) in *part-1) echo oh no >&2; exit 3;; esac"
    with pytest.raises(DataError, match=naming("part-1", "status 3", "oh no")):
        list(dataset_of(files, pipe_command=command))


# Passes that are not finished


@pytest.mark.parametrize("command", [None, "cat", "cat; sleep 1000 & sleep 1000 | cat"])
@pytest.mark.parametrize("compressed", [False, True])
def test_abandoning_a_pass_leaves_no_thread_and_no_process(
    tmp_path: Path, command: str | None, compressed: bool
) -> None:
    files = write(tmp_path, [30_000] * 3, id_line)
    if compressed:
        for path in files:
            Path(path).write_bytes(gzip.compress(Path(path).read_bytes(), 1))
    before, others = set(threading.enumerate()), set(children())
    dataset = dataset_of(files, thread_num=2, batch_size=10, pipe_command=command, queue_batches=1)
    for batch in dataset:
        assert batch.num_samples == 10
        break
    assert not set(children()) - others
    jobs.wait_until(lambda: set(threading.enumerate()) <= before, "all threads have ended", SECONDS)


def test_leaving_a_pass_does_not_wait_for_a_pipe_command_that_says_nothing(tmp_path: Path) -> None:
    """All that is there has been read, and the command still runs: a consumer that leaves need not wait for it."""
    others = set(children())
    dataset = dataset_of(write(tmp_path, [30], id_line), batch_size=10, pipe_command="cat; sleep 200")
    batches = iter(dataset)
    assert ids(itertools.islice(batches, 3)) == list(range(30))
    start = time.monotonic()
    batches.close()
    assert time.monotonic() - start < 100, "closing waits until the command ends by itself"
    assert not set(children()) - others


def test_an_error_does_not_wait_for_another_threads_pipe_command(tmp_path: Path) -> None:
    files = write(tmp_path, [3, 3], id_line)
    command = "case $(readlink /proc/$$/fd/0) in *part-0) exit 3;; *) sleep 200;; esac"
    start = time.monotonic()
    with pytest.raises(DataError, match="part-0"):
        list(dataset_of(files, thread_num=2, pipe_command=command))
    assert time.monotonic() - start < 100, "the error waits until the other command ends by itself"


@pytest.mark.parametrize("compressed", [False, True])
def test_a_malformed_line_from_a_pipe_ends_the_command_even_while_the_error_is_kept(
    tmp_path: Path, compressed: bool
) -> None:
    others = set(children())
    path = tmp_path / "a"
    text = "".join(id_line(i) for i in range(10)).encode()
    path.write_bytes(gzip.compress(text) if compressed else text)
    with pytest.raises(DataError) as raised:
        list(dataset_of([str(path)], pipe_command="echo 1 x; sleep 1000"))
    left, text_found = set(children()) - others, str(raised.value)
    del raised
    gc.collect()
    assert "'x'" in text_found
    assert not left, "the command runs on as long as somebody holds the error"


def test_an_exception_in_the_loop_ends_the_pass(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for batch in dataset_of(write(tmp_path, [100], id_line), queue_batches=1):
            _ = 1 // (ids([batch])[0] - 1)
    assert set(threading.enumerate()) <= before


def test_closing_an_iterator_twice_or_before_its_first_batch_does_no_harm(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    dataset = dataset_of(write(tmp_path, [100], id_line), queue_batches=1)
    batches = dataset.iterate()
    batches.close()
    batches.close()
    assert set(threading.enumerate()) <= before
    assert len(ids(dataset)) == 100


def test_a_closed_iterator_gives_nothing_more(tmp_path: Path) -> None:
    batches = dataset_of(write(tmp_path, [100], id_line), queue_batches=5).iterate()
    next(batches)
    jobs.wait_until(lambda: batches._pass._feed.num_waiting == 5, "batches wait", SECONDS)
    batches.close()
    assert list(batches) == []


LEAVING = """
import sys
from torchfleet.data.memory_dataset import InMemoryDataset
from torchfleet.data.queue_dataset import QueueDataset
from torchfleet.data.slots import Slot
dataset = (QueueDataset if sys.argv[1] == "pass" else InMemoryDataset)()
dataset.init(use_var=[Slot("id", dim=1)], thread_num=2, queue_batches=1 << 30)
dataset.set_filelist(sys.argv[2:])
if sys.argv[1] == "pass":
    batches = iter(dataset)
    next(batches)
else:
    dataset.preload_into_memory()
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["pass", "preload"])
def test_a_script_may_end_in_the_middle(tmp_path: Path, what: str) -> None:
    files = write(tmp_path, [20_000] * 20, id_line)
    command = [sys.executable, "-c", LEAVING, what, *files]
    done = processes.run(command, cwd=jobs.ROOT, timeout=200, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")


# Mistakes


@pytest.mark.parametrize("make", [QueueDataset, InMemoryDataset, fleet.QueueDataset, fleet.InMemoryDataset])
class TestOrder:
    def read(self, dataset: Dataset) -> None:
        dataset.load_into_memory() if isinstance(dataset, InMemoryDataset) else list(dataset)

    def test_without_init_it_says_call_init(self, tmp_path: Path, make: type[Dataset]) -> None:
        dataset = make()
        dataset.set_filelist(write(tmp_path, [1], id_line))
        with pytest.raises(DataError, match=r"dataset\.init"):
            self.read(dataset)

    def test_without_files_it_says_call_set_filelist(self, make: type[Dataset]) -> None:
        dataset = make()
        dataset.init(use_var=ID)
        with pytest.raises(DataError, match=r"dataset\.set_filelist"):
            self.read(dataset)

    def test_files_may_be_set_before_init(self, tmp_path: Path, make: type[Dataset]) -> None:
        dataset = make()
        dataset.set_filelist(write(tmp_path, [2], id_line))
        dataset.init(use_var=ID)
        if isinstance(dataset, InMemoryDataset):
            dataset.load_into_memory()
        assert ids(dataset) == [0, 1]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no batch": ({"batch_size": 0}, "batch_size"),
    "a negative batch": ({"batch_size": -5}, "batch_size"),
    "half a batch": ({"batch_size": 2.5}, "batch_size"),
    "a batch in text": ({"batch_size": "10"}, "batch_size"),
    "a truth for a batch": ({"batch_size": True}, "batch_size"),
    "no batch at all": ({"batch_size": None}, "batch_size"),
    "no thread": ({"thread_num": 0}, "thread_num"),
    "threads in text": ({"thread_num": "2"}, "thread_num"),
    "no queue": ({"queue_batches": 0}, "queue_batches"),
    "no slots": ({"use_var": []}, "use_var"),
    "slots by name": ({"use_var": ["id"]}, "use_var"),
    "one slot, no list": ({"use_var": fleet.Slot("id")}, "use_var"),
    "nothing for slots": ({"use_var": None}, "use_var"),
    "two slots of one name": ({"use_var": ID * 2}, "id"),
    "an unknown way with bad lines": ({"on_bad_line": "ignore"}, "on_bad_line 'error' 'skip'"),
    "a command and a format": (
        {"pipe_command": "cat", "data_format": fleet.CriteoFormat()},
        "pipe_command data_format",
    ),
    "an empty command": ({"pipe_command": ""}, "pipe_command"),
    "a command as a list": ({"pipe_command": ["cat"]}, "pipe_command"),
    "a generator class": ({"pipe_command": fleet.MultiSlotDataGenerator}, "MultiSlotDataGenerator"),
    "a format by name": ({"data_format": "criteo"}, "data_format"),
    "a format with other slots": ({"data_format": fleet.CriteoFormat()}, "slots"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_refused_by_init(name: str) -> None:
    options, match = WRONG[name]
    for make in (QueueDataset, InMemoryDataset):
        with pytest.raises(DataError, match=naming(*match.split())):
            make().init(**{"use_var": ID, **options})


def test_slots_given_as_an_iterator_are_taken_or_refused_by_init(tmp_path: Path) -> None:
    dataset = QueueDataset()
    try:
        dataset.init(use_var=(fleet.Slot(name, dim=1) for name in ["id"]))  # type: ignore[arg-type]
    except DataError:
        return
    dataset.set_filelist(write(tmp_path, [3], id_line))
    assert ids(dataset) == [0, 1, 2]


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="batchsize"):
        QueueDataset().init(batchsize=3, use_var=ID)  # type: ignore[call-arg]


def test_whole_numbers_of_numpy_are_whole_numbers_or_clearly_refused(tmp_path: Path) -> None:
    dataset = QueueDataset()
    try:
        dataset.init(batch_size=np.int64(2), use_var=ID)  # type: ignore[arg-type]
    except DataError as error:
        assert "int64" in str(error)  # noqa: PT017
        return
    dataset.set_filelist(write(tmp_path, [3], id_line))
    assert ids(dataset) == [0, 1, 2]


@pytest.mark.parametrize("make", [QueueDataset, InMemoryDataset])
class TestFileList:
    """A wrong list is refused at once, and the one before it stays."""

    @pytest.fixture
    def dataset(self, tmp_path: Path, make: type[Dataset]) -> Iterator[Dataset]:
        dataset = make()
        dataset.init(use_var=ID)
        dataset.set_filelist(write(tmp_path, [2], id_line))
        yield dataset
        if isinstance(dataset, InMemoryDataset):
            dataset.load_into_memory()
        assert ids(dataset) == [0, 1]

    def test_a_missing_file_is_named(self, dataset: Dataset, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="missing-7"):
            dataset.set_filelist([str(tmp_path / "part-0"), str(tmp_path / "missing-7")])

    def test_many_missing_files_are_counted(self, dataset: Dataset, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=naming("missing-0", 997, 1000)):
            dataset.set_filelist([str(tmp_path / f"missing-{i}") for i in range(1000)])

    def test_a_folder_is_named(self, dataset: Dataset, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=naming(tmp_path)):
            dataset.set_filelist([str(tmp_path)])

    def test_a_file_twice_is_named(self, dataset: Dataset, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="part-0"):
            dataset.set_filelist([str(tmp_path / "part-0")] * 2)

    @pytest.mark.parametrize("files", ["part-0", b"part-0", Path("part-0"), None, 7, [7], [None], [b"part-0"], [["a"]]])
    def test_what_is_no_list_of_paths_is_refused(self, dataset: Dataset, files: Any) -> None:
        with pytest.raises(DataError, match="set_filelist"):
            dataset.set_filelist(files)


@pytest.mark.parametrize("lease", [0, -1, float("nan"), 1e9])
def test_a_lease_of_no_sense_is_refused_and_changes_nothing(tmp_path: Path, lease: float) -> None:
    files = write(tmp_path, [1, 1], id_line)
    dataset = dataset_of(files[:1])
    with pytest.raises(DataError, match="lease"):
        dataset.set_filelist(files[1:], dynamic=True, lease=lease)
    assert ids(dataset) == [0]


def test_shared_files_need_workers(tmp_path: Path) -> None:
    for make, match in ((QueueDataset, r"fleet\.init_worker"), (fleet.QueueDataset, r"fleet\.init")):
        dataset = make()
        dataset.init(use_var=ID)
        dataset.set_filelist(write(tmp_path, [1], id_line), dynamic=True)
        with jobs.clean_facade(), pytest.raises(FleetError, match=match):
            list(dataset)


def test_many_threads_may_each_make_passes(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [50, 50], id_line), thread_num=2, batch_size=7)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: sorted(ids(dataset)), range(8), timeout=SECONDS):
            assert found == list(range(100))


def test_the_size_of_a_pass_is_known_from_the_one_before_and_estimated_by_bytes_in_the_first(tmp_path: Path) -> None:
    paths = []
    for i, num in enumerate((100, 300, 200)):
        paths.append(str(tmp_path / f"part-{i}"))
        Path(paths[-1]).write_text("".join(f"1 {1000 + j}\n" for j in range(num)))  # lines of one length
    dataset = QueueDataset()
    dataset.init(batch_size=50, use_var=ID, queue_batches=1)
    dataset.set_filelist(paths)
    assert dataset.num_samples is None
    batches = iter(dataset)
    jobs.wait_until(lambda: next(batches) is not None and dataset.num_samples is not None, "a file was read", SECONDS)
    assert dataset.num_samples == 600
    for _ in batches:
        pass
    Path(paths[0]).write_text("1 1\n" * 7)  # another size than the estimate would go by
    assert dataset.num_samples == 600
    assert len([batch for batch in dataset if batch.num_samples]) == 11  # 507 samples in batches of 50
    assert dataset.num_samples == 507
    dataset.init(batch_size=50, use_var=ID, drop_last=True)
    assert dataset.num_samples == 500
    dataset.set_filelist(paths)
    assert dataset.num_samples is None
