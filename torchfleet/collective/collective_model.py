"""The module that fleet.distributed_model returns: it wraps the user's model and runs it under the strategies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial, update_wrapper
from sys import modules
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchfleet.base.errors import ModelError
from torchfleet.collective.data_parallel import BackwardPasses, WrappedModel
from torchfleet.collective.strategy import CallArguments, Forward, LossFn, Runner, Strategy
from torchfleet.collective.tensors.local_tensors import is_local
from torchfleet.collective.tensors.outputs import tensors


class CollectiveModel(torch.nn.Module):
    """The model, run by all ranks together. `module` is the user's own model; parameters and states keep the names that
    they have there.

    `train_batch` and `eval_batch` work under every strategy. Under `pipeline`, a model that is called must
    return its loss.
    """

    def __init__(
        self,
        wrapped: WrappedModel,
        strategies: Sequence[Strategy],
        parallel: DistributedDataParallel | None,
        runner: Runner | None,
        share_buffers: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self.module = wrapped.module
        # Not registered: parameters would be listed twice, and once more with prefixes.
        self.__dict__["_parallel"] = parallel
        self.__dict__["_called"] = parallel or wrapped
        self.__dict__["wrapped"] = wrapped  # the model under the strategies, for one rank alone
        self.strategies, self._runner = tuple(strategies), runner
        # A strategy with backward passes of its own prepares the exchange of each, and so does one through servers.
        own_backward = any(strategy.has_own_backward for strategy in strategies)
        is_watched = isinstance(parallel, DistributedDataParallel) and not own_backward
        self._passes = BackwardPasses(parallel) if parallel is not None and is_watched else None
        trained: Forward = self._called
        for strategy in strategies:
            trained = strategy.wrap_call(trained)
        self.__dict__["_trained"] = trained
        self._ended_by = ""  # the call that ended the job
        self.num_samples = 0
        self.on_loss: Callable[[torch.Tensor], object] | None = None  # called with the loss, if the model returns it
        self.on_begin: Callable[[], object] = lambda: None  # called where ranks may begin to wait for each other
        self.clear: Callable[[bool], None] | None = None  # the optimizer's zero_grad, once there is one
        self._share_buffers = share_buffers
        self._is_trained = False  # whether it was trained since the buffers were last equal on all ranks
        self.forward = self._own_forward()  # type: ignore[method-assign]
        self.train(self.module.training)

    def _own_forward(self) -> Callable[..., Any]:
        """`forward` with the signature of the user's: trainers inspect it to learn the model's arguments.

        torch.compile skips this function and compiles what it calls: the counters in this function would cause a
        recompilation in every step, also in a step that a CUDA graph captures.
        """
        own = torch.compiler.disable(type(self).forward, recursive=False)  # type: ignore[no-untyped-call]
        return update_wrapper(partial(own, self), self.module.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner is not None:
            return self._run(self._runner, CallArguments(args, kwargs))
        if not torch.is_grad_enabled():
            return self._called(*args, **kwargs)
        self._begin()
        self._count(args, kwargs)
        outputs = self._trained(*args, **kwargs)
        if self._passes is not None:
            self._passes.watch(outputs)
        if self.on_loss is not None:
            for tensor in tensors(outputs):
                if tensor.dim() == 0 and tensor.requires_grad:
                    self.on_loss(tensor.detach())
                    break
        if not self.training:
            self._watch_backward(outputs, self.on_begin)
        return outputs

    def _run(self, runner: Runner, inputs: CallArguments) -> torch.Tensor:
        """Call a model whose layers are on several ranks; returns its loss, the same on all of them.

        With gradients, backward of all micro-batches runs here too; `loss.backward()` then has nothing left to do.
        """
        if runner.refusal:
            raise RuntimeError(runner.refusal)
        if not torch.is_grad_enabled():
            if self._is_trained:
                self.sync_buffers()
            return runner.shared(runner.eval_loss(inputs))
        loss = runner.shared(self.train_batch(inputs, None, runner.own_loss))
        anchor = torch.empty(0, requires_grad=True)  # makes the loss need gradients
        return _TrainedLoss.apply(anchor, loss)  # type: ignore[no-any-return,no-untyped-call]

    def _watch_backward(self, outputs: Any, call: Callable[[], object]) -> None:
        """Call `call` in backward: in evaluation mode, only a backward pass shows that the model is trained."""
        found = next((tensor for tensor in tensors(outputs) if tensor.requires_grad), None)
        if found is not None:
            found.register_hook(lambda _: _done(call))  # type: ignore[no-untyped-call]

    def train_batch(self, inputs: Any, target: Any, loss_fn: LossFn) -> torch.Tensor | None:
        """Run forward and backward of one batch; returns the loss (in a pipeline on the last stage, None elsewhere).

        `inputs` are the model's arguments: a tensor, or a tuple of them. `loss_fn(output, target)` returns a mean over
        samples.
        """
        if self._runner is not None:
            self._begin()
            self._count((inputs,), {})
            for strategy in self.strategies:
                strategy.begin_backward()
            loss = self._runner.train_batch(inputs, target, self._scaled(loss_fn))
            for strategy in self.strategies:
                strategy.end_backward()
            if self.on_loss is not None and loss is not None:
                self.on_loss(loss.detach())
            return loss
        loss = loss_fn(self(*_arguments(inputs)), target)
        if self.on_loss is not None:
            self.on_loss(loss.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _scaled(self, loss_fn: LossFn) -> LossFn:
        def scaled(output: Any, target: Any) -> torch.Tensor:
            loss = loss_fn(output, target)
            for strategy in self.strategies:
                loss = strategy.scaled_loss(loss) if isinstance(loss, torch.Tensor) else loss
            return loss

        return scaled

    @torch.no_grad()
    def eval_batch(self, inputs: Any) -> Any:
        """The outputs for one batch, without gradients; in a pipeline on the last stage, None elsewhere.

        All ranks call it. On the first call after training, they take the first rank's buffers, as `sync_buffers` does.
        """
        if self._is_trained:
            self.sync_buffers()
        if self._runner is not None:
            return self._runner.eval_batch(inputs)
        return self(*_arguments(inputs))

    def sync_buffers(self) -> None:
        """Set running statistics and other buffers to those of the first of the ranks that hold the same layers.

        During training each rank has its own buffers. All ranks call it together.
        """
        self._is_trained = False
        self._share_buffers()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like the optimizer's zero_grad: does nothing while gradients are accumulated over several batches."""
        if self.clear is None:
            super().zero_grad(set_to_none)
        else:
            self.clear(set_to_none)

    def end(self, ended_by: str) -> None:
        """Refuse training from now on, because the job is over; predictions in eval mode still work."""
        self.__dict__["_ended_by"] = ended_by

    def forget(self) -> None:
        """Drop the exchange of gradients, before the model gets a new one."""
        self.__dict__.update(_parallel=None, _called=None, _trained=None, _passes=None)
        gc.collect()  # frees DistributedDataParallel, which is in a reference cycle, and its hooks on the parameters

    def become(self, made: CollectiveModel) -> None:
        """Take over the state of `made`, another wrapper of the same model; references to this one stay valid."""
        own = vars(self)["_modules"]
        self.__dict__.update(vars(made))
        self.__dict__["_modules"] = own
        own["module"] = made.module
        self.forward = self._own_forward()  # type: ignore[method-assign]

    def _begin(self) -> None:
        if self._ended_by and self.training:
            raise job_is_over("the model", self._ended_by)
        self._is_trained = True
        if self.training:  # DistributedDataParallel sometimes exchanges in forward too
            self.on_begin()
        answers = [strategy.exchanges() for strategy in self.strategies]
        exchanging = all(answers)
        if self._parallel is not None:
            self._parallel.require_backward_grad_sync = exchanging
        for strategy in self.strategies:
            strategy.begin_forward(exchanging)

    def _count(self, args: Any, kwargs: Any) -> None:
        if not self.training:  # evaluation is not counted
            return
        first = next((tensor for tensor in tensors([args, kwargs]) if tensor.dim()), None)
        self.num_samples += 0 if first is None else first.shape[0]

    # Names are those of the user's model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint.state_dict: the child whose name is not a part of the names below it."""
        return {"": "module"}

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A copy of the user's own model, which belongs to no job: for averages of weights, and predictions."""
        cutting = [f"{strategy.field}=True" for strategy in self.strategies if strategy.owns_gradients]
        if any(is_local(parameter) for parameter in self.module.parameters()):
            cutting.append("MarginSoftmax")
        if not cutting:
            return deepcopy(self.module, memo)
        raise ModelError(
            f"copy.deepcopy: under {', '.join(cutting)} a rank has a part of the model alone, which cannot be copied. "
            "Save it with fleet.save and load it into a model of its own, or use data parallelism or "
            "sharding_configs={'stage': 1}."
        )

    def train(self, mode: bool = True) -> CollectiveModel:
        super().train(mode)
        self._called.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "_is_accelerate_prepared":
            return _is_prepared()
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _TrainedLoss(torch.autograd.Function):
    """A loss whose gradients are in .grad already."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if float(gradients[0]) != 1.0:
            raise ModelError(
                f"under pipeline=True gradients are computed while the model is called: call backward() on the loss as "
                f"it is, found it multiplied by {float(gradients[0]):g}. Scale it in the model's forward; "
                "gradient_merge=True takes the mean over several batches."
            )
        return None, None


def job_is_over(what: str, ended_by: str) -> ModelError:
    """The error of training after the end of the job."""
    return ModelError(
        f"{what} belongs to a job that {ended_by} has ended: its ranks train no more together. Train before, or call "
        "fleet.init, fleet.distributed_model and fleet.distributed_optimizer again. Predictions in eval mode work."
    )


def _done(call: Callable[[], object]) -> None:
    """Call `call` and return None: a hook that returns a value would change the gradient."""
    call()


def _arguments(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def _is_prepared() -> bool:
    """Tells accelerate, and so Hugging Face's Trainer, that the model is already data parallel.

    accelerate then does not apply its own mixed precision to the model either: asking for it raises ModelError.
    """
    accelerate = modules.get("accelerate")
    if accelerate is not None and accelerate.state.is_initialized():
        precision = accelerate.state.AcceleratorState().mixed_precision
        if precision != "no":
            raise ModelError(
                f"mixed precision {precision} of accelerate does not reach a model of fleet.distributed_model: leave "
                "fp16 and bf16 out there, and use fleet.DistributedStrategy(amp=True)"
            )
    return True
