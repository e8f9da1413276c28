"""Names of Paddle Fleet that torchfleet does not have, and what takes their place. docs/migrate/paddle.md lists them.

Names that work as in Paddle are defined where ours are: DistributeTranspilerConfig in base/strategy/, DatasetFactory
and the setters of datasets with the datasets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, ParamSpec, TypeVar

from torchfleet.base.errors import FleetError

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


class Absent(NamedTuple):
    """A field or argument that torchfleet does not have, and its defaults in Paddle. () is a repeated field without
    elements; a text as the default of an argument may be the name of a module.
    """

    defaults: tuple[Any, ...]
    reason: str


_LOOP = "write an ordinary loop: loss.backward(), optimizer.step(), optimizer.zero_grad()"
_PROGRAM = "torch has no programs: call the model itself"
_EXECUTOR = "torch has no executors: leave it out"

# Attributes of `fleet`.
FLEET: Mapping[str, str] = {
    "main_program": _PROGRAM,
    "startup_program": "torch has no programs: parameters are made with the model, and init_worker shares them",
    "minimize": _LOOP,
    "role_maker": "fleet.PaddleCloudRoleMaker, fleet.UserDefinedRoleMaker",
    "Role": "fleet.UserDefinedRoleMaker(role='worker' or 'server')",
    "dataset": "fleet.InMemoryDataset, fleet.QueueDataset",
    "data_generator": "fleet.MultiSlotDataGenerator, fleet.MultiSlotStringDataGenerator",
    "utils": "fleet.util; DistributedInfer is fleet.DistributedInfer, recompute is recompute=True of the strategy",
    "UtilBase": "fleet.util is a module",
    "StrategyFactory": "fleet.DistributedStrategy(a_sync=..., a_sync_configs={...})",
    "DistributeTranspiler": "fleet.distributed_model and fleet.distributed_optimizer, with a fleet.DistributedStrategy",
    "TranspilerOptimizer": "fleet.distributed_optimizer",
    "CollectiveOptimizer": "fleet.distributed_optimizer after fleet.init(is_collective=True)",
    "Executor": _LOOP,
    "meta_parallel": "fleet.nn.ColumnParallelLinear and the others are in fleet.nn",
    "recompute": "DistributedStrategy(recompute=True, recompute_configs={'checkpoints': [names of modules]})",
    "distributed_scaler": "nothing: DistributedStrategy(amp=True) scales losses and gradients itself",
    "launch_ps": "fleetrun, or python -m torchfleet.launch_ps",
    "launch": "fleetrun, or python -m torchfleet.launch",
    "rank": "fleet.worker_index()",
    "nranks": "fleet.worker_num()",
    "local_rank": "fleet.device() gives the GPU of this process",
    "get_hybrid_communicate_group": "fleet.data_shard(); hybrid_configs of the strategy lays the ranks out",
    "load_model": "fleet.init_server(dirname), or fleet.load_inference_model(dirname, model)",
    "load_one_table": "fleet.init_server(dirname, var_names=[table])",
    "save_one_table": "fleet.save_persistables(dirname); `fleet export` writes one table",
    "save_model": "fleet.save_persistables(dirname)",
    "save_cache_model": "fleet.save_persistables(dirname)",
    "save_dense_params": "torch.save(model.state_dict(), path)",
    "clear_model": "begin a job anew: fleet.stop_worker(), fleet.init()",
    "shrink_sparse_table": "fleet.shrink()",
    "set_date": "fleet.set_time(seconds)",
    "init_coordinator": "torchfleet has no coordinators",
}
METRICS: Mapping[str, str] = {
    "Loss": "fleet.metrics.sum, max or min of the loss",
    "Max": "fleet.metrics.max",
    "Min": "fleet.metrics.min",
}
OPTIMIZER: Mapping[str, str] = {
    "minimize": _LOOP,
    "clear_grad": "optimizer.zero_grad()",
    "clear_gradients": "optimizer.zero_grad()",
    "get_lr": "optimizer.param_groups[0]['lr']",
    "set_lr": "optimizer.param_groups[0]['lr'] = value, or a scheduler of torch.optim.lr_scheduler",
    "set_state_dict": "optimizer.load_state_dict",
    "apply_gradients": "optimizer.step()",
}
DATASET: Mapping[str, str] = {
    "set_queue_num": "dataset.init(queue_batches=...)",
    "set_hdfs_config": "give set_filelist URLs that fsspec opens, such as hdfs://host/path",
    "set_download_cmd": "give set_filelist URLs that fsspec opens, such as hdfs://host/path",
    "set_fea_eval": "slots_shuffle(slots) needs no preparation",
    "set_parse_ins_id": "read the id as a slot: fleet.Slot(name)",
    "set_merge_by_lineid": "merge lines in the data generator",
    "update_settings": "dataset.init(...) with all settings, or the setters set_batch_size and others",
}
INFER: Mapping[str, str] = {"get_dist_infer_program": f"{_PROGRAM}, infer.predict(batch)"}

# Arguments of functions, by function.
SAVING = {"executor": Absent((None,), _EXECUTOR), "main_program": Absent((None,), "the model of the job is saved")}
SAVING_INFERENCE = {
    **SAVING,
    "feeded_var_names": Absent((None,), "load_inference_model takes the model, which knows its inputs"),
    "target_vars": Absent((None,), "load_inference_model takes the model, which knows its outputs"),
    "export_for_deployment": Absent((True,), "fleet.to_plain makes a model that torch and ONNX can export"),
}
DATASET_PASS = {
    "program": Absent((None,), "give a function step(batch) that returns the loss, or a model and loss_fn"),
    "scope": Absent((None,), "torch has no scopes: fetch_list names what the step returns"),
    "debug": Absent((False,), "`fleet profile` shows where the time of a step goes"),
}
INFERRING = {
    "main_program": Absent((None,), "give the model: fleet.DistributedInfer(model)"),
    "startup_program": Absent((None,), "give the model: fleet.DistributedInfer(model)"),
}
INFERRING_ENV = {
    "exe": Absent((None,), _EXECUTOR),
    "loss": Absent((None,), "infer.predict(batch) returns the model's output"),
    "role_maker": Absent((None,), "give it to fleet.init(role_maker)"),
}

# Options of fleetrun, paddle.distributed.launch and paddle.distributed.launch_ps.
OPTIONS: Mapping[str, str] = {
    "trainer_num": "use --worker_num",
    "trainers": "use --workers",
    "selected_gpus": "use --gpus",
    "devices": "use --gpus",
    "heter_devices": "a heter worker takes the GPU with its index on its machine; CUDA_VISIBLE_DEVICES names others",
    "coordinator_num": "torchfleet has no coordinators",
    "endpoints": "use --servers with the addresses of all servers and --workers with those of all workers",
    "start_port": "fleetrun chooses free ports; --servers host:port,... names them",
    "started_port": "fleetrun chooses free ports; --master host:port names that of the ranks",
    "cluster_node_ips": "use --ips",
    "node_ip": "fleetrun finds the address of this machine in --ips",
    "use_paddlecloud": "PADDLE_TRAINERS_NUM and the other variables are read without it",
    "print_config": "use --dry_run",
    "run_mode": "--server_num and --worker_num start a job with servers, --nproc_per_node a collective one",
    "elastic_server": "use --nnodes MIN:MAX and --max_restart",
}

# Variables of the environment. {value} is what the user set.
_CONFIGS = "strategy.a_sync_configs = {'NAME': {value}}"
_QUEUE_KEYS = (
    *("thread_pool_size", "max_merge_var_num", "send_queue_size", "send_wait_times"),
    *("independent_recv_thread", "min_send_grad_num_before_recv"),
)
_MERGED = "nothing: a worker always sums the gradients of a row before it sends them"
_MORE_SERVERS = "more servers (--server_num): a server answers requests in one thread"
_PROFILE = "`fleet profile` shows the time of every request"
FLAGS: Mapping[str, str] = {
    **{f"FLAGS_communicator_{name}": _CONFIGS.replace("NAME", name) for name in _QUEUE_KEYS},
    "FLAGS_communicator_max_send_grad_num_before_recv": _CONFIGS.replace("NAME", "min_send_grad_num_before_recv"),
    "FLAGS_communicator_merge_sparse_grad": _MERGED,
    "FLAGS_communicator_merge_sparse_bucket": _MERGED,
    "FLAGS_communicator_is_sgd_optimizer": "nothing: merged gradients are summed for every optimizer",
    "FLAGS_communicator_fake_rpc": "fleetrun --simulate",
    "FLAGS_rpc_deadline": "strategy.rpc_timeout, in seconds (FLAGS_rpc_deadline={value} is in milliseconds)",
    "FLAGS_rpc_retry_times": "strategy.rpc_retry_times = {value}",
    "FLAGS_rpc_retry_bind_port": "fleetrun --server_num, which chooses free ports",
    "FLAGS_rpc_disable_reuse_port": "nothing: servers never share a port",
    "FLAGS_rpc_get_thread_num": _MORE_SERVERS,
    "FLAGS_rpc_send_thread_num": _MORE_SERVERS,
    "FLAGS_rpc_prefetch_thread_num": _MORE_SERVERS,
    "FLAGS_rpc_server_profile_path": _PROFILE,
    "FLAGS_rpc_server_profile_period": _PROFILE,
    "FLAGS_enable_rpc_profiler": _PROFILE,
    "FLAGS_eager_delete_tensor_gb": "nothing: torch frees a tensor after its last use",
    "FLAGS_fraction_of_gpu_memory_to_use": "torch.cuda.set_per_process_memory_fraction({value})",
    "FLAGS_cudnn_deterministic": "torch.use_deterministic_algorithms({value})",
}
_READ = ("FLAGS_selected_gpus",)  # by base/role/role_makers.py


def ignored_flags(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each of Paddle's variables that is set and has no effect, with what to use instead."""
    found = sorted(name for name in environment if name.startswith("FLAGS_") and name not in _READ)
    told = []
    for name in found:
        value = environment[name]
        way = FLAGS[name].replace("{value}", value) if name in FLAGS else "nothing: torchfleet has no such setting"
        told.append(f"{name}={value} has no effect in torchfleet. Use instead: {way}")
    return told


