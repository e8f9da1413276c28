"""InMemoryDataset: the order of files and lines whatever the threads, uniform shuffles, preloading beside iteration,
and memory that is given back."""

from __future__ import annotations

import ctypes
import gc
import itertools
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import jobs, processes
from support.grids import first_of
from support.messages import names, naming
from support.searches import examples

import torchfleet as fleet
from torchfleet.base.errors import DataError
from torchfleet.data import feed as feed_module
from torchfleet.data.memory_dataset import InMemoryDataset
from torchfleet.data.reading.reader import ReadOptions
from torchfleet.data.sample_rows import SampleRows
from torchfleet.data.sample_store import Store
from torchfleet.data.slots import SampleLayout
from torchfleet.ps.tables.rows.memory import RELEASE, Memory

SECONDS = 60.0
SLOTS = [
    fleet.Slot("id", dim=1),
    fleet.Slot("words"),
    fleet.Slot("x", dtype="float32", dim=2),
    fleet.Slot("marks", dtype="float32"),
    fleet.Slot("label", dim=1),
]
ID = [fleet.Slot("id", dim=1)]
MiB = 1 << 20

Sample = tuple[Any, ...]


@pytest.fixture(scope="module", autouse=True)
def quick_looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "_LOOK", 0.005)
        yield


@pytest.fixture(autouse=True)
def no_thread_is_left(no_old_garbage: None) -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    jobs.wait_until(lambda: not set(threading.enumerate()) - before, "all threads have ended", SECONDS)


def sample(i: int) -> Sample:
    return (i,), tuple(range(10 * i, 10 * i + i % 4)), (i / 2, -float(i)), (i + 0.25,) * (i % 3), (i % 2,)


def line(i: int) -> str:
    return " ".join(f"{len(values)} {' '.join(map(str, values))}".strip() for values in sample(i)) + "\n"


def id_line(i: int) -> str:
    return f"1 {i}\n"


def samples_of(batches: Iterable[Any]) -> list[Sample]:
    found: list[Sample] = []
    for batch in batches:
        columns = [
            slot.split() if isinstance(slot, tuple) else list(slot) for slot in (batch[name] for name in list(batch))
        ]
        assert {len(column) for column in columns} == {batch.num_samples}
        found += [tuple(tuple(part.tolist()) for part in parts) for parts in zip(*columns, strict=True)]
    return found


def ids(batches: Iterable[Any]) -> list[int]:
    return [i for batch in batches for i in batch["id"].flatten().tolist()]


