"""Operator fusion by torch.compile and fused optimizers: the flags of build_strategy.

fuse_elewise_add_act_ops, fuse_bn_act_ops, fuse_bn_add_act_ops and fuse_relu_depthwise_conv name fusions of Paddle's
graph passes. Here each of them compiles the model with torch.compile, which fuses these and all others that it finds;
rank 0 prints them after the first step (`Fusion.report`). allow_cuda_graph_capture also compiles, and lets
torch.compile record the kernels of a pass as a CUDA graph: one launch instead of hundreds. Results equal those of the
eager model up to the order of sums inside a kernel: about 1e-5 of a value in float32, 1e-2 in half precision.

With fuse_all_optimizer_ops the optimizer uses one kernel for many parameters: its own `fused` variant if it has one for
the device and the parameters, otherwise `foreach`.

Source: Ansel et al. 2024, PyTorch 2 (TorchDynamo and TorchInductor). Composes with every strategy except pipeline,
which splits the model, and recompute's enable_offload; fuse_all_optimizer_ops does not compose with lars, lamb and dgc,
which have their own steps.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from typing import Any

import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategies.compiler_counts import Counts
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import World

COMPILING = ("fuse_elewise_add_act_ops", "fuse_bn_act_ops", "fuse_bn_add_act_ops", "fuse_relu_depthwise_conv",
             "allow_cuda_graph_capture")  # fmt: skip
_CUDA_GRAPHS = "reduce-overhead"  # torch.compile's name for it


class Fusion(Strategy):
    field = "build_strategy"

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        flags = settings.build_strategy
        self.configs = {name: value for name, value in vars(flags).items() if value}
        self.compiled_for = [name for name in COMPILING if getattr(flags, name)]
        self._fuses_optimizer = bool(flags.fuse_all_optimizer_ops)
        self._before = Counts()
        self._is_reported = not self.compiled_for
        self._optimizer = ""
        if self.compiled_for:
            _check_pairs(settings, f"build_strategy.{self.compiled_for[0]}")
            if "allow_cuda_graph_capture" in self.compiled_for:
                _check_graphs(settings, world.device)
            _check_compiler(world.device, f"build_strategy.{self.compiled_for[0]}")
        if self._fuses_optimizer:
            _check_rule(settings)

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.compiled_for:
            self._before = Counts.now()
            _compile(model, _CUDA_GRAPHS if "allow_cuda_graph_capture" in self.compiled_for else "default")
        return model

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        if self._fuses_optimizer:
            self._inner, self._optimizer = inner, fuse_optimizer(inner)
        return inner

    def after_load(self) -> None:
        if self._fuses_optimizer:  # the saved groups may be those of an optimizer that was not fused
            fuse_optimizer(self._inner)

    def after_step(self) -> None:
        if not self._is_reported:
            self._is_reported = True
            if self.world.rank == 0:
                print(self.report(), flush=True)

    def report(self) -> str:
        """What was fused so far; numbers that this version of torch does not count are omitted."""
        lines = []
        if self.compiled_for:
            lines.append(f"build_strategy ({', '.join(self.compiled_for)}): compiled, {Counts.now() - self._before}")
        if self._optimizer:
            lines.append(f"build_strategy (fuse_all_optimizer_ops): {self._optimizer}")
        return "\n".join(lines)


def _compile(model: torch.nn.Module, mode: str) -> None:
    """Like Module.compile, which compiles nothing of a Sequential: dynamo skips the frames of torch.nn itself."""
    if not type(model).forward.__module__.startswith("torch.nn"):
        model.compile(mode=mode)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call, mode=mode)


def _check_pairs(settings: DistributedStrategy, flag: str) -> None:
    if settings.pipeline:
        raise StrategyError(
            f"{flag} and pipeline cannot be used together: a pipeline takes the model apart, and it is compiled whole. "
            "Leave one of them out."
        )
    if settings.context_parallel:
        raise StrategyError(
            f"{flag} and context_parallel cannot be used together: attention over several ranks is not compiled. Leave "
            "one of them out."
        )
    configs = settings.recompute_configs
    changed = {
        "enable_offload": configs.enable_offload,
        "half_inputs": configs.half_inputs,
        "slices": configs.slices > 1,
    }
    ours = next((name for name, is_on in changed.items() if is_on), None)
    if settings.recompute and ours is not None:
        raise StrategyError(
            f"{flag} and recompute_configs['{ours}'] cannot be used together: a compiled model decides itself what it "
            "keeps where. Leave one of them out."
        )


def _check_graphs(settings: DistributedStrategy, device: torch.device) -> None:
    """Refuse what conflicts with CUDA graphs, which use fixed memory for gradients, outputs and parameters."""
    flag = "build_strategy.allow_cuda_graph_capture"
    if device.type != "cuda":
        raise StrategyError(f"{flag} needs a GPU, and this job computes on the {device.type}: leave it out")
    if settings.gradient_merge:
        raise StrategyError(
            f"{flag} and gradient_merge cannot be used together: a graph's gradients are gone when it runs again. "
            "Leave one of them out."
        )
    if settings.sharding and settings.sharding_configs.stage > 1:
        raise StrategyError(
            f"{flag} and sharding (stage {settings.sharding_configs.stage}) cannot be used together: parameters are "
            "gathered into other memory at every call. Use stage 1, or leave the flag out."
        )


def _check_rule(settings: DistributedStrategy) -> None:
    own_rules = {"lars": settings.lars, "lamb": settings.lamb, "dgc": settings.dgc}
    rule = next((name for name, is_on in own_rules.items() if is_on), None)
    if rule is not None:
        raise StrategyError(
            f"build_strategy.fuse_all_optimizer_ops and {rule} cannot be used together: {rule} does not step with "
            "the optimizer's own kernels. Leave one of them out."
        )


def _check_compiler(device: torch.device, flag: str) -> None:
    """Check for a compiler now: the error of the first step would be late and long."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise StrategyError(
            f"{flag} compiles the model, which needs Triton on a GPU: pip install triton, or leave it out"
        )
    variable, usual = ("CC", ["gcc", "clang"]) if device.type == "cuda" else ("CXX", ["g++"])
    wanted = shlex.split(os.environ.get(variable, ""))[:1] or usual
    if not any(shutil.which(name) for name in wanted):
        raise StrategyError(
            f"{flag} compiles the model, which needs a C++ compiler, and there is no {' or '.join(wanted)} on the "
            f"PATH. Install one (apt install g++, dnf install gcc-c++), set {variable} to it, or leave the flag out."
        )


