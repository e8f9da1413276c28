"""Workers among themselves over bad networks: gathered bytes, parcels and shared files, a few hundred schedules of
lost, repeated, late and overtaking messages on virtual time; and exchanges whose servers have no room."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.fleets import WAIT, Fleet, in_process
from support.jobs import in_threads
from support.lossy import Faults, Network
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import FleetError, ServerUnreachable
from torchfleet.data import Slot
from torchfleet.data.dataset import WorkerGroup
from torchfleet.data.memory_dataset import InMemoryDataset
from torchfleet.ps.net.wire import Array, Command, pack
from torchfleet.ps.server.meeting import mail
from torchfleet.ps.server.server import Server
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Call, Patience
from torchfleet.ps.worker.peers import Exchange, Parcel, SharedFiles, Workers

PATIENT = Patience(timeout=600.0, retries=12)
LEASE = 86400.0  # real seconds: no worker dies here
NUM_SCHEDULES = examples(50)


class Mismatch(AssertionError):
    """Something was lost, doubled or mixed up, or does not end."""


class Schedule:
    """Workers of one job on one bad network; one thread plays them all."""

    def __init__(self, seed: int, worst: float = 0.25) -> None:
        self.dice = random.Random(seed)
        rates = [self.dice.uniform(0, worst) for _ in range(3)]
        faults = Faults(rates[0], rates[1], delay=self.dice.uniform(0.01, 2.0), refuse=rates[2] / 2)
        self.network = Network(seed, faults)
        self.num = self.dice.randint(1, 4)
        self.servers = [Server(max_table_bytes=1 << 14, num_workers=self.num) for _ in range(self.dice.randint(1, 3))]

    def client(self, worker: int) -> Client:
        return Client([self.network.connect(server) for server in self.servers], worker=worker, patience=PATIENT)

    def cut(self, clients: list[Client]) -> None:
        """Now and then a connection breaks; what is on its way to the server may still arrive."""
        if self.dice.random() < 0.03:
            connection = self.dice.choice(self.dice.choice(clients)._connections)
            connection._channel.reconnect()


def all_of(schedule: type, seeds: range) -> list[int]:
    """Seeds of the schedules in which a client gave up; what is wrong raises Mismatch."""
    given_up = []
    for seed in seeds:
        try:
            schedule(seed).run()
        except ServerUnreachable:
            given_up.append(seed)
    return given_up


class GatherSchedule(Schedule):
    def run(self) -> None:
        clients = [self.client(i) for i in range(self.num)]
        for number in range(1, 6):
            brought = [self.dice.randbytes(self.dice.randint(0, 10)) for _ in range(self.num)]
            name = self.dice.choice(["a", "b"])
            calls = {}
            for worker in self.dice.sample(range(self.num), self.num):
                body = pack({"name": name, "round": number, "num_workers": self.num, "timeout": 3600.0})
                arrays = [body, Array(0, np.frombuffer(brought[worker], np.uint8))]
                calls[worker] = clients[worker]._connections[0].submit(Command.GATHER, arrays)
            self._wait(clients, calls)
            for worker, call in calls.items():
                if call.error is not None:
                    raise call.error
                assert call.reply is not None
                found = [(array.number, array.data.tobytes()) for array in call.reply]
                if found != list(enumerate(brought)):
                    raise Mismatch(f"gathering {number}: worker {worker} got {found}, brought were {brought}")

    def _wait(self, clients: list[Client], calls: dict[int, Call]) -> None:
        """All of them wait at once, as threads would."""
        while any(not call.is_done for call in calls.values()):
            worker = self.dice.choice([worker for worker, call in calls.items() if not call.is_done])
            clients[worker]._connections[0]._work()
            self.cut(clients)


class ParcelSchedule(Schedule):
    def run(self) -> None:
        clients = [self.client(i) for i in range(self.num)]
        for topic in ("first", "second"):
            exchanges = [Exchange(clients[i], topic, i, self.num, 3600.0) for i in range(self.num)]
            sent: dict[int, list[bytes]] = {i: [] for i in range(self.num)}
            got: dict[int, list[bytes]] = {i: [] for i in range(self.num)}
            for step in range(20):
                worker, to = self.dice.randrange(self.num), self.dice.randrange(self.num)
                if self.dice.random() < 0.6:
                    payload = f"{step} from {worker}".encode()
                    exchanges[worker].send(to, [np.frombuffer(payload, np.uint8)], self._into(got[worker]))
                    sent[to].append(payload)
                else:
                    exchanges[worker].take(self._into(got[worker]))
                self.cut(clients)
            for worker, exchange in enumerate(exchanges):
                enough = len(sent[worker])
                exchange.take_until(lambda own=got[worker], n=enough: len(own) >= n, self._into(got[worker]))
                exchange.finish()
                if got[worker] != sent[worker]:
                    raise Mismatch(f"worker {worker} got {got[worker]}, sent were {sent[worker]}")
        self.network.deliver_all()
        waiting = sum(server.state.meetings.mail.num_bytes for server in self.servers)
        if waiting:
            raise Mismatch(f"{waiting} bytes are still kept although all was acknowledged")

    @staticmethod
    def _into(received: list[bytes]) -> Callable[[Parcel], None]:
        return lambda parcel: received.append(parcel[0].tobytes())


class FileSchedule(Schedule):
    def run(self) -> None:
        clients = [self.client(i) for i in range(self.num)]
        for number in range(2):
            files = [f"part-{i}" for i in range(self.dice.randint(1, 12))]
            shared = [SharedFiles(client, "files", number, files, LEASE) for client in clients]
            self._pass(clients, shared, files)
            for one in shared:
                one._over.set()  # its thread ends; the client goes on with the next pass
                one._thread.join(10)

    def _pass(self, clients: list[Client], shared: list[SharedFiles], files: list[str]) -> None:
        held: dict[int, list[str]] = {i: [] for i in range(self.num)}
        at_end: set[int] = set()
        taken: Counter[str] = Counter()
        for _ in range(40 * (len(files) + self.num)):
            if len(at_end) == self.num:
                break
            worker = self.dice.choice([i for i in range(self.num) if i not in at_end])
            self.cut(clients)
            if held[worker] and self.dice.random() < 0.5:
                shared[worker].done(held[worker].pop(0))
                continue
            path = shared[worker].take()
            if path is None:
                at_end.add(worker)
            elif path:
                taken[path] += 1
                held[worker].append(path)
        if taken != Counter(files):
            raise Mismatch(f"of {len(files)} files these were taken: {dict(taken)}")
        if len(at_end) < self.num or any(held.values()):
            raise Mismatch(f"the pass does not end: at the end are {at_end} of {self.num}, held are {held}")


@pytest.mark.parametrize("schedule", [GatherSchedule, ParcelSchedule, FileSchedule])
def test_bad_networks_change_nothing_about_what_workers_get(schedule: type) -> None:
    given_up = all_of(schedule, range(NUM_SCHEDULES))
    assert len(given_up) <= 5, f"these schedules were to come to their end: {given_up}"


def test_the_schedules_find_mail_that_keeps_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    send = mail.Mail.send

    def forgetful(box: mail.Mail, sender: int, body: mail.SendBody, parcel: list[Array]) -> bool:
        box._topic(body.topic, sender).sent.clear()
        return send(box, sender, body, parcel)

    monkeypatch.setattr(mail.Mail, "send", forgetful)
    with pytest.raises(Mismatch):
        all_of(ParcelSchedule, range(100))


# Exchanges without room


def exchange(fleet: Fleet, index: int, num: int, timeout: float = 20.0) -> Exchange:
    return Workers(fleet.client(worker=index), index, num, timeout).exchange("t")


@pytest.mark.parametrize("num_servers", [1, 2])
def test_workers_that_all_send_more_than_the_servers_can_keep_come_to_an_end(
    monkeypatch: pytest.MonkeyPatch, num_servers: int
) -> None:
    monkeypatch.setattr(mail, "MAX_BYTES", 1000)
    num, num_parcels = 3, 30
    with in_process(num_servers) as fleet:

        def work(index: int) -> Counter[int]:
            own, got = exchange(fleet, index, num), Counter()

            def take_in(parcel: Parcel) -> None:
                got[int(parcel[0][0, 0])] += 1

            for number in range(num_parcels):
                for to in range(num):
                    if to != index:
                        own.send(to, [np.full(50, 1000 * index + number, np.uint64)], take_in)
            own.take_until(lambda: sum(got.values()) >= (num - 1) * num_parcels, take_in)
            own.finish()
            return got

        results = in_threads(work, num)
        for index, got in enumerate(results):
            expected = [1000 * i + n for i in range(num) if i != index for n in range(num_parcels)]
            assert got == Counter(expected)
        assert sum(server.state.meetings.mail.num_bytes for server in fleet.servers) == 0


def test_a_receiver_that_takes_nothing_is_named_in_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "MAX_BYTES", 100)
    own = exchange(fleet, 0, 3, timeout=0.3)
    own.send(2, [np.zeros(12, np.uint64)], lambda parcel: None)
    with pytest.raises(FleetError, match=naming("0.3", "worker 2")):
        own.send(2, [np.zeros(12, np.uint64)], lambda parcel: None)


def test_parcels_that_never_come_are_an_error_in_time(fleet: Fleet) -> None:
    own = exchange(fleet, 0, 2, timeout=0.3)
    with pytest.raises(FleetError, match=naming("0.3")):
        own.take_until(lambda: False, lambda parcel: None)


def test_thousands_of_small_parcels_reach_a_worker_that_is_slow_to_take(fleet: Fleet) -> None:
    sender, receiver = exchange(fleet, 0, 2), exchange(fleet, 1, 2)
    got: list[int] = []
    for number in range(3000):
        sender.send(1, [np.array([number], np.uint64)], lambda parcel: None)
    receiver.take_until(lambda: len(got) >= 3000, lambda parcel: got.append(int(parcel[0][0, 0])))
    assert got == list(range(3000))


def test_what_a_parcel_raises_leaves_it_to_be_taken_again(fleet: Fleet) -> None:
    sender, receiver = exchange(fleet, 0, 2), exchange(fleet, 1, 2)
    for number in range(3):
        sender.send(1, [np.array([number], np.uint64)], lambda parcel: None)
    got: list[int] = []

    def fail_on_the_second(parcel: Parcel) -> None:
        if parcel[0][0, 0] == 1 and len(got) == 1:
            got.append(-1)
            raise RuntimeError("no")
        got.append(int(parcel[0][0, 0]))

    with pytest.raises(RuntimeError):
        receiver.take(fail_on_the_second)
    receiver.take(fail_on_the_second)
    assert got == [0, -1, 1, 2]


# Global shuffle, which is made of both


class Together(InMemoryDataset):
    """A dataset of one of several workers in this process."""

    def __init__(self, make: Callable[[], WorkerGroup]) -> None:
        super().__init__()
        self._make = make

    def workers(self) -> WorkerGroup:
        return self._make()


@pytest.mark.parametrize("seed", [None, 7], ids=["no seed", "one seed"])
def test_a_global_shuffle_can_be_made_again_and_again(tmp_path: Path, seed: int | None) -> None:
    """With the same seed every time, too: it says in which order, not that it is the same exchange."""
    num, num_samples = 2, 40
    for index in range(num):
        lines = "".join(f"1 {index * num_samples + i}\n" for i in range(num_samples))
        (tmp_path / f"part-{index}").write_text(lines)
    with in_process(2) as fleet:

        def work(index: int) -> list[list[int]]:
            dataset = Together(lambda: Workers(fleet.client(worker=index), index, num, timeout=WAIT))
            dataset.init(batch_size=10, use_var=[Slot("id", dim=1)])
            dataset.set_filelist([str(tmp_path / f"part-{index}")])
            dataset.load_into_memory()
            seen = []
            for _ in range(3):
                dataset.global_shuffle(seed)
                seen.append(_ids(dataset))
            return seen

        results = in_threads(work, num)
    for shuffles in zip(*results, strict=True):
        assert sorted(itertools.chain(*shuffles)) == list(range(num * num_samples))
        assert [len(share) for share in shuffles] == [num_samples] * num


def _ids(batches: Any) -> list[int]:
    found: list[npt.NDArray[np.int64]] = [batch["id"].numpy().reshape(-1) for batch in batches]
    return [int(number) for number in np.concatenate(found)]
