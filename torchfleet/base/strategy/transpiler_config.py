"""DistributeTranspilerConfig: the strategy of Paddle Fleet 1.5 to 1.8, which becomes a DistributedStrategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.strategy.execution import ObjectFields
from torchfleet.base.strategy.fields import Field

_SERVERS = "servers decide by themselves which of them holds what"
_COLLECTIVE = "it is for collective jobs: use fleet.init(is_collective=True) and a fleet.DistributedStrategy"


class DistributeTranspilerConfig(ObjectFields):
    """The mode of a job with servers, by the names of Paddle 1.5 to 1.8. fleet.init and distributed_optimizer take it
    in place of a DistributedStrategy.

    - `sync_mode`: True: sync. False: async; geo and half_async by the next three fields.
    - `geo_sgd_mode`: geo. `geo_sgd_need_push_nums`: steps between two exchanges, a_sync_configs["k_steps"].
    - `half_async`: half_async.
    - `runtime_split_send_recv`: True needs sync_mode=False, as in Paddle. Workers send through a communicator either
      way.
    """

    sync_mode = Field(True)
    runtime_split_send_recv = Field(False)
    half_async = Field(False)
    geo_sgd_mode = Field(False)
    geo_sgd_need_push_nums = Field(100, at_least=1)
    completely_not_async = Field(False, only="use sync_mode=True")
    enable_dc_asgd = Field(False, only="use a_sync_configs['max_staleness'] of a fleet.DistributedStrategy")
    slice_var_up = Field(True, only=_SERVERS)
    min_block_size = Field(8192, only=_SERVERS)
    wait_port = Field(True, only="workers always wait for servers; FLEET_START_TIMEOUT says how long")
    mode = Field("pserver", only=_COLLECTIVE)
    nccl_comm_num = Field(1, only=_COLLECTIVE)
    use_hierarchical_allreduce = Field(False, only=_COLLECTIVE)
    hierarchical_allreduce_inter_nranks = Field(0, only=_COLLECTIVE)
    print_log = Field(False, only="use PSERVER_DEBUG=1 or fleetrun --verbose")

    _OWN = ("_used_by",)
    _PADDLE_NAMES: ClassVar[Mapping[str, str]] = {
        "geo_sgd_need_push_num": "geo_sgd_need_push_nums",
        "split_method": f"nothing: {_SERVERS}",
        "collective_mode": _COLLECTIVE,
    }

    def __init__(self, /, **fields: Any) -> None:
        self._used_by = ""
        super().__init__(**fields)

    def as_strategy(self, user: str) -> DistributedStrategy:
        """The same settings as a DistributedStrategy. After this, changes raise an error that names `user`.

        Raises StrategyError for fields that contradict each other.
        """
        for name in ("runtime_split_send_recv", "half_async", "geo_sgd_mode"):
            if self.sync_mode and getattr(self, name):
                raise StrategyError(f"{name}=True needs sync_mode=False: it is a form of asynchronous training")
        if self.half_async and self.geo_sgd_mode:
            raise StrategyError("half_async=True and geo_sgd_mode=True are different modes: choose one of them")
        self._used_by = user
        k_steps = self.geo_sgd_need_push_nums if self.geo_sgd_mode else 0
        configs = {"k_steps": k_steps, "half_async": self.half_async}
        return DistributedStrategy(a_sync=not self.sync_mode, a_sync_configs=configs)

    def _assign(self, name: str, value: Any) -> None:
        if self._used_by:
            raise StrategyError(f"{name}: these settings were used by {self._used_by} and can no longer change")
        super()._assign(name, value)
