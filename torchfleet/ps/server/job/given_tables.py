"""What worker 0 tells a server that was started without a script: its tables, and the saved model to load into them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from torchfleet.base.errors import CheckpointError, TableError, WireError
from torchfleet.ps.checkpoint.manifest import Parameter
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import unpack
from torchfleet.ps.server.arrays import only
from torchfleet.ps.server.state.claims import MAX_TABLES, Name
from torchfleet.ps.tables.settings.spec import TableSpec

NO_TABLES = "it waits for worker 0, which says what its tables are"
MAX_BYTES = 1 << 24
_MAX_PATH = 4096

Names = list[Annotated[str, msgspec.Meta(max_length=_MAX_PATH)]]


class GivenTables(msgspec.Struct, forbid_unknown_fields=True):
    """The body of TABLES. `dirname`, `var_names`: the arguments of init_worker."""

    tables: Annotated[list[TableSpec], msgspec.Meta(min_length=1, max_length=MAX_TABLES)]  # as this server has them
    layouts: dict[Name, list[Parameter]] = {}  # by dense table: the places of its parameters
    dirname: Annotated[str, msgspec.Meta(max_length=_MAX_PATH)] | None = None
    var_names: Names | None = None


@dataclass(frozen=True)
class ModelChoice:
    """Which saved model a server loads: the one that its launcher names, the one that worker 0 names, or none."""

    dirname: str | None = None
    var_names: Sequence[str] | None = None
    by_worker: bool = False
    stores: Sequence[str] = ()  # URLs below which worker 0 may name a model; a folder of this machine needs none

    def of(self, given: GivenTables) -> tuple[str, Sequence[str] | None] | None:
        """Return the folder to load and the names of its part, or None. Raises CheckpointError if worker 0 names a
        store that this server was not started with: a message cannot make it talk to an address."""
        if not self.by_worker:
            return None if self.dirname is None else (self.dirname, self.var_names)
        if given.dirname is None:
            return None
        place = given.dirname
        if "::" in place or ("://" in place and not any(_is_below(place, store) for store in self.stores)):
            raise CheckpointError(
                f"worker 0 asks for the model {place!r:.300}, and this server was started without that store: expected "
                "a local folder, or a URL that is an argument of the script or below a --save_root. fleetrun "
                "--servers_run_script lets the servers run the script, which names the model itself."
            )
        return place, given.var_names


class TablesInbox:
    """Takes TABLES while the server does not serve yet. Any thread may wait for it."""

    def __init__(self) -> None:
        self._given: GivenTables | None = None
        self._is_here = threading.Event()

    def take(self, request: Request) -> None:
        """Keep the first request that comes; a repeat changes nothing. Raises WireError or TableError."""
        try:
            given = unpack(only(request), GivenTables, MAX_BYTES)
        except (TableError, WireError) as error:
            raise type(error)(
                f"{error}. If the script adds rules or kinds of tables, start it with fleetrun --servers_run_script: "
                "this server has imported none of its modules."
            ) from None
        if self._given is None:
            self._given = given
            self._is_here.set()

    def wait(self, seconds: float) -> GivenTables | None:
        """Return what worker 0 has said, or None if it has said nothing within this time."""
        self._is_here.wait(seconds)
        return self._given


def _is_below(place: str, store: str) -> bool:
    return ".." not in place.split("/") and (place == store.rstrip("/") or place.startswith(f"{store.rstrip('/')}/"))
