"""Lists of files that workers take from: every file is done once, although workers die and repeat requests."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.fleets import Talk, assert_ok, refusal
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import DataError
from torchfleet.ps.net.wire import OK, Command, pack, unpack
from torchfleet.ps.server.meeting import file_lists as module
from torchfleet.ps.server.meeting.file_lists import FileLists, FilesBody
from torchfleet.ps.server.meeting.file_pass import END, MAX_CLIENTS, WAIT
from torchfleet.ps.server.server import Server

ABC = ["a", "b", "c"]


class Worker:
    """One process of a worker: its client's number, its wishes, and what it has in its hands."""

    def __init__(
        self, lists: FileLists, index: int, files: list[str], client: int = 0, lease: float = 10.0, number: int = 0
    ) -> None:
        self.lists, self.index, self.files, self.lease, self.number = lists, index, files, lease, number
        self.client = client or 100 + index
        self.wish = 0
        self.held: list[str] = []

    def ask(self, now: float = 0.0, **fields: object) -> tuple[str, str]:
        body = FilesBody("files", self.number, self.lease, **fields)
        return self.lists.ask(self.client, self.index, body, now)

    def begin(self, now: float = 0.0) -> None:
        assert self.ask(now, files=self.files) == ("", "")

    def take(self, now: float = 0.0) -> tuple[str, str]:
        self.wish += 1
        answer = self.ask(now, take=self.wish)
        if answer[0] == "file":
            self.held.append(answer[1])
        return answer

    def done(self, path: str, now: float = 0.0) -> None:
        self.held.remove(path)
        assert self.ask(now, done=[path]) == ("", "")


def team(num: int, files: list[str], lists: FileLists | None = None, **options: object) -> list[Worker]:
    shared = lists or FileLists()
    workers = [Worker(shared, i, files, **options) for i in range(num)]
    for worker in workers:
        worker.begin()
    return workers