def write(folder: Path, sizes: Sequence[int], make_line: Callable[[int], str] = line, first: int = 0) -> list[str]:
    serial = itertools.count(first)
    paths = [folder / f"part-{first}-{i}" for i in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_text("".join(make_line(next(serial)) for _ in range(size)))
    return [str(path) for path in paths]


def dataset_of(files: Sequence[str], load: bool = True, **options: Any) -> InMemoryDataset:
    dataset = InMemoryDataset()
    dataset.init(**{"use_var": ID, **options})
    dataset.set_filelist(files)
    if load:
        dataset.load_into_memory()
    return dataset


@pytest.fixture
def twenty(tmp_path: Path) -> InMemoryDataset:
    return dataset_of(write(tmp_path, [12, 0, 8]), use_var=SLOTS, batch_size=7, thread_num=2)


TWENTY = [sample(i) for i in range(20)]


def assert_uniform(counts: np.ndarray) -> None:
    """Chi-square of a table whose rows and columns are fixed: six standard deviations, and the seeds are fixed too."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = (counts.shape[0] - 1) * (counts.shape[1] - 1)
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom), f"{statistic:.0f} for {freedom} degrees of freedom"


# Loading and iterating


@settings(max_examples=examples(30))
@given(
    sizes=st.lists(st.integers(0, 40), max_size=7),
    batch_size=st.integers(1, 50),
    thread_num=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_the_order_is_that_of_files_and_lines_whatever_the_threads(
    sizes: list[int], batch_size: int, thread_num: int, drop_last: bool
) -> None:
    total = sum(sizes)
    with tempfile.TemporaryDirectory() as folder:
        dataset = dataset_of(
            write(Path(folder), sizes),
            use_var=SLOTS,
            batch_size=batch_size,
            thread_num=thread_num,
            drop_last=drop_last,
        )
        whole, rest = divmod(total, batch_size)
        expected_sizes = [batch_size] * whole + ([rest] if rest and not drop_last else [])
        assert dataset.get_memory_data_size() == total
        assert len(dataset) == len(expected_sizes)
        for _ in range(2):
            batches = list(dataset)
            assert [batch.num_samples for batch in batches] == expected_sizes
            assert samples_of(batches) == [sample(i) for i in range(sum(expected_sizes))]


def test_threads_that_read_in_between_each_other_keep_the_order(tmp_path: Path) -> None:
    """Files of several chunks, so that their rows come in turns."""
    sizes = [300_000, 100, 300_000, 100]
    dataset = dataset_of(write(tmp_path, sizes, id_line), thread_num=4, batch_size=100_000)
    assert ids(dataset) == list(range(sum(sizes)))


def test_an_empty_list_of_files_is_an_empty_dataset() -> None:
    dataset = dataset_of([], thread_num=3)
    assert (list(dataset), len(dataset), dataset.get_memory_data_size()) == ([], 0, 0)
    dataset.local_shuffle()
    dataset.global_shuffle()
    dataset.slots_shuffle(["id"])
    assert list(dataset) == []


def test_a_batch_larger_than_everything_holds_everything(tmp_path: Path) -> None:
    (batch,) = dataset_of(write(tmp_path, [3, 4], id_line), batch_size=1 << 62)
    assert ids([batch]) == list(range(7))


def test_before_loading_everything_says_load(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [3], id_line), load=False)
    assert dataset.get_memory_data_size() == 0
    assert dataset.get_shuffle_data_size() == 0
    calls: list[Callable[[], object]] = [
        lambda: list(dataset), lambda: iter(dataset), lambda: len(dataset), dataset.local_shuffle,
        dataset.global_shuffle, lambda: dataset.slots_shuffle(["id"]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(DataError, match="load_into_memory"):
            call()


def test_loading_again_replaces_what_was_there(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [5], id_line))
    dataset.local_shuffle(seed=1)
    dataset.set_filelist(write(tmp_path, [2], id_line, first=100))
    assert sorted(ids(dataset)) == list(range(5))  # until it is loaded
    dataset.load_into_memory()
    assert ids(dataset) == [100, 101]


def test_a_malformed_line_is_an_error_with_its_place(tmp_path: Path) -> None:
    files = write(tmp_path, [5, 5, 5], id_line)
    Path(files[1]).write_text("1 1\n1 2 3\n")
    for thread_num in (1, 3):
        with pytest.raises(DataError, match=naming("part-0-1", "line 2", "'id'", "'3'")):
            dataset_of(files, thread_num=thread_num)


def test_skipped_lines_are_counted_and_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path, [5, 5], lambda i: "bad\n" if i % 4 == 2 else id_line(i))
    dataset = dataset_of(files, on_bad_line="skip", thread_num=2)
    assert ids(dataset) == [0, 1, 3, 4, 5, 7, 8, 9]
    assert dataset.num_skipped == 2
    report = capfd.readouterr().err
    assert names(report, 1, files[0], "line 3")
    assert names(report, 1, files[1], "line 2")


def test_leaving_an_iteration_ends_its_thread(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [100], id_line), queue_batches=1)
    before = set(threading.enumerate())
    for batch in dataset:
        assert ids([batch]) == [0]
        break
    assert set(threading.enumerate()) <= before


def test_init_after_loading_changes_the_size_of_batches_but_not_the_samples(twenty: InMemoryDataset) -> None:
    twenty.init(batch_size=20, use_var=SLOTS)
    (batch,) = twenty
    assert samples_of([batch]) == TWENTY


# local_shuffle


def test_local_shuffle_keeps_every_sample_whole(twenty: InMemoryDataset) -> None:
    for _ in range(3):
        twenty.local_shuffle()
        assert sorted(samples_of(twenty)) == sorted(TWENTY)
    assert samples_of(twenty) != TWENTY


def test_the_same_seed_gives_the_same_order_whatever_the_threads(tmp_path: Path) -> None:
    files = write(tmp_path, [30] * 6, id_line)
    orders = []
    for thread_num in (1, 1, 5, 5):
        dataset = dataset_of(files, thread_num=thread_num)
        dataset.local_shuffle(seed=3)
        orders.append(ids(dataset))
    assert orders[0] == orders[1] == orders[2] == orders[3] != list(range(180))
    dataset.load_into_memory()
    dataset.local_shuffle(seed=4)
    assert ids(dataset) != orders[0]


def test_without_a_seed_orders_differ(tmp_path: Path) -> None:
    files = write(tmp_path, [50], id_line)
    orders = set()
    for _ in range(3):
        dataset = dataset_of(files)
        dataset.local_shuffle()
        orders.add(tuple(ids(dataset)))
    assert len(orders) == 3


def test_local_shuffle_is_uniform(tmp_path: Path) -> None:
    num, rounds = 8, 800
    dataset = dataset_of(write(tmp_path, [5, 3], id_line), batch_size=num)
    counts, pairs = np.zeros((num, num)), np.zeros((num, num))
    for seed in range(rounds):
        dataset.local_shuffle(seed)
        (batch,) = dataset
        order = batch["id"].flatten().numpy()
        counts[np.arange(num), order] += 1
        pairs[order[:-1], order[1:]] += 1  # neighbours
    assert_uniform(counts)
    apart = pairs[~np.eye(num, dtype=bool)]
    expected = apart.sum() / apart.size
    assert ((apart - expected) ** 2 / expected).sum() < apart.size + 6 * np.sqrt(2 * apart.size)


def test_one_worker_alone_shuffles_globally_as_locally(tmp_path: Path) -> None:
    files = write(tmp_path, [20, 20], id_line)
    one, other = dataset_of(files), dataset_of(files)
    one.local_shuffle(seed=5)
    other.global_shuffle(seed=5)
    assert ids(one) == ids(other)
    assert (one.get_shuffle_data_size(), other.get_shuffle_data_size()) == (0, 40)


# slots_shuffle


@settings(max_examples=examples(25))
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    names=st.lists(st.sampled_from([slot.name for slot in SLOTS]), unique=True),
    shuffled=st.booleans(),
    seed=st.integers(0, 5),
)
def test_slots_shuffle_permutes_these_slots_and_keeps_all_others(
    sizes: list[int], names: list[str], shuffled: bool, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = dataset_of(write(Path(folder), sizes), use_var=SLOTS, batch_size=7)
        if shuffled:
            dataset.local_shuffle(seed)
        before = samples_of(dataset)
        dataset.slots_shuffle(names)
        after = samples_of(dataset)
    for slot, was, now in zip(SLOTS, zip(*before, strict=True), zip(*after, strict=True), strict=False):
        assert Counter(was) == Counter(now)
        if slot.name not in names:
            assert was == now
    assert len(before) == len(after) == dataset.get_memory_data_size()


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(["id", "words"]))
def test_slots_shuffle_deals_the_values_uniformly(tmp_path: Path, name: str) -> None:
    num, rounds = 6, 400
    (path,) = write(tmp_path, [num], lambda i: f"1 {i} {i} {' '.join([str(i)] * i)}\n".replace(" \n", "\n"))
    slots = [fleet.Slot("id", dim=1), fleet.Slot("words")]
    counts = np.zeros((num, num))
    dataset = dataset_of([path], use_var=slots, batch_size=num)
    for seed in range(rounds):
        dataset.slots_shuffle([name], seed=seed)
        (batch,) = dataset
        column = batch["id"].flatten().tolist() if name == "id" else [len(part) for part in batch["words"].split()]
        counts[np.arange(num), column] += 1
    assert_uniform(counts)


def test_two_slots_are_dealt_independently(tmp_path: Path) -> None:
    slots = [fleet.Slot("id", dim=1), fleet.Slot("other", dim=1)]
    dataset = dataset_of(write(tmp_path, [200], lambda i: f"1 {i} 1 {i}\n"), use_var=slots)
    dataset.slots_shuffle(["id", "other"])
    found = samples_of(dataset)
    assert sum(values[0] == values[1] for values in found) < 20, "both slots went the same way"


def test_one_slot_may_be_given_by_its_name_alone(twenty: InMemoryDataset) -> None:
    twenty.slots_shuffle("id")
    assert [values[1:] for values in samples_of(twenty)] == [values[1:] for values in TWENTY]


def test_an_unknown_slot_is_refused_and_nothing_is_shuffled(twenty: InMemoryDataset) -> None:
    with pytest.raises(DataError, match=naming("'idd'", "id", "words", "x", "marks", "label")):
        twenty.slots_shuffle(["id", "idd"])
    assert samples_of(twenty) == TWENTY


def test_slots_are_those_of_the_samples_also_after_another_init(tmp_path: Path) -> None:
    one, other = fleet.Slot("one", dim=1), fleet.Slot("other", dim=1)
    dataset = dataset_of(write(tmp_path, [50], lambda i: f"1 {i} 1 {100 + i}\n"), use_var=[one, other])
    dataset.init(use_var=[other, one])
    dataset.slots_shuffle(["other"])
    assert [batch["one"].item() for batch in dataset] == list(range(50))


# What happens in the middle of an iteration


CHANGES: dict[str, Callable[[InMemoryDataset], object]] = {
    "local_shuffle": lambda dataset: dataset.local_shuffle(1),
    "global_shuffle": lambda dataset: dataset.global_shuffle(1),
    "slots_shuffle": lambda dataset: dataset.slots_shuffle(["id", "words"]),
    "release_memory": lambda dataset: dataset.release_memory(),
    "load_into_memory": lambda dataset: dataset.load_into_memory(),
    "init": lambda dataset: dataset.init(batch_size=2, use_var=SLOTS, drop_last=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_the_middle_of_an_iteration_does_not_disturb_it(tmp_path: Path, name: str) -> None:
    dataset = dataset_of(write(tmp_path, [300, 200]), use_var=SLOTS, batch_size=7, queue_batches=1)
    batches = iter(dataset)
    found = samples_of(itertools.islice(batches, 5))
    CHANGES[name](dataset)
    found += samples_of(batches)
    assert found == [sample(i) for i in range(500)]


def test_two_iterations_at_once_do_not_disturb_each_other(twenty: InMemoryDataset) -> None:
    first = iter(twenty)
    found = samples_of([next(first)])
    assert samples_of(twenty) == TWENTY
    assert found + samples_of(first) == TWENTY


# Preloading


def gate(options: ReadOptions, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Readers made from now on wait until it is set."""
    is_open = threading.Event()
    make = ReadOptions.reader

    def reader(self: ReadOptions, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert is_open.wait(SECONDS)
        return make(self, *args)

    monkeypatch.setattr(ReadOptions, "reader", reader)
    return is_open


@pytest.mark.parametrize("thread_num", [None, 1, 3])
def test_a_preload_goes_on_beside_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread_num: int | None
) -> None:
    dataset = dataset_of(write(tmp_path, [5], id_line))
    dataset.set_filelist(write(tmp_path, [3, 4], id_line, first=50))
    is_open = gate(dataset.settings, monkeypatch)
    dataset.preload_into_memory(thread_num)
    for _ in range(2):
        assert ids(dataset) == list(range(5))
    assert dataset.get_memory_data_size() == 5
    running = iter(dataset)
    is_open.set()
    dataset.wait_preload_done()
    assert ids(dataset) == list(range(50, 57))
    assert ids(running) == list(range(5))


def test_a_preload_may_be_the_first_loading(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [5], id_line), load=False)
    dataset.preload_into_memory()
    dataset.wait_preload_done()
    assert ids(dataset) == list(range(5))


