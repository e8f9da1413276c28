"""Global shuffle: nothing lost or doubled, equal shares, uniform over workers and positions; parcels that are none.

The workers are threads of this process: over a stand-in that hands parcels on in any order, and over real servers.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import jobs
from support.fleets import Fleet, in_process, in_threads
from support.grids import first_of
from support.messages import naming
from support.searches import examples

import torchfleet as fleet
from torchfleet.base.errors import DataError, FleetError
from torchfleet.data import feed as feed_module
from torchfleet.data import shuffle
from torchfleet.data.memory_dataset import InMemoryDataset
from torchfleet.data.sample_rows import SampleRows
from torchfleet.data.sample_store import Store
from torchfleet.data.shuffle import deal, exchange_samples, packed, unpacked
from torchfleet.data.slots import SampleLayout, Slot
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.meeting import mail
from torchfleet.ps.worker.peers import Workers

SECONDS = 60.0
ID = [Slot("id", dim=1)]
MIXED = [Slot("id", dim=1), Slot("words"), Slot("x", dtype="float32", dim=1), Slot("marks", dtype="float32")]
Parcel = list[np.ndarray]
OnParcel = Callable[[Parcel], None]


@pytest.fixture(scope="module", autouse=True)
def quick_looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "_LOOK", 0.005)
        yield


# A stand-in for the servers


class Room:
    """Where the workers meet. `pick(n)`: which of n parcels that wait comes next."""

    def __init__(self, num: int, pick: Callable[[int], int] = lambda n: 0) -> None:
        self.num, self.pick = num, pick
        self.all_here = threading.Barrier(num, timeout=SECONDS)
        self.brought: dict[int, bytes] = {}
        self.boxes: dict[int, list[tuple[int, int, Parcel]]] = {i: [] for i in range(num)}
        self.serial = itertools.count()
        self.changed = threading.Condition()
        self.waits_for_all = False  # parcels are taken only when all have sent theirs

    def worker(self, index: int) -> FellowWorker:
        return FellowWorker(self, index)


class FellowWorker:
    """One worker's view of it; as torchfleet.data.dataset.WorkerGroup."""

    def __init__(self, room: Room, index: int) -> None:
        self._room, self.index, self.num = room, index, room.num

    def gather(self, name: str, data: bytes) -> list[bytes]:
        room = self._room
        room.brought[self.index] = data
        room.all_here.wait()
        found = [room.brought[i] for i in range(room.num)]
        room.all_here.wait()
        return found

    def exchange(self, topic: str) -> FellowWorker:
        return self

    def send(self, to: int, arrays: Parcel, on_parcel: OnParcel) -> None:
        with self._room.changed:
            parcel = [array.copy() for array in arrays]
            self._room.boxes[to].append((self.index, next(self._room.serial), parcel))
            self._room.changed.notify_all()

    def take_until(self, is_enough: Callable[[], bool], on_parcel: OnParcel) -> None:
        room = self._room
        if room.waits_for_all:
            room.all_here.wait()
        deadline = time.monotonic() + SECONDS
        while not is_enough():
            with room.changed:
                box = room.boxes[self.index]
                if not box:
                    assert room.changed.wait(max(0.01, deadline - time.monotonic())), "no parcel comes"
                    continue
                box.sort(key=lambda entry: entry[:2])
                _, _, parcel = box.pop(room.pick(len(box)))
            on_parcel(parcel)

    def finish(self) -> None:
        pass

    def files(self, name: str, number: int, paths: Sequence[str], lease: float) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Loaded(InMemoryDataset):
    """A dataset with samples of its own and these fellow workers."""

    def __init__(self, store: Store, workers: Callable[[], Any], **options: Any) -> None:
        super().__init__()
        self.init(**{"use_var": store.layout.slots, "batch_size": 1000, **options})
        self._store, self._workers = store, workers

    def workers(self) -> Any:
        return self._workers()


