"""train_from_dataset and infer_from_dataset: what is trained, by one thread and by several, in every mode; what they
print and return; and what goes wrong."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.jobs import Servers, assert_equal_values, fleet_optimizer
from support.messages import naming
from support.scripts import slotted
from support.scripts.slotted import Slotted, job, loss_of
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.errors import DataError, FleetError, ModelError

RULES = {"sgd": {"lr": 0.3}, "adagrad": {"lr": 0.1}, "adam": {"lr": 0.01}}
SIZE, NUM = 7, 40  # the last batch has 5 samples
THREADED = ["half_async", "async", "geo"]
# Without a bound, the sending thread is started with the job: not with the first pass of several threads.
QUEUED: dict[str, dict[str, Any]] = {"async": {"max_staleness": 0}}


@contextlib.contextmanager
def no_thread_more() -> Iterator[None]:
    """Whatever happens within, when it is over no thread has been left."""
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert not left


def make_files(folder: Path, num_files: int = 2, num: int = NUM) -> tuple[list[str], list[slotted.Sample]]:
    samples = slotted.make_samples(5, num)
    bounds = np.linspace(0, num, num_files + 1).astype(int)
    files = [slotted.write(folder / f"part-{i}", samples[bounds[i] : bounds[i + 1]]) for i in range(num_files)]
    return files, samples


def new_model() -> Slotted:
    torch.manual_seed(0)
    return Slotted()


def plain_training(rule: str, batches: list[Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(parameters, losses) of plain torch."""
    model = new_model()
    optimizers = jobs.plain_optimizers(rule, model, **RULES[rule])
    losses = []
    for batch in batches:
        loss = loss_of(model(batch), batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return jobs.values_of(model), losses


def values(part: jobs.Part) -> dict[str, torch.Tensor]:
    dense = {name: value.detach().clone() for name, value in part.model.named_parameters() if len(value)}
    return {**dense, **{name: part.rows(name, range(num)) for name, num in slotted.TABLES.items()}}


# One thread: as plain torch


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["queue", "memory"])
def test_sync_training_equals_a_plain_loop_over_the_same_samples(tmp_path: Path, rule: str, kind: str) -> None:
    files, samples = make_files(tmp_path)
    batches = slotted.batches_of(samples, SIZE)
    expected, losses = plain_training(rule, batches * 2)
    with job(new_model(), fleet_optimizer(rule, **RULES[rule]), num_servers=2) as part:
        data = slotted.dataset(kind, files, SIZE)
        for number in (1, 2):
            result = fleet.train_from_dataset(part.model, data, part.optimizer, loss_of, print_period=0)
            assert (result.steps, result.samples) == (6, NUM)
            assert result.last == {"loss": pytest.approx(losses[6 * number - 1], rel=1e-5)}
            assert result.samples_per_s == pytest.approx(NUM / result.seconds)
        assert_equal_values(values(part), expected, 1e-6)
        assert fleet.stats()["worker"]["samples"] == 2 * NUM


@pytest.mark.parametrize("mode", ["half_async", "geo"])
def test_one_worker_of_a_mode_that_waits_equals_a_plain_loop(tmp_path: Path, mode: str) -> None:
    files, samples = make_files(tmp_path)
    expected, _ = plain_training("sgd", slotted.batches_of(samples, SIZE))
    with job(new_model(), fleet_optimizer("sgd", **RULES["sgd"]), num_servers=2, mode=mode) as part:
        fleet.train_from_dataset(part.model, slotted.dataset("queue", files, SIZE), part.optimizer, loss_of)
        part.flush()
        assert_equal_values(values(part), expected, 1e-5)


def test_two_optimizers_train_as_in_a_plain_loop_and_in_one_thread_only(tmp_path: Path) -> None:
    files, samples = make_files(tmp_path)
    expected, _ = plain_training("adam", slotted.batches_of(samples, SIZE))
    both = lambda model: jobs.plain_optimizers("adam", model, **RULES["adam"])  # noqa: E731
    with job(new_model(), both, mode="half_async") as part:
        data = slotted.dataset("queue", files, SIZE)
        with pytest.raises(FleetError, match=naming("thread=2", 2)):
            fleet.train_from_dataset(part.model, data, part.optimizer, loss_of, thread=2)
        fleet.train_from_dataset(part.model, data, part.optimizer, loss_of)
        assert_equal_values(values(part), expected, 1e-5)


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_batches_of_any_size_train_as_in_plain_torch(tmp_path: Path, size: int) -> None:
    """In small batches whole slots are empty now and then."""
    files, samples = make_files(tmp_path)
    expected, _ = plain_training("adagrad", slotted.batches_of(samples, size))
    with job(new_model(), fleet_optimizer("adagrad", **RULES["adagrad"])) as part:
        train_plainly(part, slotted.dataset("queue", files, size), print_period=0)
        assert_equal_values(values(part), expected, 1e-5)


