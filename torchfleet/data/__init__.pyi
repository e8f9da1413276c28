"""The names of fleet.data, once: data/__init__.py reads this file, and so do type checkers and editors."""

from torchfleet.api import negatives as negatives
from torchfleet.api.datasets import from_arrow as from_arrow, from_parquet as from_parquet, from_ray as from_ray
from torchfleet.data.feature_file import FeatureFile as FeatureFile, read_features as read_features
from torchfleet.data.queue_dataset import FileBatches as FileBatches
from torchfleet.data.reading.criteo import CriteoFormat as CriteoFormat
from torchfleet.data.reading.generator import (
    MultiSlotDataGenerator as MultiSlotDataGenerator,
    MultiSlotStringDataGenerator as MultiSlotStringDataGenerator,
)
from torchfleet.data.reading.parquet import ParquetFormat as ParquetFormat
from torchfleet.data.reading.string_hash import hash_string as hash_string
from torchfleet.data.slots import Batch as Batch, Ragged as Ragged, Slot as Slot
from torchfleet.ps.worker.batch.string_ids import hash_strings as hash_strings
