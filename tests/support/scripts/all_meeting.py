"""Servers meet before they serve, workers and servers meet together; each process writes what it found to FOLDER."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet
from torchfleet import util


def refusal(call: Callable[[], Any]) -> str:
    try:
        return f"no error: {call()}"
    except fleet.FleetError as error:
        return str(error)


def of_server(index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"too early": refusal(lambda: util.barrier("server"))}
    fleet.init_server()
    time.sleep(0.5 * index)  # who comes last is waited for
    found["sum"] = util.all_reduce(10.0 + index, comm_world="server")
    found["largest"] = util.all_reduce(torch.tensor([index, -index]), "max", "server").tolist()
    util.barrier("server")
    found["all"] = util.all_gather({"server": index}, comm_world="all")
    util.barrier("all")
    found["as a worker"] = refusal(lambda: util.all_gather(1))
    return found


def of_worker(index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"too early": refusal(lambda: util.barrier("all"))}
    fleet.init_worker()
    found["as a server"] = refusal(lambda: util.all_reduce(1, comm_world="server"))
    found["unknown"] = refusal(lambda: util.barrier("everybody"))
    found["workers"] = util.all_gather({"worker": index})
    found["all"] = util.all_gather({"worker": index}, comm_world="all")
    util.barrier("all")
    found["workers again"] = util.all_reduce(1 + index)
    return found


def main(folder: Path) -> None:
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(1, 1))
    strategy = fleet.DistributedStrategy(sync_timeout=60.0)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), strategy)
    if fleet.is_server():
        found = of_server(fleet.server_index())
        (folder / f"server-{fleet.server_index()}").write_text(json.dumps(found))
        fleet.run_server()
        return
    found = of_worker(fleet.worker_index())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()  # the servers that have met serve as usual
    found["weight"] = [model.weight.item(), model.bias.item()]
    (folder / f"worker-{fleet.worker_index()}").write_text(json.dumps(found))
    fleet.stop_worker()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main(Path(sys.argv[1]))
