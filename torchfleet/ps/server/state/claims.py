"""Settings of the job that a worker sends when it joins, and those that the present workers agree on."""

from __future__ import annotations

from typing import Annotated

import msgspec

from torchfleet.ps.server.meeting.presence import MAX_NAME
from torchfleet.ps.tables.settings.spec import TableSpec

MAX_TABLES = 1024  # of a server
MAX_CLAIMS = 1 << 20  # bytes
MAX_FIELDS = 256
MAX_VALUE = 1024  # characters

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Value = bool | int | float | Annotated[str, msgspec.Meta(max_length=MAX_VALUE)]


class Claims(msgspec.Struct, forbid_unknown_fields=True):
    """A worker's settings of the job that must be the same on all workers."""

    release: Name  # of torchfleet
    server: int  # the index of this server in the worker's list of addresses
    num_servers: int
    strategy: Annotated[dict[Name, Value], msgspec.Meta(max_length=MAX_FIELDS)]
    tables: Annotated[list[TableSpec], msgspec.Meta(max_length=MAX_TABLES)]  # as this server has them


class Agreement(msgspec.Struct):
    """The settings of the first present worker. All other present workers have the same."""

    worker: int
    num_workers: int
    claims: Claims
