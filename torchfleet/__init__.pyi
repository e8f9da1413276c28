"""The public names, once: torchfleet/__init__.py reads this file, and so do type checkers and editors."""

from torchfleet import (
    callbacks as callbacks,
    data as data,
    elastic as elastic,
    lightning as lightning,
    metrics as metrics,
    nn as nn,
    notebook as notebook,
    online as online,
    optim as optim,
    ray as ray,
    transformers as transformers,
    util as util,
)
from torchfleet.api.datasets import (
    DatasetFactory as DatasetFactory,
    InMemoryDataset as InMemoryDataset,
    QueueDataset as QueueDataset,
)
from torchfleet.api.distributing import (
    distributed_model as distributed_model,
    distributed_optimizer as distributed_optimizer,
    distributed_scheduler as distributed_scheduler,
)
from torchfleet.api.infer import DistributedInfer as DistributedInfer, load_inference_model as load_inference_model
from torchfleet.api.job_life import (
    add_callback as add_callback,
    init as init,
    init_server as init_server,
    init_worker as init_worker,
    reset as reset,
    run_heter_worker as run_heter_worker,
    run_server as run_server,
    stop_worker as stop_worker,
)
from torchfleet.api.prepare.prepare_job import prepare as prepare
from torchfleet.api.process_role import (
    barrier_worker as barrier_worker,
    data_shard as data_shard,
    device as device,
    first_step as first_step,
    heter_worker_num as heter_worker_num,
    is_first_worker as is_first_worker,
    is_heter_worker as is_heter_worker,
    is_server as is_server,
    is_worker as is_worker,
    server_endpoints as server_endpoints,
    server_index as server_index,
    server_num as server_num,
    worker_endpoints as worker_endpoints,
    worker_index as worker_index,
    worker_num as worker_num,
)
from torchfleet.api.row_passes import begin_pass as begin_pass, end_pass as end_pass
from torchfleet.api.job_state import load_state as load_state, save_state as save_state
from torchfleet.api.saves import (
    load as load,
    replace_features as replace_features,
    save as save,
    save_inference_model as save_inference_model,
    save_persistables as save_persistables,
    saved_extra as saved_extra,
    stop_if_asked as stop_if_asked,
)
from torchfleet.api.table_calls import (
    describe as describe,
    flush as flush,
    set_time as set_time,
    shrink as shrink,
    stats as stats,
    whole_tables as whole_tables,
)
from torchfleet.api.to_plain import to_plain as to_plain
from torchfleet.api.training_passes import (
    epochs as epochs,
    infer_from_dataset as infer_from_dataset,
    prefetch as prefetch,
    report as report,
    split_files as split_files,
    train_from_dataset as train_from_dataset,
)
from torchfleet.apps.nearest_items import build_index as build_index, load_index as load_index
from torchfleet.base.device_guard import device_guard as device_guard
from torchfleet.base.errors import FleetError as FleetError
from torchfleet.base.fetch import FetchHandler as FetchHandler
from torchfleet.base.role.role_makers import (
    PaddleCloudRoleMaker as PaddleCloudRoleMaker,
    UserDefinedRoleMaker as UserDefinedRoleMaker,
)
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy as DistributedStrategy
from torchfleet.base.strategy.execution import BuildStrategy as BuildStrategy, ExecutionStrategy as ExecutionStrategy
from torchfleet.base.strategy.transpiler_config import DistributeTranspilerConfig as DistributeTranspilerConfig
from torchfleet.data.features import Feature as Feature
from torchfleet.data.reading.criteo import CriteoFormat as CriteoFormat
from torchfleet.data.reading.generator import (
    MultiSlotDataGenerator as MultiSlotDataGenerator,
    MultiSlotStringDataGenerator as MultiSlotStringDataGenerator,
)
from torchfleet.data.reading.parquet import ParquetFormat as ParquetFormat
from torchfleet.data.reading.string_hash import hash_string as hash_string
from torchfleet.data.slots import Ragged as Ragged, Slot as Slot
from torchfleet.ps.tables.settings.policy import (
    CountFilterEntry as CountFilterEntry,
    PredicateEntry as PredicateEntry,
    ProbabilityEntry as ProbabilityEntry,
    ShowClickEntry as ShowClickEntry,
    Shrink as Shrink,
    WindowCountEntry as WindowCountEntry,
)
from torchfleet.ps.tables.settings.storage import Tiered as Tiered
from torchfleet.ps.worker.batch.string_ids import hash_strings as hash_strings

__version__: str
