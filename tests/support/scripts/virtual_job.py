"""Jobs for tests of the simulator: training, ranks of torch.distributed, threads that wait, and what fails."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

import torchfleet as fleet


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = fleet.nn.SparseEmbedding(4, name="words")
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(ids).mean(1)).squeeze(1)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    if options.pid:
        os.getpid = lambda: options.pid
    fleet.init()
    configs = {"hybrid": True} if options.mode == "hybrid" else {}
    if options.max_staleness is not None:
        configs["max_staleness"] = options.max_staleness
    strategy = fleet.DistributedStrategy(a_sync=options.mode != "sync", a_sync_configs=configs)
    model = fleet.distributed_model(Tiny())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    generator = torch.Generator().manual_seed(fleet.worker_index())
    begun = time.monotonic()
    for step in range(options.steps):
        if step == 2 and fleet.worker_index() == 1:
            fail(options.fail)
        ids = torch.randint(0, 30, (8, 3), generator=generator)
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item()!r}", flush=True)
    fleet.flush()
    print(f"{options.steps} steps in {time.monotonic() - begun!r} s")
    fleet.stop_worker()


def fail(how: str) -> None:
    if how == "error":
        raise RuntimeError("this worker was told to fail")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait":
        while True:
            signal.pause()


def reduce() -> None:
    """Plain DistributedDataParallel, in buckets; and a wait without an end, if the worker was told to."""
    if os.environ["FLEET_ROLE"] == "SERVER":
        return
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in batches(size):
        model(inputs[rank::size]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    shares = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(shares, torch.tensor([10.0 * rank]), group=dist.new_group(backend="gloo"))
    print("sum", total.item(), "all", [share.item() for share in shares])
    print("weights", [weight for p in model.module.parameters() for weight in p.flatten().tolist()])


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batches(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4 * size, 3, generator=generator) for _ in range(3)]


def wait_for_each_other() -> None:
    """Rank 0 waits for an event that is never set, the others for rank 0."""
    if os.environ["FLEET_ROLE"] == "SERVER":
        return
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        threading.Event().wait()
    dist.barrier()


def wait_in_threads() -> None:
    """Prints when waits of several kinds end, in seconds since they began."""
    if os.environ["FLEET_ROLE"] == "SERVER":
        return
    begun, ends = time.monotonic(), {}
    things: queue.Queue[int] = queue.Queue(1)

    def note(name: str) -> None:
        ends[name] = round(time.monotonic() - begun, 6)

    def produce() -> None:
        for number in range(3):
            time.sleep(0.5)
            things.put(number)
        note("producer")

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        things.get(timeout=0.25)
    except queue.Empty:
        note("time-out")
    for name in ("first", "second"):
        things.get()
        note(name)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(time.sleep, (1.0, 1.0)))
    note("pool")
    thread.join()
    note("join")
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(0.1, lock.release).start()
    lock.acquire()
    note("lock")
    print(ends)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "reduce", "deadlock", "threads"])
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--fail", default="")
    parser.add_argument("--max_staleness", type=int)
    parser.add_argument("--pid", type=int, help="what os.getpid() returns")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "train":
        train(options)
    else:
        {"reduce": reduce, "deadlock": wait_for_each_other, "threads": wait_in_threads}[options.what]()


if __name__ == "__main__":
    sys.exit(main())