def test_a_preload_reads_the_files_that_were_set_when_it_began(tmp_path: Path) -> None:
    """The list for the day after may be set while it is under way, however slowly its thread begins."""
    is_set = threading.Event()

    class SlowToBegin(InMemoryDataset):
        @property
        def settings(self) -> ReadOptions:
            if threading.current_thread() is not threading.main_thread():
                assert is_set.wait(SECONDS)
            return super().settings

    dataset = SlowToBegin()
    dataset.init(use_var=ID)
    dataset.set_filelist(write(tmp_path, [5], id_line))
    dataset.preload_into_memory()
    dataset.set_filelist(write(tmp_path, [2], id_line, first=50))
    is_set.set()
    dataset.wait_preload_done()
    assert ids(dataset) == list(range(5))


def test_an_error_of_a_preload_is_raised_by_who_waits_for_it_and_the_old_samples_stay(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [5], id_line))
    bad = tmp_path / "bad"
    bad.write_text("1 1\noh\n")
    dataset.set_filelist([str(bad)])
    dataset.preload_into_memory()
    with pytest.raises(DataError, match=naming("bad", "line 2")):
        dataset.wait_preload_done()
    assert ids(dataset) == list(range(5))
    bad.write_text("1 9\n")
    dataset.preload_into_memory()
    dataset.wait_preload_done()
    assert ids(dataset) == [9]


