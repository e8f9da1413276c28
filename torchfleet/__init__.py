"""Fleet for PyTorch: parameter-server training. `import torchfleet as fleet`.

Names are loaded when they are first used, so that a bare server (python -m torchfleet.server) never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchfleet import nn
    from torchfleet.errors import FleetError
    from torchfleet.fleet import (
        barrier_worker,
        describe,
        distributed_model,
        distributed_optimizer,
        distributed_scheduler,
        flush,
        init,
        init_server,
        init_worker,
        is_first_worker,
        is_server,
        is_worker,
        prefetch,
        report,
        run_server,
        save_persistables,
        server_endpoints,
        server_index,
        server_num,
        stats,
        stop_worker,
        worker_endpoints,
        worker_index,
        worker_num,
    )
    from torchfleet.role import PaddleCloudRoleMaker, UserDefinedRoleMaker
    from torchfleet.strategy import DistributedStrategy

__version__ = "0.1.0"

__all__ = [
    "DistributedStrategy",
    "FleetError",
    "PaddleCloudRoleMaker",
    "UserDefinedRoleMaker",
    "barrier_worker",
    "describe",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scheduler",
    "flush",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "nn",
    "prefetch",
    "report",
    "run_server",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "stats",
    "stop_worker",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]

_ELSEWHERE = {
    "DistributedStrategy": "strategy",
    "FleetError": "errors",
    "PaddleCloudRoleMaker": "role",
    "UserDefinedRoleMaker": "role",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"torchfleet has no '{name}'; it has {', '.join(__all__)}")
    if name == "nn":
        return import_module("torchfleet.nn")
    return getattr(import_module(f"torchfleet.{_ELSEWHERE.get(name, 'fleet')}"), name)
