"""Ranks to test with: processes that are forked, torch imported already, from one that never ran a backward pass.

    def train(learning_rate: float) -> dict[str, Any]:       # at the top of a test module; runs on every rank
        fleet.init(is_collective=True, strategy=...)
        ...
        return {"loss": 0.5, "weight": model.weight.detach()}

    def test_something(ranks: Ranks) -> None:
        first, second = ranks.run(train, 2, learning_rate=0.1)

A function `prepare_ranks` of the module runs once, before the first of its ranks is forked: for what is slow at first.
Arguments are what JSON can hold; results are dicts of numbers, text and tensors. A rank that raises fails the test with
its traceback; the other ranks are then killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from support import processes
from support.nursery import has_gpu_driver
from support.paths import ROOT

from torchfleet.launch.roles import free_ports

SECONDS = 200.0  # that ranks may take, on busy cores


class Ranks:
    """The nursery: asked by lines of JSON on its standard input, it forks and waits."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self._process = processes.Popen(  # by the nursery of all processes, which has imported everything already
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FLEET_DEVICE": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process.wait(SECONDS)

    def run(self, function: Callable[..., dict[str, Any]], size: int, **arguments: Any) -> list[dict[str, Any]]:
        """What `function` returned on every rank, in their order."""
        import torch

        with tempfile.TemporaryDirectory() as folder:
            job = {"module": function.__module__, "function": function.__name__, "size": size, "folder": folder}
            job["path"] = str(Path(str(sys.modules[function.__module__].__file__)).parent)
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.write(json.dumps({**job, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            codes = json.loads(self._process.stdout.readline())
            logs = "\n".join(f"rank {i}:\n{(Path(folder) / f'log.{i}').read_text()}" for i in range(size))
            assert codes == [0] * size, f"exit statuses {codes}\n{logs}"
            return [torch.load(Path(folder) / f"result.{i}", weights_only=True) for i in range(size)]

    def close(self) -> None:
        self._process.communicate(timeout=200)


@contextlib.contextmanager
def nursery() -> Iterator[Ranks]:
    with contextlib.closing(Ranks()) as made:
        yield made


def export_once() -> None:
    """For `prepare_ranks`: what torch.export imports when it is first called takes most of a second."""
    import torch

    if not has_gpu_driver():  # it asks for GPUs, after which no rank that is forked could use one
        torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),))


def _serve() -> None:
    if os.fork():  # the one that serves has no parent: other tests look for processes that are left
        os._exit(0)
    gc.collect()
    gc.freeze()  # ranks share these pages, and do not search a million objects of torch's for garbage
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        if job["path"] not in sys.path:  # tests lie in folders, from which pytest imports them by their bare names
            sys.path.append(job["path"])
        with contextlib.suppress(Exception):  # once for all ranks; if it fails, it fails in each of them, with a log
            is_new = job["module"] not in sys.modules
            prepare = getattr(import_module(job["module"]), "prepare_ranks", None)
            if is_new and prepare is not None:
                prepare()
        port = free_ports(1)[0]
        children = [_fork(job, rank, port) for rank in range(job["size"])]
        print(json.dumps(_wait(children)), file=answers, flush=True)
    os._exit(0)  # nothing is left to be done at exit, and taking torch apart takes a while


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    log = os.open(f"{job['folder']}/log.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        import torch

        torch.set_num_threads(1)
        size = str(job["size"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        result = getattr(import_module(job["module"]), job["function"])(**job["arguments"])
        torch.save(result, f"{job['folder']}/result.{rank}")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children: list[int]) -> list[int]:
    """Exit statuses; when one fails, the others, which may wait for it, are killed after a moment."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + SECONDS
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    deadline = min(deadline, time.monotonic() + 2)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]


if __name__ == "__main__":
    _serve()
