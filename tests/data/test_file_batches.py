"""FileBatches in a plain DataLoader: each sample once, the same batches as a QueueDataset's, also from processes."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import jobs
from support.messages import names, naming
from support.searches import examples
from torch.utils.data import DataLoader

import torchfleet as fleet
from torchfleet.base.errors import DataError
from torchfleet.data import feed as feed_module
from torchfleet.data.queue_dataset import QueueDataset

SECONDS = 60.0
SLOTS = [fleet.Slot("id", dim=1), fleet.Slot("words"), fleet.Slot("x", dtype="float32", dim=2)]


@pytest.fixture(scope="module", autouse=True)
def quick_looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "_LOOK", 0.005)
        yield


def line(i: int) -> str:
    words = " ".join(str(100 * i + k) for k in range(i % 4))
    return f"1 {i} {f'{i % 4} {words}'.strip()} 2 {i / 2} {-i}\n"


def write(folder: Path, sizes: Sequence[int], make_line: Callable[[int], str] = line) -> list[str]:
    serial = itertools.count()
    paths = [folder / f"part-{i}" for i in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_text("".join(make_line(next(serial)) for _ in range(size)))
    return [str(path) for path in paths]


def plain(batch: Any) -> tuple[Any, ...]:
    """A batch as plain Python."""
    assert isinstance(batch, fleet.data.Batch)
    assert list(batch) == ["id", "words", "x"]
    assert [batch["id"].dtype, batch["words"].values.dtype, batch["x"].dtype] == [
        torch.int64,
        torch.int64,
        torch.float32,
    ]
    words = batch["words"]
    return batch.num_samples, batch["id"].tolist(), words.values.tolist(), words.offsets.tolist(), batch["x"].tolist()


def of_queue(files: Sequence[str], **options: Any) -> list[tuple[Any, ...]]:
    dataset = QueueDataset()
    dataset.init(use_var=SLOTS, **options)
    dataset.set_filelist(files)
    return [plain(batch) for batch in dataset]


def ids(batches: Iterable[Any]) -> list[int]:
    return [i for batch in batches for i in batch["id"].flatten().tolist()]


def saved(batch: Any) -> Any:
    stream = io.BytesIO()
    torch.save(batch, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@settings(max_examples=examples(30))
@given(sizes=st.lists(st.integers(0, 30), max_size=5), batch_size=st.integers(1, 40), drop_last=st.booleans())
def test_batches_are_those_of_a_queue_dataset(sizes: list[int], batch_size: int, drop_last: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), sizes)
        batches = fleet.data.FileBatches(files, batch_size, SLOTS, drop_last=drop_last)
        loader = DataLoader(batches, batch_size=None)
        for _ in range(2):
            found = [plain(batch) for batch in loader]
            assert found == of_queue(files, batch_size=batch_size, drop_last=drop_last)
        if not drop_last:
            assert sorted(ids(loader)) == list(range(sum(sizes)))


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_processes_read_each_sample_once(tmp_path: Path, num_workers: int) -> None:
    files = write(tmp_path, [7, 0, 12])
    batches = fleet.data.FileBatches(files, batch_size=5, use_var=SLOTS)
    loader = DataLoader(batches, batch_size=None, num_workers=num_workers, timeout=SECONDS)
    found = [plain(batch) for batch in loader]
    expected = [
        batch for i in range(num_workers) for batch in of_queue(files[i::num_workers], batch_size=5)
    ]  # each process has its share of the files
    assert sorted(found) == sorted(expected)
    assert sorted(i for batch in found for (i,) in batch[1]) == list(range(19))


@pytest.mark.slow
def test_processes_that_live_on_make_several_passes(tmp_path: Path) -> None:
    batches = fleet.data.FileBatches(write(tmp_path, [9, 4, 3]), batch_size=4, use_var=SLOTS)
    loader = DataLoader(batches, batch_size=None, num_workers=2, persistent_workers=True, timeout=SECONDS)
    for _ in range(3):
        assert sorted(ids(loader)) == list(range(16))
    del loader


@pytest.mark.slow
def test_a_spawned_process_reads_too(tmp_path: Path) -> None:
    batches = fleet.data.FileBatches(write(tmp_path, [6]), batch_size=4, use_var=SLOTS, pipe_command="cat")
    loader = DataLoader(batches, batch_size=None, num_workers=1, multiprocessing_context="spawn", timeout=250)
    assert ids(loader) == list(range(6))


def test_pipe_commands_run_in_the_processes(tmp_path: Path) -> None:
    files = write(tmp_path, [5, 5])
    batches = fleet.data.FileBatches(files, 3, SLOTS, pipe_command="grep -v '^1 3 '")
    for num_workers in (0, 2):
        loader = DataLoader(batches, batch_size=None, num_workers=num_workers)
        assert sorted(ids(loader)) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def commands() -> list[str]:
    """What runs below this process because of a pipe command."""
    lines = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(" ".join(child.cmdline()))
    return [text for text in lines if "sleep 100" in text]


@pytest.mark.slow
def test_leaving_in_the_middle_leaves_no_thread_and_no_process(tmp_path: Path) -> None:
    files = write(tmp_path, [3000, 3000])
    batches = fleet.data.FileBatches(files, 3, SLOTS, pipe_command="cat; sleep 100 | cat")
    before = set(threading.enumerate())
    for num_workers in (0, 2):
        for batch in DataLoader(batches, batch_size=None, num_workers=num_workers):
            assert ids([batch]) in ([0, 1, 2], [3000, 3001, 3002])
            break
        jobs.wait_until(lambda: set(threading.enumerate()) <= before, "all threads have ended", SECONDS)
        jobs.wait_until(lambda: not commands(), "no command is left", SECONDS)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_file_arrives_with_its_place(tmp_path: Path, num_workers: int) -> None:
    files = write(tmp_path, [5, 5])
    Path(files[1]).write_text("1 1 0 2 1 1\n1 x 0 2 1 1\n")
    loader = DataLoader(fleet.data.FileBatches(files, 2, SLOTS), batch_size=None, num_workers=num_workers)
    with pytest.raises(DataError, match=naming("part-1", "line 2", "'id'", "'x'")):
        list(loader)


def test_bad_lines_may_be_skipped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path, [5, 5], lambda i: "bad\n" if i == 7 else line(i))
    batches = fleet.data.FileBatches(files, 3, SLOTS, on_bad_line="skip")
    for num_workers in (0, 2):
        assert sorted(ids(DataLoader(batches, batch_size=None, num_workers=num_workers))) == [*range(7), 8, 9]
        report = capfd.readouterr().err
        assert names(report, "part-1", "line 3")


@pytest.mark.parametrize(
    "copied",
    [lambda batch: pickle.loads(pickle.dumps(batch)), copy.copy, copy.deepcopy, saved],
    ids=["pickle", "copy", "deepcopy", "torch.save"],
)
def test_a_batch_can_be_copied_and_sent(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    for batch in fleet.data.FileBatches(write(tmp_path, [5]), 3, SLOTS):
        other = copied(batch)
        assert plain(other) == plain(batch)
        assert type(other) is type(batch)
        assert type(other["words"]) is type(batch["words"])


def test_mistakes_are_errors_at_once(tmp_path: Path) -> None:
    files = write(tmp_path, [1])
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([str(tmp_path / "missing")], {}, "missing"),
        (files * 2, {}, "part-0"),
        (files[0], {}, "list"),
        (files, {"batch_size": 0}, "batch_size"),
        (files, {"use_var": []}, "use_var"),
        (files, {"on_bad_line": "x"}, "on_bad_line"),
        (files, {"pipe_command": 3}, "pipe_command"),
    ]
    for paths, options, match in wrong:
        with pytest.raises(DataError, match=match):
            fleet.data.FileBatches(paths, **{"use_var": SLOTS, **options})


def test_no_files_give_no_batches() -> None:
    assert list(DataLoader(fleet.data.FileBatches([], 3, SLOTS), batch_size=None, num_workers=1)) == []
