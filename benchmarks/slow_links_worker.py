"""One end of benchmarks.slow_links: a rank that trains and is timed (`train`), or one end of a plain transfer."""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path
from typing import Any

STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16_allreduce": {"fp16_allreduce": True},
    "dgc": {"dgc": True, "dgc_configs": {"sparsity": [0.999], "rampup_begin_step": 0, "rampup_step": 1}},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 8}},
    "adaptive_localsgd": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 8}},
}
INTERVAL = 8  # steps between two exchanges of those that exchange parameters: times are of whole multiples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "receive", "send"])
    parser.add_argument("--address", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--strategy", default="plain", choices=list(STRATEGIES))
    parser.add_argument("--device", default="", help="the network device whose bytes are counted")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    if options.what == "train":
        print(f"RESULT {json.dumps(train(options))}", flush=True)
    elif options.what == "receive":
        print(receive(options.address, options.port))
    else:
        send(options.address, options.port, options.seconds)


def train(options: argparse.Namespace) -> dict[str, float]:
    """Steps per second and bytes sent per step, of whole intervals that take about --seconds."""
    import torch
    import torch.distributed as dist

    import torchfleet as fleet

    torch.manual_seed(0)
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**STRATEGIES[options.strategy]))
    layers = [torch.nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)]
    model: Any = fleet.distributed_model(torch.nn.Sequential(*layers))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    torch.manual_seed(1 + fleet.worker_index())
    inputs, target = torch.randn(2, options.batch, options.width)
    unit = INTERVAL if "localsgd" in options.strategy else 1

    def steps(num: int) -> float:
        """Seconds, until the slowest rank is through."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num):
            model.train_batch(inputs, target, torch.nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - start

    steps(max(2, unit))  # the first are slower: buckets are cut anew, buffers made
    num = torch.tensor([max(2, round(options.seconds / steps(unit)))])
    dist.broadcast(num, 0)  # clocks differ a little
    total, before = unit * int(num), sent(options.device)
    seconds = steps(total)
    bytes_sent = sent(options.device) - before
    fleet.stop_worker()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"steps_per_s": total / seconds, "mb_per_step": bytes_sent / total / 1e6, "parameters": parameters}


def sent(device: str) -> int:
    """Bytes that left through this device, all its headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[8])
    raise SystemExit(f"there is no network device '{device}' here")


def receive(address: str, port: int) -> float:
    """Mbit/s from the first byte to the last."""
    with socket.create_server((address, port)) as server:
        server.settimeout(90)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(60)
            num, start = len(connection.recv(1 << 16)), time.perf_counter()
            while some := connection.recv(1 << 20):
                num += len(some)
            return num * 8 / 1e6 / (time.perf_counter() - start)


def send(address: str, port: int, seconds: float) -> None:
    block, patience = bytes(1 << 16), time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=60)
            break
        except OSError:
            if time.monotonic() > patience:
                raise
            time.sleep(0.05)
    with connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(block)


if __name__ == "__main__":
    main()
