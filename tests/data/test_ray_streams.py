"""Ray Data as a source: two workers of a job share one dataset of a real Ray, each sample going to one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs

import torchfleet as fleet
from torchfleet.data.arrow_dataset import ArrowDataset
from torchfleet.data.ray_streams import stream_of_worker
from torchfleet.errors import DataError
from torchfleet.worker.peers import Workers

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("ray_data")]

NUM = 600


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    folder = tmp_path_factory.mktemp("r")
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False, _temp_dir=str(folder)
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def test_every_sample_goes_to_one_of_two_workers_in_every_pass(cluster: None, tmp_path: Path) -> None:
    rows = {"id": np.arange(NUM), "x": np.arange(3 * NUM, dtype=np.float32).reshape(NUM, 3)}
    source = ray.data.from_numpy([np.zeros(0)]) if False else ray.data.from_items(
        [{"id": int(i), "x": rows["x"][i]} for i in range(NUM)], override_num_blocks=6
    )
    slots = [fleet.Slot("id", dim=1), fleet.Slot("x", "float32", 3)]

    def read(part: jobs.Part) -> list[list[tuple[int, list[float]]]]:
        with part.worker.workers() as workers:
            stream, kept = stream_of_worker(source, workers, is_equal=True)
        dataset = ArrowDataset()
        dataset.set_stream(stream, 32, slots)
        passes = []
        for _ in range(2):
            found = []
            for batch in dataset:
                found += list(zip(batch["id"].flatten().tolist(), batch["x"].tolist(), strict=True))
            passes.append(found)
        part.barrier()
        assert (kept is not None) == (workers.num > 1)
        return passes

    run = jobs.run(read, jobs.Net, jobs.sgd, jobs.strategy("async"), 2)
    expected = [(i, rows["x"][i].tolist()) for i in range(NUM)]
    for number in range(2):
        shares = [result[number] for result in run.results]
        assert sorted(sample for share in shares for sample in share) == expected
        assert [len(share) for share in shares] == [NUM // 2, NUM // 2]