def test_slots_that_are_empty_at_first_do_not_disturb_those_after(tmp_path: Path) -> None:
    """The first batches have neither words nor left tags; later ones have words that are no tags."""
    samples = slotted.make_samples(1, 20)
    for number, sample in enumerate(samples):
        sample["right"] = [number]
        if number < 8:
            sample["words"] = sample["left"] = []
        else:
            sample["words"] = [slotted.NUM_WORDS - 1]
    expected, _ = plain_training("sgd", slotted.batches_of(samples, 2))
    with job(new_model(), fleet_optimizer("sgd", **RULES["sgd"])) as part:
        train_plainly(part, slotted.dataset("queue", [slotted.write(tmp_path / "part", samples)], 2))
        assert_equal_values(values(part), expected, 1e-5)


def test_a_shuffled_dataset_is_trained_in_its_new_order(tmp_path: Path) -> None:
    files, _ = make_files(tmp_path)
    with job(new_model(), fleet_optimizer("adam", **RULES["adam"])) as part:
        data = slotted.dataset("memory", files, SIZE)
        data.local_shuffle(seed=3)
        expected, _ = plain_training("adam", list(data))
        fleet.train_from_dataset(part.model, data, part.optimizer, loss_of, print_period=0)
        assert_equal_values(values(part), expected, 1e-6)


def test_step_and_model_with_loss_fn_are_two_ways_to_say_the_same(tmp_path: Path) -> None:
    files, _ = make_files(tmp_path)
    found = []
    for form in ("loss_fn", "step", "step with a dict", "loss_fn with a dict"):
        with job(new_model(), fleet_optimizer("adagrad", **RULES["adagrad"])) as part:

            def step(batch: Any, form: str = form, model: torch.nn.Module = part.model) -> Any:
                loss = loss_of(model(batch), batch)
                return {"more": 3, "loss": loss} if "dict" in form else loss

            def in_dict(output: torch.Tensor, batch: Any) -> Any:
                return {"loss": loss_of(output, batch)}

            data = slotted.dataset("memory", files, SIZE)
            if form.startswith("step"):
                fleet.train_from_dataset(step, data, part.optimizer)
            else:
                loss_fn: Any = in_dict if "dict" in form else loss_of
                fleet.train_from_dataset(part.model, data, part.optimizer, loss_fn=loss_fn)
            found.append(values(part))
    for other in found[1:]:
        assert_equal_values(other, found[0])


def test_a_scheduler_in_the_step_acts_as_in_plain_torch(tmp_path: Path) -> None:
    """Rates are read at every step."""
    files, _ = make_files(tmp_path)
    with job(Counted(), jobs.sgd) as part:
        scheduler = torch.optim.lr_scheduler.LambdaLR(part.optimizer, lambda epoch: 0.5**epoch)
        data = slotted.dataset("memory", files, 20)

        def step(batch: Any) -> torch.Tensor:
            return part.model(batch["items"] * 0).sum() / 40  # a gradient of 1 for row 0

        for _ in range(2):
            fleet.train_from_dataset(step, data, part.optimizer)
            scheduler.step()
        assert part.rows("rows", [0]).item() == pytest.approx(-(0.5 + 0.5 + 0.25 + 0.25))


# What it returns and prints


def train_plainly(part: jobs.Part, data: Any, **options: Any) -> Any:
    return fleet.train_from_dataset(part.model, data, part.optimizer, loss_of, **options)


def test_last_holds_the_numbers_of_the_last_step(tmp_path: Path) -> None:
    files, _ = make_files(tmp_path)
    sizes: list[int] = []
    with job(new_model()) as part:

        def step(batch: Any) -> Any:
            sizes.append(batch.num_samples)
            more = {
                "size": batch.num_samples,
                "half": np.float32(0.5),
                "one": torch.tensor([1]),
                "no": None,
                "is": True,
            }
            return {"loss": loss_of(part.model(batch), batch), **more, "vector": torch.ones(3), "text": "words"}

        result = fleet.train_from_dataset(step, slotted.dataset("queue", files, SIZE), part.optimizer)
        assert sizes == [7, 7, 7, 7, 7, 5]
        assert result.last.keys() == {"loss", "size", "half", "one", "is"}
        assert {**result.last, "loss": 0} == {"loss": 0, "size": 5, "half": 0.5, "one": 1, "is": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_a_step_may_return_tensors_of_any_kind(tmp_path: Path, dtype: torch.dtype) -> None:
    """As a model under autocast does: what cannot be shown must not end the training."""
    files, _ = make_files(tmp_path)
    with job(new_model()) as part:

        def step(batch: Any) -> Any:
            output = part.model(batch)
            return {"loss": loss_of(output, batch), "output": output.detach().to(dtype), "one": torch.ones(1).to(dtype)}

        data = slotted.dataset("queue", files, SIZE)
        assert fleet.train_from_dataset(step, data, part.optimizer, print_period=2).steps == 6


def printed_lines(capsys: pytest.CaptureFixture[str], what: str = "train") -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{what} step")]


@pytest.mark.parametrize(("period", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (4, [4]), (6, [6]), (7, []), (0, [])])
def test_a_line_is_printed_every_so_many_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], period: int, steps: list[int]
) -> None:
    files, samples = make_files(tmp_path)
    _, losses = plain_training("sgd", slotted.batches_of(samples, SIZE))
    with job(new_model(), fleet_optimizer("sgd", **RULES["sgd"])) as part:
        train_plainly(part, slotted.dataset("queue", files, SIZE), print_period=period)
    lines = printed_lines(capsys)
    assert len(lines) == len(steps)
    for line, number in zip(lines, steps, strict=True):
        found = re.fullmatch(r"train step (\d+) \| ([\d,]+) samples/s \| loss (\S+)", line)
        assert found, line
        assert int(found[1]) == number
        assert int(found[2].replace(",", "")) > 0
        assert float(found[3]) == pytest.approx(losses[number - 1], rel=1e-4)