class TestFileLists:
    def test_files_are_handed_out_one_after_another_each_to_one_worker(self) -> None:
        first, second = team(2, ABC)
        assert first.take() == ("file", "a")
        assert second.take() == ("file", "b")
        assert first.take() == ("file", "c")
        assert second.take() == (WAIT, "")

    def test_the_end_comes_to_all_when_the_last_file_is_done(self) -> None:
        first, second = team(2, ["a", "b"])
        first.take()
        second.take()
        first.done("a")
        assert first.take() == (WAIT, "")
        second.done("b")
        assert first.take() == second.take() == (END, "")

    def test_a_worker_that_waits_for_its_own_file_is_told_to_wait(self) -> None:
        (only,) = team(1, ["a"])
        only.take()
        assert only.take() == (WAIT, "")
        only.done("a")
        assert only.take() == (END, "")

    def test_files_of_a_worker_that_leaves_go_to_others_first_of_all(self) -> None:
        first, second = team(2, ["a", "b", "c", "d"])
        first.take()
        first.take()
        first.lists.leave(0)
        assert [second.take()[1] for _ in range(4)] == ["a", "b", "c", "d"]

    def test_a_worker_is_given_up_after_its_lease_and_not_before(self) -> None:
        first, second = team(2, ["a"], lease=10.0)
        first.take(now=5)
        second.lists.expire(now=15)
        assert second.take(now=15) == (WAIT, "")
        second.lists.expire(now=15.1)
        assert second.take(now=15.1) == ("file", "a")

    def test_a_worker_that_says_it_is_alive_keeps_its_files(self) -> None:
        first, second = team(2, ["a"], lease=10.0)
        first.take(now=0)
        for now in range(5, 500, 5):
            first.ask(now)
            second.lists.expire(now + 4.0)
            assert second.take(now + 4.0) == (WAIT, "")
        first.done("a", now=500)
        assert second.take(now=500) == (END, "")

    def test_one_that_was_given_up_and_comes_back_cannot_finish_what_another_has(self) -> None:
        first, second = team(2, ["a", "b"], lease=10.0)
        first.take(now=0)
        second.ask(now=8)
        second.lists.expire(now=11)
        assert second.take(now=11) == ("file", "a")
        first.done("a", now=12)
        assert first.take(now=12) == ("file", "b")
        first.done("b", now=12)
        assert first.take(now=12) == (WAIT, ""), "worker 1 still works on a"
        second.done("a", now=13)
        assert first.take(now=13) == second.take(now=13) == (END, "")

    def test_a_worker_that_was_started_again_gives_its_files_back_at_once(self) -> None:
        first, second = team(2, ABC)
        first.take()
        second.take()
        again = Worker(first.lists, 0, ABC, client=999)
        again.begin()
        assert again.take() == ("file", "a")
        assert again.take() == ("file", "c")

    def test_a_worker_that_was_started_again_passes_over_what_is_finished(self) -> None:
        lists = FileLists()
        for number in range(3):
            (worker,) = team(1, ABC, lists, number=number)
            while (answer := worker.take())[0] == "file":
                worker.done(answer[1])
        for number in range(3):
            again = Worker(lists, 0, ABC, client=999, number=number)
            again.begin()
            assert again.take() == (END, "")

    def test_the_same_wish_gets_the_same_file(self) -> None:
        first, second = team(2, ABC)
        for _ in range(3):
            assert first.ask(take=1) == ("file", "a")
        assert second.ask(take=1) == ("file", "b")
        assert first.ask(take=2) == ("file", "c")
        assert first.ask(take=2) == ("file", "c")
        assert second.ask(take=2) == (WAIT, "")

    def test_a_file_said_to_be_done_twice_counts_once(self) -> None:
        (only,) = team(1, ["a", "b"])
        only.take()
        for _ in range(3):
            only.ask(done=["a"])
        assert only.take() == ("file", "b")
        assert only.take() == (WAIT, "")

    def test_what_a_worker_does_not_hold_it_cannot_finish(self) -> None:
        first, second = team(2, ["a", "b"])
        first.take()
        second.ask(done=["a", "b", "no such file", ""])
        assert second.take() == ("file", "b")
        assert second.take() == (WAIT, "")

    def test_a_late_copy_of_an_old_wish_takes_no_file(self) -> None:
        """Its answer reaches no worker: a file given to it would stay with a worker that never reads it."""
        first, second = team(2, ["a", "b", "c"])
        assert first.ask(take=1) == ("file", "a")
        assert first.ask(take=2) == ("file", "b")
        first.ask(take=1)
        first.ask(done=["a", "b"])
        assert second.take() == ("file", "c")
        second.done("c")
        assert first.ask(take=3) == second.take() == (END, "")

    def test_a_late_copy_of_a_wish_that_had_to_wait_takes_no_file_either(self) -> None:
        first, second, third = team(3, ["a"])
        assert second.take() == ("file", "a")
        assert first.ask(take=1) == (WAIT, "")
        assert first.ask(take=2) == (WAIT, "")
        first.lists.leave(1)
        first.ask(take=1)
        assert third.take() == ("file", "a"), "worker 0 was given it without knowing"
        third.done("a")
        assert first.ask(take=3) == (END, "")

    def test_a_late_message_of_a_former_process_does_not_take_the_files_of_the_new_one(self) -> None:
        former, other = team(2, ["a", "b"])
        former.take()
        again = Worker(former.lists, 0, ["a", "b"], client=999)
        again.begin()
        assert again.take() == ("file", "a")
        former.ask()  # had been under way when it was killed
        assert other.take() == ("file", "b")
        assert other.take() == (WAIT, ""), "file a is in the hands of the new process"
        again.done("a")
        other.done("b")
        assert again.take() == (END, "")

    def test_lists_that_differ_are_refused_with_a_hint(self) -> None:
        (first,) = team(1, ABC)
        for files in (["a", "b"], ["a", "b", "d"], ["x"]):
            with pytest.raises(DataError, match=naming("'files'", 3)):
                Worker(first.lists, 1, files).begin()
        assert first.take() == ("file", "a")

    def test_another_order_is_the_same_list(self) -> None:
        (first,) = team(1, ABC)
        second = Worker(first.lists, 1, ["c", "a", "b"])
        second.begin()
        assert sorted(second.take()[1] for _ in range(3)) == ABC

    def test_another_list_under_a_finished_pass_is_refused_and_not_passed_over(self) -> None:
        """A worker whose files are all new must not be told that there is nothing to do."""
        (first,) = team(1, ["monday"])
        first.take()
        first.done("monday")
        assert first.take() == (END, "")
        second = Worker(first.lists, 0, ["tuesday"], client=999)
        with pytest.raises(DataError, match="files"):
            second.ask(files=["tuesday"], take=1)

    def test_names_and_numbers_are_passes_of_their_own(self) -> None:
        lists = FileLists()
        for name, number in (("train", 0), ("train", 1), ("test", 0)):
            lists.ask(1, 0, FilesBody(name, number, 10.0, files=[f"{name} {number}"]), 0.0)
            found = lists.ask(1, 0, FilesBody(name, number, 10.0, take=1), 0.0)
            assert found == ("file", f"{name} {number}")

    def test_an_unknown_pass_is_an_error(self) -> None:
        with pytest.raises(DataError, match=naming("'files'", 0)):
            FileLists().ask(1, 0, FilesBody("files", 0, 10.0, take=1), 0.0)

    def test_a_finished_pass_keeps_no_file_names(self) -> None:
        lists = FileLists()
        (worker,) = team(1, [f"file {i}" for i in range(100)], lists)
        while (answer := worker.take())[0] == "file":
            worker.done(answer[1])
        assert not any(isinstance(left, module.Pass) for left in lists._passes.values())

    @pytest.mark.parametrize("num_passes", [2 * module.MAX_LISTS, 5 * module.MAX_LISTS])
    def test_any_number_of_passes_can_be_made_and_all_are_remembered(self, num_passes: int) -> None:
        lists = FileLists()
        for number in range(num_passes):
            (worker,) = team(1, ["a"], lists, number=number)
            worker.take()
            worker.done("a")
        for number in range(num_passes):
            again = Worker(lists, 0, ["a"], client=999, number=number)
            again.begin()
            assert again.take() == (END, ""), f"pass {number} of {num_passes} was finished, and is trained again"

    def test_any_number_of_passes_may_be_left_in_the_middle(self) -> None:
        """for batch in dataset: ... break, many times over."""
        lists = FileLists()
        for number in range(2 * module.MAX_LISTS):
            worker = Worker(lists, 0, ABC, client=1000 + number, number=number)
            worker.begin(now=number)
            assert worker.take(now=number) == ("file", "a")
            lists.expire(now=number)

    @settings(max_examples=examples(25))
    @given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**9))
    def test_every_file_is_done_once_when_nobody_dies(self, num_files: int, num: int, num_held: int, seed: int) -> None:
        dice = random.Random(seed)
        files = [str(i) for i in range(num_files)] or ["only"]
        workers = team(num, files)
        finished: list[str] = []
        at_end: set[int] = set()
        for _ in range(20 * (len(files) + num) * num):
            worker = dice.choice(workers)
            if worker.held and (len(worker.held) >= num_held or dice.random() < 0.5):
                finished.append(worker.held[0])
                worker.done(worker.held[0])
            elif worker.take()[0] == END:
                at_end.add(worker.index)
            if len(at_end) == num:
                break
        assert sorted(finished) == sorted(files)
        assert len(at_end) == num


