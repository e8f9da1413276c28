"""The fields of collective strategies: names, defaults, limits. docs/collective/ explains each."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torchfleet.errors import StrategyError


class Key(NamedTuple):
    """A key of a `<name>_configs` dictionary, or a field by itself."""

    default: Any
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[Any, ...] = ()
    only: str = ""  # the reason, if the default is the only value that can be had


SWITCHES = (
    "amp", "recompute", "gradient_merge", "lars", "lamb", "dgc", "localsgd", "adaptive_localsgd", "sharding",
    "pipeline", "tensor_parallel", "fp16_allreduce", "use_hierarchical_allreduce", "sync_batch_norm",
    "find_unused_parameters", "cudnn_exhaustive_search",
)  # fmt: skip

_DDP = "torch's DistributedDataParallel cuts its buckets by bytes alone: use fuse_grad_size_in_MB"
FIELDS: dict[str, Key] = {
    **{name: Key(False) for name in SWITCHES},
    "fuse_all_reduce_ops": Key(True),
    "fuse_grad_size_in_MB": Key(32, at_least=1),
    "fuse_grad_size_in_num": Key(8, only=_DDP),
    "last_comm_group_size_MB": Key(1.0, only=_DDP),
    "nccl_comm_num": Key(1, at_least=1, at_most=16),
    "sync_nccl_allreduce": Key(True),
    "hierarchical_allreduce_inter_nranks": Key(1, at_least=1),
    "cudnn_batchnorm_spatial_persistent": Key(False, only="torch chooses the batch norm kernel itself"),
    "conv_workspace_size_limit": Key(512, only="torch has no limit of its own for cuDNN's workspace"),
}

CONFIGS: dict[str, dict[str, Key]] = {
    "amp": {
        "init_loss_scaling": Key(32768.0, at_least=1e-30),
        "incr_every_n_steps": Key(1000, at_least=1),
        "decr_every_n_nan_or_inf": Key(2, at_least=1),
        "incr_ratio": Key(2.0, at_least=1.0),
        "decr_ratio": Key(0.5, at_least=1e-6, at_most=1.0),
        "use_dynamic_loss_scaling": Key(True),
        "custom_white_list": Key(()),
        "custom_black_list": Key(()),
        "use_pure_fp16": Key(False),
        "use_pure_bf16": Key(False),
        "dtype": Key("float16", choices=("float16", "bfloat16")),
    },
    "recompute": {
        "checkpoints": Key(()),
        "enable_offload": Key(False),
        "checkpoint_shape": Key((), only="shapes are seen when the model runs"),
    },
    "gradient_merge": {"k_steps": Key(1, at_least=1), "avg": Key(True)},
    "lars": {
        "lars_coeff": Key(0.001, at_least=0.0),
        "lars_weight_decay": Key(0.0005, at_least=0.0),
        "epsilon": Key(0.0, at_least=0.0),
        "exclude_from_weight_decay": Key(()),
    },
    "lamb": {"lamb_weight_decay": Key(0.01, at_least=0.0), "exclude_from_weight_decay": Key(())},
    "dgc": {
        "rampup_begin_step": Key(0, at_least=0),
        "rampup_step": Key(1, at_least=1),
        "sparsity": Key((0.999,)),
        "local_grad_clip_norm": Key(0.0, at_least=0.0),
    },
    "localsgd": {"k_steps": Key(1, at_least=1), "begin_step": Key(1, at_least=1)},
    "adaptive_localsgd": {"init_k_steps": Key(1, at_least=1, at_most=16), "begin_step": Key(1, at_least=1)},
    "sharding": {
        "stage": Key(1, choices=(1, 2, 3)),
        "sharding_degree": Key(0, at_least=0),  # 0: all ranks
        "hybrid_dp": Key(False),
        "segment_broadcast_MB": Key(32.0, at_least=0.0),
    },
    "pipeline": {
        "accumulate_steps": Key(1, at_least=1),
        "micro_batch_size": Key(0, at_least=0),  # 0: what accumulate_steps makes of the batch
        "schedule_mode": Key("1F1B", choices=("1F1B", "F-then-B")),
        "stages": Key(()),  # names of the modules at which the second, third, ... stage begins
    },
    "tensor_parallel": {"tensor_parallel_degree": Key(1, at_least=1)},
    "hybrid": {
        "dp_degree": Key(0, at_least=0),  # 0: what the other degrees leave
        "mp_degree": Key(1, at_least=1),
        "pp_degree": Key(1, at_least=1),
        "sharding_degree": Key(1, at_least=1),
    },
}

# Other names for the same key, as Paddle's documents have them.
ALIASES: dict[str, dict[str, str]] = {
    "sharding": {"fuse_broadcast_MB": "segment_broadcast_MB", "sharding_group_size": "sharding_degree"},
    "pipeline": {"micro_batch": "accumulate_steps"},
}


class _Flags:
    """Fields by keyword or attribute; an unknown one is an error that lists the known."""

    _KEYS: ClassVar[dict[str, Key]] = {}

    def __init__(self, **fields: Any) -> None:
        for name, key in self._KEYS.items():
            object.__setattr__(self, name, key.default)
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        where = type(self).__name__
        if name not in self._KEYS:
            raise StrategyError(f"{where} has no field '{name}'; it has {', '.join(self._KEYS)}")
        key = self._KEYS[name]
        if type(value) is not type(key.default):
            raise StrategyError(f"{where}.{name} expects a {type(key.default).__name__}, found {value!r}")
        if key.only and value != key.default:
            raise StrategyError(f"{where}.{name}={value!r} cannot be had: {key.only}. Leave it at {key.default!r}.")
        if key.at_least is not None and value < key.at_least:
            raise StrategyError(f"{where}.{name} must be at least {key.at_least:g}, found {value!r}")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


_GRAPHS = "eager PyTorch has no graph of operators to change; torch.compile chooses by itself"


class BuildStrategy(_Flags):
    """Operator fusion. Any of the first four compiles the model with torch.compile, which fuses what it can."""

    _KEYS: ClassVar[dict[str, Key]] = {
        "fuse_elewise_add_act_ops": Key(False),
        "fuse_bn_act_ops": Key(False),
        "fuse_bn_add_act_ops": Key(False),
        "fuse_relu_depthwise_conv": Key(False),
        "fuse_all_optimizer_ops": Key(False),  # the optimizer's own fused or foreach kernels
        "fuse_broadcast_ops": Key(False, only="DistributedDataParallel broadcasts first values in one go already"),
        "enable_inplace": Key(False, only=_GRAPHS),
        "memory_optimize": Key(False, only=_GRAPHS),
        "enable_addto": Key(False, only=_GRAPHS),
        "enable_sequential_execution": Key(False, only=_GRAPHS),
    }


class ExecutionStrategy(_Flags):
    """How a rank computes. num_threads: threads of torch on the CPU (0: as torch decides)."""

    _KEYS: ClassVar[dict[str, Key]] = {
        "num_threads": Key(0, at_least=0),
        "num_iteration_per_drop_scope": Key(10, only="eager PyTorch has no scopes"),
        "num_iteration_per_run": Key(1, only="the loop is the script's own"),
        "use_thread_barrier": Key(False, only="eager PyTorch has one thread per rank"),
    }
