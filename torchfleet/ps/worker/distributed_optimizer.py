"""The user's optimizer, with the update moved to the servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchfleet.base.adoption import AdoptedOptimizer
from torchfleet.base.errors import FleetError, ModelError
from torchfleet.ps.tables.rows.row_statistics import NUM_PUSHED, is_pushed
from torchfleet.ps.worker.finite_gradients import check_finite
from torchfleet.ps.worker.lookup.dense_group import DenseGroup
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.lookup.plan import Plan, SparseGroup
from torchfleet.ps.worker.modes.communicator import Communicator, Gradients
from torchfleet.ps.worker.optimizer_state import GivenState, NetworkStates, OptimizerState
from torchfleet.ps.worker.row_state.row_weight import RowWeight


class DistributedOptimizer(AdoptedOptimizer):
    """Replaces the user's optimizer: same param groups (shared with it), same step() and zero_grad().

    Learning rates are read from the param groups at every step, so torch's schedulers work on it unchanged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, plan: Plan, share: int = 0, has_network: bool = False) -> None:
        """`share`: the index of `optimizer` among the job's optimizers. `plan`: the tables of its parameters.
        `has_network`: this worker steps the network itself, and has its state.
        """
        super().__init__(optimizer)
        self._has_network = has_network
        self.plan = self._pushed = plan
        self._share = share
        self._sets_zeros = False  # the last zero_grad() had set_to_none=False
        for parameter in [p for p, state in optimizer.state.items() if not _is_of_steps(state)]:
            if isinstance(parameter, RowWeight):  # Adagrad creates state at construction
                del optimizer.state[parameter]
        self.given = self._parsed(optimizer.state)
        for group in plan.sparse.values():
            for module in group.modules if group.own is not None else ():
                module.optimizer._opt_called = True  # type: ignore[union-attr]  # else its schedulers warn
        self._engine: Engine | None = None
        self._communicator: Communicator | None = None
        self._served: OptimizerState | None = None  # the state on the servers, while this worker is bound to them
        self._has_left = False
        self._unbound = "optimizer.step() before fleet.init_worker(): there are no servers to send gradients to"
        self._twins: dict[int, torch.nn.Parameter] = {}

    def bind(self, engine: Engine, communicator: Communicator) -> None:
        self._engine, self._communicator = engine, communicator

    def use_state(self, served: OptimizerState) -> None:
        """From now on the state is on the servers."""
        self._served, self.given = served, GivenState({}, {})
        for parameter in [parameter for parameter in self.state if isinstance(parameter, RowWeight)]:
            del self.state[parameter]

    def unbind(self, reason: str) -> None:
        """Make every later step raise an error with this reason."""
        self._engine = self._communicator = self._served = None
        self._unbound, self._has_left = reason, True

    def step_locally(self) -> None:
        """Step the dense parameters by torch's own rule, for geo training.

        Steps on twins that share the parameters' memory, so that autograd, which may run in another thread, sees no
        change.
        """
        own = [group["params"] for group in self._user.param_groups]
        for group in self._user.param_groups:
            group["params"] = [self._twin(p) for p in group["params"] if not isinstance(p, RowWeight)]
        try:
            self._swap_state(to_twins=True)
            self._user.step()
        finally:
            self._swap_state(to_twins=False)
            for group, params in zip(self._user.param_groups, own, strict=True):
                group["params"] = params

    def _swap_state(self, to_twins: bool) -> None:
        """Move the user's optimizer's state to the twins while it steps, and back to the parameters."""
        state = self._user.state
        for parameter, twin in self._pairs:
            old, new = (parameter, twin) if to_twins else (twin, parameter)
            if old in state:
                state[new] = state.pop(old)

    @property
    def _pairs(self) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
        own = [parameter for group in self.plan.dense for parameter in group.parameters]
        return [(parameter, self._twins[id(parameter)]) for parameter in own if id(parameter) in self._twins]

    def _twin(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        twin = self._twins.setdefault(id(parameter), torch.nn.Parameter(parameter.data, parameter.requires_grad))
        twin.data, twin.grad = parameter.data, parameter.grad
        return twin

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand over this step's gradients. The mode decides whether to wait for the servers."""
        loss = self._begin_step(closure)
        engine, communicator = self._bound()
        self.plan.check_options(self._user)
        if _unscaled(self):
            communicator.step(self._gradients())
        else:
            engine.take_gradients(self.plan.sparse)
            engine.drop_gradients(self.plan.sparse)
            communicator.skip_step(self._share)
        self.after_step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells torch.amp.GradScaler whether to call `step` even if gradients are not finite.

        If all workers make a step together, a worker without gradients must still take part. Otherwise the scaler works
        as with any optimizer: it unscales `.grad`, including that of rows, and skips the step.
        """
        return self._communicator is not None and self._communicator.steps_together

    @property
    def communicator(self) -> Communicator:
        return self._bound()[1]

    def step_apart(self, loss: torch.Tensor) -> None:
        """Backward and step for one of several training threads, separate from the gradients of other threads."""
        communicator = self.communicator
        self._opt_called = self._user._opt_called = True  # type: ignore[attr-defined]
        with communicator.alone:  # geo training swaps parameters meanwhile
            self.plan.check_options(self._user)
        trained = [parameter for group in self.plan.dense for parameter in group.parameters]
        modules = [module for group in self.plan.sparse.values() for module in group.modules]
        embeddings = [module.weight for module in modules if module.weight.requires_grad]
        found = torch.autograd.grad(loss, [*trained, *embeddings], allow_unused=True)
        grads = {id(p): grad for p, grad in zip(trained, found, strict=False)}
        gradients = self._gradients(grads)
        self._bound()[0].drop_gradients(self.plan.sparse)
        with communicator.alone:
            if communicator.steps_here:  # by torch's own rule, which reads .grad
                for parameter in trained:
                    parameter.grad = grads[id(parameter)]
            communicator.step(gradients)
            if communicator.steps_here:
                for parameter in trained:
                    parameter.grad = None
        self.after_step()

    def _bound(self) -> tuple[Engine, Communicator]:
        if self._engine is None or self._communicator is None:
            raise FleetError(self._unbound)
        return self._engine, self._communicator

    def _gradients(self, dense: Mapping[int, torch.Tensor | None] | None = None) -> Gradients:
        """All gradients since the last step; dense ones from `dense` by parameter, or from .grad."""
        gradients = self._take_gradients(dense)
        # Checked here in every mode: a sender thread or a local step could not name the parameter.
        check_finite(self._pushed, gradients, self._bound()[1].num_steps + 1)
        return gradients

    def _take_gradients(self, dense: Mapping[int, torch.Tensor | None] | None = None) -> Gradients:
        """As `_gradients`, without the check that they are finite."""
        engine, plan = self._bound()[0], self._pushed
        rates = plan.rates()
        cached = engine.take_cached(plan.sparse, rates) if engine.caches else []
        found, versions = engine.take_gradients(plan.sparse)
        sparse, blocks = {}, {}
        for name, group in plan.sparse.items():  # a step counts for every table, even if no key was touched
            if group.modules[0].table_rows.reading is not None:
                group.modules[0].table_rows.end_reading()
            if name in engine.caches:
                continue
            if name in found:
                sparse[name] = found[name]
            else:
                width = group.spec.dim + NUM_PUSHED * is_pushed(group.spec)  # all workers must push the same width
                sparse[name] = np.empty(0, np.uint64), np.empty((0, width), np.float32)
        for network in plan.dense:
            blocks[network.spec.name] = network.gradients(dense)
        return Gradients(sparse, versions, blocks, rates, share=self._share, cached=cached)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ModelError(
            "add_param_group: the tables of the job are made, each with the rule of its param group. Give the "
            "optimizer these parameters before fleet.distributed_optimizer, in a group of their own, and freeze them "
            "after it (requires_grad_(False)) until they are to be trained."
        )

    @property
    def network_states(self) -> dict[Any, Any]:
        """The state, by parameter, of a network that this worker steps itself."""
        states: dict[Any, Any] = self._user.state
        return states

    def kept_network(self) -> NetworkStates | None:
        """The state of the network, if this worker keeps it; None: the servers do."""
        return NetworkStates(self.network_states, lambda parameter: True) if self._has_network else None

    @property
    def has_state(self) -> bool:
        """Whether the rule of any of its tables keeps state."""
        groups: tuple[DenseGroup | SparseGroup, ...] = (*self.plan.dense, *self.plan.sparse.values())
        return any(group.spec.num_states or group.spec.num_row_states for group in groups)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of all of the state: that of rows has a row for every id of a table with a declared size.

        Any worker may call it, between init_worker and stop_worker. Raises ModelError for a table with rows for any id:
        fleet.save_state and fleet.save_persistables save those.
        """
        if self._has_left and self.has_state:
            raise FleetError(self._unbound)
        if self._served is None:
            return super().state_dict()
        found = self._served.read()
        in_order = [parameter for group in self.param_groups for parameter in group["params"]]
        own = self.state
        self.state = defaultdict(dict, {parameter: found[parameter] for parameter in in_order if parameter in found})
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and state, also those of plain torch; parameters are matched by their order. All workers call
        it, and worker 0's state counts. Before init_worker, the job begins with them unless its servers load a save.
        """
        if self._has_left and self.has_state:
            raise FleetError(self._unbound)
        given = self._parsed(self._by_parameter(state_dict))  # before anything changes
        own = self.state
        self._load_in_place(self, super().load_state_dict, state_dict)
        loaded, self.state = self.state, own
        if self._served is not None:
            self._served.load(given, loaded)
            return
        self.given = given
        for states in (own, self.network_states):  # a hybrid network's may be another dict
            states.clear()
            states.update(loaded)

    def _parsed(self, states: Mapping[Any, Any]) -> GivenState:
        return GivenState.of(
            self.plan, {p: state for p, state in states.items() if _is_of_steps(state)}, self._has_network
        )

    def _by_parameter(self, state_dict: Mapping[str, Any]) -> dict[Any, Any]:
        """The states of a state_dict as they are in it; torch would give `keys` the parameter's type."""
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        states = state_dict["state"]
        return {parameter: states[number] for number, parameter in zip(saved, own, strict=False) if number in states}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, those of sparse rows included. With set_to_none=False the gradients of rows become one
        of no rows: torch.amp.GradScaler refuses a step in which no parameter of an optimizer has a gradient.
        """
        if self._sets_zeros or not set_to_none:
            self._sets_zeros = not set_to_none
            for module in (module for group in self.plan.sparse.values() for module in group.modules):
                module.row_weight.is_zeroed = self._sets_zeros and module.row_weight.is_shown
        if self._engine is not None:
            self._engine.drop_gradients(self.plan.sparse)
        if self._communicator is not None:
            self._communicator.drop_gradients(self._share)
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:  # torch's own does the same, but takes a millisecond
            for parameter in group["params"]:
                if not isinstance(parameter, RowWeight) or self._engine is None:  # else dropped above
                    parameter.grad = None


def _is_of_steps(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state is more than what Adagrad makes at construction."""
    return bool(state) and ("step" not in state or float(state["step"]) > 0)


def _unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """Divide an optimizer's gradients in place by the scale, if torch.amp.GradScaler has left one on it.

    Returns whether the scaler found them finite. Without a scaler, returns True without checking.
    """
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is not None and bool(found_inf.item()):
        return False
    if scale is not None:
        inverse = scale.double().reciprocal().float()  # as the scaler itself computes it
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            gradient = parameter.grad
            if gradient is not None:
                numbers = gradient._values() if gradient.is_sparse else gradient
                numbers.mul_(inverse.to(numbers.device))
    return True
