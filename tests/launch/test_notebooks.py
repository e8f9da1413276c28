"""Notebooks in a real kernel: the examples, cells that fail or are interrupted, and fleets that a cell starts.

Kernels are forked, and so is all that their cells start; but for the one whose end has to end its fleet.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import processes
from support.extras import Late, needing
from support.paths import ROOT
from support.scripts.launching import SOON, clean_environment, wait_until

nbclient, nbformat = Late("nbclient"), Late("nbformat")
manager = Late("jupyter_client.manager")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    needing("nbclient", "nbformat", "ipykernel", "jupyter_client", "cloudpickle"),
]

MARK = "TORCHFLEET_TEST_NOTEBOOK"  # in the environment of a kernel, and of all that it starts
PATIENCE = 240.0  # seconds for a cell that starts a fleet, on few cores


def kernel_environment(**more: str) -> dict[str, str]:
    return clean_environment(PYTHONPATH=str(ROOT), MPLBACKEND="agg", **more)


@pytest.fixture
def forked_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_client.launcher.Popen", processes.Popen)


@pytest.mark.parametrize("name", ["one_process", "fleet_from_a_cell"])
@pytest.mark.usefixtures("forked_kernels")
@pytest.mark.long
def test_an_example_runs_to_its_end(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "examples are kept without outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=PATIENCE, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=kernel_environment())
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )
    if name == "one_process":
        assert "sync, after a failure: AUC" in printed
    else:
        assert "[(0, 300, " in printed
        assert "(1, 300, " in printed, "120 batches, 5 epochs, two workers: each has half"
        assert "[fleetrun]" in printed
        assert "of new pairs are told apart" in printed
        assert "failed: ValueError: a mistake in the function" in printed


class Kernel:
    """A kernel of Jupyter, and the processes that its cells start."""

    def __init__(self, folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        environment = kernel_environment(**{MARK: self._mark})
        self.manager, self.client = manager.start_new_kernel(startup_timeout=PATIENCE, cwd=str(folder), env=environment)
        self.pid = int(self.manager.provisioner.pid)

    def run(self, code: str) -> tuple[str, str]:
        """What a cell printed, and the name of its error, or nothing."""
        printed: list[str] = []
        reply = self.client.execute_interactive(
            code, timeout=PATIENCE, output_hook=lambda message: printed.append(text_of(message)), stop_on_error=False
        )
        return "".join(printed), reply["content"].get("ename", "")

    def begin(self, code: str, sign: str) -> str:
        """Start a cell and wait until it has printed this; the number of the request.

        Without `stop_on_error` a cell that comes right after one that failed is run: a kernel that has sent the reply
        is not always done with giving up what waits.
        """
        identity = str(self.client.execute(code, stop_on_error=False))
        seen, end = "", time.monotonic() + PATIENCE
        while sign not in seen:
            assert time.monotonic() < end, f"no {sign!r} in {seen}"
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=1.0)
                seen += text_of(message)
                is_over = message["content"].get("execution_state") == "idle"
                assert not (is_over and message["parent_header"]["msg_id"] == identity), f"it ended with {seen}"
        return identity

    def interrupt(self, code: str, sign: str, num_started: int = 0) -> str:
        """Interrupt a cell once it has printed this, and has started `num_started` processes or more; the name of its
        error."""
        identity = self.begin(code, sign)
        num = len(self.started())
        assert num >= num_started if num_started else num == 0  # a server may also start one that compiles its kernels
        self.manager.interrupt_kernel()
        while (reply := self.client.get_shell_msg(timeout=PATIENCE))["parent_header"]["msg_id"] != identity:
            pass
        return str(reply["content"].get("ename", ""))

    def started(self) -> list[psutil.Process]:
        """Processes that cells have started and that run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_own = processes.environment_of(process).get(MARK) == self._mark and process.pid != self.pid
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        for process in self.started():
            process.kill()


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    if message["msg_type"] == "error":
        return f"{content['ename']}: {content['evalue']}\n"
    return str(content.get("text", "")) if message["msg_type"] == "stream" else ""


