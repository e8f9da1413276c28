"""Fleet for PyTorch: parameter-server and collective training. `import torchfleet as fleet`.

Names are loaded when they are first used, so that a bare server (python -m torchfleet.server) never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchfleet import callbacks, data, lightning, metrics, nn, notebook, online, ray, transformers, util
    from torchfleet.collective.pipeline.stages import device_guard
    from torchfleet.data.reading.criteo import CriteoFormat
    from torchfleet.data.reading.generator import MultiSlotDataGenerator, MultiSlotStringDataGenerator
    from torchfleet.data.reading.parquet import ParquetFormat
    from torchfleet.data.reading.string_hash import hash_string
    from torchfleet.data.samples.slots import Ragged, Slot
    from torchfleet.datasets import InMemoryDataset, QueueDataset
    from torchfleet.errors import FleetError
    from torchfleet.fetch import FetchHandler
    from torchfleet.fleet import (
        add_callback,
        barrier_worker,
        data_shard,
        describe,
        distributed_model,
        distributed_optimizer,
        distributed_scheduler,
        epochs,
        first_step,
        flush,
        infer_from_dataset,
        init,
        init_server,
        init_worker,
        is_first_worker,
        is_server,
        is_worker,
        load,
        prefetch,
        replica,
        report,
        reset,
        run_server,
        save,
        save_inference_model,
        save_persistables,
        saved_extra,
        server_endpoints,
        server_index,
        server_num,
        set_time,
        shrink,
        split_files,
        stats,
        stop_if_asked,
        stop_worker,
        train_from_dataset,
        whole_tables,
        worker_endpoints,
        worker_index,
        worker_num,
    )
    from torchfleet.infer import DistributedInfer, load_inference_model
    from torchfleet.plain.to_plain import to_plain
    from torchfleet.preparation.prepare_job import prepare
    from torchfleet.role import PaddleCloudRoleMaker, UserDefinedRoleMaker
    from torchfleet.strategy.distributed_strategy import DistributedStrategy
    from torchfleet.strategy.execution import BuildStrategy, ExecutionStrategy
    from torchfleet.tables.settings.policy import (
        CountFilterEntry,
        PredicateEntry,
        ProbabilityEntry,
        ShowClickEntry,
        Shrink,
        WindowCountEntry,
    )

__version__ = "0.1.0"

__all__ = [
    "BuildStrategy",
    "CountFilterEntry",
    "CriteoFormat",
    "DistributedInfer",
    "DistributedStrategy",
    "ExecutionStrategy",
    "FetchHandler",
    "FleetError",
    "InMemoryDataset",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
    "PaddleCloudRoleMaker",
    "ParquetFormat",
    "PredicateEntry",
    "ProbabilityEntry",
    "QueueDataset",
    "Ragged",
    "ShowClickEntry",
    "Shrink",
    "Slot",
    "UserDefinedRoleMaker",
    "WindowCountEntry",
    "add_callback",
    "barrier_worker",
    "callbacks",
    "data",
    "data_shard",
    "describe",
    "device_guard",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scheduler",
    "epochs",
    "first_step",
    "flush",
    "hash_string",
    "infer_from_dataset",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "lightning",
    "load",
    "load_inference_model",
    "metrics",
    "nn",
    "notebook",
    "online",
    "prefetch",
    "prepare",
    "ray",
    "replica",
    "report",
    "reset",
    "run_server",
    "save",
    "save_inference_model",
    "save_persistables",
    "saved_extra",
    "server_endpoints",
    "server_index",
    "server_num",
    "set_time",
    "shrink",
    "split_files",
    "stats",
    "stop_if_asked",
    "stop_worker",
    "to_plain",
    "train_from_dataset",
    "transformers",
    "util",
    "whole_tables",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]

_MODULES = ("callbacks", "data", "lightning", "metrics", "nn", "notebook", "online", "ray", "transformers", "util")
_ELSEWHERE = {
    "BuildStrategy": "strategy.execution",
    "CountFilterEntry": "tables.settings.policy",
    "CriteoFormat": "data.reading.criteo",
    "DistributedInfer": "infer",
    "DistributedStrategy": "strategy.distributed_strategy",
    "ExecutionStrategy": "strategy.execution",
    "FetchHandler": "fetch",
    "FleetError": "errors",
    "InMemoryDataset": "datasets",
    "MultiSlotDataGenerator": "data.reading.generator",
    "MultiSlotStringDataGenerator": "data.reading.generator",
    "PaddleCloudRoleMaker": "role",
    "ParquetFormat": "data.reading.parquet",
    "PredicateEntry": "tables.settings.policy",
    "ProbabilityEntry": "tables.settings.policy",
    "QueueDataset": "datasets",
    "Ragged": "data.samples.slots",
    "ShowClickEntry": "tables.settings.policy",
    "Shrink": "tables.settings.policy",
    "Slot": "data.samples.slots",
    "UserDefinedRoleMaker": "role",
    "WindowCountEntry": "tables.settings.policy",
    "device_guard": "collective.pipeline.stages",
    "hash_string": "data.reading.string_hash",
    "load_inference_model": "infer",
    "prepare": "preparation.prepare_job",
    "to_plain": "plain.to_plain",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"torchfleet has no '{name}'; it has {', '.join(__all__)}")
    if name in _MODULES:
        return import_module(f"torchfleet.{name}")
    return getattr(import_module(f"torchfleet.{_ELSEWHERE.get(name, 'fleet')}"), name)


def __dir__() -> list[str]:
    """The public names, for completion; not what this file imports, nor modules that happen to be loaded."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
