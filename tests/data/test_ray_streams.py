"""Ray Data as a source: two workers of a job share one dataset of a real Ray, each sample going to one of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import jobs
from support.extras import Late, needing
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import DataError
from torchfleet.data.arrow_dataset import ArrowDataset
from torchfleet.data.ray_streams import stream_of_worker

ray = Late("ray")
pytestmark = [pytest.mark.cluster, needing("ray", "pyarrow"), pytest.mark.xdist_group("ray_data")]

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


def test_every_sample_goes_to_one_of_two_workers_in_every_pass(cluster: None) -> None:
    x = np.arange(3 * NUM, dtype=np.float32).reshape(NUM, 3)
    source = ray.data.from_items([{"id": i, "x": x[i]} for i in range(NUM)], override_num_blocks=6)

    def read(part: jobs.Part) -> list[list[tuple[int, list[float]]]]:
        with part.worker.workers() as workers:
            stream, keeper = stream_of_worker(source, workers, is_equal=True)
        dataset = ArrowDataset()
        dataset.set_stream(stream, 32, [fleet.Slot("id", dim=1), fleet.Slot("x", "float32", 3)])
        found = [[sample for batch in dataset for sample in _samples(batch)] for _ in range(2)]
        part.barrier()  # no worker ends while another one reads
        assert keeper is not None
        return found

    run = jobs.run(read, jobs.Net, jobs.sgd, mode="async", num_workers=2)
    for number in range(2):
        shares = [result[number] for result in run.results]
        assert sorted(sample for share in shares for sample in share) == [(i, x[i].tolist()) for i in range(NUM)]
        assert [len(share) for share in shares] == [NUM // 2, NUM // 2]


def _samples(batch: Any) -> list[tuple[int, list[float]]]:
    return list(zip(batch["id"].flatten().tolist(), batch["x"].tolist(), strict=True))


@contextlib.contextmanager
def a_worker_alone() -> Iterator[None]:
    with jobs.clean_facade():
        fleet.init()
        fleet.distributed_optimizer(jobs.sgd(fleet.distributed_model(jobs.Net())))
        fleet.init_worker()
        yield
        fleet.stop_worker()


def test_a_worker_alone_has_all_of_it(cluster: None) -> None:
    with a_worker_alone():
        dataset = fleet.data.from_ray(ray.data.range(100), batch_size=30)
        assert sorted(i for batch in dataset for i in batch["id"].flatten().tolist()) == list(range(100))


def test_other_sources_are_refused() -> None:
    with a_worker_alone():
        with pytest.raises(DataError, match=naming("ray.data.Dataset", "streaming_split")):
            fleet.data.from_ray({"id": [1]})
        with pytest.raises(DataError, match=naming(1, 2)):
            fleet.data.from_ray([1, 2])
