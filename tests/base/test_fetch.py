"""FetchHandler: what it is called with, when, from which thread; and that training does not depend on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.cases import each_of
from support.messages import names, naming
from support.scripts import slotted

import torchfleet as fleet
from torchfleet.base.errors import FleetError

NUM = 20
ID = [fleet.Slot("id", dim=1)]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(1, name="rows", initializer=fleet.nn.Constant(0.0))
        self.dense = torch.nn.Parameter(torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum() + self.dense.sum()


class Recorder(fleet.FetchHandler):
    """Keeps what it is called with, and from where."""

    def __init__(self, var_dict: Any, period_secs: float = 0.01, then: Callable[[], Any] = lambda: None) -> None:
        super().__init__(var_dict, period_secs)
        self.calls: list[dict[str, Any]] = []
        self.threads: set[threading.Thread] = set()
        self.called = threading.Event()
        self._then = then

    def handler(self, values: dict[str, Any]) -> None:
        self.calls.append(values)
        self.threads.add(threading.current_thread())
        self.called.set()
        self._then()


@pytest.fixture
def part() -> Iterator[jobs.Part]:
    with slotted.job(Model(), mode="half_async") as made:
        yield made


@pytest.fixture
def data(tmp_path: Path) -> Any:
    return slotted.dataset("memory", [slotted.write(tmp_path / "ids", [{"id": [i]} for i in range(NUM)])], 1, ID)


def train(
    part: jobs.Part, data: Any, handler: Any, at: Callable[[int], Any] = lambda number: None, **options: Any
) -> Any:
    """A pass that calls `at` with the number of each step."""
    count = iter(range(1000))

    def step(batch: Any) -> Any:
        number = next(count)
        at(number)
        values = {"number": number, "ids": batch["id"].flatten().repeat(2), "grad": part.model.dense * 2}
        return {"loss": part.model(batch["id"]), **values}

    options = {"print_period": 0, **options}
    return fleet.train_from_dataset(step, data, part.optimizer, fetch_handler=handler, **options)


def test_values_come_by_name_tensor_and_function_as_numbers_and_arrays(part: jobs.Part, data: Any) -> None:
    own = torch.arange(4.0, requires_grad=True)
    watched = {
        "n": "number",
        "ids": "ids",
        "with gradient": "grad",
        "one": torch.tensor([2.5]),
        "tensor": own,
        "parameter": part.model.dense,
        "function": lambda: 7,
        "function of a tensor": lambda: torch.ones(2, 2),
        "numpy": lambda: np.float64(1.5),
        "array": lambda: np.arange(3),
    }
    handler = Recorder(watched, period_secs=3600)
    train(part, data, handler)
    (found,) = handler.calls
    assert found.keys() == watched.keys()
    assert found["n"] == NUM - 1
    assert type(found["n"]) is int
    assert found["one"] == 2.5
    assert type(found["one"]) is float
    assert (found["function"], found["numpy"]) == (7, 1.5)
    for name in ("ids", "with gradient", "tensor", "parameter", "function of a tensor", "array"):
        assert isinstance(found[name], np.ndarray), name
    assert found["ids"].tolist() == [NUM - 1] * 2
    assert found["tensor"].tolist() == [0, 1, 2, 3]
    assert found["parameter"].tolist() == [-0.5 * NUM] * 3
    assert found["function of a tensor"].tolist() == [[1, 1], [1, 1]]


def test_an_array_is_a_copy_that_training_does_not_change(part: jobs.Part, data: Any) -> None:
    handler = Recorder({"dense": part.model.dense})

    def at(number: int) -> None:
        if number == 5:
            assert handler.called.wait(jobs.SECONDS)

    train(part, data, handler, at)
    first, last = handler.calls[0]["dense"], handler.calls[-1]["dense"]
    assert first[0] >= -0.5 * 5
    assert last[0] == -0.5 * NUM
    last[:] = 100
    assert part.model.dense[0].item() == -0.5 * NUM


def test_it_is_called_again_and_again_from_one_thread_of_its_own(part: jobs.Part, data: Any) -> None:
    handler = Recorder({"n": "number"})

    def at(number: int) -> None:
        if 0 < number < 4:  # three calls, each while this step is under way
            handler.called.clear()
            assert handler.called.wait(jobs.SECONDS)

    train(part, data, handler, at)
    assert len(handler.calls) >= 4
    numbers = [call["n"] for call in handler.calls]
    assert numbers == sorted(numbers)
    assert numbers[-1] == NUM - 1
    assert len(handler.threads) == 1
    assert threading.main_thread() not in handler.threads
    assert not handler.threads.pop().is_alive()


@pytest.mark.parametrize("thread", [1, 3])
def test_the_last_call_has_the_values_at_the_end(part: jobs.Part, data: Any, thread: int) -> None:
    handler = Recorder({"n": "number", "dense": part.model.dense}, period_secs=3600)
    result = train(part, data, handler, thread=thread)
    assert len(handler.calls) == 1
    assert handler.calls[0]["n"] == result.last["number"]


@pytest.mark.parametrize("thread", [1, 3])
def test_training_does_not_wait_for_a_slow_handler(part: jobs.Part, data: Any, thread: int) -> None:
    """The first call returns only when the last step has begun: if training waited for it, that would never be."""
    last, in_time = threading.Event(), []

    def at(number: int) -> None:
        if number == 1:
            assert handler.called.wait(jobs.SECONDS)
        if number == NUM - 1:
            last.set()

    handler = Recorder({"n": "number"}, then=lambda: in_time.append(last.wait(jobs.SECONDS)))
    assert train(part, data, handler, at, thread=thread).steps == NUM
    assert all(in_time)
    assert len(in_time) >= 2


def test_the_time_of_a_pass_is_that_of_training_and_not_of_the_handler(part: jobs.Part, data: Any) -> None:
    handler = Recorder({"n": "number"}, period_secs=3600, then=lambda: time.sleep(0.6))
    started = time.monotonic()
    result = train(part, data, handler)
    assert result.seconds <= time.monotonic() - started - 0.6


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, SystemExit])
def test_what_a_handler_raises_is_shown_and_training_goes_on(
    part: jobs.Part, data: Any, error: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error("of the handler")

    handler = Recorder({"n": "number"}, then=fail)

    def at(number: int) -> None:
        if 0 < number < 3:
            handler.called.clear()
            assert handler.called.wait(jobs.SECONDS), "it is called again after it has failed"

    assert train(part, data, handler, at).steps == NUM
    assert len(handler.calls) >= 3
    assert handler.calls[-1]["n"] == NUM - 1
    told = capsys.readouterr().err
    assert told.count("of the handler") >= 3
    assert "Traceback" in told


def test_a_value_that_is_not_there_is_told_by_name(
    part: jobs.Part, data: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = Recorder({"auc": "acu"}, period_secs=3600)
    assert train(part, data, handler).steps == NUM
    assert not handler.calls
    assert names(capsys.readouterr().err, "loss", "number", "ids", "grad", "'acu'")


def test_a_function_that_fails_is_shown(part: jobs.Part, data: Any, capsys: pytest.CaptureFixture[str]) -> None:
    handler = Recorder({"a": lambda: 1 / 0}, period_secs=3600)
    assert train(part, data, handler).steps == NUM
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_handler_that_nobody_wrote_says_so(part: jobs.Part, data: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(part, data, fleet.FetchHandler({"n": "number"}, 3600)).steps == NUM
    assert "FetchHandler.handler(values)" in capsys.readouterr().err


def test_when_training_fails_the_handlers_thread_ends(part: jobs.Part, data: Any) -> None:
    handler = Recorder({"n": "number"})

    def at(number: int) -> None:
        if number == 3:
            assert handler.called.wait(jobs.SECONDS)
            raise OSError("of the step")

    before = set(threading.enumerate())
    with pytest.raises(OSError, match="of the step"):
        train(part, data, handler, at)
    assert set(threading.enumerate()) <= before
    assert handler.calls[-1]["n"] == 2


def test_one_handler_serves_several_passes_and_prediction(part: jobs.Part, data: Any) -> None:
    handler = Recorder({"loss": "loss"}, period_secs=3600)
    for _ in range(2):
        train(part, data, handler)
    fleet.infer_from_dataset(lambda batch: part.model(batch["id"]), data, fetch_handler=handler)
    assert len(handler.calls) == 3
    assert all(type(call["loss"]) is float for call in handler.calls)


@pytest.mark.parametrize("period", [1e10, float("inf")])
def test_a_period_without_end_means_only_at_the_end(part: jobs.Part, data: Any, period: float) -> None:
    handler = Recorder({"n": "number"}, period_secs=period)
    train(part, data, handler)
    assert [call["n"] for call in handler.calls] == [NUM - 1]


# Mistakes


@each_of("var_dict", [None, {}, [], ["loss"], "loss"])
def test_what_is_no_dict_is_refused(var_dict: Any) -> None:
    with pytest.raises(FleetError, match="dict"):
        fleet.FetchHandler(var_dict)


@pytest.mark.parametrize("what", [None, 3, ["loss"], 0.5])
def test_what_cannot_be_watched_is_refused_by_name(what: Any) -> None:
    with pytest.raises(FleetError, match=naming("'auc'")):
        fleet.FetchHandler({"loss": "loss", "auc": what})


@each_of("period", [0, -1, float("nan"), "5", None])
def test_a_period_that_is_none_is_refused(period: Any) -> None:
    with pytest.raises(FleetError, match=naming("period_secs", 0)):
        fleet.FetchHandler({"loss": "loss"}, period)


@pytest.mark.parametrize("wrong", [Recorder, lambda values: None, {"loss": "loss"}, 5])
def test_what_is_no_handler_is_refused_before_training(part: jobs.Part, data: Any, wrong: Any) -> None:
    with pytest.raises(FleetError, match=naming("fleet.FetchHandler")):
        train(part, data, wrong, at=pytest.fail)
