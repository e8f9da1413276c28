"""The strategies of a job: which there are, the order they act in, and the pairs that exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import World


class Listed(NamedTuple):
    """A line of ORDER."""

    path: str  # module and class; imported only when the strategy is on, because some need much of torch
    is_on: Callable[[DistributedStrategy], bool] | None = None  # None: the field is True or False


# Adding a strategy is a line here, under the name of its field in DistributedStrategy.
# The order: models are converted and forwards wrapped from the first to the last (the last is outermost), optimizers
# replaced and `before_step` called from the first to the last, `after_step` from the last to the first.
_HERE = "torchfleet.collective"
ORDER: Mapping[str, Listed] = {
    "sync_batch_norm": Listed(f"{_HERE}.strategies.batch_norm.SyncBatchNorm"),
    "tensor_parallel": Listed(f"{_HERE}.layers.parallel_strategy.TensorParallel"),
    "context_parallel": Listed(f"{_HERE}.sequence.context_parallel.ContextParallel"),
    "recompute": Listed(f"{_HERE}.strategies.recomputation.recompute.Recompute"),
    "build_strategy": Listed(
        f"{_HERE}.strategies.fusion.Fusion", is_on=lambda settings: not settings.is_default("build_strategy")
    ),
    "amp": Listed(f"{_HERE}.strategies.mixed_precision.amp.Amp"),
    "pipeline": Listed(f"{_HERE}.pipeline.pipeline.Pipeline"),
    "fp16_allreduce": Listed(f"{_HERE}.strategies.fp16_allreduce.Fp16AllReduce"),
    "use_hierarchical_allreduce": Listed(f"{_HERE}.strategies.hierarchical.HierarchicalAllReduce"),
    "nccl_comm_num": Listed(
        f"{_HERE}.strategies.communicators.Communicators", is_on=lambda settings: settings.nccl_comm_num > 1
    ),
    "dgc": Listed(f"{_HERE}.strategies.dgc.DeepGradientCompression"),
    "lars": Listed(f"{_HERE}.strategies.layerwise.lars.Lars"),
    "lamb": Listed(f"{_HERE}.strategies.layerwise.lamb.Lamb"),
    "sharding": Listed(f"{_HERE}.strategies.sharding.sharding.Sharding"),
    "localsgd": Listed(f"{_HERE}.strategies.localsgd.LocalSGD"),
    "adaptive_localsgd": Listed(f"{_HERE}.strategies.adaptive_localsgd.AdaptiveLocalSGD"),
    "gradient_merge": Listed(f"{_HERE}.strategies.gradient_merge.GradientMerge"),
}


def _is_on(settings: DistributedStrategy, field: str) -> bool:
    listed = ORDER.get(field)
    return listed.is_on(settings) if listed and listed.is_on else bool(getattr(settings, field))


_HOOK = "both say how gradients are exchanged"
_LOCAL = "with it the ranks train alone and exchange parameters, not gradients"
_OWN_EXCHANGE = "exchanges gradients in its own way"
_RULE = "both replace the optimizer's rule"
_SGD = "the one has a rule of its own, and the other needs plain SGD"

# Pairs of strategies that cannot be combined, and why.
INCOMPATIBLE: Mapping[tuple[str, str], str] = {
    ("dgc", "fp16_allreduce"): _HOOK,
    ("dgc", "use_hierarchical_allreduce"): _HOOK,
    ("dgc", "nccl_comm_num"): _HOOK,
    ("dgc", "sharding"): "every rank needs the momentum of all parameters",
    ("dgc", "find_unused_parameters"): "what is sent for a parameter without a gradient would be lost",
    ("fp16_allreduce", "use_hierarchical_allreduce"): _HOOK,
    ("fp16_allreduce", "nccl_comm_num"): _HOOK,
    ("use_hierarchical_allreduce", "nccl_comm_num"): _HOOK,
    **{(field, other): _LOCAL for field in ("localsgd", "adaptive_localsgd")
       for other in ("dgc", "sharding", "pipeline", "tensor_parallel", "fp16_allreduce", "use_hierarchical_allreduce",
                     "nccl_comm_num")},
    **{(field, "context_parallel"): "with it the ranks train alone, and ranks with parts of a sequence cannot"
       for field in ("localsgd", "adaptive_localsgd")},
    ("pipeline", "context_parallel"): "a pipeline traces the model for whole sequences",
    ("localsgd", "adaptive_localsgd"): "one has a fixed interval, the other finds its own",
    ("lars", "lamb"): _RULE,
    ("lars", "localsgd"): _SGD,
    ("lars", "adaptive_localsgd"): _SGD,
    ("lars", "dgc"): _RULE,
    ("lamb", "dgc"): _SGD,
    ("lamb", "localsgd"): _SGD,
    ("lamb", "adaptive_localsgd"): _SGD,
    **{(field, other): f"it {_OWN_EXCHANGE}" for field in ("pipeline", "tensor_parallel")
       for other in ("dgc", "fp16_allreduce", "use_hierarchical_allreduce", "nccl_comm_num", "find_unused_parameters")},
}  # fmt: skip

# Sharding keeps data parallelism's exchange in stage 1 and has its own in stages 2 and 3.
_NOT_FROM_STAGE_2 = ("fp16_allreduce", "use_hierarchical_allreduce", "nccl_comm_num", "find_unused_parameters")


def check(settings: DistributedStrategy) -> None:
    """Check a collective job for contradicting settings; each error names both fields and the fix."""
    if settings.a_sync:
        raise StrategyError("a_sync=True is a mode of parameter servers, and this job is collective: leave it out")
    if not settings.is_default("sync_mean"):
        raise StrategyError("sync_mean is a setting of parameter servers, and this job is collective: leave it out")
    check_together(settings)


def check_together(settings: DistributedStrategy) -> None:
    """Check for strategies that exclude each other, and for settings that would have no effect."""
    for (field, other), reason in INCOMPATIBLE.items():
        if _is_on(settings, field) and _is_on(settings, other):
            raise StrategyError(f"{field} and {other} cannot be used together: {reason}. Leave one of them out.")
    stage = settings.sharding_configs.stage
    for other in _NOT_FROM_STAGE_2:
        if settings.sharding and stage > 1 and _is_on(settings, other):
            raise StrategyError(
                f"sharding (stage {stage}) and {other} cannot be used together: from stage 2 on sharding "
                f"{_OWN_EXCHANGE}. Use sharding_configs={{'stage': 1}}, or leave {other} out."
            )
    _check_idle(settings)
    for name in settings.differences():
        switch = name.removesuffix("_configs")
        if name.endswith("_configs") and switch not in ("hybrid", "a_sync") and not getattr(settings, switch):
            raise StrategyError(f"{name} is given, but {switch} is off: set {switch}=True, or leave {name} out")


def _check_idle(settings: DistributedStrategy) -> None:
    """Check for settings that have no effect in combination with others."""
    idle = {
        "sync_nccl_allreduce": (settings.nccl_comm_num == 1, "nccl_comm_num=1: one communicator works in order anyway"),
        "hierarchical_allreduce_inter_nranks": (
            not settings.use_hierarchical_allreduce,
            "use_hierarchical_allreduce=False",
        ),
        "fuse_grad_size_in_MB": (not settings.fuse_all_reduce_ops, "fuse_all_reduce_ops=False"),
        "last_comm_group_size_MB": _without_backward_exchange(settings),
    }
    for name, (is_idle, beside) in idle.items():
        if is_idle and not settings.is_default(name):
            raise StrategyError(f"{name}={getattr(settings, name)} has no effect with {beside}. Leave one of them out.")


def _without_backward_exchange(settings: DistributedStrategy) -> tuple[bool, str]:
    """Whether backward exchanges no buckets, and the reason."""
    found = [f"{name}=True" for name in ("pipeline", "tensor_parallel") if getattr(settings, name)]
    if settings.sharding and settings.sharding_configs.stage > 1:
        found.append(f"sharding (stage {settings.sharding_configs.stage})")
    found += [] if settings.fuse_all_reduce_ops else ["fuse_all_reduce_ops=False"]
    return bool(found), "".join(found[:1])


def build(settings: DistributedStrategy, world: World) -> list[Strategy]:
    """The strategies of a job that are on, in ORDER."""
    return [_class_at(listed.path)(settings, world) for field, listed in ORDER.items() if _is_on(settings, field)]


def _class_at(path: str) -> type[Strategy]:
    module, _, name = path.rpartition(".")
    found: type[Strategy] = getattr(import_module(module), name)
    return found
