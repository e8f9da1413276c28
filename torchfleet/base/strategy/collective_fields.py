"""The fields of collective training: a switch for each strategy and its dictionary. docs/collective/ explains each.

To add a strategy, add a class with its keys here and two lines to CollectiveFields. Files, flags and checks follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.configs import Configs, ConfigsField, aliases_of
from torchfleet.base.strategy.execution import BuildStrategy, ExecutionStrategy, ObjectField
from torchfleet.base.strategy.fields import DictKey, Field, Fields, Key, ListKey, NamesKey, Switch, fields_of

_COMPILING = ("fuse_elewise_add_act_ops", "fuse_bn_act_ops", "fuse_bn_add_act_ops", "fuse_relu_depthwise_conv")
_WHOLE = "in hybrid mode every worker holds the whole network, so that the servers can keep it"


class AmpConfigs(Configs, field="amp_configs"):
    init_loss_scaling = Key(32768.0, at_least=1e-30)
    incr_every_n_steps = Key(1000, at_least=1)
    decr_every_n_nan_or_inf = Key(2, at_least=1)
    incr_ratio = Key(2.0, at_least=1.0)
    decr_ratio = Key(0.5, at_least=1e-6, at_most=1.0)
    use_dynamic_loss_scaling = Key(True)
    custom_white_list = ListKey(str)
    custom_black_list = ListKey(str)
    use_pure_fp16 = Key(False)
    use_pure_bf16 = Key(False)
    dtype = Key("float16", choices=("float16", "bfloat16", "float8"))  # float8: linear layers; others bfloat16
    float8_exclude = NamesKey()  # names of linear layers that stay in bfloat16

    def _check_together(self) -> None:
        if self.float8_exclude and self.dtype != "float8":
            raise StrategyError(
                f"amp_configs: float8_exclude is given, but dtype={self.dtype!r}: set dtype='float8', or leave it out"
            )


class RecomputeConfigs(Configs, field="recompute_configs"):
    checkpoints = NamesKey()
    enable_offload = Key(False)
    half_inputs = Key(False)
    slices = Key(1, at_least=1)
    checkpoint_shape = ListKey(int, only="shapes are seen when the model runs")


class GradientMergeConfigs(Configs, field="gradient_merge_configs"):
    k_steps = Key(1, at_least=1)
    avg = Key(True)


class LarsConfigs(Configs, field="lars_configs"):
    lars_coeff = Key(0.001, at_least=0.0)
    lars_weight_decay = Key(0.0005, at_least=0.0)
    epsilon = Key(0.0, at_least=0.0)
    exclude_from_weight_decay = NamesKey()


class LambConfigs(Configs, field="lamb_configs"):
    lamb_weight_decay = Key(0.01, at_least=0.0)
    exclude_from_weight_decay = NamesKey()


class DgcConfigs(Configs, field="dgc_configs"):
    rampup_begin_step = Key(0, at_least=0)
    rampup_step = Key(1, at_least=1)
    sparsity = ListKey(float, [0.999])
    local_grad_clip_norm = Key(0.0, at_least=0.0)


class LocalSGDConfigs(Configs, field="localsgd_configs"):
    k_steps = Key(1, at_least=1)
    begin_step = Key(1, at_least=1)


class AdaptiveLocalSGDConfigs(Configs, field="adaptive_localsgd_configs"):
    init_k_steps = Key(1, at_least=1, at_most=16)
    begin_step = Key(1, at_least=1)


class ShardingConfigs(
    Configs,
    field="sharding_configs",
    aliases={"fuse_broadcast_MB": "segment_broadcast_MB", "sharding_group_size": "sharding_degree"},
):
    stage = Key(1, choices=(1, 2, 3))
    sharding_degree = Key(0, at_least=0)  # 0: all ranks
    hybrid_dp = Key(False)
    segment_broadcast_MB = Key(32.0, at_least=0.0)
    offload = Key(False)  # parameters, gradients and optimizer state in host memory


class PipelineConfigs(Configs, field="pipeline_configs", aliases={"micro_batch": "accumulate_steps"}):
    accumulate_steps = Key(1, at_least=1)
    micro_batch_size = Key(0, at_least=0)  # 0: derived from the batch and accumulate_steps
    schedule_mode = Key(
        "1F1B", choices=("1F1B", "F-then-B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    )
    vpp_degree = Key(1, at_least=1)  # stages on each rank
    stages = NamesKey()  # the names of the modules at which the second, third, ... stage begins
    cut = Key("even", choices=("even", "measured"))  # without stages: by parameters, or by a dry step
    memory_MB = Key(0.0, at_least=0.0)  # memory that a rank may use, for a measured cut; 0: by its GPU

    def _check_together(self) -> None:
        if self.cut == "measured" and self.stages:
            raise StrategyError(
                "pipeline_configs: cut='measured' and stages contradict each other: a dry step finds where the stages "
                "begin. Give one of them."
            )
        if self.memory_MB and self.cut != "measured":
            raise StrategyError(
                f"pipeline_configs: memory_MB={self.memory_MB:g} has no effect with cut={self.cut!r}: set "
                "cut='measured', or leave it out"
            )
        mode, degree = self.schedule_mode, self.vpp_degree
        fitting = {"Interleaved1F1B": degree > 1, "InterleavedZeroBubble": True, "ZBVZeroBubble": degree == 2}
        if not fitting.get(mode, degree == 1):
            raise StrategyError(
                f"pipeline_configs: schedule_mode={mode!r} and vpp_degree={degree} contradict each other: 1F1B and "
                "F-then-B have one stage on each rank, Interleaved1F1B at least two, ZBVZeroBubble two, and "
                "InterleavedZeroBubble any number"
            )


class TensorParallelConfigs(Configs, field="tensor_parallel_configs"):
    tensor_parallel_degree = Key(1, at_least=1)
    plan = DictKey()  # pattern of module names → how these modules are cut; {}: by the class of the model
    sequence_parallel = Key(False)  # presets: norms and dropout work on parts of the sequence


class ContextParallelConfigs(Configs, field="context_parallel_configs"):
    context_parallel_degree = Key(0, at_least=0)  # 0: all ranks that hold the same layers
    position_argument = Key("position_ids")  # argument of the model's forward; "": it has none


class HybridConfigs(Configs, field="hybrid_configs"):
    dp_degree = Key(0, at_least=0)  # 0: the ranks that remain after the other degrees
    mp_degree = Key(1, at_least=1)
    pp_degree = Key(1, at_least=1)
    sharding_degree = Key(1, at_least=1)


_BYTES = "torch's DistributedDataParallel cuts its buckets by bytes alone: use fuse_grad_size_in_MB"


class CollectiveFields(Fields):
    """The fields of DistributedStrategy for collective training. The texts appear in a command line's --help."""

    amp = Switch("mixed precision: matrix products in half precision, with loss scaling for float16")
    amp_configs = ConfigsField(AmpConfigs)
    recompute = Switch(
        "keep fewer activations: the modules of recompute_configs run a second time in the backward pass"
    )
    recompute_configs = ConfigsField(RecomputeConfigs)
    gradient_merge = Switch(
        "exchange gradients and step once in k_steps batches, as if the batch were k times as large"
    )
    gradient_merge_configs = ConfigsField(GradientMergeConfigs)
    lars = Switch("layer-wise learning rates for large batches; the optimizer must be SGD with momentum")
    lars_configs = ConfigsField(LarsConfigs)
    lamb = Switch("layer-wise learning rates for very large batches; the optimizer must be Adam")
    lamb_configs = ConfigsField(LambConfigs)
    dgc = Switch("send only the largest gradients (slow networks); the optimizer must be SGD with momentum")
    dgc_configs = ConfigsField(DgcConfigs)
    localsgd = Switch("every rank trains alone, parameters are averaged every k_steps (slow networks)")
    localsgd_configs = ConfigsField(LocalSGDConfigs)
    adaptive_localsgd = Switch("localsgd whose interval follows the loss and the learning rate")
    adaptive_localsgd_configs = ConfigsField(AdaptiveLocalSGDConfigs)
    sharding = Switch("cut optimizer state (stage 1), gradients (2) and parameters (3) over the ranks")
    sharding_configs = ConfigsField(ShardingConfigs)
    pipeline = Switch("different layers on different ranks; micro-batches flow through them")
    pipeline_configs = ConfigsField(PipelineConfigs)
    tensor_parallel = Switch("large layers cut over ranks that work on the same batch")
    tensor_parallel_configs = ConfigsField(TensorParallelConfigs)
    context_parallel = Switch("each rank has a part of every sequence; attention sees all of it")
    context_parallel_configs = ConfigsField(ContextParallelConfigs)
    hybrid_configs = ConfigsField(HybridConfigs, "how many ranks for data, tensor, pipeline and sharding parallelism")
    fp16_allreduce = Switch("gradients cross the network in half precision: half the bytes")
    use_hierarchical_allreduce = Switch("add gradients up inside groups of ranks first, then among the groups")
    sync_batch_norm = Switch("batch norm over the batches of all ranks: for small batches per rank")
    find_unused_parameters = Switch("for models that leave out some parameters in some steps; costs time")
    cudnn_exhaustive_search = Switch("let cuDNN time its algorithms: for inputs of one size")
    fuse_all_reduce_ops = Field(True, "exchange gradients in buckets, not one by one")
    fuse_grad_size_in_MB = Field(32, "size of those buckets", at_least=1)
    fuse_grad_size_in_num = Field(8, only=_BYTES)
    last_comm_group_size_MB = Field(1.0, "size of the bucket that is exchanged last", at_least=0.001)
    nccl_comm_num = Field(1, "communicators that take turns, so that exchanges overlap", at_least=1, at_most=16)
    sync_nccl_allreduce = Field(True, "a communicator waits for its last bucket before it takes the next")
    hierarchical_allreduce_inter_nranks = Field(
        1, "ranks of a group of use_hierarchical_allreduce; 1: those of a machine", at_least=1
    )
    cudnn_batchnorm_spatial_persistent = Field(False, only="torch chooses the batch norm kernel itself")
    conv_workspace_size_limit = Field(512, only="torch has no limit of its own for cuDNN's workspace")
    build_strategy = ObjectField(BuildStrategy, "operator fusion through torch.compile: fuse_bn_act_ops, ...")
    execution_strategy = ObjectField(ExecutionStrategy, "threads of a rank on the CPU")