def test_a_copy_of_a_request_that_comes_after_the_lease_gives_no_second_file() -> None:
    """The client has the first answer, and would never say that it has done the file of the second."""
    first, second = team(2, ["a", "b"])
    assert [first.take(), second.take()] == [("file", "a"), ("file", "b")]
    assert second.take() == (WAIT, "")
    assert first.lists.expire(20.0)  # both files wait again
    assert second.ask(20.0, take=second.wish) == (WAIT, "")
    assert {first.take(21.0), first.take(21.0)} == {("file", "a"), ("file", "b")}
    first.ask(22.0, done=["a", "b"])
    assert [first.take(22.0), second.take(22.0)] == [(END, ""), (END, "")]


@pytest.mark.parametrize("other_has_it", [False, True])
def test_a_copy_after_the_lease_gets_its_file_again_unless_another_worker_has_it(other_has_it: bool) -> None:
    first, second = team(2, ABC)
    assert first.take() == ("file", "a")
    assert first.lists.expire(20.0)
    if other_has_it:
        assert second.take(20.0) == ("file", "a")
    restored = FileLists()
    restored.restore(first.lists.export())
    for lists in (first.lists, restored):
        body = FilesBody("files", 0, 10.0, take=1)
        assert lists.ask(first.client, 0, body, 21.0) == ((WAIT, "") if other_has_it else ("file", "a"))


