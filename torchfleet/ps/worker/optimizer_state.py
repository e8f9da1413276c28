"""state_dict and load_state_dict of an optimizer whose state is on the servers: that of rows, and that of the network
unless the worker steps it itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.dense_group import DenseGroup
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.lookup.plan import Plan, SparseGroup
from torchfleet.ps.worker.model_state import Servers
from torchfleet.ps.worker.row_state.table_rows import slices
from torchfleet.ps.worker.row_state.whole_rows import fetch_states
from torchfleet.ps.worker.torch_states import (
    BlockState,
    OneState,
    RowsState,
    block_state,
    has_state,
    rows_as_torch,
    rows_state,
    states_of,
)

States = Mapping[torch.Tensor, OneState]  # by parameter


class GivenState(NamedTuple):
    """A state that was loaded, as the tables have it; a table that is not there begins anew."""

    blocks: dict[str, BlockState]
    rows: dict[str, RowsState]

    @staticmethod
    def of(plan: Plan, states: States, has_network: bool) -> GivenState:
        """`has_network`: the worker keeps the state of the network itself. Raises ModelError if it does not fit."""
        blocks, rows = {}, {}
        for dense in [] if has_network else plan.dense:
            found = [states.get(parameter, {}) for parameter in dense.parameters]
            if any(map(has_state, found)):
                blocks[dense.spec.name] = block_state(dense, found)
        for name, sparse in plan.sparse.items():
            of_weights = (states.get(module.weight, {}) for module in sparse.modules)
            given = next(filter(has_state, of_weights), None)
            if given is not None and not _is_left_out(sparse):
                rows[name] = rows_state(sparse.spec, given)
        return GivenState(blocks, rows)

    def put_rows(self, client: Client, group: SparseGroup) -> None:
        """Give the servers the state of one table's rows. Rows that it has no state for begin anew."""
        name, spec = group.spec.name, group.spec
        num = spec.num_words - spec.dim
        first = np.float32(spec.rule.row_rule.initial_state(spec.rule))
        given = self.rows.get(name)
        step = given.step if given is not None else 0
        if given is None or given.rows.keys is not None:
            for keys, _ in list(client.walk(spec)):
                client.assign_states(name, keys.copy(), np.full((len(keys), num), first), step)
        for keys, states in slices(given.rows.keys, given.rows.values) if given is not None else ():
            is_new = (states.view(np.uint32) != first.view(np.uint32)).any(axis=1)
            client.pull(name, keys[is_new]).result()  # makes the rows that have state and are not there yet
            client.assign_states(name, keys, states, step)

    def block(self, group: DenseGroup) -> BlockState:
        """The state of one dense table."""
        return self.blocks.get(group.spec.name) or block_state(group, [{}] * len(group.parameters))


