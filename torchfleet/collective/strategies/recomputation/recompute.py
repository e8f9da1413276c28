"""Recomputation: the modules named in `checkpoints` keep only their inputs; backward runs them forward again.

With n modules of equal size, memory holds n inputs and the activations of one module, instead of those of n modules.
The price is one more forward pass: about a third more computation. Random numbers are those of the first run, so that
dropout masks, results and gradients are the same, bit for bit where the kernels are deterministic. Running statistics
of norms are updated by the first run only. With `enable_offload` the inputs are kept in host memory (offload.py). With
`half_inputs` they are rounded to amp's precision, before the first run, so that both runs compute the same. With
`slices` a module runs on a few samples at a time, in both runs (slices.py).

    recompute_configs={"checkpoints": ["encoder.layer.*"], "enable_offload": True}

`*` stands for one component of a module's name, or a fragment of one, `**` for zero or more components.
A module inside a recomputed one is not recomputed separately.

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; the work is done by torch.utils.checkpoint.
Composes with every strategy; `enable_offload` does not compose with build_strategy's fusion. A module whose forward
changes other state of its own (a counter, a cache) changes it twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.module_names import matching
from torchfleet.collective.strategies.recomputation.offload import Offload
from torchfleet.collective.strategies.recomputation.slices import check_sliceable, in_slices
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import World


class Recompute(Strategy):
    field = "recompute"

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        self._patterns: list[str] = self.settings.recompute_configs.checkpoints
        if not self._patterns:
            raise StrategyError(
                "recompute=True needs recompute_configs['checkpoints'], the modules to run again in backward, found "
                "[]. Give names of model.named_modules(), or patterns, for example ['encoder.layer.*'], or classes."
            )
        configs = settings.recompute_configs
        if settings.pipeline and (configs.half_inputs or configs.slices > 1):
            raise StrategyError(
                "recompute_configs['half_inputs'] and ['slices'] cannot be used together with pipeline, which has "
                "small micro-batches already: raise pipeline_configs['accumulate_steps'] instead"
            )
        if configs.half_inputs and not settings.amp:
            raise StrategyError(
                "recompute_configs['half_inputs']=True keeps inputs in the precision of amp, and amp is off: set "
                "amp=True, or leave half_inputs out"
            )
        self.offload = Offload(world.device) if configs.enable_offload else None

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Set up the modules in place; names and state_dict do not change."""
        for module in chosen(model, self._patterns):
            recompute(
                module,
                self.offload,
                self.settings.recompute_configs.half_inputs,
                self.settings.recompute_configs.slices,
            )
        return model


def recompute(
    module: torch.nn.Module, offload: Offload | None = None, half_inputs: bool = False, slices: int = 1
) -> None:
    """From now on `module` keeps only its inputs for backward. The same holds for a deep copy of it."""
    inner: Any = module.forward
    if getattr(inner, "__self__", None) is module:
        body = inner.__func__
    else:  # the user has replaced the method by a function

        def body(_: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

    if slices > 1:
        check_sliceable(module)

    @wraps(body)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return body(self, *args, **kwargs)
        if half_inputs:
            args, kwargs = tree_map(_in_half, (args, kwargs))
        call = partial(_checkpointed, body, self, offload)
        if slices > 1 and not torch.compiler.is_compiling():
            return in_slices(call, slices, args, kwargs)
        return call(*args, **kwargs)

    module.forward = MethodType(forward, module)


def _checkpointed(
    body: Callable[..., Any], module: torch.nn.Module, offload: Offload | None, *args: Any, **kwargs: Any
) -> Any:
    if torch.compiler.is_compiling():  # the compiler handles random numbers and statistics itself
        return checkpoint(body, module, *args, use_reentrant=False, **kwargs)
    contexts = _contexts(module)
    if offload is None:
        return checkpoint(body, module, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    # Flat, because checkpoint saves only tensors among the positional arguments and holds references to all others.
    leaves, structure = tree_flatten((args, kwargs))

    def of_leaves(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        return body(module, *args, **kwargs)

    with offload.hooks():  # applies to the inputs: inside, checkpoint has its own hooks
        return checkpoint(of_leaves, *leaves, use_reentrant=False, context_fn=contexts)


def _in_half(value: Any) -> Any:
    """A kept tensor in amp's half precision; everything else unchanged."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or not value.requires_grad:
        return value
    kind = value.device.type
    return value.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else value


Context = contextlib.AbstractContextManager[None]


def _contexts(module: torch.nn.Module) -> Callable[[], tuple[Context, Context]]:
    """The contexts of both runs. The second has the function modes of the first, and discards running statistics."""
    active = _function_modes()  # type: ignore[no-untyped-call]
    modes = [mode for mode in active if not isinstance(mode, DeviceContext)]  # checkpoint handles it itself
    norms = [
        inside
        for inside in module.modules()
        if isinstance(inside, _NormBase) and inside.training and inside.track_running_stats
    ]
    return lambda: (contextlib.nullcontext(), _Again(modes, norms))


class _Again(Context):
    """Entered for every backward pass through the module: more than once if the graph is retained."""

    def __init__(self, modes: Sequence[TorchFunctionMode], norms: Sequence[_NormBase]) -> None:
        self._modes, self._norms = modes, norms
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        for mode in self._modes:
            self._entered.enter_context(mode)
        for norm in self._norms:
            self._entered.callback(norm._buffers.update, dict(norm._buffers))
            norm._buffers.update(
                {name: buffer if buffer is None else buffer.clone() for name, buffer in norm._buffers.items()}
            )

    def __exit__(self, *_: object) -> None:
        self._entered.close()


# Which modules


def chosen(model: torch.nn.Module, patterns: Iterable[str]) -> list[torch.nn.Module]:
    """The modules that the patterns match, each once, without modules inside of other matches."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    matched: set[str] = set()
    for pattern in patterns:
        names = matching(pattern, modules, "recompute_configs['checkpoints']")
        runs = [name for name in names if _has_forward(modules[name])]
        if not runs:
            raise ModelError(
                f"recompute_configs['checkpoints']: {names[0]!r} is a {type(modules[names[0]]).__name__}, which is "
                f"never called itself: give the modules in it, for example {names[0] + '.*'!r}"
            )
        matched.update(runs)
    outer = [modules[name] for name in modules if name in matched and not _is_inside(name, matched)]
    inside = {id(child) for module in outer for child in module.modules() if child is not module}
    return list(
        {id(module): module for module in outer if id(module) not in inside}.values()
    )  # a module may have several names


def _has_forward(module: torch.nn.Module) -> bool:
    """Whether it can be called; lists of modules cannot."""
    return getattr(module.forward, "__func__", None) is not torch.nn.Module.forward and not isinstance(
        module, (torch.nn.ModuleList, torch.nn.ModuleDict)
    )


def _is_inside(name: str, matched: set[str]) -> bool:
    components = name.split(".")
    return any(".".join(components[:length]) in matched for length in range(1, len(components)))