def store_of(values: Sequence[int], slots: Sequence[Slot] = ID) -> Store:
    """Samples whose contents follow from their number."""
    words: list[int] = []
    starts = [0]
    for i in values:
        for slot in slots:
            count = slot.dim or i % 4
            words += [count] if slot.dim is None else []
            words += [i, 0] * count if slot.dtype == "int64" else [int(np.float32(i).view(np.uint32))] * count
        starts.append(len(words))
    store = Store(SampleLayout(slots))
    store.append(SampleRows(np.array(words, np.uint32), np.array(starts)))
    store.order = np.arange(store.num)
    return store


def numbered(numbers: Sequence[int], slots: Sequence[Slot] = ID) -> list[Store]:
    """One store per worker; the samples are numbered through."""
    serial = itertools.count()
    return [store_of([next(serial) for _ in range(number)], slots) for number in numbers]


def ids(dataset: InMemoryDataset) -> list[int]:
    """The numbers of the samples, each checked to be whole."""
    found: list[int] = []
    for batch in dataset:
        own = batch["id"].flatten().tolist()
        if "words" in batch:
            assert [part.tolist() for part in batch["words"].split()] == [[i] * (i % 4) for i in own]
            assert [part.tolist() for part in batch["marks"].split()] == [[float(i)] * (i % 4) for i in own]
            assert batch["x"].flatten().tolist() == own
        found += own
    return found


def shuffled(
    stores: Sequence[Store],
    workers: Callable[[int], Any],
    seed: int | None = None,
    seeds: Sequence[int | None] | None = None,
) -> list[list[int]]:
    """What each worker has after a global shuffle, in order."""

    def work(index: int) -> list[int]:
        dataset = Loaded(stores[index], lambda: workers(index))
        dataset.global_shuffle(seed if seeds is None else seeds[index])
        found = ids(dataset)
        assert dataset.get_memory_data_size() == dataset.get_shuffle_data_size() == len(found)
        return found

    return jobs.in_threads(work, len(stores))


def assert_dealt(shares: list[list[int]], total: int) -> None:
    assert sorted(itertools.chain(*shares)) == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def real_workers(servers: Fleet, num: int, timeout: float = SECONDS) -> Callable[[int], Workers]:
    def make(index: int) -> Workers:
        role = Role.WORKER if index else Role.FIRST_WORKER
        return Workers(servers.client(worker=index, role=role), index, num, timeout)

    return make