@contextlib.contextmanager
def started_kernel(folder: Path) -> Iterator[Kernel]:
    made = Kernel(folder)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def kernel(tmp_path: Path, forked_kernels: None) -> Iterator[Kernel]:
    with started_kernel(tmp_path) as made:
        yield made


TRAIN = """
import torch, torchfleet as fleet

def begin(strategy=None, dim=4):
    torch.manual_seed(0)
    fleet.init()
    rows, head = torch.nn.Embedding(50, dim, sparse=True), torch.nn.Linear(2 * dim, 1)
    model = fleet.distributed_model(torch.nn.Sequential(rows, torch.nn.Flatten(), head))
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(adagrad, strategy or fleet.DistributedStrategy())
    fleet.init_worker()
    return model, optimizer

def steps(model, optimizer, num):
    draw = torch.Generator().manual_seed(1)
    for _ in range(num):
        ids = torch.randint(50, (32, 2), generator=draw)
        loss = (model(ids).squeeze(1) - (ids[:, 0] % 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()

def whole(**options):
    found = steps(*begin(**options), 30)
    fleet.stop_worker()
    return found
"""


@pytest.mark.long
def test_a_kernel_trains_again_after_stop_an_error_and_an_interrupt(kernel: Kernel) -> None:
    assert kernel.run(TRAIN) == ("", "")
    assert kernel.run("first = whole()")[1] == ""
    assert kernel.run("whole(strategy=fleet.DistributedStrategy(a_sync=True), dim=8); assert whole() == first")[1] == ""

    assert kernel.run("parts = begin(); steps(*parts, 3); 1 / 0")[1] == "ZeroDivisionError"
    assert "fleet.reset()" in kernel.run("begin()")[0]
    assert kernel.run("fleet.reset(); assert whole() == first")[1] == ""

    endless = "parts = begin(); print('begun', flush=True)\nwhile True: steps(*parts, 1)"
    assert kernel.interrupt(endless, "begun") == "KeyboardInterrupt"
    assert kernel.run("fleet.reset(); assert whole() == first")[1] == ""


FLEET = """
import time
scale = 3.0  # a variable of the notebook, which the function uses

class Result:  # of a class of the notebook
    pass

def train(num, strange=False):
    fleet.init()
    model = torch.nn.Sequential(fleet.nn.SparseEmbedding(4, name="rows"), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    model, optimizer = fleet.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
    steps(model, optimizer, num)
    return Result() if strange else {"worker": fleet.worker_index(), "scale": scale, "weight": model[2].weight}

def waits():
    train(3)
    print("waiting", flush=True)
    time.sleep(600)
"""


def test_a_cell_starts_a_fleet_and_ends_it_when_it_is_interrupted(kernel: Kernel) -> None:
    assert kernel.run(TRAIN + FLEET) == ("", "")
    check = """
found = fleet.notebook.run(train, server_num=1, worker_num=2, args=(5,))
assert [one["worker"] for one in found] == [0, 1] and found[0]["scale"] == 3.0
assert torch.equal(found[0]["weight"], found[1]["weight"])
"""
    text, error = kernel.run(check)
    assert error == "", text
    assert not kernel.started()

    text, error = kernel.run("fleet.notebook.run(train, kwargs={'num': 1, 'strange': True})")
    assert error == "FleetError"
    assert "__main__.Result" in text

    assert kernel.interrupt("fleet.notebook.run(waits)", "[worker 0] waiting", 2) == "KeyboardInterrupt"
    assert not kernel.started()


@pytest.mark.long
def test_a_fleet_ends_with_its_kernel(tmp_path: Path) -> None:
    """Of new interpreters, all of them: the nursery would end what it forked."""
    with started_kernel(tmp_path) as kernel:
        assert kernel.run(TRAIN + FLEET) == ("", "")
        kernel.begin("fleet.notebook.run(waits)", "[worker 0] waiting")
        assert len(kernel.started()) >= 2
        os.kill(kernel.pid, 9)
        wait_until(lambda: not kernel.started(), SOON, "end of the processes")
