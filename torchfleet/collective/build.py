"""Which strategies a job has, in the order they act in, and which do not go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from torchfleet.collective.strategy import Part
from torchfleet.collective.world import World
from torchfleet.errors import StrategyError
from torchfleet.strategy.distributed_strategy import DistributedStrategy

# The order. Models are converted and forwards wrapped from the first to the last (the last is outermost), optimizers
# replaced and `before_step` called from the first to the last, `after_step` from the last to the first.
# Field of DistributedStrategy → module and class; imported only when it is on, because some need much of torch.
ORDER: Mapping[str, str] = {
    "sync_batch_norm": "strategies.batch_norm.SyncBatchNorm",
    "tensor_parallel": "layers.tensor_parallel.TensorParallel",
    "recompute": "strategies.recomputation.recompute.Recompute",
    "build_strategy": "strategies.fusion.Fusion",
    "amp": "strategies.mixed_precision.amp.Amp",
    "pipeline": "pipeline.pipeline.Pipeline",
    "fp16_allreduce": "strategies.fp16_allreduce.Fp16AllReduce",
    "use_hierarchical_allreduce": "strategies.hierarchical.HierarchicalAllReduce",
    "nccl_comm_num": "strategies.communicators.Communicators",
    "dgc": "strategies.dgc.DeepGradientCompression",
    "lars": "strategies.layerwise.lars.Lars",
    "lamb": "strategies.layerwise.lamb.Lamb",
    "sharding": "strategies.sharding.sharding.Sharding",
    "localsgd": "strategies.localsgd.LocalSGD",
    "adaptive_localsgd": "strategies.adaptive_localsgd.AdaptiveLocalSGD",
    "gradient_merge": "strategies.gradient_merge.GradientMerge",
}


def _is_on(strategy: DistributedStrategy, field: str) -> bool:
    special: Mapping[str, Callable[[], bool]] = {
        "nccl_comm_num": lambda: strategy.nccl_comm_num > 1,
        "build_strategy": lambda: not strategy.is_default("build_strategy"),
    }
    return special[field]() if field in special else bool(getattr(strategy, field))


_HOOK = "both say how gradients are exchanged"
_LOCAL = "with it the ranks train alone and exchange parameters, not gradients"
_OWN = "it exchanges gradients in its own way"
_RULE = "both replace the optimizer's rule"
_SGD = "the one has a rule of its own, and the other needs plain SGD"

# Pairs that cannot be had together, and why.
INCOMPATIBLE: Mapping[tuple[str, str], str] = {
    ("dgc", "fp16_allreduce"): _HOOK,
    ("dgc", "use_hierarchical_allreduce"): _HOOK,
    ("dgc", "nccl_comm_num"): _HOOK,
    ("dgc", "sharding"): "every rank needs the momentum of all parameters",
    ("dgc", "find_unused_parameters"): "what is sent for a parameter without a gradient would be lost",
    ("fp16_allreduce", "use_hierarchical_allreduce"): _HOOK,
    ("fp16_allreduce", "nccl_comm_num"): _HOOK,
    ("use_hierarchical_allreduce", "nccl_comm_num"): _HOOK,
    **{(one, other): _LOCAL for one in ("localsgd", "adaptive_localsgd")
       for other in ("dgc", "sharding", "pipeline", "tensor_parallel", "fp16_allreduce", "use_hierarchical_allreduce",
                     "nccl_comm_num")},
    ("localsgd", "adaptive_localsgd"): "one has a fixed interval, the other finds its own",
    ("lars", "lamb"): _RULE,
    ("lars", "localsgd"): _SGD,
    ("lars", "adaptive_localsgd"): _SGD,
    ("lars", "dgc"): _RULE,
    ("lamb", "dgc"): _SGD,
    ("lamb", "localsgd"): _SGD,
    ("lamb", "adaptive_localsgd"): _SGD,
    **{(one, other): _OWN for one in ("pipeline", "tensor_parallel")
       for other in ("dgc", "fp16_allreduce", "use_hierarchical_allreduce", "nccl_comm_num", "find_unused_parameters")},
}  # fmt: skip

# Sharding keeps data parallelism's exchange in stage 1 and has its own in stages 2 and 3.
_NOT_FROM_STAGE_2 = ("fp16_allreduce", "use_hierarchical_allreduce", "nccl_comm_num", "find_unused_parameters")


def check(strategy: DistributedStrategy) -> None:
    """Contradictions, each an error that names both fields and the way out."""
    if strategy.a_sync:
        raise StrategyError("a_sync=True is a mode of parameter servers, and this job is collective: leave it out")
    for (one, other), reason in INCOMPATIBLE.items():
        if _is_on(strategy, one) and _is_on(strategy, other):
            raise StrategyError(f"{one} and {other} cannot be used together: {reason}. Leave one of them out.")
    stage = strategy.sharding_configs["stage"]
    for other in _NOT_FROM_STAGE_2:
        if strategy.sharding and stage > 1 and _is_on(strategy, other):
            raise StrategyError(
                f"sharding (stage {stage}) and {other} cannot be used together: from stage 2 on sharding {_OWN[3:]}. "
                f"Use sharding_configs={{'stage': 1}}, or leave {other} out."
            )
    _check_idle(strategy)
    for name in strategy.differences():
        switch = name.removesuffix("_configs")
        if name.endswith("_configs") and switch not in ("hybrid", "a_sync") and not getattr(strategy, switch):
            raise StrategyError(f"{name} is given, but {switch} is off: set {switch}=True, or leave {name} out")


def _check_idle(strategy: DistributedStrategy) -> None:
    """Settings that would have no effect beside others."""
    idle = {
        "sync_nccl_allreduce": (strategy.nccl_comm_num == 1, "nccl_comm_num=1: one communicator works in order anyway"),
        "hierarchical_allreduce_inter_nranks": (
            not strategy.use_hierarchical_allreduce,
            "use_hierarchical_allreduce=False",
        ),
        "fuse_grad_size_in_MB": (not strategy.fuse_all_reduce_ops, "fuse_all_reduce_ops=False"),
    }
    for name, (is_idle, beside) in idle.items():
        if is_idle and not strategy.is_default(name):
            raise StrategyError(
                f"{name}={getattr(strategy, name)} does nothing beside {beside}. Leave one of them out."
            )


def build(strategy: DistributedStrategy, world: World) -> list[Part]:
    """The parts of a job, in ORDER."""
    return [_part(place)(strategy, world) for field, place in ORDER.items() if _is_on(strategy, field)]


def _part(place: str) -> type[Part]:
    module, _, name = place.rpartition(".")
    found: type[Part] = getattr(import_module(f"torchfleet.collective.{module}"), name)
    return found
