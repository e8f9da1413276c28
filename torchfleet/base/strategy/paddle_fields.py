"""Fields of Paddle's DistributedStrategy (distributed_strategy.proto, Paddle 2.0 to 2.6) that torchfleet does not have.

A file written by Paddle may contain such a field with its default. Other values are refused, with the reason given
here. Where the default differs between versions of Paddle, each default is accepted.
"""

from __future__ import annotations

from typing import Any

from torchfleet.base.paddle_names import Absent


def _each(reason: str, **defaults: Any) -> dict[str, Absent]:
    return {name: Absent((value,), reason) for name, value in defaults.items()}


def reasons(where: str) -> dict[str, str]:
    """Why torchfleet does not have a field of Paddle's message `where`, or what to use instead, by field."""
    return {name: absent.reason for name, absent in ABSENT.get(where, {}).items()}


# Common fields whose default in Paddle is not available here or would enable something. Paddle writes defaults out,
# so these values are not the user's choice: they map to torchfleet's own default.
LEFT: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {"cudnn_batchnorm_spatial_persistent": (True,), "conv_workspace_size_limit": (4000,)},
    "build_strategy": {"fuse_bn_add_act_ops": (True,)},
    "execution_strategy": {"num_threads": (1,)},
    "a_sync_configs": {"send_queue_size": (16,)},
    "hybrid_configs": {"dp_degree": (-1,)},  # -1 there and 0 here: the ranks that remain after the other degrees
}
# Common fields with different defaults: a file without the field means Paddle's default.
DIFFERENT: dict[str, dict[str, Any]] = {"amp_configs": {"decr_ratio": 0.8}}
RENAMED = {"sharding_configs": {"broadcast_MB": "segment_broadcast_MB"}}
WITHOUT_SWITCH = ("qat_configs", "model_parallel_configs")  # their switch is refused, so they have no effect

_GRAPH = "eager PyTorch has no static graph of operators for it to change; torch.compile decides by itself"
_STREAMS = "torch's process groups order their streams themselves"
_AUTO = "torchfleet does not choose a strategy by itself: switch on the ones you want"
_LOCAL = "torchfleet has no such training"
_TABLES = "tables and their files are described by the model and by fleet.save_persistables, not by the strategy"
_DEGREES = "degrees of other dimensions belong into hybrid_configs"
_MERGE = "use gradient_merge: true and gradient_merge_configs { k_steps: ... }"
_OFFLOAD = "sharding_configs { stage: 3 offload: true } keeps parameters, gradients and optimizer state in host memory"
_EXCHANGE = "torchfleet's tensor-parallel layers and pipeline choose by themselves how they communicate"
_PRECISION = "amp has custom_white_list, custom_black_list, use_pure_fp16 and use_pure_bf16 instead"

