"""Pipes: files through real commands; what they print, how they end, and that none is left behind."""

from __future__ import annotations

import gzip
import io
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from fsspec.spec import AbstractFileSystem
from support.messages import names, naming

from torchfleet.base.errors import DataError
from torchfleet.data.queue_dataset import QueueDataset
from torchfleet.data.reading.pipe import piped
from torchfleet.data.slots import Slot

TEXT = b"".join(b"1 %d\n" % i for i in range(300_000))
kinds = pytest.mark.parametrize("kind", ["plain", "gz", "memory"])


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves a process, a zombie or a thread of its own."""
    children = set(psutil.Process().children(recursive=True))
    threads = set(threading.enumerate())
    yield
    wait_for(lambda: not set(psutil.Process().children(recursive=True)) - children, "processes are left")
    wait_for(lambda: not {t for t in threading.enumerate() if t.is_alive()} - threads, "threads are left")


def wait_for(is_done: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def make(folder: Path, kind: str = "plain", data: bytes = TEXT) -> str:
    """The same bytes as a plain file, a compressed one, or in a remote place."""
    if kind == "memory":
        path = f"memory://{folder.name}/part-0"
        fsspec.filesystem("memory").pipe(path, data)
        return path
    path = folder / ("part-0.gz" if kind == "gz" else "part-0")
    path.write_bytes(gzip.compress(data, 1) if kind == "gz" else data)
    return str(path)


def output(path: str, command: str, skip: bool = False) -> bytes:
    return b"".join(piped(path, command, skip))


def failure(path: str, command: str) -> str:
    with pytest.raises(DataError) as caught:
        output(path, command)
    return str(caught.value)


def read(paths: list[str], command: str, thread_num: int = 1, **options: Any) -> tuple[list[int], int]:
    """(the ids of all samples, number of skipped lines) with a dataset."""
    dataset = QueueDataset()
    dataset.init(batch_size=1000, thread_num=thread_num, use_var=[Slot("a")], pipe_command=command, **options)
    dataset.set_filelist(paths)
    return [value for batch in dataset for value in batch["a"].values.tolist()], dataset.num_skipped


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def noted_pid(path: Path) -> int:
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"), "the command has not started")
    return int(path.read_text())


# What a command prints


@kinds
def test_a_command_gets_the_contents_and_its_output_comes_back(tmp_path: Path, kind: str) -> None:
    assert output(make(tmp_path, kind), "cat") == TEXT


@pytest.mark.parametrize("size", [0, 1, 65536, 65537])
@kinds
def test_files_of_any_size_go_through(tmp_path: Path, kind: str, size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    assert output(make(tmp_path, kind, data), "cat") == data


def test_any_executable_will_do(tmp_path: Path) -> None:
    path = make(tmp_path, data=b"5\n6\n7\n")
    script = tmp_path / "reader"
    script.write_text(f"#!{sys.executable}\nimport sys\nfor line in sys.stdin: print(1, int(line) * 2)\n")
    script.chmod(0o755)
    assert read([path], str(script)) == ([10, 12, 14], 0)
    assert read([path], "sed 's/^/1 /'") == ([5, 6, 7], 0)
    assert read([path], "awk '{print 1, $1 + 1}' | sort -r | head -n 2") == ([8, 7], 0)
    assert read([path], f"{sys.executable} -c 'import sys; print(1, len(sys.stdin.read()))'") == ([6], 0)


def test_several_commands_run_at_once(tmp_path: Path) -> None:
    """Each waits until the others have started too."""
    paths = []
    for i in range(3):
        (tmp_path / str(i)).write_text(f"1 {i}\n")
        paths.append(str(tmp_path / str(i)))
    marks = tmp_path / "marks"
    marks.mkdir()
    command = (
        f"touch {marks}/$$; "
        f"for i in $(seq 3000); do [ $(ls {marks} | wc -l) = 3 ] && exec cat; sleep 0.02; done; exit 9"
    )
    assert sorted(read(paths, command, thread_num=3)[0]) == [0, 1, 2]


@kinds
def test_a_command_that_wants_only_the_first_line_is_no_error(tmp_path: Path, kind: str) -> None:
    assert output(make(tmp_path, kind), "head -n 1") == b"1 0\n"
    assert read([make(tmp_path, kind)], "head -n 1") == ([0], 0)


@kinds
def test_a_command_that_reads_nothing_is_no_error(tmp_path: Path, kind: str) -> None:
    assert output(make(tmp_path, kind), "echo 1 5") == b"1 5\n"
    assert output(make(tmp_path, kind), "true") == b""


def test_a_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    assert read([make(tmp_path)], "printf '1 5\\n1 6'") == ([5, 6], 0)


@kinds
def test_a_command_may_print_much_more_than_it_reads(tmp_path: Path, kind: str) -> None:
    total = sum(map(len, piped(make(tmp_path, kind, b"x\n"), "cat >/dev/null; yes '1 5' | head -c 60000000", False)))
    assert total == 60_000_000


@kinds
def test_a_command_may_print_before_it_has_read_all(tmp_path: Path, kind: str) -> None:
    """Both pipes are full at once: neither side may wait for the other."""
    path = make(tmp_path, kind, b"x" * 5_000_000)
    assert len(output(path, "head -c 3000000 /dev/zero; cat")) == 8_000_000


def test_much_stderr_does_not_stop_a_command(tmp_path: Path) -> None:
    assert output(make(tmp_path), "yes complaint | head -c 3000000 >&2; echo 1 5") == b"1 5\n"


def test_the_command_is_told_what_to_do_with_bad_lines(tmp_path: Path) -> None:
    path = make(tmp_path)
    assert output(path, "echo $FLEET_ON_BAD_LINE", skip=True) == b"skip\n"
    assert output(path, "echo $FLEET_ON_BAD_LINE", skip=False) == b"error\n"


# Garbage


@pytest.mark.parametrize("options", [{}, {"on_bad_line": "skip"}])
def test_garbage_is_malformed_lines_of_the_commands_output(tmp_path: Path, options: dict[str, str]) -> None:
    path = make(tmp_path, data=b"")
    command = "printf '1 5\\n\\377\\376garbage\\n1 6\\n\\000\\000'"
    if options:
        assert read([path], command, **options) == ([5, 6], 2)
    else:
        with pytest.raises(DataError) as caught:
            read([path], command)
        assert names(str(caught.value), path, command, "line 2", "'a'")


def test_a_command_that_fails_in_the_middle_of_a_line_is_the_error_that_is_shown(tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(DataError, match=naming("status 3")):
        read([path], "printf '1 5\\n1 6\\n1 x'; exit 3", on_bad_line="skip")


# How a command ends


@kinds
@pytest.mark.parametrize("status", [1, 3, 255])
def test_a_status_other_than_0_is_an_error_with_command_file_and_stderr(tmp_path: Path, kind: str, status: int) -> None:
    path, command = make(tmp_path, kind), f"cat >/dev/null; echo first >&2; echo last >&2; exit {status}"
    message = failure(path, command)
    assert names(message, path, command, f"status {status}")
    assert message.endswith("\n  first\n  last")


def test_a_silent_failure_says_so(tmp_path: Path) -> None:
    assert names(failure(make(tmp_path), "false"), "`false`", "status 1", "stderr")


def test_a_failure_after_good_output_is_an_error_too(tmp_path: Path) -> None:
    stream = piped(make(tmp_path), "echo 1 5; exit 1", False)
    assert next(stream) == b"1 5\n"
    with pytest.raises(DataError, match="status 1"):
        list(stream)


def test_only_the_last_lines_of_stderr_are_shown(tmp_path: Path) -> None:
    message = failure(make(tmp_path), "seq 1000000 >&2; exit 2")
    assert message.endswith("\n  999999\n  1000000")
    assert message.count("\n") == 20
    long = failure(make(tmp_path), "head -c 5000000 /dev/zero | tr '\\0' x >&2; exit 2")
    assert len(long) < 3000
    strange = failure(make(tmp_path), "printf '\\377\\376' >&2; exit 2")
    assert strange.endswith("\ufffd\ufffd")


@kinds
def test_a_command_that_does_not_exist_is_an_error(tmp_path: Path, kind: str) -> None:
    message = failure(make(tmp_path, kind), "no-such-command --fast")
    assert names(message, "no-such-command --fast", 127)
    assert "not found" in message


@pytest.mark.parametrize("command", ["cat 'unclosed", "if", "| cat", "cat <"])
def test_a_command_that_the_shell_does_not_understand_is_an_error(tmp_path: Path, command: str) -> None:
    assert names(failure(make(tmp_path), command), command, "status 2")


def test_a_command_that_cannot_be_run_at_all_is_an_error_with_the_file(tmp_path: Path) -> None:
    path = make(tmp_path)
    for command in ("cat\0", "cat " + "x" * 5_000_000):
        with pytest.raises(DataError, match=re.escape(path)):
            output(path, command)


@pytest.mark.parametrize("number", [9, 11, 15])
@kinds
def test_a_command_that_is_killed_is_an_error_with_the_signal(tmp_path: Path, kind: str, number: int) -> None:
    assert names(failure(make(tmp_path, kind), f"kill -{number} $$"), f"signal {number}")


def test_a_command_killed_from_outside_is_an_error(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    stream = piped(make(tmp_path), f"echo $$ > {note}; echo 1 5; exec sleep 300", False)
    assert next(stream) == b"1 5\n"
    psutil.Process(noted_pid(note)).kill()
    with pytest.raises(DataError, match=naming("signal 9")):
        list(stream)


def test_a_damaged_file_is_the_error_even_if_the_command_is_content(tmp_path: Path) -> None:
    path = tmp_path / "part-0.gz"
    path.write_bytes(gzip.compress(TEXT)[:-1000])
    with pytest.raises(DataError, match=naming(path)):
        output(str(path), "cat")


def test_a_missing_file_is_the_error(tmp_path: Path) -> None:
    for path in (f"{tmp_path}/gone", f"memory://{tmp_path.name}/gone"):
        with pytest.raises(DataError, match=naming(path)):
            output(path, "cat")


class Lost(Exception):
    """As the errors of network libraries: no OSError."""


class LossyFile(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > 0 and size != 6:
            raise Lost("connection lost")
        return super().read(1000)


class LossyFileSystem(AbstractFileSystem):
    protocol = "lossy"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> LossyFile:
        return LossyFile(TEXT)


def test_a_file_system_that_fails_in_the_middle_is_an_error_and_no_shorter_file() -> None:
    fsspec.register_implementation("lossy", LossyFileSystem, clobber=True)
    with pytest.raises(Exception, match="connection lost"):
        output("lossy://part-0", "cat")


# When the rest is not read


@kinds
@pytest.mark.parametrize(
    "command", ["cat", "yes '1 5'", "cat | cat", "echo 1 5; sleep 300", "trap '' TERM; echo 1 5; sleep 300"]
)
def test_an_abandoned_command_is_ended(tmp_path: Path, kind: str, command: str) -> None:
    note = tmp_path / "pid"
    stream = piped(make(tmp_path, kind, TEXT * 3), f"echo $$ > {note}; {command}", False)
    next(stream)
    pid = noted_pid(note)
    stream.close()  # type: ignore[attr-defined]
    assert is_gone(pid)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gz", "memory"])
def test_a_pass_that_is_over_ends_a_command_that_does_not_read_its_input(tmp_path: Path, kind: str) -> None:
    note = tmp_path / "pid"

    def has_started() -> bool:  # the pass is over once the command has said its number
        return note.exists() and note.read_text().endswith("\n")

    stream = piped(make(tmp_path, kind, TEXT * 3), f"echo $$ > {note}; exec sleep 300", False, has_started)
    reading = threading.Thread(target=list, args=(stream,), daemon=True)
    reading.start()
    try:
        reading.join(60)
        assert not reading.is_alive()
        assert is_gone(noted_pid(note))
    finally:
        if not is_gone(noted_pid(note)):
            psutil.Process(noted_pid(note)).kill()


def test_what_an_abandoned_command_has_started_is_ended_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = f"sleep 300 & echo $! > {note}; yes '1 5'"
    stream = piped(make(tmp_path), command, False)
    next(stream)
    pid = noted_pid(note)
    stream.close()  # type: ignore[attr-defined]
    wait_for(lambda: is_gone(pid), "a process in the background is left")


def test_what_runs_in_the_background_of_an_abandoned_command_is_ended_if_its_shell_is_gone(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    others = psutil.Process().children()
    stream = piped(make(tmp_path), f"(echo 1 5; exec sleep 300) & echo $! > {note}; exit 0", False)
    try:
        next(stream)
        pid = noted_pid(note)
        shells = [child for child in psutil.Process().children() if child not in others]
        wait_for(lambda: all(is_gone(shell.pid) for shell in shells), "the shell has not ended")
        stream.close()  # type: ignore[attr-defined]
        wait_for(lambda: is_gone(pid), "a process in the background is left")
    finally:
        if not is_gone(noted_pid(note)):
            psutil.Process(noted_pid(note)).kill()


def test_a_dataset_that_is_left_early_ends_its_commands(tmp_path: Path) -> None:
    paths = []
    for i in range(3):
        (tmp_path / str(i)).write_bytes(b"")
        paths.append(str(tmp_path / str(i)))
    notes = tmp_path / "notes"
    notes.mkdir()
    dataset = QueueDataset()
    dataset.init(batch_size=10, thread_num=3, use_var=[Slot("a")], pipe_command=f"echo $$ > {notes}/$$; yes '1 5'")
    dataset.set_filelist(paths)
    batches = iter(dataset)
    assert next(batches)["a"].values.tolist() == [5] * 10
    wait_for(lambda: len(list(notes.iterdir())) == 3, "three commands have not started")
    batches.close()
    assert all(is_gone(int(note.name)) for note in notes.iterdir())


def test_a_malformed_line_ends_the_command_while_its_error_is_still_looked_at(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(DataError, match=naming("line 2", "'a'")):
        read([make(tmp_path)], f"echo $$ > {note}; echo 1 5; echo x; exec yes '1 5'")
    wait_for(lambda: is_gone(noted_pid(note)), "the command is left")
