"""A hybrid-mode worker whose network is exchanged through the servers: rounds, joining workers, uneven machines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchfleet.api.hybrid.dense_network import DenseNetwork
from torchfleet.api.hybrid.even_shares import Recut, Shares
from torchfleet.api.hybrid.exchange_choice import network_device
from torchfleet.api.hybrid.hybrid_optimizer import HybridOptimizer
from torchfleet.api.hybrid.hybrid_worker import HybridWorker
from torchfleet.api.hybrid.kept_network import KeptNetwork
from torchfleet.api.hybrid.lone_world import LoneWorld
from torchfleet.api.hybrid.network_copy import NetworkCopy, receive_copy, send_copy
from torchfleet.api.hybrid.quorum_rounds import QuorumRounds
from torchfleet.api.hybrid.server_average import ServerAverage
from torchfleet.api.hybrid.server_rounds import ServerRounds
from torchfleet.base.errors import StrategyError, WorkerMissing
from torchfleet.base.monitor.notices import tell
from torchfleet.base.monitor.stop_request import stop_request
from torchfleet.base.role.role_info import LOSS_END, RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.data.file_passes import END, HELD, is_batch, look_ahead
from torchfleet.ps.net.wire import Array
from torchfleet.ps.worker.batch.sample_count import SampleCount
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.peers import Workers

_MARGIN = 2.0  # seconds beyond the time-out of a worker that may have been lost while it sent the network
_MOST_TRIES = 5  # to get the network from another worker
_PAUSE, _MAX_PAUSE = 0.02, 1.0  # seconds between two questions for the others' network; the pause doubles


class RoundWorker(HybridWorker):
    """As HybridWorker, without a process group: the servers know who takes part."""

    meets_at_end = False

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: HybridOptimizer,
        settings: DistributedStrategy,
        info: RoleInfo,
        client: Client,
        own_client: Client,
    ) -> None:
        """`own_client`: used by the exchange alone, and closed by `close`."""
        plan, configs = optimizer.plan, settings.a_sync_configs
        self._plan, self._info = plan, info
        self._others = Workers(own_client, info.worker_index, info.num_workers, settings.sync_timeout)
        self._model, self._client, self._own_client, self._is_first = model, client, own_client, info.worker_index == 0
        self._is_apart = info.on_worker_loss != LOSS_END or configs.quorum > 0
        self.rounds = _rounds(settings, info, own_client)
        samples = SampleCount(model, info.worker_index) if settings.sync_mean == "samples" else None
        self._average = ServerAverage(settings, self.rounds, samples, self._enter)
        world = LoneWorld(info, settings, network_device(plan))
        self._network = DenseNetwork(model, optimizer.user, plan, settings, info, world, self._average)
        self._kept = KeptNetwork(plan, self._network.optimizer, self._network.owns_state, configs.hybrid_keep_seconds)
        self._kept.take(client)
        self._copy = NetworkCopy(model, self._network.optimizer)
        self._shares = Shares(info.worker_index) if configs.balance else None
        if self._shares is not None:
            self._average.row_share = self._row_share
        optimizer.join(self._network)

    def agreed(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The batches of a loop. In training, a worker without a batch leaves the rounds, and the others go on; the
        loops of all workers end together, or each by itself if workers may be lost or rounds have a quorum.
        """
        if not (torch.is_grad_enabled() and self._model.training):
            return loader
        return RoundLoop(self, iter(loader) if self._shares is None else Recut(loader, self._shares))

    def has_any_one(self, batch: Any) -> bool:
        """Whether any worker has a first batch. Workers whose loops end together call it together."""
        if self.is_apart:
            return True
        flags = self._others.gather("hybrid loop", b"1" if is_batch(batch) else b"0")
        return b"1" in flags

    def stand_aside(self, is_new: bool) -> None:
        """There is no batch for this worker at present: the others do not wait for it in rounds from now on.

        `is_new`: it has had none in this loop. The others then wait for it at the entrance, if all workers begin
        together: in every loop, or (if workers may be lost) before the first round.
        """
        rounds, is_elastic = self.rounds, self._info.is_elastic
        is_awaited = not rounds.num_made and not is_elastic if self._is_apart else is_new
        if rounds.is_in or is_awaited:
            self._average.give_nothing()
            self._leave_copy()

    def end_loop(self, is_new: bool) -> None:
        """This worker's batches have ended: leave the rounds. If the loops of all workers end together, wait for the
        others, and take their network."""
        self.batch_given(False)
        if self.rounds.is_in and self.rounds.is_end:
            return
        self.stand_aside(is_new)
        if not self.is_apart and not self.rounds.is_in and (self.rounds.workers or self.rounds.is_behind):
            self._take_others_network()

    def _take_others_network(self) -> None:
        """Wait until the last of the other workers has left the rounds, and take the network that it leaves."""
        pause = _PAUSE
        while not (copy := self.rounds.newer_copy()):
            server = self._own_client.stats()[0]
            lost = [worker["worker"] for worker in server["workers"] if worker["is_lost"]]
            if lost:
                raise WorkerMissing(
                    f"hybrid mode: worker {self._info.worker_index} has no more batches and waits for the others' "
                    f"network, and no heartbeat comes from worker {', '.join(map(str, lost))}. Look at its log."
                )
            if stop_request.was_seen() or not set(server["members"]["expected"]) - {self._info.worker_index}:
                return  # the others have made their last step, outside of such a loop
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        self._copy.restore_pieces(copy)

    def step_made(self) -> None:
        """Send the network to workers that join, and copy it to the servers from time to time."""
        self._send_network()
        self._leave_copy()
        if self._shares is not None:
            self._shares.note(self.rounds.told)
        if not self.rounds.is_missed:
            super().step_made()

    def _leave_copy(self) -> None:
        """If this worker is the last one to leave the rounds, leave its network with the servers."""
        if self.rounds.leaves_copy:
            self.rounds.leaves_copy = False
            number = self.rounds.number - 1
            self._own_client.leave_network(number, [piece[0] for piece in self._copy.pieces(number, [])])

    def put_network(self) -> None:
        """Copy the newest network to the servers: this worker's or, if others went on after it left, theirs."""
        if not self.rounds.is_in and self.rounds.num_made:
            copy = self.rounds.newer_copy()
            if copy:
                self._copy.restore_pieces(copy)
        super().put_network()

    def meet(self, what: str) -> None:
        """Do nothing: the servers know which workers wait for each other."""

    def close(self, alone: bool = False) -> None:
        """Take no further part in rounds. Later calls do nothing."""
        self._average.close()
        self._network.close()
        self._own_client.close()

    def stats(self) -> dict[str, Any]:
        """Statistics of the exchange, for fleet.stats()."""
        rounds = self.rounds
        own: dict[str, Any] = {}
        if isinstance(rounds, QuorumRounds):
            own = {"on_time": rounds.num_on_time, "late": rounds.num_late, "dropped": rounds.num_dropped}
            own |= {"missed": rounds.num_missed, "samples_dropped": rounds.samples_dropped}
        return {
            **own, "rounds": rounds.num_made, "computed": self._average.seconds, "waited": rounds.seconds,
            "slowest": self._average.seconds_behind, "bytes": rounds.num_bytes, "again": rounds.num_again,
            "workers": list(rounds.workers),
        }  # fmt: skip

    def _row_share(self) -> float:
        return 1.0 if self._shares is None else self._shares.row_share(self.rounds.told)

    def _enter(self) -> None:
        """Take part in rounds, beginning with the network of the workers that already do."""
        for _ in range(_MOST_TRIES):
            entered, copy = self.rounds.enter()
            if not entered.holders:
                self._take_servers_copy(copy)
                return
            if self._info.worker_index in entered.holders:
                self._send_network()
                return
            topic = _topic(entered.round, self._info.worker_index)
            found = receive_copy(self._own_client, self._info.worker_index, topic, self._info.worker_timeout + _MARGIN)
            if found is not None:
                self._copy.restore(*found)
                self.rounds.begin(found[0].round, found[0].workers)
                return
            tell("hybrid mode: the worker that was to send the network has not; asking another one")
        raise WorkerMissing(
            f"hybrid mode: asked {_MOST_TRIES} times for the network, and no worker has sent it. Look at the logs of "
            "the others."
        )

    def _take_servers_copy(self, copy: list[Array]) -> None:
        """Begin with the copy that the last workers have left with the servers, else with the tables' values."""
        if copy:
            self._copy.restore_pieces(copy)
            return
        for dense in (*self._plan.dense, *self._plan.fixed):
            dense.write(self._client.pull_dense(dense.spec.name).result())
        self._kept.take(self._client)

    def _send_network(self) -> None:
        newcomers, self.rounds.newcomers = self.rounds.newcomers, []
        seconds = self._info.worker_timeout
        for worker in newcomers:
            pieces = self._copy.pieces(self.rounds.number, self.rounds.workers)
            topic = _topic(self.rounds.number, worker)
            if not send_copy(self._own_client, worker, topic, pieces, seconds):
                tell(
                    f"hybrid mode: worker {worker} did not fetch the copy of the network within {seconds:g} s; it asks "
                    "again if it still runs"
                )

    def batch_given(self, is_last: bool) -> None:
        """The training loop gets a batch. `is_last`: this worker has none after it."""
        self._average.is_last = is_last

    @property
    def is_apart(self) -> bool:
        """Whether the loop of each worker ends by itself."""
        return self._is_apart


