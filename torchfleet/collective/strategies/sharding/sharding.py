"""Sharding (ZeRO): parameters, gradients and optimizer state sharded over the ranks of a group.

With Ψ parameters, N ranks in a group and K bytes of optimizer state per parameter (12 for Adam in mixed precision), a
rank holds in bytes, beside activations, for parameters and gradients of b bytes each:

    stage 1    2bΨ + KΨ/N         optimizer state is cut; gradients are averaged as usual, owners send new parameters
    stage 2    bΨ + (2b + K)Ψ/N   gradients too: reduce-scattered; parameters are whole from forward to backward
    stage 3    (2b + K)Ψ/N        parameters too: gathered unit by unit when they are needed, and freed

Stage 1 assigns whole parameters to ranks (zero.py) and takes any optimizer. Stages 2 and 3 are torch's FSDP2: every
parameter is sharded along its first dimension; units.py finds the modules that are gathered together.
`segment_broadcast_MB` is the approximate amount that is sent or gathered at a time; at its default, neighbours that are
gathered together have no more than a quarter of the parameters. `sharding_degree` ranks form a group; with `hybrid_dp`
there are several groups, among which gradients are averaged too. With `offload`, parameters, gradients and optimizer
state of stage 3 are in host memory, also on a single rank.

Sources: Rajbhandari et al. 2020, ZeRO; Zhao et al. 2023, PyTorch FSDP. Composes with amp, recompute, gradient_merge,
lars, lamb, tensor_parallel, pipeline; stage 1 also with every way to exchange gradients. Stage 1 equals plain training
bit for bit. Stages 2 and 3 may sum gradients in a different order than an all-reduce: the last bits may differ.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.strategy.collective_fields import CONFIGS
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategies.mixed_precision.precision import precision
from torchfleet.collective.strategies.mixed_precision.weight_types import WeightTypes
from torchfleet.collective.strategies.sharding.units import MAX_SHARE, Kind, Units
from torchfleet.collective.strategies.sharding.zero import ShardedOptimizer
from torchfleet.collective.strategy import Forward, Strategy
from torchfleet.collective.tensors.local_tensors import is_local
from torchfleet.collective.world import World


class Sharding(Strategy):
    field = "sharding"

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        self._axis = world.axis("sharding")
        self.keeps_parameters_in_host = settings.sharding_configs.offload
        if self.keeps_parameters_in_host:
            _check_offload(settings)
        is_cut = self._axis.size > 1 or self.keeps_parameters_in_host  # with one rank there is nothing to shard
        self.stage = settings.sharding_configs.stage if is_cut else 0
        self.owns_gradients = self.replaces_parameters = self.stage > 1
        megabytes = settings.sharding_configs.segment_broadcast_MB
        self._segment_bytes = int(megabytes * (1 << 20))
        # A small model would be gathered whole, and stage 3 would save nothing.
        self._max_share = MAX_SHARE if megabytes == CONFIGS["sharding"]["segment_broadcast_MB"].default else 1.0
        self._model: torch.nn.Module = torch.nn.Identity()
        self._units: list[FSDPModule] = []
        self._is_exchanging = True  # the setting of FSDP2; True at first
        self._optimizer: ShardedOptimizer | None = None

    def owns_state(self, parameter: torch.Tensor) -> bool:
        return self._optimizer is None or self._optimizer.owns(parameter)

    # Stage 1

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        if self.stage > 1:
            _check_fused(inner, self.stage)
        if self.stage != 1:
            return inner
        apart = {name for parameter, name in names.items() if is_local(parameter)}
        # By name: float32 copies have the name, but not the mark.
        others = [parameter for parameter, name in names.items() if name in apart]
        first = {name: parameter for parameter, name in reversed(names.items())}  # the model's own come before copies
        stepped = [parameter for group in inner.param_groups for parameter in group["params"]]
        models = {parameter: own for parameter in stepped if (own := first[names[parameter]]) is not parameter}
        self._optimizer = ShardedOptimizer(inner, self._axis, self._segment_bytes, others, models)
        return self._optimizer

    # Stages 2 and 3

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.stage < 2:
            return model
        self._model = model
        for name, parameter in model.named_parameters():
            if not parameter.dim():
                raise ModelError(
                    f"sharding (stage {self.stage}) cannot cut '{name}', a single number: give it the shape (1,), or "
                    "use sharding_configs={'stage': 1}"
                )
        own = {parameter for parameter in model.parameters() if is_local(parameter)}
        settings: dict[str, Any] = {"mesh": self._mesh(), **_leaving_out(own)}
        if self.keeps_parameters_in_host:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")
        gathered = WeightTypes(self.settings)
        for unit, kind in list(
            Units(model, self._segment_bytes, tuple(own), gathered, self._max_share).find_with_kinds()
        ):
            if getattr(model, "fleet_traced", False) and unit != [model]:
                raise StrategyError(
                    f"sharding (stage {self.stage}) and a pipeline of a {type(model).__name__}, which is traced: its "
                    "parameters are of several types (amp with pure precision keeps norms in float32), and are "
                    "gathered at once. Use sharding_configs={'stage': 1}, or make the model a torch.nn.Sequential."
                )
            # Backward needs the model's own remaining parameters first: they stay gathered, as in torch.
            settings["reshard_after_forward"] = self.stage == 3 and unit != [model]
            settings["mp_policy"] = _policy(kind)
            fully_shard(unit if len(unit) > 1 else unit[0], **settings)
        self._units = sharded_modules(model)
        return model

    def _mesh(self) -> DeviceMesh:
        mesh = self.world.mesh
        return mesh["data", "sharding"] if self.world.degrees["data"] > 1 else mesh["sharding"]

    def wrap_forward(self, forward: Forward) -> Forward:
        if self.stage < 2:
            return forward

        def sharded(*args: Any, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            if not torch.is_grad_enabled():  # no backward pass will free the parameters
                self._reshard()
            return outputs

        return sharded

    def begin_forward(self, exchanging: bool) -> None:
        if self._is_exchanging != exchanging and isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(exchanging)  # looks at every module
            self._is_exchanging = exchanging

    def after_step(self) -> None:
        """Free parameters that an evaluation between backward and step has gathered: they are from before the step."""
        self._reshard()

    def after_load(self) -> None:
        """Drop gradients of passes without an exchange, which FSDP2 keeps whole in places of its own."""
        for module in self._units:
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one in older releases
            for parameter in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def _reshard(self) -> None:
        for module in self._units:
            module.reshard()


def _check_offload(settings: DistributedStrategy) -> None:
    stage = settings.sharding_configs.stage
    if stage < 3:
        raise StrategyError(
            f"sharding_configs: offload=True and stage={stage}: parameters stay in host memory only if they are "
            "gathered when they are needed. Use stage=3, or leave offload out."
        )
    on_device = [field for field in ("lars", "lamb") if getattr(settings, field)]
    if settings.amp and precision(settings.amp_configs)[0] == torch.float16:
        on_device.append("amp in float16")
    if on_device:
        raise StrategyError(
            f"sharding_configs['offload'] and {on_device[0]} cannot be used together: offload keeps gradients "
            f"in host memory, and {on_device[0]} needs them on the device. Leave one of them out."
        )


def _check_fused(optimizer: torch.optim.Optimizer, stage: int) -> None:
    """Refuse fused steps that torch has not for cut parameters; its own error comes in the first step."""
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        name = type(optimizer).__name__
        raise StrategyError(
            f"sharding (stage {stage}) and {name}(fused=True) cannot be used together: torch steps on cut parameters "
            f"by fused kernels of Adam and AdamW alone. Use {name}(foreach=True), or sharding_configs={{'stage': 1}}."
        )


def sharded_modules(model: torch.nn.Module) -> list[FSDPModule]:
    """The modules whose parameters are gathered and freed; `reshard` of each leaves this rank its own shards."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _policy(kind: Kind | None) -> MixedPrecisionPolicy:
    """Gather parameters in half precision where amp would cast them; sum gradients in float32."""
    if kind is None or kind.kept == kind.gathered:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=kind.gathered, reduce_dtype=kind.kept, cast_forward_inputs=False)


def _leaving_out(parameters: set[torch.nn.Parameter]) -> dict[str, Any]:
    """The option that excludes parameters that belong to each rank alone."""
    if not parameters:
        return {}
    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise StrategyError(
            f"sharding from stage 2 on with layers that are cut over the ranks by themselves needs torch 2.7 or newer, "
            f"found {torch.__version__}. Use sharding_configs={{'stage': 1}}."
        )
    return {"ignored_params": parameters}