# The optimizer


def fuse_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Switch the optimizer to its fused or else its foreach kernels; returns a description of the choice."""
    name = type(optimizer).__name__
    if "fused" in optimizer.defaults and _is_fusible(optimizer):
        chosen, words = {"fused": True, "foreach": False}, f"{name} steps by its fused kernel"
    elif "foreach" in optimizer.defaults:
        chosen, words = {"foreach": True}, f"{name} steps by kernels for lists of tensors (foreach)"
    else:
        raise ModelError(
            f"build_strategy.fuse_all_optimizer_ops: {name} has neither fused nor foreach kernels. Use an optimizer of "
            "torch.optim that has (SGD, Adam, AdamW, Adagrad, RMSprop and others), or leave the flag out."
        )
    uniform = [group for group in optimizer.param_groups if not _is_mixed(group)]
    for options in (optimizer.defaults, *uniform):
        options.update(chosen)
    if len(uniform) < len(optimizer.param_groups):
        words += "; param groups that mix sharded and whole parameters keep their own kernels"
    if chosen.get("fused"):
        _move_counts(optimizer)
    return words


def _is_mixed(group: dict[str, Any]) -> bool:
    """Whether some parameters are sharded (tensor_parallel) and others whole: no kernel takes both."""
    return len({getattr(parameter, "device_mesh", None) for parameter in group["params"]}) > 1


def _is_fusible(optimizer: torch.optim.Optimizer) -> bool:
    kinds: list[str] = _get_fused_kernels_supported_devices()
    if isinstance(optimizer, torch.optim.Adagrad):
        kinds = ["cpu"]
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    fits = all(parameter.device.type in kinds and parameter.is_floating_point() for parameter in parameters)
    if any(hasattr(parameter, "placements") for parameter in parameters):  # sharded: no other kernels exist for them
        fits = fits and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    return fits and not any(group.get("differentiable") for group in groups)


def _move_counts(optimizer: torch.optim.Optimizer) -> None:
    """Move step counts to the parameters' device for fused kernels; a loaded state may have them on the CPU."""
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device)
