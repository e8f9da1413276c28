"""Mixed precision: matrix products in half precision, sums and parameters in float32.

The model runs under torch.autocast; custom_white_list and custom_black_list change what it does for single functions.
In float16 the loss is scaled (loss_scaling.py): gradients of the model's outputs are multiplied by the scale, and when
the backward pass is over the parameters' gradients are divided by it, so that .grad is what it would be without, and
clipping or merging see true gradients. A term of the loss that uses parameters directly, and not the model's outputs,
must be computed inside the model. bfloat16 has float32's range and needs no scale.

use_pure_fp16 / use_pure_bf16 keep the parameters themselves in half precision (those of norms excepted) and a copy in
float32 in the optimizer, which steps. There the gradients of a float16 model stay scaled until the step.

Source: Micikevicius et al. 2018, Mixed Precision Training. Composes with every strategy but, in float16, dgc.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from torchfleet.collective.local_tensors import local
from torchfleet.collective.outputs import map_tensors
from torchfleet.collective.strategies.mixed_precision.bfloat16_cpu import warn_if_slow
from torchfleet.collective.strategies.mixed_precision.loss_scaling import LossScaling
from torchfleet.collective.strategies.mixed_precision.op_lists import OpLists
from torchfleet.collective.strategy import Forward, JobView, Strategy
from torchfleet.collective.world import World
from torchfleet.errors import StrategyError
from torchfleet.strategy.collective_fields import CONFIGS, AmpConfigs
from torchfleet.strategy.distributed_strategy import DistributedStrategy

_SCALING = ("init_loss_scaling", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio",
            "use_dynamic_loss_scaling")  # fmt: skip


class Amp(Strategy):
    field = "amp"

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        self.dtype, self.is_pure = _precision(settings.amp_configs)
        if self.dtype == torch.bfloat16 and world.device.type == "cpu" and world.rank == 0:
            warn_if_slow()
        white, black = settings.amp_configs.custom_white_list, settings.amp_configs.custom_black_list
        self._lists = OpLists(white, black, world.device.type, self.dtype) if white or black else None
        self.scaling = LossScaling(settings.amp_configs, world.device) if self.dtype == torch.float16 else None
        self._is_sharded = False  # one rank's gradients may overflow and another's not
        self._returns_outputs = True  # forward returns the model's outputs, not those of a stage before the last
        self._ends_backward = True  # a runner tells when its many backward passes are over
        self._is_scaled = False  # the gradients, right now
        self._is_ending = False
        self._pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []  # of the model, of the optimizer

    # The model

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.is_pure:
            for module in model.modules():
                if not _is_norm(module):
                    _cast_own(module, self.dtype)
        return model

    def joined(self, job: JobView) -> None:
        self._model, self._is_sharded = job.model, job.is_sharded
        if job.runner is not None:
            self._returns_outputs, self._ends_backward = job.runner.is_last, False

    def wrap_forward(self, forward: Forward) -> Forward:
        device = self.world.device.type

        def with_amp(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, self.dtype):
                if self._lists is None:
                    outputs = forward(*args, **kwargs)
                else:
                    with self._lists:
                        outputs = forward(*args, **kwargs)
            return self._scaled(outputs)

        return with_amp

    def _scaled(self, outputs: Any) -> Any:
        if self.scaling is None or not torch.is_grad_enabled() or not self._returns_outputs:
            return outputs
        return map_tensors(self._scale_gradient_of, outputs)

    def _scale_gradient_of(self, output: torch.Tensor) -> torch.Tensor:
        """The same values; a view, because inside the model the tensor's own gradient must not be scaled again."""
        if not output.requires_grad:
            return output
        view = output.view_as(output)
        view.register_hook(self._scale)  # type: ignore[no-untyped-call]
        return view

    def _scale(self, gradient: torch.Tensor) -> torch.Tensor:
        assert self.scaling is not None
        if self._ends_backward and not self._is_ending:
            self._is_ending = True
            self.begin_backward()
            # Behind what torch itself has to do at the end of a backward pass, which is queued when this one runs.
            engine = Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self.end_backward))
        return gradient * self.scaling.value

    def begin_forward(self, exchanging: bool) -> None:
        self._is_ending = self._is_scaled = False  # also after a backward pass that was broken off

    def begin_backward(self) -> None:
        """Gradients of earlier passes that are being accumulated must have the scale of those to come."""
        if self.scaling is not None and not self._is_scaled:
            gradients = self._gradients()
            if gradients and not self.is_pure:
                torch._foreach_mul_(gradients, self.scaling.value)
            self._is_scaled = True

    def end_backward(self) -> None:
        """The gradients are complete, exchanged where they are to be: back to their true size."""
        self._is_ending = False
        if self.scaling is not None and not self.is_pure:
            self.scaling.unscale(self._gradients(), self.scaling.value)
        self._is_scaled = False

    def _gradients(self) -> list[torch.Tensor]:
        return [local(parameter.grad) for parameter in self._model.parameters() if parameter.grad is not None]

    # The optimizer

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        if not self.is_pure:
            return inner
        if inner.state:
            raise StrategyError("amp with pure parameters: the optimizer has made steps already; make a new one")
        for group in inner.param_groups:
            group["params"] = [self._master(parameter, names) for parameter in group["params"]]
        return inner

    def _master(self, parameter: torch.nn.Parameter, names: dict[torch.Tensor, str]) -> torch.nn.Parameter:
        if parameter.dtype == torch.float32:
            return parameter
        master = torch.nn.Parameter(parameter.detach().float(), parameter.requires_grad)
        names[master] = names[parameter]
        for mark in ("fleet_piece", "fleet_local", "fleet_copies"):
            if hasattr(parameter, mark):
                setattr(master, mark, getattr(parameter, mark))
        self._pairs.append((parameter, master))
        return master

    def before_step(self) -> bool:
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        if self.scaling is None:
            return True
        if self.is_pure:
            gradients = [local(parameter.grad) for parameter in self._stepped() if parameter.grad is not None]
            self.scaling.unscale(gradients, self.scaling.value)
        if self._is_sharded and self.world.size > 1:
            dist.all_reduce(self.scaling.overflow, dist.ReduceOp.MAX)
        return self.scaling.update()

    def _stepped(self) -> Iterator[torch.nn.Parameter]:
        """What the optimizer steps on: float32 copies, and parameters that are in float32 themselves."""
        masters = {id(parameter): master for parameter, master in self._pairs}
        for parameter in self._model.parameters():
            yield masters.get(id(parameter), parameter)

    def row_scale(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.value

    def note_overflow(self) -> None:
        if self.scaling is not None:
            self.scaling.overflow.fill_(1.0)

    def after_step(self) -> None:
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)
                master.grad = None

    # Saving

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self.scaling is None else {"scaling": self.scaling.state()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if self.scaling is not None and "scaling" in state:
            self.scaling.load_state(state["scaling"])


def _precision(configs: AmpConfigs) -> tuple[torch.dtype, bool]:
    pure = [name for name in ("use_pure_fp16", "use_pure_bf16") if configs[name]]
    if len(pure) > 1:
        raise StrategyError("amp_configs: use_pure_fp16 and use_pure_bf16 are both on: choose one of them")
    is_bfloat = configs.use_pure_bf16 or (configs.dtype == "bfloat16" and not pure)
    if pure == ["use_pure_fp16"] and configs.dtype == "bfloat16":
        raise StrategyError("amp_configs: use_pure_fp16 and dtype='bfloat16' contradict each other: use_pure_bf16")
    changed = [name for name in _SCALING if configs[name] != CONFIGS["amp"][name].default]
    if is_bfloat and changed:
        raise StrategyError(
            f"amp_configs['{changed[0]}'] scales the loss of float16 training; bfloat16 needs no scale: leave it out"
        )
    return (torch.bfloat16 if is_bfloat else torch.float16), bool(pure)


def _is_norm(module: torch.nn.Module) -> bool:
    kinds = (torch.nn.modules.batchnorm._NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm)
    return isinstance(module, kinds) or "Norm" in type(module).__name__


def _cast_own(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """The parameters of this very module, not of those in it. They stay the same objects: tied ones stay tied."""
    for parameter in module.parameters(recurse=False):
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)
