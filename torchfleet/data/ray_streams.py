"""A Ray Data dataset as streams of Arrow tables, one per worker, which Ray distributes while it reads."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from torchfleet.base.errors import DataError
from torchfleet.base.extras import required
from torchfleet.data.dataset import WorkerGroup

_NAMESPACE = "torchfleet"


def ray_module() -> Any:
    """The module, with Ray Data loaded. Raises MissingPackage."""
    required("ray.data", "from_ray", "ray,parquet")
    return required("ray", "from_ray", "ray,parquet")


def stream_of_worker(source: Any, workers: WorkerGroup, is_equal: bool) -> tuple[Callable[[], Iterable[Any]], Any]:
    """This worker's stream, and an object that must be kept alive while it is used.

    `source`: a ray.data.Dataset, which worker 0 splits; or the result of its streaming_split, for all workers or for
    this one. `is_equal`: all workers get equally many rows, and the remainder is dropped.
    """
    ray = ray_module()
    kept = None
    if isinstance(source, (list, tuple)):
        if len(source) != workers.num:
            raise DataError(f"from_ray: expected a stream for each of {workers.num} workers, found {len(source)}")
        source = source[workers.index]
    elif isinstance(source, ray.data.Dataset) and workers.num > 1:
        source, kept = _dealt(ray, source, workers, is_equal)
    if not isinstance(source, (ray.data.Dataset, ray.data.DataIterator)):
        raise DataError(
            f"from_ray: expected a ray.data.Dataset, or what its streaming_split gives, found {type(source).__name__}"
        )
    return lambda: source.iter_batches(batch_size=None, batch_format="pyarrow"), kept


def _dealt(ray: Any, dataset: Any, workers: WorkerGroup, is_equal: bool) -> tuple[Any, Any]:
    """This worker's share of worker 0's dataset: all workers must pass the same dataset and settings.

    Worker 0 keeps the shares in a Ray actor, and sends the actor's name to the others through the servers.
    """
    here = ray.get_runtime_context().gcs_address
    name, keeper = f"shares-{secrets.token_hex(16)}", None
    if workers.index == 0:
        shares = dataset.streaming_split(workers.num, equal=is_equal)
        keeper = ray.remote(num_cpus=0)(_Shares).options(name=name, namespace=_NAMESPACE).remote(shares)
        ray.get(keeper.ready.remote())
    told = [text.decode() for text in workers.gather("shares of a dataset of Ray", f"{here} {name}".encode())]
    place, name = told[0].split(" ")
    if place != here:
        raise DataError(
            f"from_ray: worker 0 is in the Ray cluster at {place}, and worker {workers.index} in that at {here}: call "
            "ray.init(address=...) with one address on all workers"
        )
    keeper = keeper or ray.get_actor(name, namespace=_NAMESPACE)
    return ray.get(keeper.share.remote(workers.index)), keeper


class _Shares:
    """An actor that keeps the shares, and gives each worker its own."""

    def __init__(self, shares: list[Any]) -> None:
        self._shares = shares

    def ready(self) -> bool:
        return True

    def share(self, worker: int) -> Any:
        return self._shares[worker]