class _ServedStates:
    """The state of all rows of a table on the servers, as a RowSource; this worker's own replaces it in geo mode."""

    def __init__(self, client: Client, group: SparseGroup, own: Callable[[], Iterator[tuple[Keys, Floats]]]) -> None:
        self._client, self._spec, self._own = client, group.spec, own
        self.step = 0

    def walk(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        for keys, rows, step in self._client.walk_rows(self._spec):
            self.step = max(self.step, step)
            yield keys, rows[:, self._spec.dim :]
        yield from self._own()

    def num_rows(self, table: str) -> int:
        return sum(int(server["tables"][table]["rows"]) for server in self._client.stats())

    def check_writable(self) -> None:
        """Does nothing: this source is only read."""


class NetworkStates(NamedTuple):
    """The state of the network where this worker steps it itself: by torch's optimizer, in this process."""

    states: dict[Any, Any]
    owns: Callable[[torch.Tensor], bool]  # whether this worker has the state of a parameter


class OptimizerState:
    """Created when an optimizer is bound to its servers. `network`: what the worker keeps itself; None: nothing."""

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        is_first: bool,
        is_restarted: bool,
        servers: Servers,
        network: NetworkStates | None,
        counts_in_int: bool,
    ) -> None:
        """`counts_in_int`: the user's optimizer counts its steps in an int."""
        self._plan, self._engine, self._servers, self._network = plan, engine, servers, network
        self._is_first, self._is_restarted, self._counts_in_int = is_first, is_restarted, counts_in_int

    def read(self) -> dict[Any, Any]:
        """The state by parameter, after all steps of this worker; any worker may call it. Raises ModelError, before
        anything is fetched, if it cannot be had as tensors.
        """
        stateful = {name: group for name, group in self._plan.sparse.items() if _is_stateful(group)}
        for name, group in stateful.items():
            _check_tensors(name, group)
        communicator = self._servers.communicator()
        communicator.settle()
        found: dict[Any, Any] = {}
        with self._servers.connect() as client:  # a client of its own, because any thread may call this
            for dense in self._plan.dense:
                found |= self._of_network(client, dense)
            for name, group in stateful.items():
                if _is_left_out(group):
                    continue
                source = _ServedStates(client, group, lambda name=name: communicator.own_states(name))  # type: ignore[misc]
                rows = fetch_states(source, group.spec)
                if not source.step and not _begins_with_state(group):
                    continue
                made = rows_as_torch(group.spec, RowsState(rows, source.step), self._counts_in_int)
                found |= {module.weight: made for module in group.modules}
        return found

    def _of_network(self, client: Client, group: DenseGroup) -> dict[Any, Any]:
        if self._network is not None:
            missing = [n for n, p in zip(group.names, group.parameters, strict=True) if not self._network.owns(p)]
            if missing:
                raise ModelError(
                    f"optimizer.state_dict(): the state of '{missing[0]}' is cut over the workers, and no worker has "
                    "all of it. Leave 'sharding' out, or save the model without it."
                )
            own = self._network.states
            return {parameter: own[parameter] for parameter in group.parameters if parameter in own}
        if not group.spec.num_states:
            return {}
        block, step = client.pull_block(group.spec.name)
        if not step and not _begins_with_state(group):
            return {}
        states = states_of(group, BlockState(block[1:], step), self._counts_in_int)
        return dict(zip(group.parameters, states, strict=True))

    def load(self, given: GivenState, states: States) -> None:
        """All workers call it, and worker 0's state counts; `states` replace those of a network that the worker steps
        itself.
        """
        communicator = self._servers.communicator()
        communicator.check_loading()
        if self._is_restarted and not communicator.num_steps:
            print(
                "optimizer.load_state_dict is ignored: this worker was restarted, and continues with the servers' "
                "current state",
                file=sys.stderr,
                flush=True,
            )
            return
        self._engine.end_step()
        communicator.hand_over()
        self._servers.meet()  # so that no worker pushes gradients after the load
        self._keep(states)
        if self._is_first:
            self._put(given)
        self._servers.meet()
        communicator.begin_with_states(self._steps())
        communicator.flush()

    def _keep(self, states: States) -> None:
        if self._network is None:
            return
        for parameter in (parameter for group in self._plan.dense for parameter in group.parameters):
            self._network.states.pop(parameter, None)
            if parameter in states:
                self._network.states[parameter] = states[parameter]

    def _put(self, given: GivenState) -> None:
        client = self._servers.client
        if self._servers.put_network is not None:
            self._servers.put_network()
        for dense in self._plan.dense if self._network is None else ():
            if dense.spec.num_states:
                client.set_block_state(dense.spec.name, *given.block(dense))
        for group in self._plan.sparse.values():
            if _is_stateful(group) and not _is_left_out(group):
                given.put_rows(client, group)

    def _steps(self) -> dict[str, int]:
        """The number of updates of each table of rows with state, as the servers have it now."""
        stats = self._servers.client.stats()
        names = [name for name, group in self._plan.sparse.items() if _is_stateful(group)]
        return {name: max(int(server["tables"][name]["step"]) for server in stats) for name in names}


def _is_stateful(group: SparseGroup) -> bool:
    """Whether the table's rule keeps state of its rows."""
    return group.spec.num_words > group.spec.dim


def _is_left_out(group: SparseGroup) -> bool:
    """Whether the table is no part of states: SparseEmbedding(state="none")."""
    return group.modules[0].state == "none"


def _begins_with_state(group: DenseGroup | SparseGroup) -> bool:
    """Whether torch's optimizer makes state when it is made itself, and expects it in a file: Adagrad."""
    return group.spec.rule.name == "adagrad"


def _check_tensors(name: str, group: SparseGroup) -> None:
    """Raise ModelError for a table whose rows are no single tensor."""
    if not group.spec.has_size and group.modules[0].state is None:
        raise ModelError(
            f"optimizer.state_dict(): table '{name}' has rows for any id, on the servers, and their state cannot be "
            "one tensor. Save model and optimizer with fleet.save_state(dirname) or fleet.save_persistables; or say "
            "SparseEmbedding(..., state='rows') to have it beside the ids as `keys`, or state='none' to leave it out; "
            "or declare the table's size (num_embeddings)."
        )