@dataclass
class Process:
    """What a process of a worker believes."""

    index: int
    client: int
    heard: float
    wish: int = 0
    held: set[str] = field(default_factory=set)
    last: tuple[str, str] = ("", "")
    sent: list[FilesBody] = field(default_factory=list)
    is_alive: bool = True


class FilesMachine(RuleBasedStateMachine):
    """Workers take, finish, die, come back, fall silent and repeat themselves.

    Plain bookkeeping knows who may hold what. In the end those who are left finish the pass, in a bounded number of
    requests.
    """

    LEASE = 10.0

    @initialize(num_files=st.integers(1, 12), num=st.integers(1, 4))
    def begin(self, num_files: int, num: int) -> None:
        self.files = [f"part-{i}" for i in range(num_files)]
        self.lists = FileLists()
        self.now = 0.0
        self.clients = 0
        self.done: set[str] = set()
        self.processes: list[Process] = []
        for index in range(num):
            self._start(index)

    def _start(self, index: int) -> None:
        for former in self.processes:
            if former.index == index:
                former.held.clear()
        self.clients += 1
        process = Process(index, self.clients, self.now)
        self.processes.append(process)
        self._send(process, FilesBody("files", 0, self.LEASE, files=self.files))

    def _send(self, process: Process, body: FilesBody) -> tuple[str, str]:
        process.sent.append(body)
        self._expire()
        process.heard = self.now
        return self.lists.ask(process.client, process.index, body, self.now)

    def _expire(self) -> None:
        self.lists.expire(self.now)
        for process in self.processes:
            if self.now > process.heard + self.LEASE:
                process.held.clear()
                process.last = ("", "")

    def _living(self) -> list[Process]:
        return [process for process in self.processes if process.is_alive]

    @precondition(lambda self: self._living())
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(self._living()))
        process.wish += 1
        self._taken(process, self._send(process, FilesBody("files", 0, self.LEASE, take=process.wish)))

    def _taken(self, process: Process, answer: tuple[str, str]) -> None:
        what, path = answer
        process.last = answer
        if what == "file":
            assert path in self.files
            assert path not in self.done, "a file that is done was handed out again"
            assert not any(path in other.held for other in self.processes), "two workers have one file"
            process.held.add(path)
        elif what == END:
            assert self.done == set(self.files)
        else:
            assert what == WAIT
            assert self.done != set(self.files)

    @precondition(lambda self: any(process.held for process in self._living()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([process for process in self._living() if process.held]))
        path = data.draw(st.sampled_from(sorted(process.held)))
        self._expire()
        was_held = path in process.held
        self._send(process, FilesBody("files", 0, self.LEASE, done=[path]))
        process.held.discard(path)
        if was_held:
            self.done.add(path)

    @precondition(lambda self: self._living())
    @rule(data=st.data())
    def repeat_the_last_wish(self, data: st.DataObject) -> None:
        """The reply got lost."""
        process = data.draw(st.sampled_from(self._living()))
        if process.wish and process.last[0] == "file" and process.last[1] in process.held:
            body = FilesBody("files", 0, self.LEASE, take=process.wish)
            self._expire()
            if process.last[1] in process.held:
                assert self._send(process, body) == process.last

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self._living())
    @rule()
    def all_say_that_they_are_alive(self) -> None:
        for process in self._living():
            self._send(process, FilesBody("files", 0, self.LEASE))

    @precondition(lambda self: len(self._living()) > 1)
    @rule(data=st.data(), says_so=st.booleans())
    def end(self, data: st.DataObject, says_so: bool) -> None:
        process = data.draw(st.sampled_from(self._living()))
        process.is_alive = False
        if says_so:
            self.lists.leave(process.index)
            process.held.clear()

    @precondition(lambda self: any(not process.is_alive for process in self.processes))
    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        living = {process.index for process in self._living()}
        dead = sorted({process.index for process in self.processes} - living)
        if dead:
            self._start(data.draw(st.sampled_from(dead)))

    def teardown(self) -> None:
        """Those who live, or one who is started now, go on as a worker does."""
        if not hasattr(self, "lists"):
            return
        if not self._living():
            self._start(0)
        for _ in range(10 * len(self.files) + 20):
            self.now += self.LEASE / 5
            self._expire()
            for process in self._living():
                for path in sorted(process.held):
                    if path in process.held:
                        self._send(process, FilesBody("files", 0, self.LEASE, done=[path]))
                        process.held.discard(path)
                        self.done.add(path)
                process.wish += 1
                answer = self._send(process, FilesBody("files", 0, self.LEASE, take=process.wish))
                self._taken(process, answer)
            if self.done == set(self.files):
                return
        missing = sorted(set(self.files) - self.done)
        raise AssertionError(f"the pass never ends: nobody gets {missing}")


