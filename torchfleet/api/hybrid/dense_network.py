"""The dense network of a worker in hybrid mode, exchanged and stepped as in a collective job. Rows are not exchanged.

The user's model remains the same object. Its `forward` is replaced by one that calls the collective strategies and, in
training, DistributedDataParallel or the exchange of gradients through the servers (server_average.py). The empty
weights of sparse embeddings are local to each worker.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchfleet.api.hybrid.server_average import ExchangedModel, ServerAverage
from torchfleet.base.errors import FleetError, ModelError, TableError
from torchfleet.base.job_hook import pickled_as
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.build import check_together
from torchfleet.collective.data_parallel import WrappedModel
from torchfleet.collective.job_settings import use_execution
from torchfleet.collective.model_and_optimizer import ModelAndOptimizer
from torchfleet.collective.strategy import Forward
from torchfleet.collective.tensors.local_tensors import is_local
from torchfleet.collective.world import World
from torchfleet.ps.worker.lookup.plan import Plan

_MOST_NAMES = 3
_PARTS: Any = object()  # the model's argument when its parts are about to be called separately


class NetworkJob(ModelAndOptimizer):
    """The network as the model of a collective job, under its own name. The worker handles steps and barriers."""

    _kind = "hybrid training: the network"
    _beside_rows = True

    def __init__(
        self,
        info: RoleInfo,
        settings: DistributedStrategy,
        world: World,
        forward: Forward,
        average: ServerAverage | None,
    ) -> None:
        super().__init__(info)
        self._settings, self._world, self._forward, self._average = settings, world, forward, average

    def _data_parallel(self, wrapped: WrappedModel) -> Any:
        if self._average is None:
            return super()._data_parallel(wrapped)
        self._average.watch_network(wrapped)
        return ExchangedModel(wrapped, self._average)

    def describe(self) -> str:
        if self._average is None:
            return super().describe()
        first, *strategies = super().describe().split("\n")
        workers = f"{self.info.num_workers} workers, through the servers ({self.world.device.type})"
        return "\n".join([first.partition(" on ")[0] + f" of {workers}", *strategies])

    def _forward_of(self, model: torch.nn.Module) -> Forward:
        return self.innermost

    def innermost(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; returns () for the announcement that parts of it will be called."""
        return () if args and args[0] is _PARTS else self._forward(*args, **kwargs)

    def _refuse_local_parameters(self, model: torch.nn.Module) -> None:
        """Do nothing: the parameters of rows are empty, so strategies can ignore them."""


class NetworkForward:
    """The model's forward during training in hybrid mode. A copy of the model gets the original forward."""

    def __init__(self, call: Forward, own: Forward) -> None:
        self._call, self._own = call, own
        functools.update_wrapper(self, own)
        self.__code__ = getattr(own, "__code__", None)  # torch.export looks at it before it calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._own, memo)  # bound to the copy of the model

    def __reduce__(self) -> Any:
        return pickled_as(self._own)


class NetworkZeroGrad:
    """The model's zero_grad in hybrid mode, where `.grad` does not show the gradients of rows. A copy of the model gets
    the original one.
    """

    def __init__(self, own: Callable[[bool], None], drop_rows: Callable[[], None]) -> None:
        self._own, self._drop_rows = own, drop_rows
        functools.update_wrapper(self, own)

    def __call__(self, set_to_none: bool = True) -> None:
        self._own(set_to_none)
        self._drop_rows()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._own, memo)

    def __reduce__(self) -> Any:
        return pickled_as(self._own)