def with_paddle_arguments(
    absent: Mapping[str, Absent],
) -> Callable[[Callable[Given, Returned]], Callable[Given, Returned]]:
    """A decorator: arguments of Paddle's function of the same name are accepted at Paddle's defaults. Other values, and
    a call that does not fit, raise an error that says what to use instead.
    """

    def decorate(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
        signature, shown = inspect.signature(function), function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
            for name in absent.keys() & kwargs.keys():
                value = kwargs.pop(name)
                if not _is_default(value, absent[name].defaults):
                    raise FleetError(f"{shown}({name}={value!r:.80}): {absent[name].reason}")
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(
                    f"{shown}: {error}. In torchfleet it is {shown}{signature}. Arguments of Paddle's that are not in "
                    f"it: {', '.join(f'{name} ({absent[name].reason})' for name in absent)}"
                ) from None
            return function(*args, **kwargs)

        return call

    return decorate


def _is_default(value: object, defaults: tuple[Any, ...]) -> bool:
    """By identity: values may be arrays, which cannot be compared."""
    module = value.__name__ if inspect.ismodule(value) else None
    return any(value is default or (module is not None and module == default) for default in defaults)


class WithPaddleNames:
    """A class whose errors about unknown attributes say what takes the place of Paddle's."""

    _PADDLE_NAMES: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # with this method, type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            way = self._PADDLE_NAMES.get(name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}" + (f": {way}" if way else ""),
                name=name,
                obj=self,
            )