ABSENT: dict[str, dict[str, Absent]] = {
    "": {
        "mode": Absent(("COLLECTIVE", 1), "fleet.init(is_collective=True) or fleet.init() tells the kind of the job"),
        "elastic": Absent((False,), "fleetrun --max_restart starts workers again"),
        **_each(_AUTO, auto=False, semi_auto=False, auto_search=False),
        **_each(_LOCAL, heter_ccl_mode=False, is_fl_ps_mode=False, with_coordinator=False),
        **_each("quantization is torch.ao's task, not a way of distributing", qat=False),
        **_each("sparse weights are torch.ao.pruning's task, not a way of distributing", asp=False),
        "fuse_grad_size_in_TFLOPS": Absent((50.0,), "buckets are cut by bytes: use fuse_grad_size_in_MB"),
        "without_graph_optimization": Absent((False, True), _GRAPH),
        **_each(_STREAMS, calc_comm_same_stream=False),
        **_each(_MERGE, fuse_grad_merge=False),
        **_each("use torch.optim.Adam's own options", adam_d2sum=False),
        **_each("use tensor_parallel", model_parallel=False),
        **_each("a dataset's files are cut over workers by fleet.util.get_file_shard", split_data=True),
        **_each(_TABLES, trainer_desc_configs=(), downpour_table_param=(), fs_client_param=()),
    },
    "gradient_scale_configs": {
        **_each("gradients are the mean over ranks", scale_strategy="avg", scale_gradient=False),
    },
    "a_sync_configs": {
        **_each("servers find out by themselves which rows a request needs", runtime_split_send_recv=False),
        **_each("use a scheduler of torch.optim.lr_scheduler", lr_decay_steps=10),
        **_each("servers hold their tables in host memory", use_ps_gpu=0, use_gpu_graph=0),
    },
    "amp_configs": _each(_PRECISION, custom_black_varnames=(), use_fp16_guard=True, use_optimizer_fp16=False),
    "recompute_configs": _each(_AUTO, enable_tuning=False, refined_ops_patterns=()),
    "sharding_configs": {
        **_each(
            "the model is cut by modules; segment_broadcast_MB says how large the pieces are",
            sharding_segment_strategy="segment_broadcast_MB", segment_anchors=(), sharding_segment_anchors=(),
        ),
        **_each(_DEGREES, mp_degree=1, dp_degree=1, pp_degree=1, parallelism=1, as_outer_parallelism=False),
        **_each("use pipeline: true and pipeline_configs", use_pipeline=False, schedule_mode=0, pp_bz=1),
        **_each(_MERGE, gradient_merge_acc_step=1, acc_steps=1),
        **_each(_OFFLOAD, optimize_offload=False),
        **_each(_STREAMS, pp_allreduce_in_optimize=False, use_calc_stream=False),
        **_each("use amp with use_pure_fp16 for half-precision parameters", optimize_cast=False),
        **_each("use stage: 1", _dp_as_optimizer_sharding=False),
        **_each(_AUTO, enable_tuning=False),
    },
    "pipeline_configs": {
        **_each(_EXCHANGE, p2p_cache_shape=True, enable_partial_send_recv=True, best_unbalanced_scheduler=False),
    },
    "tensor_parallel_configs": _each("use torch.manual_seed before the model is made", tensor_init_seed=-1),
    "hybrid_configs": {
        **_each("use context_parallel: true and context_parallel_configs", sep_degree=1, cp_degree=1),
        **_each(_EXCHANGE, enable_optimizer_timer=False),
    },
    "hybrid_configs.mp_configs": _each(
        _EXCHANGE, sync_param=True, sync_grad=False, sync_moment=False, sync_mode="broadcast",
        mp_async_allreduce=False, mp_skip_c_identity=False, mp_fused_linear_param_grad_add=False,
        need_broadcast_data=True, recompute_allgather=False, sp_async_reduce_scatter=False,
    ),
    "hybrid_configs.pp_configs": _each(
        _EXCHANGE, dp_comm_overlap=False, delay_scale_loss=False, enable_timer=False, sharding_comm_overlap=False,
        profiling=False, release_gradients=False, overlap_p2p_comm=False, clear_every_step_cache=False,
        use_batch_p2p_comm=True, best_unbalanced_scheduler=False, enable_offload_queue=False,
        enable_dynamic_shape=False,
    ),
    "hybrid_configs.sharding_configs": _each(
        _EXCHANGE, tensor_fusion=False, accumulate_steps=1, comm_overlap=False, split_param=False,
        fuse_optimizer=True, use_reduce_avg=True, comm_buffer_size_MB=256, release_gradients=False,
        free_grads_in_comm=False, enable_fuse_optimizer_states=False,
    ),
    "build_strategy": {
        **_each("use sharding: each rank then updates its share of the parameters", reduce_strategy=0),
        **_each(_GRAPH, enable_backward_optimizer_op_deps=True, cache_runtime_context=False, enable_auto_fusion=False,
                fix_op_run_order=False, fuse_gemm_epilogue=False, fused_attention=False,
                fused_feedforward=False, fuse_dot_product_attention=False, fuse_resunit=False),
        **_each("use torch.cuda.graphs in the script", allow_cuda_graph_capture=False),
        **_each("use TORCH_LOGS=graph_code to see compiled graphs", debug_graphviz_path=""),
    },
}  # fmt: skip

# Fields of the strategies before DistributedStrategy (Paddle 1.5 to 1.8).
OLD_FIELDS = {
    "sync_mode": "a_sync=False is sync_mode=True; or give a fleet.DistributeTranspilerConfig",
    "geo_sgd_mode": "geo is a_sync=True with a_sync_configs={'k_steps': N}",
    "geo_sgd_need_push_nums": "a_sync_configs={'k_steps': N}, with a_sync=True",
    "runtime_split_send_recv": "nothing: workers always send through a communicator",
    "use_local_sgd": "localsgd=True",
    "use_amp": "amp=True",
    "amp_loss_scaling": "amp_configs={'init_loss_scaling': N}",
    "forward_recompute": "recompute=True",
    "recompute_checkpoints": "recompute_configs={'checkpoints': [names of modules]}",
    "use_dgc": "dgc=True",
    "exec_strategy": "execution_strategy",
    "fuse_all_optimizer_ops": "build_strategy={'fuse_all_optimizer_ops': True}",
}
