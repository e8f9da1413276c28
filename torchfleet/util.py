"""fleet.util: exchange among workers and servers, shards of files, printing on one worker."""

from __future__ import annotations

from torchfleet.api.util import all_gather, all_reduce, as_array, barrier, get_file_shard, print_on_rank
from torchfleet.base.lazy_names import nearest

__all__ = ["all_gather", "all_reduce", "as_array", "barrier", "get_file_shard", "print_on_rank"]
__getattr__ = nearest(__name__, __all__)
