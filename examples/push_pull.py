"""The parameter server by itself: start two servers, pull and push rows and a dense block, look at the statistics.

python -m examples.push_pull
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client


def main() -> float:
    """Fit ten rows to targets by pulling, computing a gradient and pushing it; returns the final error."""
    with (
        ServerProcess() as first,
        ServerProcess() as second,
        Client.connect([first.endpoint, second.endpoint]) as client,
    ):
        print(f"servers at {first.endpoint} and {second.endpoint}")
        rows = TableSpec("rows", dim=4, rule=Rule("sgd", lr=0.2), initializer=Initializer("uniform", -1, 1))
        client.create_table(rows)
        client.create_table(TableSpec("bias", "dense", size=4, rule=Rule("sgd", lr=0.02)))
        keys = np.array([7, 8, 9, 2**64 - 1, 0, 10**15, 11, 12, 13, 14], np.uint64)
        target = np.arange(40, dtype=np.float32).reshape(10, 4) / 40
        for step in range(60):
            found, bias = client.pull("rows", keys), client.pull_dense("bias")  # both are on their way
            error = found.result() + bias.result() - target
            client.push_tables({"rows": (keys, error), "bias": error.sum(axis=0)})  # one message per server
            if step % 15 == 0:
                print(f"step {step:2}: mean squared error {np.square(error).mean():.6f}")
        client.flush()
        for i, server in enumerate(client.stats()):
            print(f"server {i}: {server['tables']['rows']['rows']} rows, {server['requests']} requests")
        return float(np.square(error).mean())


if __name__ == "__main__":
    print(f"final mean squared error {main():.2e}")