# Strategy → the key of its dictionary that is also a degree of hybrid_configs, and the name of that degree.
DEGREES = {
    "tensor_parallel": ("tensor_parallel_degree", "mp_degree"),
    "sharding": ("sharding_degree", "sharding_degree"),
}
_ALL = fields_of(CollectiveFields)
SWITCHES = tuple(name for name, field in _ALL.items() if isinstance(field, Switch))
OBJECTS: dict[str, Mapping[str, Key[Any]]] = {
    name: fields_of(field.kind) for name, field in _ALL.items() if isinstance(field, ObjectField)
}
_CLASSES = {
    name.removesuffix("_configs"): field.configs for name, field in _ALL.items() if isinstance(field, ConfigsField)
}
# Strategy → keys of its dictionary, and → aliases of these keys.
CONFIGS: dict[str, Mapping[str, Key[Any]]] = {name: fields_of(configs) for name, configs in _CLASSES.items()}
ALIASES: dict[str, Mapping[str, str]] = {name: aliases_of(configs) for name, configs in _CLASSES.items()}
# Fields with a single value.
FIELDS: dict[str, Key[Any]] = {
    name: field for name, field in _ALL.items() if not isinstance(field, (ConfigsField, ObjectField))
}


def check_hybrid(settings: CollectiveFields) -> None:
    """Raise StrategyError for settings that hybrid mode does not support for its network."""
    for name in ("pipeline", "tensor_parallel"):
        if getattr(settings, name):
            raise StrategyError(
                f"{name}=True and a_sync_configs['hybrid'] cannot be used together: {_WHOLE}. Leave one of them out."
            )
    if settings.context_parallel:
        raise StrategyError(
            "context_parallel=True and a_sync_configs['hybrid'] cannot be used together: workers with servers read "
            "different samples. Leave one of them out."
        )
    if settings.sharding and settings.sharding_configs.stage > 1:
        raise StrategyError(
            f"sharding_configs['stage']={settings.sharding_configs.stage} and a_sync_configs['hybrid'] cannot be used "
            f"together: {_WHOLE}. Use sharding_configs={{'stage': 1}}, or leave sharding out."
        )
    for name in ("use_pure_fp16", "use_pure_bf16"):
        if settings.amp and settings.amp_configs[name]:
            raise StrategyError(
                f"amp_configs['{name}'] and a_sync_configs['hybrid'] cannot be used together: the servers keep the "
                f"parameters in float32. Leave '{name}' out: amp then computes in half precision on float32 parameters."
            )
    for name in _COMPILING:
        if getattr(settings.build_strategy, name):
            raise StrategyError(
                f"build_strategy.{name} and a_sync_configs['hybrid'] cannot be used together: it compiles the model as "
                "a whole, and lookups of rows cannot be compiled. Leave it out, or compile the dense part yourself."
            )