# What comes out


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(
    numbers=st.lists(st.integers(0, 40), min_size=2, max_size=5),
    seed=st.none() | st.integers(0, 1 << 40),
    parcel_rows=st.sampled_from([1, 3, 1 << 14]),
)
@example(numbers=[0, 0, 0], seed=1, parcel_rows=3)
@example(numbers=[0, 1], seed=1, parcel_rows=3)
@example(numbers=[0, 0, 37], seed=None, parcel_rows=3)
def test_nothing_is_lost_or_doubled_and_shares_are_equal(
    numbers: list[int], seed: int | None, parcel_rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "_PARCEL_ROWS", parcel_rows)
        shares = shuffled(numbered(numbers, MIXED), Room(len(numbers)).worker, seed)
    assert_dealt(shares, sum(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("numbers", first_of([(2, 2, 1), (4, 1, 3), (0, 6)]))
def test_it_is_uniform_over_workers_and_positions(numbers: tuple[int, ...]) -> None:
    total, rounds = sum(numbers), 150
    counts = np.zeros((total, total))  # sample, place: the workers' shares one behind the other
    for seed in range(rounds):
        order = list(itertools.chain(*shuffled(numbered(numbers), Room(len(numbers)).worker, seed)))
        counts[order, np.arange(total)] += 1
    expected, freedom = rounds / total, (total - 1) ** 2
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)


@pytest.mark.slow
def test_who_comes_to_which_worker_together_is_uniform_too() -> None:
    """All 20 ways to deal six samples to two workers."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(300):
        first, _ = shuffled(numbered([4, 2]), Room(2).worker, seed)
        key = tuple(sorted(first))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 20
    statistic = sum((count - 15) ** 2 / 15 for count in counts.values())
    assert statistic < 19 + 6 * np.sqrt(2 * 19)


def test_without_a_seed_every_shuffle_is_another() -> None:
    found = {tuple(map(tuple, shuffled(numbered([20, 20]), Room(2).worker))) for _ in range(3)}
    assert len(found) == 3


def test_the_same_seed_deals_the_same_samples_to_the_same_workers() -> None:
    runs = [shuffled(numbered([20, 9, 30]), Room(3).worker, seed=5) for _ in range(2)]
    assert [sorted(share) for share in runs[0]] == [sorted(share) for share in runs[1]]
    other = shuffled(numbered([20, 9, 30]), Room(3).worker, seed=6)
    assert [sorted(share) for share in runs[0]] != [sorted(share) for share in other]


@pytest.mark.parametrize("how", ["parcels", "threads"])
def test_the_same_seed_gives_the_same_order_whatever_comes_first(how: str) -> None:
    """As for local_shuffle: neither the way of the parcels nor that of the reading threads makes a difference."""

    def run(backwards: bool) -> list[list[int]]:
        room = Room(3, (lambda n: n - 1) if backwards and how == "parcels" else (lambda n: 0))
        room.waits_for_all = True
        stores = numbered([20, 9, 30])
        if backwards and how == "threads":  # the same samples in the same order, but they lie the other way round
            for store in stores:
                first = int(store.rows.words[0])
                store.drain(1 << 20)
                turned = store_of(range(first + store.num - 1, first - 1, -1))
                turned.order = turned.order[::-1].copy()
                stores[stores.index(store)] = turned
        assert [ids(Loaded(store, lambda: None)) for store in stores] == [
            [*range(20)], [*range(20, 29)], [*range(29, 59)]
        ]  # fmt: skip
        return shuffled(stores, room.worker, seed=5)

    assert run(False) == run(True)


def test_workers_that_give_different_seeds_still_lose_nothing() -> None:
    assert_dealt(shuffled(numbered([5, 6, 7]), Room(3).worker, seeds=[1, 2, None]), 18)


def test_a_shuffled_dataset_can_be_shuffled_again() -> None:
    room, stores = Room(3), numbered([10, 0, 5], MIXED)

    def work(index: int) -> list[list[int]]:
        dataset = Loaded(stores[index], lambda: room.worker(index))
        found = []
        for seed in (1, 2, None):
            dataset.global_shuffle(seed)
            dataset.local_shuffle()
            assert dataset.get_memory_data_size(all_workers=True) == 15
            assert dataset.get_shuffle_data_size(all_workers=True) == 15
            found.append(ids(dataset))
        return found

    for shares in zip(*jobs.in_threads(work, 3), strict=True):
        assert_dealt(list(shares), 15)


def test_the_old_store_is_empty_afterwards() -> None:
    stores, room = numbered([30, 30]), Room(2)
    jobs.in_threads(lambda i: exchange_samples(stores[i], room.worker(i), 1, begin), 2)
    assert [store.num for store in stores] == [0, 0]


# Dealing


@settings(max_examples=examples(40))
@given(numbers=st.lists(st.integers(0, 10**7), min_size=1, max_size=20), seed=st.integers(0, 1000))
def test_what_is_dealt_adds_up(numbers: list[int], seed: int) -> None:
    flows = deal(np.array(numbers), np.random.default_rng(seed))
    assert (flows >= 0).all()
    assert flows.sum(1).tolist() == numbers
    room = flows.sum(0)
    assert room.max() - room.min() <= 1


@pytest.mark.parametrize("numbers", [(10**9, 10**9), (4 * 10**9, 0, 5 * 10**8), (1,) * 10 + (10**10,)])
def test_more_than_a_thousand_million_samples_are_dealt(numbers: tuple[int, ...]) -> None:
    flows = deal(np.array(numbers), np.random.default_rng(0))
    assert flows.sum(1).tolist() == list(numbers)
    room = flows.sum(0)
    assert room.max() - room.min() <= 1
    share = np.array(numbers) / len(numbers)
    assert (np.abs(flows - share[:, None]) <= 10 * np.sqrt(share)[:, None] + 1).all()


# In the middle of an iteration, and when it fails


def test_a_global_shuffle_in_the_middle_of_an_iteration_does_not_disturb_it() -> None:
    num = 60_000  # more than the pages that are given back at a time
    stores = [store_of(range(num)), store_of(range(num, num + 1000))]
    room = Room(2)

    def work(index: int) -> list[int]:
        dataset = Loaded(stores[index], lambda: room.worker(index), queue_batches=1)
        batches = iter(dataset)
        found = next(batches)["id"].flatten().tolist()
        dataset.global_shuffle()
        return found + [i for batch in batches for i in batch["id"].flatten().tolist()]

    found = jobs.in_threads(work, 2)[0]
    assert len(found) == num
    wrong = sum(i != j for i, j in enumerate(found))
    assert wrong == 0, f"{wrong:,} of {num:,} samples changed under the iteration"


@pytest.mark.parametrize("when", ["sending", "receiving"])
def test_after_a_global_shuffle_that_failed_no_sample_is_wrong(when: str) -> None:
    """Either the samples are as they were, or there are none and it says so."""
    num, room = 60_000, Room(2)

    class Broken(FellowWorker):
        def take_until(self, is_enough: Callable[[], bool], on_parcel: OnParcel) -> None:
            raise FleetError("the servers are gone")

    class BrokenInSend(Broken):
        num_sent = 0

        def send(self, to: int, arrays: Parcel, on_parcel: OnParcel) -> None:
            self.num_sent += 1
            if self.num_sent > 2:
                raise FleetError("the servers are gone")

    def work(index: int) -> list[int] | None:
        kind = BrokenInSend if when == "sending" else Broken
        dataset = Loaded(store_of(range(index, num + index)), lambda: kind(room, index))
        with pytest.raises(FleetError, match="the servers are gone"):
            dataset.global_shuffle()
        try:
            return [i - index for i in ids(dataset)]
        except DataError:
            return None

    for found in jobs.in_threads(work, 2):
        wrong = 0 if found is None else num - sum(i == j for i, j in enumerate(found))
        assert wrong == 0, f"{wrong:,} of {num:,} samples are wrong or gone, and nothing says so"


def test_different_slots_on_workers_are_an_error_on_all() -> None:
    room, errors = Room(2), queue.Queue[str]()
    stores = [store_of(range(5), ID), store_of(range(5), MIXED)]

    def work(index: int) -> list[int]:
        dataset = Loaded(stores[index], lambda: room.worker(index))
        with pytest.raises(DataError, match="slots") as raised:
            dataset.global_shuffle()
        errors.put(str(raised.value))
        return ids(dataset)

    assert jobs.in_threads(work, 2) == [list(range(5))] * 2  # and the samples are still there
    assert errors.qsize() == 2


def test_a_worker_that_has_left_is_an_error() -> None:
    class Left(FellowWorker):
        def gather(self, name: str, data: bytes) -> list[bytes]:
            return [data]

    dataset = Loaded(store_of(range(5)), lambda: Left(Room(2), 0))
    with pytest.raises(DataError, match=naming(2, 1)):
        dataset.global_shuffle()
    assert ids(dataset) == list(range(5))


@pytest.mark.parametrize("kind", ["too many", "none"])
def test_parcels_that_are_not_what_was_agreed_are_an_error(kind: str) -> None:
    surplus = (
        packed(0, np.arange(50), store_of(range(50)).rows)
        if kind == "too many"
        else [np.zeros(3, np.uint8), np.zeros(2, np.uint64)]
    )

    class Wrong(FellowWorker):
        def send(self, to: int, arrays: Parcel, on_parcel: OnParcel) -> None:
            super().send(to, surplus, on_parcel)

    room = Room(2)

    def work(index: int) -> None:
        with pytest.raises(DataError, match="shuffle"):
            exchange_samples(store_of(range(20)), Wrong(room, index), 1, begin)

    jobs.in_threads(work, 2)


def begin() -> None:
    """Called before the first sample goes."""


# Malformed parcels


def addressed(rows: Parcel) -> Parcel:
    """As worker 3 would send them."""
    num = rows[1].size - 1 if len(rows) > 1 else 0
    return [np.array([3], np.uint64), np.arange(max(0, num), dtype=np.uint64), *rows]


def is_whole(words: Sequence[int], starts: Sequence[int], slots: Sequence[Slot]) -> bool:
    """The oracle: read along."""
    if not starts or starts[0] != 0 or starts[-1] != len(words):
        return False
    for at, end in itertools.pairwise(starts):
        if not 0 <= at <= end <= len(words):
            return False
        for slot in slots:
            count = slot.dim
            if count is None:
                if at >= end:
                    return False
                count = words[at]
                at += 1  # noqa: PLW2901
            at += count * (2 if slot.dtype == "int64" else 1)  # noqa: PLW2901
        if at != end:
            return False
    return True


LAYOUTS = [MIXED, ID, [Slot("a")], [Slot("a", "float32"), Slot("b")], [Slot("x", "float32", 3), Slot("a")]]
WORDS = st.integers(0, 6) | st.sampled_from([1 << 31, (1 << 32) - 1, (1 << 31) - 1, 1 << 30])
STARTS = st.integers(-3, 12) | st.sampled_from([1 << 62, (1 << 63) - 1, -(1 << 63), 1 << 32, -(1 << 32)])


@settings(max_examples=examples(60))
@given(data=st.data(), slots=st.sampled_from(LAYOUTS), num=st.integers(0, 5))
def test_corrupted_rows_are_refused_exactly_when_they_are_not_whole(
    data: st.DataObject, slots: list[Slot], num: int
) -> None:
    rows = store_of(range(num), slots).rows
    words, starts = rows.words.tolist(), rows.starts.tolist()
    assert is_whole(words, starts, slots)
    for _ in range(data.draw(st.integers(0, 3))):
        array, values = data.draw(st.sampled_from([(words, WORDS), (starts, STARTS)]))
        place = data.draw(st.integers(0, len(array)))
        what = data.draw(st.sampled_from(["put", "drop", "set"]))
        if what == "put":
            array.insert(place, data.draw(values))
        elif place < len(array) and what == "drop":
            del array[place]
        elif place < len(array):
            array[place] = data.draw(values)
    store = Store(SampleLayout(slots))
    parcel = addressed([np.array(words, np.uint32).view(np.uint8), np.array(starts, np.int64).view(np.uint64)])
    if is_whole(words, starts, slots):
        sender, places, found = unpacked(parcel, store.layout)
        assert (sender, places.tolist()) == (3, list(range(len(starts) - 1)))
        assert (found.words.tolist(), found.starts.tolist()) == (words, starts)
        if starts:
            assert store.layout.check(SampleRows(np.array(words, np.uint32), np.array(starts, np.int64)))
    else:
        with pytest.raises(DataError, match=naming("use_var")):
            unpacked(parcel, store.layout)


@pytest.mark.parametrize(
    "parcel",
    [
        [],
        [np.zeros(8, np.uint8)],
        [np.zeros(8, np.uint8), np.array([0, 2], np.uint64), np.zeros(1, np.uint8)],
        [np.zeros(7, np.uint8), np.array([0, 2], np.uint64)],
        [np.zeros(8, np.float32), np.array([0, 2], np.uint64)],
        [np.zeros(8, np.uint8), np.array([0, 2], np.float64)],
        [np.zeros(8, np.uint8), np.zeros(0, np.uint64)],
        [np.zeros(0, np.uint8), np.zeros(0, np.uint64)],
        [np.zeros(8, np.uint8), np.array([2, 0], np.uint64)],
    ],
    ids=str,
)
def test_a_parcel_of_another_form_is_refused(parcel: Parcel) -> None:
    with pytest.raises(DataError, match=naming("use_var")):
        unpacked(addressed(parcel), SampleLayout(ID))


def test_a_parcel_may_have_any_shape_and_its_memory_may_go() -> None:
    rows = store_of([1, 2, 3]).rows
    words = rows.words.view(np.uint8).reshape(1, -1).copy()
    _, _, found = unpacked(addressed([words, rows.starts.view(np.uint64).reshape(-1, 1)]), SampleLayout(ID))
    words[:] = 0
    assert found.words.tolist() == [1, 0, 2, 0, 3, 0]


# Over real servers


@pytest.mark.parametrize("num_servers", [1, 2])
def test_over_servers_nothing_is_lost_or_doubled(monkeypatch: pytest.MonkeyPatch, num_servers: int) -> None:
    monkeypatch.setattr(shuffle, "_PARCEL_ROWS", 50)
    with in_process(num_servers) as servers:
        for numbers in ([300, 0, 700], [0, 0, 1], [0, 0, 0], [333, 333, 333]):
            shares = shuffled(numbered(numbers, MIXED), real_workers(servers, 3))
            assert_dealt(shares, sum(numbers))


def test_over_sockets_nothing_is_lost_or_doubled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shuffle, "_PARCEL_ROWS", 500)
    with in_threads([f"ipc://{tmp_path}/{i}" for i in range(2)]) as servers:
        assert_dealt(shuffled(numbered([5000, 100, 2000], MIXED), real_workers(servers, 3)), 7100)


def test_servers_with_little_room_slow_it_down_but_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "_PARCEL_ROWS", 20)
    monkeypatch.setattr(mail, "MAX_BYTES", 400)
    with in_process(1) as servers:
        assert_dealt(shuffled(numbered([150, 50, 100], MIXED), real_workers(servers, 3)), 300)


def test_over_servers_a_seed_may_be_used_again() -> None:
    """Every day its own files, and the same script."""
    with in_process(2) as servers:
        for _ in range(3):
            assert_dealt(shuffled(numbered([30, 10, 20]), real_workers(servers, 3), seed=7), 60)


def test_over_servers_many_shuffles_follow_each_other() -> None:
    with in_process(2) as servers:
        stores = numbered([30, 10, 20], MIXED)
        make = real_workers(servers, 3)

        def work(index: int) -> list[list[int]]:
            dataset = Loaded(stores[index], lambda: make(index))
            found = []
            for _ in range(12):  # more than the topics that a server keeps
                dataset.global_shuffle()
                found.append(ids(dataset))
            assert dataset.get_memory_data_size(all_workers=True) == 60
            return found

        for shares in zip(*jobs.in_threads(work, 3), strict=True):
            assert_dealt(list(shares), 60)


def test_over_servers_different_slots_are_an_error_on_all() -> None:
    with in_process(1) as servers:
        make = real_workers(servers, 2)
        stores = [store_of(range(5), ID), store_of(range(5), MIXED)]

        def work(index: int) -> None:
            with pytest.raises(DataError, match="slots"):
                Loaded(stores[index], lambda: make(index)).global_shuffle()

        jobs.in_threads(work, 2)


def test_over_servers_a_worker_that_has_left_is_an_error_for_the_others() -> None:
    with in_process(1) as servers:
        servers.client(worker=1, role=Role.LAUNCHER).leave()
        dataset = Loaded(store_of(range(5)), lambda: real_workers(servers, 2)(0))
        with pytest.raises(DataError, match=naming(2, 1)):
            dataset.global_shuffle()
        assert ids(dataset) == list(range(5))


def test_over_servers_a_worker_that_does_not_come_is_an_error_after_the_time_out() -> None:
    with in_process(1) as servers:
        dataset = Loaded(store_of(range(5)), lambda: real_workers(servers, 2, timeout=0.3)(0))
        with pytest.raises(FleetError, match=naming("worker 1")):
            dataset.global_shuffle()
        assert ids(dataset) == list(range(5))


@pytest.mark.slow
def test_a_job_of_one_worker_shuffles_as_locally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "PSERVER_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "a"
    path.write_text("".join(f"1 {i}\n" for i in range(50)))
    orders = []
    with jobs.clean_facade():
        fleet.init()
        model = fleet.distributed_model(jobs.Net())
        fleet.distributed_optimizer(jobs.sgd(model))
        fleet.init_worker()
        with contextlib.ExitStack() as stack:
            stack.callback(fleet.stop_worker)
            for name in ("local_shuffle", "global_shuffle"):
                dataset = fleet.InMemoryDataset()
                dataset.init(use_var=ID, batch_size=7)
                dataset.set_filelist(fleet.util.get_file_shard([str(path)]))
                dataset.load_into_memory()
                getattr(dataset, name)(seed=3)
                orders.append(ids(dataset))
            assert dataset.get_memory_data_size(all_workers=True) == 50
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(50))