def test_skipped_lines_of_a_preload_are_reported_when_it_is_done(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = dataset_of(write(tmp_path, [5], lambda i: "bad\n" if i == 3 else id_line(i)), False, on_bad_line="skip")
    dataset.preload_into_memory()
    dataset.wait_preload_done()
    assert dataset.num_skipped == 1
    assert "line 4" in capfd.readouterr().err


def test_calls_in_a_wrong_order_say_what_to_call(tmp_path: Path) -> None:
    dataset = InMemoryDataset()
    with pytest.raises(DataError, match=r"dataset\.init"):
        dataset.preload_into_memory()
    dataset.init(use_var=ID)
    with pytest.raises(DataError, match=r"set_filelist"):
        dataset.preload_into_memory()
    dataset.set_filelist(write(tmp_path, [5], id_line))
    with pytest.raises(DataError, match="preload_into_memory"):
        dataset.wait_preload_done()
    dataset.preload_into_memory()
    for call in (dataset.preload_into_memory, dataset.load_into_memory):
        with pytest.raises(DataError, match="wait_preload_done"):
            call()
    dataset.wait_preload_done()
    with pytest.raises(DataError, match="preload_into_memory"):
        dataset.wait_preload_done()
    assert ids(dataset) == list(range(5))


@pytest.mark.parametrize("thread_num", [0, -1, 2.5, "2", True])
def test_a_preload_with_a_wrong_number_of_threads_is_refused_at_once(tmp_path: Path, thread_num: Any) -> None:
    dataset = dataset_of(write(tmp_path, [5], id_line), load=False)
    with pytest.raises(DataError, match=naming("thread_num", 1)):
        dataset.preload_into_memory(thread_num)


# Sizes and memory


def test_sizes_follow_what_happens(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [5, 6], id_line), batch_size=4)

    def sizes() -> tuple[int, int, int, int]:
        of_all = dataset.get_memory_data_size(all_workers=True), dataset.get_shuffle_data_size(all_workers=True)
        return dataset.get_memory_data_size(), dataset.get_shuffle_data_size(), *of_all

    assert (sizes(), len(dataset)) == ((11, 0, 11, 0), 3)
    dataset.local_shuffle()
    assert sizes() == (11, 0, 11, 0)
    dataset.global_shuffle()
    assert sizes() == (11, 11, 11, 11)
    dataset.slots_shuffle(["id"])
    assert sizes() == (11, 11, 11, 11)
    dataset.load_into_memory()
    assert sizes() == (11, 0, 11, 0)
    dataset.global_shuffle()
    dataset.release_memory()
    assert sizes() == (0, 0, 0, 0)
    dataset.release_memory()  # again does no harm


