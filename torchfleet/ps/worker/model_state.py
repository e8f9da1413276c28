"""state_dict and load_state_dict of a worker's model: rows come from the servers, and loaded values go to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torchfleet.base.errors import ModelError
from torchfleet.base.job_hook import JobHook
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.modes.communicator import Communicator
from torchfleet.ps.worker.row_state.embedding_state import EmbeddingState
from torchfleet.ps.worker.row_state.table_rows import NoTable, slices
from torchfleet.ps.worker.row_state.whole_rows import WholeRows

Place = tuple[torch.nn.Module, str]  # a tensor of the model: its module, and its name in there


class Servers(NamedTuple):
    """A worker's access to its servers."""

    client: Client
    connect: Callable[[], Client]  # another client, for any thread
    communicator: Callable[[], Communicator]  # the current one: whole_tables replaces it
    meet: Callable[[], None]  # wait for all workers
    put_network: Callable[[], None] | None  # how worker 0 gives the servers dense values that the workers have trained


class ServedRows:
    """All rows of the servers' tables; on whole tables, this worker's own rows replace those of the servers."""

    def __init__(self, plan: Plan, servers: Servers) -> None:
        self._plan, self._connect, self._communicator = plan, servers.connect, servers.communicator

    def walk(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        """As RowSource.walk. Sends queued gradients first, so that the state includes all steps of this worker."""
        communicator = self._communicator()
        communicator.settle()
        with self._connect() as client:  # a client of its own, because any thread may call this
            yield from client.walk(self._plan.sparse[table].spec)
        yield from communicator.own_rows(table)

    def num_rows(self, table: str) -> int:
        with self._connect() as client:
            return sum(int(server["tables"][table]["rows"]) for server in client.stats())

    def check_writable(self) -> None:
        self._communicator().check_loading()


class Loading:
    """One call of load_state_dict: the module on which it was called, and the tensors that the state has values for."""

    def __init__(self, root: torch.nn.Module, missing_keys: list[str], errors: list[str]) -> None:
        self.root, self._missing_keys, self._errors = root, missing_keys, errors
        self.places: list[Place] = []

    def is_for(self, missing_keys: list[str]) -> bool:
        """Whether this is the call with this list: torch makes one list per call, and passes it to every module."""
        return self._missing_keys is missing_keys

    @property
    def has_failed(self) -> bool:
        """Whether torch is going to raise an error."""
        return bool(self._errors)


class ModelState:
    """Created when the model is bound to its servers; call `close` when it leaves them."""

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan,
        engine: Engine,
        is_first: bool,
        is_restarted: bool,
        servers: Servers,
    ) -> None:
        self._model, self._plan, self._engine, self._servers = model, plan, engine, servers
        self._client = servers.client
        self._is_first, self._is_restarted = is_first, is_restarted
        for group in plan.sparse.values():
            group.modules[0].table_rows.source = ServedRows(plan, servers)
        self._modules = set(model.modules())
        self._loading: Loading | None = None
        self._handles: list[Any] = []
        self._watch(model)

    def _watch(self, model: Any) -> None:
        """Register hooks as functions, not methods: a copy of the model copies its hooks, and a method would copy its
        object.
        """

        def begin(module: torch.nn.Module, *args: Any) -> None:
            self._begin(module, *args)

        def end(module: torch.nn.Module, keys: Any) -> None:
            self._end(module)

        self._handles.append(model.register_state_dict_pre_hook(JobHook(lambda module, *_: self._freshen(module))))
        for module in model.modules():
            self._handles.append(module.register_load_state_dict_pre_hook(JobHook(begin)))
            self._handles.append(module.register_load_state_dict_post_hook(JobHook(end)))

    def close(self, reason: str) -> None:
        """Make every later state_dict raise an error with this reason."""
        for handle in self._handles:
            handle.remove()
        for group in self._plan.sparse.values():
            group.modules[0].table_rows.reading = None
            group.modules[0].table_rows.source = NoTable(reason)

    def _freshen(self, module: torch.nn.Module) -> None:
        """Write the servers' dense values into the model, which include all steps of this worker."""
        if module is self._model:
            self._servers.communicator().flush()

    def _begin(
        self,
        module: torch.nn.Module,
        state: Mapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        errors: list[str],
    ) -> None:
        if module not in self._modules:  # a copy of the model copied this hook
            return
        if metadata.get("assign_to_params_buffers"):
            raise ModelError(
                "load_state_dict(assign=True) would put other parameters into the model than those that the servers "
                "keep: leave assign out"
            )
        if self._loading is None or not self._loading.is_for(missing_keys):
            self._servers.communicator().check_loading()
            self._servers.communicator().send_written()  # before the state's values are there, too
            self._loading = Loading(module, missing_keys, errors)
            for group in self._plan.sparse.values():
                group.modules[0].table_rows.loaded = None
        if isinstance(module, EmbeddingState):  # its rows are loaded separately
            return
        names = {*module._parameters, *(set(module._buffers) - module._non_persistent_buffers_set)}
        self._loading.places += [(module, name) for name in sorted(names) if prefix + name in state]

    def _end(self, module: torch.nn.Module) -> None:
        loading = self._loading
        if loading is None or loading.root is not module:
            return
        self._loading = None
        tables = {name: group.modules[0].table_rows for name, group in self._plan.sparse.items()}
        rows = {name: table.loaded for name, table in tables.items() if table.loaded is not None}
        for table in tables.values():
            table.loaded = None
            table.end_reading()
        if loading.has_failed:
            self._servers.communicator().watch_parameters()  # the values that torch could load do not go to the servers
        else:
            self._put(loading.places, rows)

    def _put(self, places: list[Place], rows: Mapping[str, WholeRows]) -> None:
        """Give the servers the loaded values from worker 0, and make all workers start from them."""
        if self._is_restarted and not self._servers.communicator().num_steps:
            print(
                "load_state_dict is ignored: this worker was restarted, and continues with the servers' current values",
                file=sys.stderr,
                flush=True,
            )
            self._servers.communicator().watch_parameters()
            self._take_dense()
            return
        values = [_tensor(place).detach().clone() for place in places]
        self._servers.communicator().watch_parameters()  # worker 0 gives the servers what was loaded
        self._engine.end_step()
        self._servers.communicator().hand_over()  # in geo mode this overwrites the model
        self._servers.meet()  # so that no worker pushes gradients after the load
        if self._is_first:
            if (
                self._servers.put_network is None
            ):  # else the worker has the newest network, and the servers an older one
                self._take_dense()
            with torch.no_grad():
                for place, value in zip(places, values, strict=True):
                    _tensor(place).copy_(value)
            self._put_dense()
            for name, loaded in rows.items():
                self._put_rows(name, loaded)
        self._servers.meet()
        self._take_dense()
        self._servers.communicator().begin_anew(rows)

    def _put_dense(self) -> None:
        if self._servers.put_network is not None:
            self._servers.put_network()
            return
        for group in (*self._plan.dense, *self._plan.fixed):
            self._client.set_dense(group.spec.name, group.values())

    def _take_dense(self) -> None:
        for group in (*self._plan.dense, *self._plan.fixed):
            group.write(self._client.pull_dense(group.spec.name).result())

    def _put_rows(self, name: str, loaded: WholeRows) -> None:
        """Make the table's rows exactly those of the state. The optimizer's state of rows is kept."""
        if loaded.keys is not None:
            kept = np.sort(loaded.keys.numpy().view(np.uint64))
            present = [keys.copy() for keys, _ in self._client.walk(self._plan.sparse[name].spec)]
            for keys in present:
                self._client.erase(name, keys[~np.isin(keys, kept)])
        for keys, values in slices(loaded.keys, loaded.values):
            self._client.assign(name, keys, values)


def _tensor(place: Place) -> torch.Tensor:
    module, name = place
    tensor: torch.Tensor = getattr(module, name)
    return tensor
