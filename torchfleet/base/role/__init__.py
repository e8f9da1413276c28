"""The role of this process in its job: worker or server, its index, and the addresses of all others."""

from __future__ import annotations

from torchfleet.base.role.fleet_role import ASK
from torchfleet.base.role.process_settings import (
    DURABILITY,
    FSYNC,
    LOG_RUN,
    LOG_STORE,
    MIN_WORKERS,
    ON_LOSS,
    durability_of,
    loss_of,
    start_timeout_of,
)
from torchfleet.base.role.role_info import (
    GO_ON,
    LOSS_END,
    LOSS_RULES,
    LOSS_WAIT,
    SERVER,
    SETTINGS,
    WORKER,
    RoleInfo,
)
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker, UserDefinedRoleMaker, is_collective_job

__all__ = [
    "ASK",
    "DURABILITY",
    "FSYNC",
    "GO_ON",
    "LOG_RUN",
    "LOG_STORE",
    "LOSS_END",
    "LOSS_RULES",
    "LOSS_WAIT",
    "MIN_WORKERS",
    "ON_LOSS",
    "SERVER",
    "SETTINGS",
    "WORKER",
    "PaddleCloudRoleMaker",
    "RoleInfo",
    "UserDefinedRoleMaker",
    "durability_of",
    "is_collective_job",
    "loss_of",
    "start_timeout_of",
]