def test_released_samples_are_gone_until_they_are_loaded_again(tmp_path: Path) -> None:
    dataset = dataset_of(write(tmp_path, [5], id_line))
    dataset.release_memory()
    with pytest.raises(DataError, match="load_into_memory"):
        list(dataset)
    dataset.load_into_memory()
    assert ids(dataset) == list(range(5))


def resident() -> int:
    """Without what the allocator keeps of freed memory, which other tests of the process have a part in."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def big_rows(num: int, words_per_row: int) -> SampleRows:
    words = np.random.default_rng(0).integers(0, 1 << 32, num * words_per_row, np.uint32)
    return SampleRows(words, np.arange(num + 1) * words_per_row)


def test_draining_a_store_gives_all_rows_and_their_memory_back() -> None:
    layout = SampleLayout([fleet.Slot("x", dtype="float32", dim=256)])
    rows = big_rows(1 << 15, 256)  # 32 MiB
    store = Store(layout)
    start = resident()
    for _ in range(4):
        store.append(rows)
    assert store.num == 1 << 17
    full = resident()
    assert full - start > 100 * MiB
    held, at = [], 0
    for numbers, part in store.drain(10_000):
        held.append(resident())
        assert numbers.start == at
        first = numbers.start % rows.num
        assert (part.words[:256] == rows.words[256 * first : 256 * first + 256]).all()
        assert part.starts.tolist() == list(range(0, 256 * len(numbers) + 1, 256))
        at = numbers.stop
    assert at == 1 << 17
    assert held == sorted(held, reverse=True) or max(np.diff(held)) < 4 * MiB
    assert resident() - start < 20 * MiB
    assert (store.num, store.num_bytes, len(store.order)) == (0, 0, 0)


def test_releasing_a_dataset_gives_its_memory_back(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(("256 " + " ".join(["1"] * 256) + "\n") * 20_000)
    dataset = dataset_of([str(path)], use_var=[fleet.Slot("x", dtype="int64", dim=256)])  # 40 MB
    full = resident()
    dataset.release_memory()
    gc.collect()
    assert full - resident() > 30 * MiB


LOADING_AGAIN = """
import ctypes, gc, sys
import torchfleet as fleet
from torchfleet.base.monitor.status import resident_bytes

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()

