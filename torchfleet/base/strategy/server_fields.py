"""The fields for training with parameter servers: the mode, its dictionary and timeouts. docs/modes/ explains each."""

from __future__ import annotations

from typing import Any

from torchfleet.base.errors import StrategyError
from torchfleet.base.pages import page
from torchfleet.base.strategy.configs import Configs, ConfigsField
from torchfleet.base.strategy.fields import Field, Fields, Key, Value, fields_of

_WEEK = 7 * 24 * 3600.0  # MAX_BARRIER_SECONDS of a server, which refuses longer waits
# The modes in which a key of a_sync_configs applies, if not all. Hybrid mode sends rows as async mode does.
ACTS_IN = {
    "hybrid_keep_seconds": ("hybrid",),
    "exchange": ("hybrid",),
    "balance": ("hybrid",),
    "quorum": ("hybrid",),
    "quorum_max_age": ("hybrid",),
    "max_merge_var_num": ("async", "hybrid"),
    "send_queue_size": ("async", "hybrid"),
    "independent_recv_thread": ("async",),
    "min_send_grad_num_before_recv": ("async",),
    "thread_pool_size": ("async", "hybrid"),
    "send_wait_times": ("async", "hybrid"),
    "max_staleness": ("async",),
    "gather": ("async", "half_async"),
    "gather_max_age": ("async", "half_async"),
}
# Keys of a_sync_configs that must be equal on all workers of a job. The others configure a worker's own threads.
SHARED_KEYS = (
    *("k_steps", "half_async", "hybrid", "exchange", "balance", "quorum", "quorum_max_age"),
    *("max_staleness", "gather", "gather_max_age", "launch_barrier"),
)
# Values of `exchange`: how the network travels in hybrid mode. AUTO is resolved when a worker starts.
AUTO, SERVERS, RANKS = "auto", "servers", "ranks"
# Value of max_staleness: the bound is the number of workers, unless another setting excludes a bound.
NUM_WORKERS = -1
# Keys of the queue between the training thread and the sending threads.
_QUEUE = (
    *("max_merge_var_num", "send_queue_size", "independent_recv_thread", "min_send_grad_num_before_recv"),
    *("thread_pool_size", "send_wait_times"),
)


class AsyncConfigs(Configs, field="a_sync_configs"):
    k_steps = Key(0, at_least=0)
    half_async = Key(False)
    hybrid = Key(False)
    hybrid_keep_seconds = Key(10.0, at_least=0.0)  # seconds between two copies of the network to the servers
    exchange = Key(AUTO, choices=(AUTO, SERVERS, RANKS))
    balance = Key(False)  # batches follow the measured speeds of the workers
    quorum = Key(0, at_least=0, at_most=1 << 16)  # a step is made when this many workers have come; 0: all
    quorum_max_age = Key(
        4, at_least=0, at_most=1 << 20
    )  # steps by which a gradient may be late; older ones are dropped
    max_merge_var_num = Key(1, at_least=1)
    send_queue_size = Key(2, at_least=1)  # Paddle: 16, with which staleness can exceed the number of workers
    independent_recv_thread = Key(False)
    min_send_grad_num_before_recv = Key(1, at_least=1)
    thread_pool_size = Key(1, at_least=1)
    send_wait_times = Key(1, at_least=0)
    max_staleness = Key(NUM_WORKERS, at_least=NUM_WORKERS)  # 0: no bound
    gather = Key(1, at_least=0, at_most=1024)  # 0, 1: every push is an update; at_most: MAX_GATHERED of a server
    gather_max_age = Key(4, at_least=0)
    launch_barrier = Key(True)
    heter_worker_device_guard = Key("cpu")

    def _check_together(self) -> None:
        if self.k_steps and self.half_async:
            raise StrategyError(
                "a_sync_configs: k_steps > 0 is geo training and half_async is another mode. Choose one of them."
            )
        if self.hybrid and (self.k_steps or self.half_async):
            other = f"k_steps={self.k_steps}, geo training," if self.k_steps else "half_async"
            raise StrategyError(f"a_sync_configs: hybrid and {other} are different modes. Choose one of them.")
        if self.quorum and self.balance:
            raise StrategyError(
                f"a_sync_configs: quorum={self.quorum} goes on without slow workers, and balance gives them smaller "
                "batches so that all come at the same time. Choose one of them."
            )
        for name in self._queued() if self.max_staleness > 0 else ():
            raise StrategyError(
                f"a_sync_configs['max_staleness']={self.max_staleness} awaits each push before the next step, so "
                f"that '{name}'={self[name]} would do nothing. Leave one of them out."
            )
        if self.gather > 1 and self.max_staleness > 0:
            raise StrategyError(
                f"a_sync_configs: gather={self.gather} drops what is older than gather_max_age, and "
                f"max_staleness={self.max_staleness} makes workers wait instead. Choose one of them."
            )
        if self.gather > 1 and self.max_merge_var_num > 1:
            raise StrategyError(
                f"a_sync_configs: gather={self.gather} takes the mean of pushes, and "
                f"max_merge_var_num={self.max_merge_var_num} sums steps into one. Choose one of them."
            )
        if self.heter_worker_device_guard not in ("cpu", "gpu"):
            raise StrategyError(
                f"a_sync_configs['heter_worker_device_guard']={self.heter_worker_device_guard!r}: expected 'gpu', "
                f"whose blocks heter workers compute ({page('heter')}), or 'cpu', Paddle's default, which "
                "changes nothing"
            )

    def bound(self, num_workers: int) -> int:
        """Return the bound on the staleness of the network in async mode; 0: no bound."""
        if self.max_staleness != NUM_WORKERS:
            return self.max_staleness
        return 0 if self.gather > 1 or self._queued() else num_workers

    def _queued(self) -> list[str]:
        """The keys of the queue that are set. With a bound, the queue is not used."""
        return [name for name in _QUEUE if self[name] != fields_of(AsyncConfigs)[name].default]


class PositiveField(Field[Value]):
    """A number of tries (0 or more) or of seconds (more than 0), up to `at_most`."""

    def checked(self, where: str, value: Any) -> Value:
        kept = self._of_type(where, value)
        if kept < 0 or (isinstance(kept, float) and kept == 0):
            raise StrategyError(f"{where} cannot be {value!r}: it must be positive")
        if not kept <= self.at_most:  # written so that NaN is refused too
            raise StrategyError(f"{where} must be at most {self.at_most:g}, found {value!r}")
        return kept  # type: ignore[no-any-return]


class ServerFields(Fields):
    """The fields of DistributedStrategy for training with parameter servers."""

    a_sync = Field(False)
    a_sync_configs = ConfigsField(AsyncConfigs)
    rpc_retry_times = PositiveField(3, at_most=1000)
    rpc_timeout = PositiveField(30.0, at_most=_WEEK)
    sync_timeout = PositiveField(1800.0, at_most=_WEEK)
    sync_mean = Field("samples", choices=("samples", "workers"))