class LateMessages(FilesMachine):
    """As before, and old messages of the living come late, too."""

    @precondition(lambda self: self._living())
    @rule(data=st.data())
    def an_old_message_comes_late(self, data: st.DataObject) -> None:
        """Its sender has its answer, and does not listen to another one."""
        process = data.draw(st.sampled_from(self._living()))
        earlier = [body for body in process.sent if not body.take or body.take < process.wish]
        if earlier:
            self._send(process, data.draw(st.sampled_from(earlier)))


_SETTINGS = settings(
    max_examples=examples(40),
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
TestFilesMachine, TestLateMessages = FilesMachine.TestCase, LateMessages.TestCase
TestFilesMachine.settings = TestLateMessages.settings = _SETTINGS


class TestServer:
    """Through messages, by hand."""

    def ask(self, talk: Talk, **fields: object) -> tuple[str, str]:
        reply = talk.ask(Command.FILES, pack({"name": "files", "number": 0, "lease": 5.0, **fields}))
        assert_ok(reply)
        return unpack(reply.arrays[0], tuple[str, str])

    def test_the_clock_of_the_server_gives_up_a_silent_worker(self, server: Server) -> None:
        first, second = Talk(server, client=1, worker=0), Talk(server, client=2, worker=1)
        for talk in (first, second):
            assert self.ask(talk, files=["a"]) == ("", "")
        assert self.ask(first, take=1) == ("file", "a")
        assert self.ask(second, take=1) == (WAIT, "")
        server.tick(time.monotonic() + 6)
        assert self.ask(second, take=2) == ("file", "a")

    def test_leaving_gives_its_files_to_others(self, server: Server) -> None:
        first, second = Talk(server, client=1, worker=0), Talk(server, client=2, worker=1)
        for talk in (first, second):
            self.ask(talk, files=["a"])
        self.ask(first, take=1)
        assert_ok(first.ask(Command.LEAVE))
        assert self.ask(second, take=1) == ("file", "a")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"lease": 0.0},
            {"lease": -1.0},
            {"lease": float("nan")},
            {"lease": float("inf")},
            {"lease": 1e9},
            {"files": "part-0"},
            {"files": [1]},
            {"take": "one"},
            {"number": None},
            {"unknown": 1},
        ],
        ids=str,
    )
    def test_malformed_requests_are_refused_and_open_nothing(self, server: Server, wrong: dict[str, object]) -> None:
        body = {"name": "files", "number": 0, "lease": 5.0, "files": ["a"], **wrong}
        assert refusal(Talk(server).ask(Command.FILES, pack(body)))[0] == "WireError"
        assert len(server.state.meetings.files._passes) == 0

    def test_no_body_and_garbage_are_refused(self, server: Server) -> None:
        talk = Talk(server)
        assert refusal(talk.ask(Command.FILES))[0] == "WireError"
        body = pack({"name": "files", "number": 0, "lease": 5.0})
        assert refusal(talk.ask(Command.FILES, body, body))[0] == "WireError"
        assert refusal(talk.ask(Command.FILES, pack([1, 2, 3])))[0] == "WireError"

    def test_a_worker_that_is_none_is_refused(self) -> None:
        server = Server(max_table_bytes=1 << 20, num_workers=2)
        body = pack({"name": "files", "number": 0, "lease": 5.0, "files": ["a"]})
        assert refusal(Talk(server, worker=2).ask(Command.FILES, body))[0] == "WireError"

    def test_a_list_with_a_file_twice_loses_no_other_file(self, server: Server) -> None:
        first, second = Talk(server, client=1, worker=0), Talk(server, client=2, worker=1)
        body = pack({"name": "files", "number": 0, "lease": 5.0, "files": ["a", "a", "b"]})
        if first.ask(Command.FILES, body).status != OK:
            return  # refused: also good
        second.ask(Command.FILES, body)
        assert self.ask(first, take=1) == ("file", "a")
        assert self.ask(second, take=1)[0] == "file"
        self.ask(first, done=["a"])
        self.ask(second, done=["a", "b"])
        taken = [self.ask(first, take=2), self.ask(second, take=2)]
        assert ("file", "b") in taken or self.ask(first, take=3) != (END, "")