dataset = fleet.InMemoryDataset()
dataset.init(use_var=[fleet.Slot("x", dtype="int64", dim=256)])
dataset.set_filelist(sys.argv[1:])
dataset.load_into_memory()
full = resident()
for _ in range(3):
    dataset.load_into_memory()
    dataset.slots_shuffle(["x"])
print(resident() - full)
"""


@pytest.mark.slow
def test_loading_again_does_not_hold_the_old_samples_meanwhile(tmp_path: Path) -> None:
    """In a process of its own: what other tests have left would be given back, or taken, in the middle."""
    path = tmp_path / "a"
    path.write_text(("256 " + " ".join(["1"] * 256) + "\n") * 20_000)  # 40 MB
    done = processes.run([sys.executable, "-c", LOADING_AGAIN, str(path)], timeout=200, stderr=subprocess.PIPE)
    assert int(done.stdout) < 30 * MiB, done.stderr


def test_a_store_takes_rows_from_many_threads() -> None:
    store = Store(SampleLayout(ID))
    parts = [SampleRows(np.array([i, 0, i, 1], np.uint32), np.array([0, 2, 4])) for i in range(400)]
    ranges = jobs.in_threads(lambda t: [(i, store.append(parts[i])) for i in range(t, 400, 4)], 4)
    rows = store.rows
    for i, numbers in itertools.chain(*ranges):
        assert [rows.words[rows.starts[n] : rows.starts[n + 1]].tolist() for n in numbers] == [[i, 0], [i, 1]]
    assert sorted(n for own in ranges for _, numbers in own for n in numbers) == list(range(800))


def test_samples_that_do_not_fit_are_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchfleet.data.sample_store.physical_bytes", lambda: 1 << 16)
    store = Store(SampleLayout([fleet.Slot("x", dtype="float32", dim=256)]))
    rows = big_rows(20, 256)
    for _ in range(3):
        store.append(rows)
    with pytest.raises(DataError, match="QueueDataset"):
        store.append(rows)
    assert store.num == 60


@settings(max_examples=examples(30))
@given(cuts=st.lists(st.integers(0, 5 * RELEASE), max_size=6))
def test_memory_is_given_back_from_the_front_and_never_beyond(cuts: list[int]) -> None:
    memory = Memory(5 * RELEASE)
    array = memory.array(np.uint8)
    array[:] = 7
    furthest = 0
    for cut in cuts:
        memory.release_up_to(cut)
        furthest = max(furthest, cut)
        gone = int((array == 0).sum())
        assert (array[:gone] == 0).all()
        assert furthest - RELEASE < gone <= furthest
        assert memory.held_bytes == 5 * RELEASE - gone
