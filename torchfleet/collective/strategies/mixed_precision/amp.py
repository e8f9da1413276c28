"""Mixed precision: matrix products in half precision, sums and parameters in float32.

The model runs under torch.autocast, and returns float32; custom_white_list and custom_black_list change what autocast
does for single functions (op_lists.py). dtype="float8" is bfloat16 with linear layers that multiply in float8
(float8.py). In float16 the backward pass from the model's outputs to its parameters is scaled (loss_scaling.py,
scaled_backward.py): .grad holds unscaled gradients, which clipping and merging see. bfloat16 has float32's range and
needs no scale.

use_pure_fp16 / use_pure_bf16 keep the parameters themselves in half precision (except those of norms), and the
optimizer steps on a float32 copy (masters.py); norms compute in half precision too, so that all activations have two
bytes. The gradients of a pure float16 model stay scaled until the step.

With Ψ parameters, and Adam, bytes beside activations, from forward to backward (the half-precision casts of weights,
which autograd keeps) and while gradients exist:

    float32    4Ψ + 8Ψ         + 4Ψ of gradients
    amp        4Ψ + 8Ψ + 2Ψ    + 4Ψ of gradients
    pure       2Ψ + 4Ψ + 8Ψ    + 2Ψ of gradients, 4Ψ while it steps

Source: Micikevicius et al. 2018, Mixed Precision Training. Composes with every strategy; in float16, except dgc.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchfleet.base.errors import ModelError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategies.mixed_precision.bfloat16_cpu import warn_if_slow
from torchfleet.collective.strategies.mixed_precision.float8 import Float8Layers
from torchfleet.collective.strategies.mixed_precision.loss_scaling import LossScaling
from torchfleet.collective.strategies.mixed_precision.masters import Masters
from torchfleet.collective.strategies.mixed_precision.op_lists import OpLists
from torchfleet.collective.strategies.mixed_precision.precision import precision
from torchfleet.collective.strategies.mixed_precision.scaled_backward import ScaledBackward
from torchfleet.collective.strategy import Forward, JobView, Runner, Strategy
from torchfleet.collective.tensors.local_tensors import shards
from torchfleet.collective.tensors.outputs import map_tensors
from torchfleet.collective.world import World

_PURE_WHITE = ("layer_norm", "group_norm", "rms_norm")  # autocast uses float32 for them on GPUs; sums do so anyway


class Amp(Strategy):
    field = "amp"

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        self.dtype, self.is_pure = precision(settings.amp_configs)
        if self.dtype == torch.bfloat16 and world.device.type == "cpu" and world.rank == 0:
            warn_if_slow()
        is_float8 = settings.amp_configs.dtype == "float8"
        self._float8 = Float8Layers(settings, world.device) if is_float8 else None
        self.can_convert_again = not is_float8
        white, black = settings.amp_configs.custom_white_list, settings.amp_configs.custom_black_list
        if self.is_pure and world.device.type == "cuda":
            white = [*white, *(name for name in _PURE_WHITE if name not in (*white, *black))]
        self._lists = OpLists(white, black, world.device.type, self.dtype)
        self.scaling = LossScaling(settings.amp_configs, world.device) if self.dtype == torch.float16 else None
        self.has_own_backward = self.scaling is not None
        self._backward = ScaledBackward(self.row_scale, self.end_backward)
        self._is_sharded = False  # gradients may overflow on one rank and not on another
        # The model's parameters; under sharding also the whole ones that take their places from forward to backward.
        # Gradients lie in both: sharding keeps those of passes without an exchange in whole parameters.
        self._parameters: dict[torch.nn.Parameter, None] = {}
        self._runner: Runner | None = None
        self._is_scaled = False  # whether the gradients are scaled at present
        self._num_backwards = 0  # since the last step
        self._masters = Masters(*_shares(settings, world))
        self._left: dict[torch.nn.Parameter, tuple[int, int]] = {}  # scaled gradients and their versions

    # The model

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._float8 is not None:
            model = self._float8.convert(model)
            if self.world.rank == 0:
                print(self._float8.report(), flush=True)
        if self.is_pure:
            for module in model.modules():
                if not _is_norm(module):
                    _cast_own(module, self.dtype)
        return model

    def joined(self, job: JobView) -> None:
        self._model, self._parameters = job.model, dict.fromkeys(job.model.parameters())
        self._is_sharded = job.is_sharded or (self.is_pure and self._masters.num_shares > 1)
        self._backward.begin = job.begin_backward
        self._runner = job.runner

    def wrap_forward(self, forward: Forward) -> Forward:
        device = self.world.device.type

        def with_amp(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as contexts:
                contexts.enter_context(torch.autocast(device, self.dtype))
                if self._lists.mode is not None:
                    contexts.enter_context(self._lists.mode)
                outputs = forward(*args, **kwargs)
            # A loss computed from them is then as precise as one inside the model; in float16, gradients are scaled
            # before they are rounded to half precision.
            is_output = self._runner is None or self._runner.is_at_outputs
            return map_tensors(_float32, outputs) if is_output else outputs

        return with_amp

    def attach(self, parallel: DistributedDataParallel) -> None:
        self._backward.use(parallel)

    def wrap_call(self, call: Forward) -> Forward:
        if self.scaling is None:
            return call

        def scaled(*args: Any, **kwargs: Any) -> Any:
            return self._backward.call(call, args, kwargs)

        return scaled

    def scaled_loss(self, loss: torch.Tensor) -> torch.Tensor:
        if self.scaling is None or not loss.requires_grad:
            return loss
        view = _float32(loss).view_as(loss)  # a view: the user may use the loss itself
        view.register_hook(lambda gradient: gradient * self.row_scale())  # type: ignore[no-untyped-call]
        return view

    def begin_forward(self, exchanging: bool) -> None:
        self._is_scaled = False  # also after an aborted backward pass

    def begin_backward(self) -> None:
        """Scale the gradients accumulated in earlier passes like those of the coming pass."""
        if self.scaling is not None and not self._is_scaled:
            if self._is_sharded:
                self._parameters.update(dict.fromkeys(self._model.parameters()))
            if self.is_pure:
                self._check_scaled()
            elif gradients := self._gradients():
                torch._foreach_mul_(gradients, self.scaling.value)
            self._is_scaled = True

    def end_backward(self) -> None:
        """Unscale the gradients, which are complete and exchanged."""
        self._num_backwards += 1
        if self.scaling is not None and not self.is_pure:
            self.scaling.unscale(self._gradients(), self.scaling.value)
        elif self.scaling is not None:
            filled = [p for p in self._parameters if p.grad is not None]
            self._left = {p: (id(p.grad), p.grad._version) for p in filled if p.grad is not None}
        self._is_scaled = False

    def _check_scaled(self) -> None:
        """Pure float16: check that .grad was written only by scaled backward passes."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None or self._left.get(parameter) == (id(gradient), gradient._version):
                continue
            if bool(gradient.any()):  # zeros have any scale
                raise ModelError(
                    "amp with use_pure_fp16: .grad, which is scaled until the step, was changed outside of the model's "
                    "backward pass. Compute a term of the loss that uses parameters directly inside the model, clip "
                    "with optimizer.clip_grad_norm_, or use use_pure_bf16, which has no scale."
                )

    def _gradients(self) -> list[torch.Tensor]:
        return shards(parameter.grad for parameter in self._parameters if parameter.grad is not None)

    # The optimizer

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        if self.is_pure:
            self._masters.take_over(inner, names)
        return inner

    def before_step(self) -> bool:
        if self.scaling is not None:
            self._check_backward()
        if self.is_pure:
            self._masters.take_gradients()
        if self.scaling is None:
            return True
        if self.is_pure:
            self.scaling.unscale([*self._masters.gradients(), *self._gradients()], self.scaling.value)
        if self._is_sharded and self.world.size > 1:
            dist.all_reduce(self.scaling.overflow, dist.ReduceOp.MAX)
        return self.scaling.update()

    def gradient_factor(self) -> float:
        return 1.0 / self.row_scale() if self.is_pure else 1.0

    def _check_backward(self) -> None:
        if self.is_pure:
            self._check_scaled()
        if not self._num_backwards and not self._gradients():
            raise ModelError(
                "amp in float16: optimizer.step() was called, but no backward pass has reached the parameters since "
                "the last step. Call loss.backward() on a loss computed from what the model returned; "
                "backward(inputs=...) and torch.autograd.grad do not reach parameters. "
                "amp_configs={'dtype': 'bfloat16'} has no such limits."
            )

    def row_scale(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.value

    def note_overflow(self) -> None:
        if self.scaling is not None:
            self.scaling.overflow.fill_(1.0)

    def after_step(self) -> None:
        self._masters.give_values()
        self._num_backwards = 0
        self._left = {}

    # Saving

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self.scaling is None else {"scaling": self.scaling.state()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if self.scaling is not None and "scaling" in state:
            self.scaling.load_state(state["scaling"])

    def after_load(self) -> None:
        self._num_backwards = 0
        self._left = {}


def _is_norm(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.modules.batchnorm._NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm)
    return isinstance(module, kinds) or "Norm" in type(module).__name__


def _cast_own(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the module's own parameters, not its children's. They stay the same objects, so that ties stay."""
    for parameter in module.parameters(recurse=False):
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)


def _shares(settings: DistributedStrategy, world: World) -> tuple[int, int]:
    """(the number of ranks that divide the steps among them, this rank's index among these ranks)."""
    if not settings.sharding or settings.sharding_configs.stage != 1:
        return 1, 0
    axis = world.axis("sharding")
    return axis.size, axis.rank


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