def size_of(lists: FileLists) -> int:
    return len(msgspec.msgpack.encode(lists.export()))


@pytest.mark.parametrize("lease", [10.0, 1e-6], ids=["replaced", "expired"])
def test_a_worker_with_ever_new_clients_takes_no_more_memory(lease: float) -> None:
    """A restarted worker has a new one; nothing keeps a hostile one from making them up."""
    lists = FileLists()
    Worker(lists, 1, ABC).begin()
    sizes = []
    for number in range(20 * MAX_CLIENTS):
        worker = Worker(lists, 0, ABC, client=10**6 + number, lease=lease)
        worker.begin(now=float(number))
        assert worker.take(now=float(number)) == ("file", "a")
        lists.expire(now=number + 0.5)
        sizes.append(size_of(lists))
    assert max(sizes[2 * MAX_CLIENTS :]) <= max(sizes[: 2 * MAX_CLIENTS])


def test_a_few_clients_of_a_worker_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = FileLists()
    former = [Worker(lists, 0, ABC, client=100 + i) for i in range(MAX_CLIENTS)]
    for worker in former:
        worker.begin()
        assert worker.take() == ("file", "a")
    for worker in former[:-1]:
        assert worker.take() == (END, "")
    assert former[-1].ask(take=former[-1].wish) == ("file", "a")


def test_names_of_dropped_lists_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTS", 4)
    monkeypatch.setattr(module, "MAX_NAMES", 8)
    lists, sizes = FileLists(), []
    for number in range(200):
        name = f"list {number:04}"
        lists.ask(1, 0, FilesBody(name, 0, 10.0, files=["a"], take=1), 0.0)
        lists.ask(1, 0, FilesBody(name, 0, 10.0, done=["a"]), 0.0)
        sizes.append(size_of(lists))
    assert max(sizes[20:]) <= max(sizes[:20])
    assert lists.ask(1, 0, FilesBody("list 0195", 0, 10.0, take=1), 0.0) == (END, "")


def test_a_finished_pass_is_dropped_before_one_whose_workers_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTS", 3)
    lists = FileLists()
    silent = Worker(lists, 0, ABC)
    silent.begin()
    assert silent.take() == ("file", "a")
    for number in (1, 2, 3):
        other = Worker(lists, 1, ["a"], client=200 + number, number=number)
        other.begin(now=100.0)
        assert other.take(now=100.0) == ("file", "a")
        other.done("a", now=100.0)
    assert silent.take(now=101.0) == ("file", "a")
    assert [silent.take(now=101.0) for _ in range(2)] == [("file", "b"), ("file", "c")]


def test_lists_that_no_worker_has_read_to_the_end_are_not_dropped_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTS", 3)
    lists = FileLists()
    for number in range(3):
        lists.ask(1, 0, FilesBody(f"list {number}", 0, 10.0, files=ABC), 0.0)
    assert lists.expire(100.0)
    with pytest.raises(DataError, match=naming(3)):
        lists.ask(1, 0, FilesBody("another", 0, 10.0, files=ABC), 100.0)
    for number in range(3):
        body = FilesBody(f"list {number}", 0, 10.0, take=1)
        assert lists.ask(1, 0, body, 100.0) == ("file", "a")
    assert lists.expire(200.0)
    assert lists.ask(1, 0, FilesBody("list 1", 1, 10.0, take=1, files=ABC), 200.0) == ("file", "a")  # as the error says
    assert lists.ask(1, 0, FilesBody("list 1", 0, 10.0, take=1), 200.0) == ("end", "")
    assert lists.ask(1, 0, FilesBody("list 2", 0, 10.0, take=1), 200.0) == ("file", "a")


def test_a_client_that_takes_files_as_another_worker_is_refused_and_changes_nothing() -> None:
    first, second = team(2, ABC)
    first.take()
    before = first.lists.export()
    with pytest.raises(DataError):
        first.lists.ask(first.client, second.index, FilesBody("files", 0, 10.0, take=9), 0.0)
    assert first.lists.export() == before
