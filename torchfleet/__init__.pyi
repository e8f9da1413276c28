"""The public names, once: torchfleet/__init__.py reads this file, and so do type checkers and editors."""

from . import (
    callbacks as callbacks,
)
from . import (
    data as data,
)
from . import (
    lightning as lightning,
)
from . import (
    metrics as metrics,
)
from . import (
    nn as nn,
)
from . import (
    notebook as notebook,
)
from . import (
    online as online,
)
from . import (
    ray as ray,
)
from . import (
    transformers as transformers,
)
from . import (
    util as util,
)
from .api.datasets import InMemoryDataset as InMemoryDataset
from .api.datasets import QueueDataset as QueueDataset
from .api.distributing import (
    distributed_model as distributed_model,
)
from .api.distributing import (
    distributed_optimizer as distributed_optimizer,
)
from .api.distributing import (
    distributed_scheduler as distributed_scheduler,
)
from .api.infer import DistributedInfer as DistributedInfer
from .api.infer import load_inference_model as load_inference_model
from .api.job_life import (
    add_callback as add_callback,
)
from .api.job_life import (
    init as init,
)
from .api.job_life import (
    init_server as init_server,
)
from .api.job_life import (
    init_worker as init_worker,
)
from .api.job_life import (
    reset as reset,
)
from .api.job_life import (
    run_server as run_server,
)
from .api.job_life import (
    stop_worker as stop_worker,
)
from .api.prepare_job import prepare as prepare
from .api.process_role import (
    barrier_worker as barrier_worker,
)
from .api.process_role import (
    data_shard as data_shard,
)
from .api.process_role import (
    first_step as first_step,
)
from .api.process_role import (
    is_first_worker as is_first_worker,
)
from .api.process_role import (
    is_server as is_server,
)
from .api.process_role import (
    is_worker as is_worker,
)
from .api.process_role import (
    server_endpoints as server_endpoints,
)
from .api.process_role import (
    server_index as server_index,
)
from .api.process_role import (
    server_num as server_num,
)
from .api.process_role import (
    worker_endpoints as worker_endpoints,
)
from .api.process_role import (
    worker_index as worker_index,
)
from .api.process_role import (
    worker_num as worker_num,
)
from .api.saves import (
    load as load,
)
from .api.saves import (
    save as save,
)
from .api.saves import (
    save_inference_model as save_inference_model,
)
from .api.saves import (
    save_persistables as save_persistables,
)
from .api.saves import (
    saved_extra as saved_extra,
)
from .api.saves import (
    stop_if_asked as stop_if_asked,
)
from .api.table_calls import (
    describe as describe,
)
from .api.table_calls import (
    flush as flush,
)
from .api.table_calls import (
    replica as replica,
)
from .api.table_calls import (
    set_time as set_time,
)
from .api.table_calls import (
    shrink as shrink,
)
from .api.table_calls import (
    stats as stats,
)
from .api.table_calls import (
    whole_tables as whole_tables,
)
from .api.to_plain import to_plain as to_plain
from .api.training_passes import (
    epochs as epochs,
)
from .api.training_passes import (
    infer_from_dataset as infer_from_dataset,
)
from .api.training_passes import (
    prefetch as prefetch,
)
from .api.training_passes import (
    report as report,
)
from .api.training_passes import (
    split_files as split_files,
)
from .api.training_passes import (
    train_from_dataset as train_from_dataset,
)
from .base.errors import FleetError as FleetError
from .base.fetch import FetchHandler as FetchHandler
from .base.role import PaddleCloudRoleMaker as PaddleCloudRoleMaker
from .base.role import UserDefinedRoleMaker as UserDefinedRoleMaker
from .base.strategy.distributed_strategy import DistributedStrategy as DistributedStrategy
from .base.strategy.execution import BuildStrategy as BuildStrategy
from .base.strategy.execution import ExecutionStrategy as ExecutionStrategy
from .collective.pipeline.stages import device_guard as device_guard
from .data.reading.criteo import CriteoFormat as CriteoFormat
from .data.reading.generator import (
    MultiSlotDataGenerator as MultiSlotDataGenerator,
)
from .data.reading.generator import (
    MultiSlotStringDataGenerator as MultiSlotStringDataGenerator,
)
from .data.reading.parquet import ParquetFormat as ParquetFormat
from .data.reading.string_hash import hash_string as hash_string
from .data.slots import Ragged as Ragged
from .data.slots import Slot as Slot
from .ps.tables.settings.policy import (
    CountFilterEntry as CountFilterEntry,
)
from .ps.tables.settings.policy import (
    PredicateEntry as PredicateEntry,
)
from .ps.tables.settings.policy import (
    ProbabilityEntry as ProbabilityEntry,
)
from .ps.tables.settings.policy import (
    ShowClickEntry as ShowClickEntry,
)
from .ps.tables.settings.policy import (
    Shrink as Shrink,
)
from .ps.tables.settings.policy import (
    WindowCountEntry as WindowCountEntry,
)

__version__: str