class RoundLoop:
    """The batches of one training loop, read one ahead, so that the last batch is known when the loop gets it."""

    def __init__(self, worker: RoundWorker, source: Iterator[Any]) -> None:
        self._worker, self._source = worker, source
        self._ahead = look_ahead(source, 0)
        self._num_read = self._num_given = 0
        self._is_new = True  # this worker has taken no part in rounds in this loop
        self._is_over = not worker.has_any_one(self._ahead)

    def __iter__(self) -> RoundLoop:
        return self

    def __next__(self) -> Any:
        """The next batch. All batches before it have been trained."""
        if self._ahead is HELD:
            if not self._is_over:
                self._worker.stand_aside(self._is_new)
                self._is_new = False
            self._ahead = next(self._source, END)
        if self._ahead is END:
            if not self._is_over:
                self._is_over = True
                self._worker.end_loop(self._is_new)
            raise StopIteration
        self._is_over = self._is_new = False
        return self._take()

    def ready(self) -> Any | None:
        """The next batch, while the one before it is in use; None if there is none at present."""
        return self._take() if is_batch(self._ahead) else None

    def given(self) -> None:
        """Called when the training loop gets a batch."""
        self._num_given += 1
        self._worker.batch_given(self._ahead is END and self._num_given == self._num_read)

    def _take(self) -> Any:
        batch = self._ahead
        self._num_read += 1
        self._ahead = look_ahead(self._source, self._num_read - self._num_given + 1)
        return batch


def _rounds(settings: DistributedStrategy, info: RoleInfo, client: Client) -> ServerRounds:
    """Raises StrategyError if the quorum does not fit the job."""
    timeout, configs = settings.sync_timeout + settings.rpc_timeout, settings.a_sync_configs
    if not configs.quorum:
        return ServerRounds(client, info.worker_index, timeout)
    if configs.quorum > info.num_workers:
        raise StrategyError(
            f"a_sync_configs['quorum']={configs.quorum}: a round would wait for more workers than the job has, which "
            f"are {info.num_workers}. Set it to {info.num_workers} or less, or to 0 to wait for all."
        )
    if settings.gradient_merge:
        raise StrategyError(
            f"a_sync_configs['quorum']={configs.quorum} and gradient_merge=True: a worker that is late would gather "
            "gradients of two networks. Leave one of them out."
        )
    rounds = QuorumRounds(client, info.worker_index, timeout)
    rounds.quorum, rounds.max_age = configs.quorum, configs.quorum_max_age
    return rounds


def _topic(number: int, worker: int) -> str:
    return f"network for worker {worker} in round {number}"
