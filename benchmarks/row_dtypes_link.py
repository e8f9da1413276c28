"""The traffic of benchmarks.row_dtypes: batches of ids by Zipf's law, pulled and pushed through a link that is held."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.links import Link, LinkError, link
from benchmarks.slow_links import held
from benchmarks.slow_links_worker import sent
from benchmarks.timing import log
from torchfleet.ps.net.sockets import SocketChannel
from torchfleet.ps.net.wire import Role
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client

DIM, SLOTS, BATCH = 16, 26, 4096
ZIPF = 1.15
PORT = 29_500
ROOT = Path(__file__).parent.parent

Ids = npt.NDArray[np.int64]


def zipf_batches(num_ids: int, num_batches: int) -> list[Ids]:
    """BATCH x SLOTS ids each; an id says nothing of how often it comes."""
    cumulative = np.cumsum(1.0 / np.arange(1, num_ids + 1) ** ZIPF)
    names = np.random.default_rng(0).permutation(num_ids)
    drawn = (np.random.default_rng(1 + i).random(BATCH * SLOTS) * cumulative[-1] for i in range(num_batches))
    return [names[np.searchsorted(cumulative, some)] for some in drawn]


def steps(client: Client, batches: Iterable[Ids]) -> int:
    """Pull the distinct ids of each batch and push a gradient for each; returns the number of samples."""
    dice, num = np.random.default_rng(0), 0
    for ids in batches:
        client.pull("rows", ids).result()
        client.push("rows", ids, dice.normal(0, 1e-4, (len(ids), DIM)).astype(np.float32)).result()
        num += BATCH
    return num


def on_link(chosen: argparse.Namespace, specs: Mapping[str, TableSpec]) -> dict[str, dict[str, float]]:
    """Samples/s and bytes per sample, by name, of one worker and one server."""
    found: dict[str, dict[str, float]] = {}
    with link() as joined:
        log(f"  a plain transfer runs at {held(joined, chosen.rate):,.0f} Mbit/s")
        for name, spec in specs.items():
            found[name] = _trained(chosen, joined, spec)
            log(f"  {name}: {found[name]}")
    return found


def _trained(chosen: argparse.Namespace, joined: Link, spec: TableSpec) -> dict[str, float]:
    endpoint = f"tcp://{joined.addresses[0]}:{PORT}"
    serve = [sys.executable, "-m", "torchfleet.server", "--endpoint", endpoint, "--insecure"]
    given = [endpoint, joined.devices[1], str(chosen.num_ids), str(chosen.num_batches), str(chosen.rounds)]
    work = [sys.executable, "-m", "benchmarks.row_dtypes_link", *given, msgspec.json.encode(spec.format).decode()]
    server = subprocess.Popen(joined.inside(0, *serve), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        if not server.stdout.readline().startswith("listening"):
            raise LinkError("the server behind the link did not start")
        done = subprocess.run(
            joined.inside(1, *work), cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
    finally:
        server.terminate()
        server.wait(30)
        if server.stdout is not None:
            server.stdout.close()
    if done.returncode:
        raise LinkError(f"the worker behind the link failed: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(arguments: list[str]) -> None:
    """One worker: the endpoint, its network device, ids, batches, rounds, and the format of the rows."""
    from benchmarks.row_dtypes import spec_of

    endpoint, device, *numbers, row_format = arguments
    num_ids, num_batches, rounds = map(int, numbers)
    spec = msgspec.structs.replace(spec_of("float32", False), format=msgspec.json.decode(row_format, type=RowFormat))
    batches = [np.unique(ids) for ids in zipf_batches(num_ids, num_batches)]
    with Client([SocketChannel(endpoint, None, Role.FIRST_WORKER)]) as client:
        client.create_table(spec)
        steps(client, batches)  # rows are made, kernels are loaded
        before, start, num = _moved(device), time.perf_counter(), 0
        for _ in range(rounds):
            num += steps(client, batches)
        seconds = time.perf_counter() - start
        moved = _moved(device) - before
        print(json.dumps({"samples_per_s": round(num / seconds), "bytes_per_sample": round(moved / num)}))


def _moved(device: str) -> int:
    """Bytes through this device, both ways."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[0]) + sent(device)
    raise SystemExit(f"there is no network device '{device}' here")


if __name__ == "__main__":
    main(sys.argv[1:])