class DenseNetwork:
    """Model and optimizer of this worker, after all workers have met. All workers must create it at the same time."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        settings: DistributedStrategy,
        info: RoleInfo,
        world: World,
        average: ServerAverage | None = None,
    ) -> None:
        """`average`: exchanges the gradients through the servers; None: among ranks."""
        check_together(settings)
        use_execution(settings)
        self._model, self._names = model, {id(p): name for name, p in model.named_parameters()}
        self._rows = _mark_rows(model, plan)
        self._trained = [parameter for parameter in model.parameters() if not is_local(parameter)]
        self._world = world
        self._job = NetworkJob(info, settings, world, model.forward, average)
        self._average = average
        self._together = self._job.distribute_model(model)
        if self._together.module is not model:
            raise ModelError("sync_batch_norm: the model is itself a batch norm; put it into a module")
        self._alone: WrappedModel = self._together.wrapped
        # A strategy around the forward, or an inspection of its outputs, does not support calls of parts of the model.
        is_wrapped = self._alone.wrapped_forward != self._job.innermost
        self._takes_parts = not is_wrapped and not settings.find_unused_parameters
        self.optimizer = self._job.distribute_optimizer(_without_rows(optimizer, plan))
        if average is not None:
            average.use_rates(self.optimizer.param_groups)
        self._num_calls = 0  # in training, since the last step
        self._hook: Any = None
        model.forward = NetworkForward(self._call, model.forward)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network. In training, all workers call it together; for prediction, each worker alone."""
        if not (torch.is_grad_enabled() and self._model.training):
            return self._alone(*args, **kwargs)
        self._num_calls += 1
        return self._together(*args, **kwargs)

    def begin_parts(self) -> None:
        """Called when rows are looked up for training. Outside a call of the model, this means that its parts are
        called separately.

        DistributedDataParallel then needs a call of its own to prepare for the backward pass.
        """
        if self._num_calls or not self._takes_parts:
            return
        self._num_calls += 1
        self._together(_PARTS)

    @property
    def row_scale(self) -> float:
        """The divisor for gradients of rows."""
        scale = 1.0
        for strategy in self._job.strategies:
            scale *= strategy.row_scale()
        return scale

    @property
    def row_share(self) -> float:
        """The factor for gradients of rows: above 1 for a batch that is larger than the user's batch size (balance)."""
        return 1.0 if self._average is None else self._average.row_share()

    def note_overflow(self) -> None:
        """Record that this worker's gradients of rows were not finite after the division."""
        for strategy in self._job.strategies:
            strategy.note_overflow()

    def owns_state(self, parameter: torch.Tensor) -> bool:
        """Whether this worker holds the optimizer's state of a parameter."""
        return all(strategy.owns_state(parameter) for strategy in self._job.strategies)

    def step(self) -> bool:
        """Step the network, or accumulate its gradients. Returns whether to apply the gradients of rows as well.

        A worker that missed its round (quorum) steps nothing: it gets the others' network before its next round.
        """
        if not self._num_calls:
            raise FleetError(
                "hybrid mode: optimizer.step() without a call of the whole model in training since the last one. "
                "Gradients are exchanged in calls of model(...) with gradients, in training mode: call the model as a "
                "whole (its parts by themselves only if they look rows up, without amp and find_unused_parameters), "
                "and model.train() before."
            )
        self._num_calls = 0
        if self._average is not None and self._average.rounds.is_missed:
            return True
        with self._common_rates():
            self.optimizer.step()
        return not self.optimizer.is_skipped

    @contextlib.contextmanager
    def _common_rates(self) -> Iterator[None]:
        """Step with the learning rates of the first worker of the round: a worker that joined later may be at another
        point of its schedule, and all networks must stay equal."""
        groups = self.optimizer.param_groups
        common = self._average.rounds.rates if self._average is not None else []
        own = [group["lr"] for group in groups]
        if len(common) != len(groups) or common == [float(rate) for rate in own]:
            yield
            return
        for group, rate in zip(groups, common, strict=True):
            group["lr"] = rate if not isinstance(group["lr"], torch.Tensor) else torch.full_like(group["lr"], rate)
        try:
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate

    def check_finite(self, step: int) -> None:
        """Raise TableError that names the parameters whose gradients have NaN or infinity, the same on all workers."""
        named = [(p, p.grad) for p in self._trained if p.grad is not None]
        if not named or bool(torch.isfinite(torch.stack(torch._foreach_norm([grad for _, grad in named]))).all()):
            return
        found = [self._names[id(p)] for p, grad in named if not bool(torch.isfinite(grad).all())]
        if found:
            more = f", and {len(found) - _MOST_NAMES:,} more" if len(found) > _MOST_NAMES else ""
            names = ", ".join(f"parameter '{name}'" for name in found[:_MOST_NAMES])
            raise TableError(
                f"step {step}: NaN or infinity in the gradient of {names}{more}. Nothing of this step was sent. It may "
                "come from another worker's batch. Look for it in the loss (torch.autograd.set_detect_anomaly(True) "
                "says where it begins), lower the learning rate, or clip the gradients."
            )

    def on_backward(self, call: Callable[[], None]) -> None:
        """Call `call` in every backward pass, early in the pass."""
        trained = [p for p in self._model.parameters() if p.requires_grad and not is_local(p)]
        if trained:  # the last parameter is near the loss
            register: Any = trained[-1].register_post_accumulate_grad_hook
            self._hook = register(lambda _: call())

    def on_zero_grad(self, drop_rows: Callable[[], None]) -> None:
        """Call `drop_rows` in every `model.zero_grad()`."""
        self._model.zero_grad = NetworkZeroGrad(self._model.zero_grad, drop_rows)  # type: ignore[method-assign]

    def close(self) -> None:
        """Restore the model, and end the strategies."""
        self._job.close_strategies()
        if isinstance(self._model.__dict__.get("zero_grad"), NetworkZeroGrad):
            del self._model.zero_grad
        if self._hook is not None:
            self._hook.remove()
        if isinstance(self._model.__dict__.get("forward"), NetworkForward):
            del self._model.forward
        for weight in self._rows:
            del weight.fleet_local  # type: ignore[attr-defined]
        self._rows = []


def _mark_rows(model: torch.nn.Module, plan: Plan) -> list[torch.nn.Parameter]:
    """Mark the empty weights of embeddings as local, so that they are not exchanged. Returns these weights."""
    for name, parameter in model.named_parameters():
        if is_local(parameter):
            raise ModelError(
                f"'{name}' is cut over all ranks by its layer (MarginSoftmax), which cannot be used in hybrid mode: "
                "the servers keep one network, alike on all workers. Use collective training, or another layer."
            )
    rows = {id(weight): weight for group in plan.sparse.values() for weight in (m.weight for m in group.modules)}
    for weight in rows.values():
        weight.fleet_local = True  # type: ignore[attr-defined]
    return list(rows.values())


def _without_rows(optimizer: torch.optim.Optimizer, plan: Plan) -> torch.optim.Optimizer:
    """The user's optimizer for the network: the same group dictionaries, without those that contain only rows.

    Schedulers change the learning rates in these dictionaries. Requirements of a rule on every group (lars: momentum)
    apply to the network's groups only.
    """
    rows = {id(module.weight) for group in plan.sparse.values() for module in group.modules}
    own = copy.copy(optimizer)
    own.param_groups = [g for g in optimizer.param_groups if not all(id(p) in rows for p in _params(g))]
    own.state = optimizer.state
    return own


def _params(group: dict[str, Any]) -> Sequence[torch.Tensor]:
    params: Sequence[torch.Tensor] = group["params"]
    return params