def step_of(model: torch.nn.Module, **more: Any) -> Any:
    return lambda batch: {"loss": loss_of(model(batch), batch), **more}


def test_fetch_list_says_what_a_line_shows_and_in_which_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, _ = make_files(tmp_path)
    data = slotted.dataset("memory", files, 20)
    with job(new_model()) as part:
        step = step_of(part.model, auc=0.75, other=2, name="text")
        fleet.train_from_dataset(step, data, part.optimizer, print_period=1, fetch_list=["other", "auc"])
        lines = printed_lines(capsys)
        assert [line.split(" | ")[2:] for line in lines] == [["other 2", "auc 0.75"]] * 2
        fleet.train_from_dataset(step, data, part.optimizer, print_period=1, fetch_list=[])
        assert [line.count("|") for line in printed_lines(capsys)] == [1, 1]
        fleet.train_from_dataset(step, data, part.optimizer, print_period=1)
        names = [part.split()[0] for part in printed_lines(capsys)[0].split(" | ")[2:]]
        assert names == ["loss", "auc", "other"]


def test_an_entry_of_fetch_list_with_several_numbers_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was asked for by name."""
    files, _ = make_files(tmp_path)
    with job(new_model()) as part:
        step = step_of(part.model, parts=torch.tensor([0.25, 0.125]))
        data = slotted.dataset("memory", files, 20)
        fleet.train_from_dataset(step, data, part.optimizer, print_period=1, fetch_list=["parts"])
    line = printed_lines(capsys)[0]
    assert re.search(r"parts .*0\.25.*0\.125", line), line


def test_a_name_of_fetch_list_that_the_step_does_not_return_is_an_error(tmp_path: Path) -> None:
    files, _ = make_files(tmp_path)
    with job(new_model()) as part:
        data = slotted.dataset("memory", files, SIZE)
        step = step_of(part.model, auc=1.0)
        with pytest.raises(FleetError, match=naming("fetch_list", "loss", "auc", "acu")):
            fleet.train_from_dataset(step, data, part.optimizer, fetch_list=["acu", "loss"], print_period=2)


class SlowNumber:
    """Takes its time to be read, so that other threads make steps meanwhile."""

    size = 1

    def item(self) -> float:
        time.sleep(0.003)
        return 1.0


def test_with_several_threads_every_line_has_a_step_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, _ = make_files(tmp_path)
    with job(new_model(), mode="half_async") as part:
        step = step_of(part.model, slow=SlowNumber())
        data = slotted.dataset("memory", files, 2)
        fleet.train_from_dataset(step, data, part.optimizer, print_period=2, thread=4)
    steps = [int(line.split()[2]) for line in printed_lines(capsys)]
    assert sorted(steps) == list(range(2, 21, 2))


# Mistakes


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda out: None, "NoneType"),
        (lambda out: {"auc": 1.0}, "NoneType among auc"),
        (lambda out: 0.5, "float"),
        (lambda out: out.mean().item(), "float"),
        (lambda out: out.mean().detach(), "Tensor"),
        (lambda out: out, "Tensor"),
        (lambda out: {"loss": torch.tensor(1.0)}, "Tensor"),
        (lambda out: {}, "NoneType"),
        (lambda out: "loss", "str"),
    ],
)
@pytest.mark.parametrize("thread", [1, 2])
def test_a_step_without_a_loss_that_can_be_learned_from_is_refused(
    tmp_path: Path, returned: Any, found: str, thread: int
) -> None:
    files, _ = make_files(tmp_path)
    with job(new_model(), mode="half_async") as part:
        data = slotted.dataset("memory", files, SIZE)
        with pytest.raises(FleetError, match=naming(found)):
            fleet.train_from_dataset(lambda batch: returned(part.model(batch)), data, part.optimizer, thread=thread)


def test_the_users_own_optimizer_is_refused(tmp_path: Path) -> None:
    files, _ = make_files(tmp_path)
    with job(new_model()) as part:
        data = slotted.dataset("memory", files, SIZE)
        own = torch.optim.SGD(new_model().parameters(), lr=0.1)
        for wrong in (own, None):
            with pytest.raises(FleetError, match=naming("fleet.distributed_optimizer")):
                fleet.train_from_dataset(part.model, data, wrong, loss_of)  # type: ignore[arg-type]


@pytest.mark.parametrize("thread", [0, -1, 1.5, "2", None, True])
@pytest.mark.parametrize("mode", ["sync", "half_async"])
def test_a_number_of_threads_that_is_none_is_refused(tmp_path: Path, thread: Any, mode: str) -> None:
    files, _ = make_files(tmp_path)
    with job(new_model(), mode=mode) as part:
        data = slotted.dataset("memory", files, SIZE)
        with no_thread_more(), pytest.raises(FleetError, match="thread"):
            train_plainly(part, data, thread=thread, fetch_handler=Watch())
        with no_thread_more(), pytest.raises(FleetError, match=naming("thread", 1)):
            fleet.infer_from_dataset(part.model, data, loss_of, thread=thread, fetch_handler=Watch())


class Watch(fleet.FetchHandler):
    def __init__(self) -> None:
        super().__init__({"loss": "loss"}, period_secs=3600)

    def handler(self, values: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_several_threads_that_step_together_are_refused_with_the_way_out(mode: str, tmp_path: Path) -> None:
    files, _ = make_files(tmp_path)
    with job(new_model(), mode=mode) as part:
        data = slotted.dataset("memory", files, SIZE)
        with no_thread_more(), pytest.raises(FleetError, match=naming("thread=2", mode, "a_sync=True")):
            train_plainly(part, data, thread=2, fetch_handler=Watch())
        assert fleet.infer_from_dataset(part.model, data, loss_of, thread=2).samples == NUM
        assert train_plainly(part, data).steps == 6


def test_a_refused_call_leaves_the_mode_as_it_was(tmp_path: Path) -> None:
    files, _ = make_files(tmp_path)
    with job(new_model(), mode="async") as part:
        before, data = part.worker.communicator, slotted.dataset("queue", files, SIZE)
        loader: Any = torch.utils.data.DataLoader([1, 2])  # type: ignore[arg-type]
        with pytest.raises(FleetError, match=naming("DataLoader", "fleet.prefetch")):
            fleet.train_from_dataset(part.model, loader, part.optimizer, loss_of, thread=2)
        with pytest.raises(FleetError, match=naming("thread=2", 3)):
            fleet.train_from_dataset(part.model, data, [part.optimizer] * 3, loss_of, thread=2)
        assert part.worker.communicator is before


def test_a_worker_with_a_cache_that_refuses_threads_keeps_its_bound(tmp_path: Path) -> None:
    (tmp_path / "part").write_text("1 5\n")
    model = torch.nn.Sequential(fleet.nn.SparseEmbedding(2, name="items", cache="1MB"), torch.nn.Linear(2, 1))
    with job(model, mode="async") as part:
        before = part.worker.communicator
        data = slotted.dataset("queue", [str(tmp_path / "part")], 1, [fleet.Slot("id", dim=1)])
        with pytest.raises(FleetError, match=naming("thread=2", "cache")):
            fleet.train_from_dataset(lambda batch: part.model(batch["id"]).sum(), data, part.optimizer, thread=2)
        assert part.worker.communicator is before


@pytest.mark.parametrize("period", [-1, 1.5, None, "10"])
def test_a_print_period_that_is_none_is_refused(tmp_path: Path, period: Any) -> None:
    files, _ = make_files(tmp_path)
    with job(new_model()) as part, pytest.raises(FleetError, match="print_period"):
        train_plainly(part, slotted.dataset("memory", files, SIZE), print_period=period)


def test_what_cannot_be_called_is_no_step(tmp_path: Path) -> None:
    files, _ = make_files(tmp_path)
    with job(new_model()) as part, pytest.raises(FleetError, match=naming("step(batch)")):
        fleet.train_from_dataset(3, slotted.dataset("memory", files, SIZE), part.optimizer)  # type: ignore[arg-type]


def test_before_init_worker_it_says_what_to_call(tmp_path: Path) -> None:
    files, _ = make_files(tmp_path)
    data = slotted.dataset("queue", files, SIZE)
    with jobs.clean_facade():
        for call in (lambda: fleet.train_from_dataset(len, data, None), lambda: fleet.infer_from_dataset(len, data)):  # type: ignore[arg-type]
            with pytest.raises(FleetError, match=r"fleet\.init_worker"):
                call()


@pytest.mark.parametrize("thread", [1, 3])
@pytest.mark.parametrize("kind", ["queue", "memory"])
def test_a_dataset_that_is_not_ready_is_an_error_and_no_thread_stays(tmp_path: Path, kind: str, thread: int) -> None:
    with job(new_model(), mode="half_async") as part:
        data = fleet.QueueDataset() if kind == "queue" else fleet.InMemoryDataset()
        with no_thread_more(), pytest.raises(DataError, match=r"set_filelist|init|load_into_memory"):
            train_plainly(part, data, thread=thread, fetch_handler=Watch())


@pytest.mark.parametrize("thread", [1, 3])
@pytest.mark.parametrize("kind", ["queue", "memory"])
def test_an_empty_dataset_makes_no_step(tmp_path: Path, kind: str, thread: int) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    for files in ([str(empty)], []):
        with job(new_model(), mode="half_async") as part:
            data = slotted.dataset(kind, files, SIZE)
            before = values(part)
            result = train_plainly(part, data, thread=thread, fetch_handler=Watch())
            assert (result.steps, result.samples, result.last) == (0, 0, {})
            inferred = fleet.infer_from_dataset(part.model, data, loss_of, thread=thread)
            assert (inferred.steps, inferred.mean) == (0, {})
            assert_equal_values(values(part), before)


@pytest.mark.parametrize(("mode", "thread"), [("sync", 1), ("async", 1), ("async", 3), ("geo", 1), ("geo", 3)])
def test_what_a_reader_finds_wrong_arrives_at_the_caller(tmp_path: Path, mode: str, thread: int) -> None:
    files, _ = make_files(tmp_path)
    with open(files[1], "a") as file:
        file.write("1 not a sample\n")
    with job(new_model(), mode=mode, **QUEUED.get(mode, {})) as part:
        data = slotted.dataset("queue", files, SIZE)
        with (
            no_thread_more(),
            pytest.raises(DataError, match=naming("part-1", "line 21", "'words'", "'not'")),
        ):
            train_plainly(part, data, thread=thread)
        assert train_plainly(part, slotted.dataset("queue", files[:1], SIZE), thread=thread).samples == 20


class OwnError(Exception):
    pass


@pytest.mark.parametrize(("mode", "thread"), [("sync", 1), *itertools.product(THREADED, [1, 3])])
@pytest.mark.parametrize("kind", ["queue", "memory"])
def test_what_a_step_raises_ends_all_threads_and_is_raised(tmp_path: Path, mode: str, thread: int, kind: str) -> None:
    """And training can go on afterwards."""
    files, _ = make_files(tmp_path)
    count = iter(range(1000))
    with job(new_model(), fleet_optimizer("sgd", lr=0.02), mode=mode, **QUEUED.get(mode, {})) as part:
        failed: list[threading.Thread] = []

        def step(batch: Any) -> torch.Tensor:
            number = next(count)
            if number == 4:
                failed.append(threading.current_thread())
                raise OwnError("the fifth")
            if number > 4:  # of another thread, which goes on when the one that failed has ended
                jobs.wait_until(lambda: bool(failed) and not failed[0].is_alive(), "the end of the thread that failed")
            return loss_of(part.model(batch), batch)

        data = slotted.dataset(kind, files, 2)
        with no_thread_more(), pytest.raises(OwnError, match="the fifth"):
            fleet.train_from_dataset(step, data, part.optimizer, thread=thread)
        assert next(count) < NUM // 2, "the others stopped early"
        assert train_plainly(part, data, thread=thread).samples == NUM
        part.flush()


def test_looking_ahead_does_not_wait_for_a_batch_that_another_thread_took(tmp_path: Path) -> None:
    """A look sees one batch, another thread takes it. One that then waits holds back a batch that it has: with files
    that are shared among workers the pass would never end."""
    files, _ = make_files(tmp_path, num_files=1)
    taken = threading.Event()

    class Reader(fleet.MultiSlotStringDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            assert taken.wait(jobs.SECONDS)  # there is no batch until the look is over
            return lambda: iter([])

    data = slotted.dataset("queue", files, SIZE, pipe_command=Reader())
    batches = data.iterate()
    try:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(batches.ready()), daemon=True)
        thread.start()
        thread.join(jobs.SECONDS / 2)
        waited = thread.is_alive()
    finally:
        taken.set()
        thread.join(jobs.SECONDS)
        batches.close()
    assert not waited
    assert found == [None]


# Several threads


class Counted(torch.nn.Module):
    """One number per id, that counts what was learned about it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(1, name="rows", initializer=fleet.nn.Constant(0.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids)


class Apart(Counted):
    """Each id also has a dense number of its own: a gradient of one cannot come without that of the other."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.dense = torch.nn.Parameter(torch.zeros(num))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).squeeze(-1) + self.dense[ids]


ID = [fleet.Slot("id", dim=1)]


def id_file(folder: Path, ids: list[int], name: str = "ids") -> str:
    return slotted.write(folder / name, [{"id": [i]} for i in ids])


@contextlib.contextmanager
def steps_watched(part: jobs.Part) -> Iterator[list[Any]]:
    """What is handed to the communicator in every step."""
    communicator, seen = part.worker.communicator, []
    step = communicator.step

    def watched(gradients: Any) -> None:
        seen.append(gradients)
        step(gradients)

    communicator.step = watched  # type: ignore[method-assign]
    yield seen


class Together:
    """Holds every thread until another one has come as far, as long as there are others."""

    def __init__(self, num: int) -> None:
        self._barrier = threading.Barrier(num)
        self.num_met = 0

    def __call__(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(jobs.SECONDS)
            self.num_met += 1


@pytest.mark.parametrize("mode", THREADED)
def test_gradients_of_threads_do_not_mix(tmp_path: Path, mode: str) -> None:
    """All samples of a batch have one id, so a step touches one row and one dense number; here all threads have
    computed their outputs before any of them goes back."""
    num, size, threads = 12, 4, 3
    together = Together(threads)
    servers = Servers(2)
    with job(
        Apart(num), jobs.sgd, mode=mode, servers=servers, **{**QUEUED, "geo": {"k_steps": 3}}.get(mode, {})
    ) as part:
        data = slotted.dataset("queue", [id_file(tmp_path, [i // size for i in range(num * size)])], size, ID)

        def step(batch: Any) -> torch.Tensor:
            out = part.model(batch["id"].squeeze(1)).sum()
            together()
            return out

        with steps_watched(part) as seen:
            result = fleet.train_from_dataset(step, data, part.optimizer, thread=threads)
        part.flush()
        assert (result.steps, result.samples) == (num, num * size)
        assert together.num_met >= threads
        ids = []
        for gradients in seen:
            keys, grads = gradients.sparse["rows"]
            assert len(keys) == 1, "a push with rows of another thread's batch"
            ids.append(int(keys[0]))
            assert grads.tolist() == [[size]]
            expected = np.zeros(num)
            expected[ids[-1]] = size
            assert np.array_equal(gradients.dense["dense.0"], expected), "the dense gradient of another thread"
        assert sorted(ids) == list(range(num))
        assert torch.equal(part.rows("rows", range(num)), torch.full((num, 1), -0.5 * size))
        assert torch.equal(part.model.dense.detach(), torch.full((num,), -0.5 * size))
        assert all(parameter.grad is None for parameter in part.model.parameters())


@pytest.mark.parametrize("mode", THREADED)
@pytest.mark.parametrize("kind", ["queue", "memory"])
def test_several_threads_train_every_sample_once(tmp_path: Path, mode: str, kind: str) -> None:
    files = [id_file(tmp_path, list(range(100 * i, 100 * i + 50)) * 2, f"part-{i}") for i in range(3)]
    ids = [i for start in (0, 100, 200) for i in range(start, start + 50)]
    servers = Servers(2)
    with job(Counted(), jobs.sgd, mode=mode, servers=servers) as part:
        data = slotted.dataset(kind, files, 7, ID, thread_num=2)
        for _ in range(2):
            result = fleet.train_from_dataset(
                lambda batch: part.model(batch["id"]).sum(), data, part.optimizer, thread=4, print_period=0
            )
            assert (result.steps, result.samples) == (43, 300)
        part.flush()
        assert torch.equal(part.rows("rows", ids), torch.full((150, 1), -0.5 * 4))
        assert part.stats()["samples"] == 600
    assert servers.num_rows("rows") == 150


class Shared(torch.nn.Module):
    """Two modules, one table."""

    def __init__(self) -> None:
        super().__init__()
        first = fleet.nn.Constant(0.0)
        self.left = fleet.nn.SparseEmbedding(1, name="both", initializer=first)
        self.right = fleet.nn.SparseEmbedding(1, name="both", initializer=first)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.left(ids) + 10 * self.right(ids)


@pytest.mark.parametrize("mode", THREADED)
@pytest.mark.parametrize("thread", [1, 2])
def test_all_modules_of_a_table_learn(tmp_path: Path, mode: str, thread: int) -> None:
    with job(Shared(), jobs.sgd, mode=mode) as part:
        data = slotted.dataset("queue", [id_file(tmp_path, list(range(8)))], 2, ID)
        fleet.train_from_dataset(lambda batch: part.model(batch["id"]).sum(), data, part.optimizer, thread=thread)
        part.flush()
        assert part.rows("both", range(8)).flatten().tolist() == [-5.5] * 8


class Frozen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fixed = torch.nn.Embedding(8, 1, sparse=True)
        self.fixed.weight.requires_grad_(False)
        self.rows = torch.nn.Embedding(8, 1, sparse=True)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fixed(ids) + self.rows(ids)


@pytest.mark.parametrize("mode", THREADED)
def test_frozen_and_unused_parameters_stay_as_they_are(tmp_path: Path, mode: str) -> None:
    torch.manual_seed(0)
    model = Frozen()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with job(model, jobs.sgd, mode=mode) as part:
        data = slotted.dataset("queue", [id_file(tmp_path, list(range(8)))], 2, ID)
        fleet.train_from_dataset(lambda batch: part.model(batch["id"]).sum(), data, part.optimizer, thread=2)
        part.flush()
        assert torch.equal(part.rows("fixed", range(8)), before["fixed.weight"])
        assert torch.equal(part.rows("rows", range(8)), before["rows.weight"] - 0.5)
        assert torch.equal(part.model.unused.weight.detach(), before["unused.weight"])


def test_after_half_async_threads_the_model_has_the_servers_dense_parameters(tmp_path: Path) -> None:
    """Two threads make one step each, and the reply to the first push comes in after the reply to the second."""
    begun, second_written, together = threading.Event(), threading.Event(), Together(2)

    class Reader(fleet.MultiSlotStringDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            assert line is not None
            if line.split() == ["1", "1"]:  # while the first batch is computed with: for the other thread
                assert begun.wait(jobs.SECONDS)
            return lambda: iter([[("id", line.split()[1:])]])

    files = [id_file(tmp_path, [i], f"part-{i}") for i in range(2)]
    with job(Apart(2), jobs.sgd, mode="half_async", num_servers=2) as part:
        group = part.job.plan.dense[0]
        write = group.write

        def late_write(values: Any, unnoticed: bool = False) -> None:
            is_second = np.count_nonzero(values) == 2
            if not is_second:
                second_written.wait(jobs.SECONDS / 2)
            write(values, unnoticed)
            if is_second:
                second_written.set()

        def step(batch: Any) -> torch.Tensor:
            out = part.model(batch["id"].squeeze(1)).sum()
            begun.set()
            together()
            return out

        group.write = late_write  # type: ignore[method-assign]
        data = slotted.dataset("queue", files, 1, ID, pipe_command=Reader())
        fleet.train_from_dataset(step, data, part.optimizer, thread=2)
        assert second_written.is_set()
        held = part.worker.client.pull_dense("dense.0").result()
        assert held.tolist() == [-0.5, -0.5]
        assert part.model.dense.tolist() == held.tolist()


def click_file(folder: Path, seed: int, num: int) -> str:
    rows = jobs.clicks(seed, num)
    samples = [
        {"ids": ids, "x": x, "y": [y]}
        for ids, x, y in zip(rows["ids"].tolist(), rows["x"].tolist(), rows["y"].tolist(), strict=True)
    ]
    return slotted.write(folder / f"clicks-{seed}", samples)


CLICKS = [fleet.Slot("ids", dim=3), fleet.Slot("x", "float32", 2), fleet.Slot("y", "float32", 1)]


def click_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, batch["y"].squeeze(1))


@pytest.mark.parametrize("mode", THREADED)
def test_several_threads_learn(tmp_path: Path, mode: str) -> None:
    """Untrained, the loss is 0.69; local training on as many rows comes to about 0.50. The order in which threads make
    their steps moves that by thousandths: the bound is in the middle, which chance does not reach."""
    files = [click_file(tmp_path, seed, 1500) for seed in (1, 2)]
    rule = fleet_optimizer("sgd", lr=2.0) if mode == "geo" else fleet_optimizer("adam", lr=0.02)
    with job(jobs.Clicks(), rule, mode=mode, num_servers=2) as part:
        data = slotted.dataset("memory", files, 50, CLICKS)
        data.local_shuffle(seed=0)
        for _ in range(2):
            fleet.train_from_dataset(part.model, data, part.optimizer, click_loss, thread=3, print_period=0)
        part.flush()
        assert jobs.click_scores(part.model)[0] < 0.6


@pytest.mark.parametrize("mode", THREADED)
def test_changed_options_of_the_optimizer_are_refused_with_threads_too(tmp_path: Path, mode: str) -> None:
    with job(Apart(8), jobs.sgd, mode=mode) as part:
        data = slotted.dataset("queue", [id_file(tmp_path, list(range(8)))], 2, ID)
        part.optimizer.param_groups[0]["weight_decay"] = 0.1
        for thread in (1, 2):
            with pytest.raises(ModelError, match=r"weight_decay"):
                fleet.train_from_dataset(
                    lambda batch: part.model(batch["id"].squeeze(1)).sum(), data, part.optimizer, thread=thread
                )
        part.optimizer.param_groups[0]["weight_decay"] = 0
        part.optimizer.zero_grad()


@pytest.mark.parametrize("thread", [1, 2])
def test_a_scheduler_after_a_pass_does_not_complain(tmp_path: Path, thread: int) -> None:
    with job(Counted(), jobs.sgd, mode="half_async") as part:
        scheduler = torch.optim.lr_scheduler.StepLR(part.optimizer, 1)
        data = slotted.dataset("queue", [id_file(tmp_path, list(range(8)))], 2, ID)
        fleet.train_from_dataset(lambda batch: part.model(batch["id"]).sum(), data, part.optimizer, thread=thread)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()


def test_after_a_pass_with_threads_one_thread_trains_as_before(tmp_path: Path) -> None:
    """Autograd again notices parameters that change between forward and backward."""
    with job(Apart(8), jobs.sgd, mode="half_async") as part:
        data = slotted.dataset("queue", [id_file(tmp_path, list(range(8)))], 2, ID)
        fleet.train_from_dataset(lambda batch: part.model(batch["id"].squeeze(1)).sum(), data, part.optimizer, thread=2)
        early = (part.model.dense * part.model.dense).sum()
        part.model(torch.tensor([1])).sum().backward()
        part.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        part.optimizer.zero_grad()


def test_the_state_of_a_geo_optimizer_can_be_asked_for() -> None:
    """Momentum of the dense parameters is in this process."""
    model = Apart(4)

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        dense, sparse = jobs.split_parameters(model)
        return torch.optim.SGD([{"params": dense, "momentum": 0.9}, {"params": sparse}], lr=0.5)

    with job(model, make, mode="geo") as part:
        for _ in range(2):
            part.model(torch.tensor([1, 2])).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
        state = part.optimizer.state_dict()["state"]
        assert state[0]["momentum_buffer"].tolist() == pytest.approx([0, 1.9, 1.9, 0])


# Prediction


@pytest.mark.parametrize("mode", ["sync", *THREADED])
@pytest.mark.parametrize("thread", [1, 3])
def test_prediction_equals_a_plain_computation_and_creates_no_rows(tmp_path: Path, mode: str, thread: int) -> None:
    known, strange = list(range(10)), list(range(500, 520))
    servers = Servers(2)
    with job(Counted(), jobs.sgd, mode=mode, servers=servers) as part:
        train_data = slotted.dataset("queue", [id_file(tmp_path, known, "known")], 5, ID)
        for _ in range(3):
            fleet.train_from_dataset(lambda batch: part.model(batch["id"]).sum(), train_data, part.optimizer)
        part.flush()
        ids = [*known, *strange, 3]
        data = slotted.dataset("memory", [id_file(tmp_path, ids, "all")], 4, ID)
        modes: list[tuple[bool, bool]] = []

        def step(batch: Any) -> Any:
            modes.append((part.model.training, torch.is_grad_enabled()))
            out = part.model(batch["id"])
            return {"loss": out.mean(), "ids": batch["id"].double().mean(), "text": "words"}

        result = fleet.infer_from_dataset(step, data, thread=thread, print_period=0)
        assert set(modes) == {(False, False)}
        assert (result.steps, result.samples) == (8, 31)
        assert result.mean == {"loss": pytest.approx(-1.5 * 11 / 31), "ids": pytest.approx(np.mean(ids))}
        assert part.model.training
        assert torch.is_grad_enabled()
        assert part.stats()["steps"] == 6
    assert servers.num_rows("rows") == len(known)


def test_the_mean_of_a_number_is_over_the_batches_that_have_it(tmp_path: Path) -> None:
    """For instance an AUC, which a batch of one class has not."""
    with job(Counted()) as part:
        data = slotted.dataset("memory", [id_file(tmp_path, [1, 1, 1, 3, 3, 3, 5])], 3, ID)

        def step(batch: Any) -> Any:
            first = float(batch["id"][0])
            return {"loss": first, **({"odd": first} if first > 1 else {})}

        result = fleet.infer_from_dataset(step, data)
        assert result.mean["loss"] == pytest.approx((3 * 1 + 3 * 3 + 5) / 7)
        assert result.mean["odd"] == pytest.approx((3 * 3 + 5) / 4)
        assert result.last == {"loss": 5, "odd": 5}
        assert part.stats()["steps"] == 0


class Towers(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.normal, self.fixed = torch.nn.BatchNorm1d(1), torch.nn.BatchNorm1d(1)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_prediction_leaves_every_part_of_the_model_in_its_mode(tmp_path: Path, fails: bool, training: bool) -> None:
    """A part that the user had put into eval mode, as one does with a frozen layer, stays there."""
    with job(Towers()) as part:
        part.model.train(training)
        part.model.fixed.train(not training)
        data = slotted.dataset("memory", [id_file(tmp_path, [1, 2])], 2, ID)

        def step(batch: Any) -> Any:
            assert not any(module.training for module in part.model.modules())
            if fails:
                raise OwnError
            return part.model(batch["id"]).sum()

        with pytest.raises(OwnError) if fails else contextlib.nullcontext():
            fleet.infer_from_dataset(step, data)
        assert [part.model.training, part.model.normal.training] == [training] * 2
        assert part.model.fixed.training is not training


def test_prediction_between_two_passes_changes_nothing(tmp_path: Path) -> None:
    files, samples = make_files(tmp_path)
    expected, _ = plain_training("adam", slotted.batches_of(samples, SIZE) * 2)
    with job(new_model(), fleet_optimizer("adam", **RULES["adam"]), num_servers=2) as part:
        data = slotted.dataset("memory", files, SIZE)
        train_plainly(part, data)
        means = [fleet.infer_from_dataset(part.model, data, loss_of).mean["loss"] for _ in range(2)]
        assert means[0] == means[1]
        train_plainly(part, data)
        assert_equal_values(values(part), expected, 1e-6)


def test_prediction_prints_its_own_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(Counted()) as part:
        data = slotted.dataset("memory", [id_file(tmp_path, [1, 2, 3])], 1, ID)
        fleet.infer_from_dataset(lambda batch: part.model(batch["id"]).sum(), data, print_period=3)
    (line,) = printed_lines(capsys, "infer")
    assert re.fullmatch(r"infer step 3 \| [\d,]+ samples/s \| loss 0", line)
