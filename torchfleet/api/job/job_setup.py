"""Model, optimizer and strategy of a process in a job with servers, and the tables that follow from them."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from torchfleet.api.hybrid.hybrid_optimizer import HybridOptimizer
from torchfleet.api.job.printing import embeddings
from torchfleet.api.job.row_caches import check_caches
from torchfleet.base.errors import FleetError, ModelError, StrategyError
from torchfleet.base.monitor.notices import tell
from torchfleet.base.pages import page
from torchfleet.base.role.role_info import WORKER, RoleInfo
from torchfleet.base.storage import Storage
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.data.model_features import ModelFeatures
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.tables.rows.row_statistics import is_counted
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.row_format import FLOAT32
from torchfleet.ps.worker.distributed_optimizer import DistributedOptimizer
from torchfleet.ps.worker.embedding.conversion import check_on_servers, convert
from torchfleet.ps.worker.embedding.embedding_choice import Sparse, choose, saved_as_tables
from torchfleet.ps.worker.global_schedules import count_globally
from torchfleet.ps.worker.lookup.optimizer_rules import has_plain_decay
from torchfleet.ps.worker.lookup.plan import Plan, make_plan, make_share, whole_plan


class JobSetup:
    """The setup of a job with servers, before the process becomes a worker or a server. It is the same on all
    processes.
    """

    def __init__(self, info: RoleInfo, strategy: DistributedStrategy | None) -> None:
        self.info = info
        self.strategy = strategy
        self.model: torch.nn.Module | None = None
        self.optimizers: list[DistributedOptimizer] = []
        self.features = ModelFeatures()
        self._plan: Plan | None = None  # set on first use, after which no more optimizers can be added
        self._strategy_before = strategy  # the strategy before the last call of `use`

    def use(self, strategy: DistributedStrategy | None, user: str) -> None:
        """Set the strategy. init and distributed_optimizer may both receive it, but not with different settings."""
        if strategy is not None and self.strategy is not None and strategy != self.strategy:
            raise StrategyError(
                f"{user}: this strategy differs from the one given earlier. Pass one strategy, to fleet.init or here."
            )
        self._strategy_before = self.strategy
        self.strategy = strategy or self.strategy

    def distribute_model(self, model: torch.nn.Module, sparse: Sparse = None, dry_batch: Any = None) -> torch.nn.Module:
        if dry_batch is not None:
            raise ModelError(
                "fleet.distributed_model(dry_batch=...) is for pipelines of collective training, and this job has "
                "servers: leave it out"
            )
        if self.model is not None:
            raise ModelError(
                "fleet.distributed_model was called before: a job has one model; fleet.init() begins another"
            )
        check_on_servers(model)
        choice = choose(model, sparse)
        self.model = convert(model, choice)
        if self.info.role == WORKER and self.info.worker_index == 0 and (choice.chosen or choice.dense):
            print(embeddings(choice), flush=True)
        return self.model

    def distribute_saved_model(self, model: torch.nn.Module, dirname: str) -> None:
        """Like `distribute_model`, for the embeddings that are tables in the saved model."""
        tables = read_manifest(Storage(dirname)).tables
        self.model = convert(model, saved_as_tables(model, {table.name for table in tables if not table.is_dense}))

    def distribute_for_prediction(self) -> None:
        """Create tables without optimizer state, since nothing will be trained."""
        assert self.model is not None
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.strategy = DistributedStrategy(a_sync=True, a_sync_configs={"half_async": True})
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        plan = make_plan(self.model, optimizer, self.info.num_servers)
        for group in plan.sparse.values():  # nothing is admitted, and without training nothing may be dropped
            group.spec = msgspec.structs.replace(group.spec, entry=AdmissionEntry(), shrink=Shrink())
        self.optimizers, self._plan = [DistributedOptimizer(optimizer, plan)], plan

    def distribute_optimizer(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
        if self.model is None:
            raise ModelError("call fleet.distributed_model(model) before fleet.distributed_optimizer")
        if self._plan is not None:
            raise ModelError(
                "fleet.distributed_optimizer: the tables were already created (as init_worker and init_server do): "
                "call distributed_optimizer for all optimizers first"
            )
        strategy = self.strategy or DistributedStrategy()
        try:
            made = self._distributed(self.model, optimizer, strategy)
        except BaseException:  # restore the state, so that the caller can retry with another optimizer or strategy
            if not self.optimizers:
                strategy.unlock()
                self.strategy = self._strategy_before
            raise
        self.strategy = strategy
        self.optimizers.append(made)
        return made

    def _distributed(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: DistributedStrategy
    ) -> DistributedOptimizer:
        strategy.freeze("fleet.distributed_optimizer")
        is_hybrid = strategy.mode == "hybrid"
        if self.optimizers:
            _check_several(strategy)
        shares = [other.plan for other in self.optimizers]
        plan = make_share(model, optimizer, self.info.num_servers, is_hybrid, shares)
        if strategy.mode == "geo" and not isinstance(optimizer, torch.optim.SGD):
            raise StrategyError(
                f"geo training (k_steps={strategy.a_sync_configs['k_steps']}) sums differences and works with SGD "
                f"only, found {type(optimizer).__name__}. Use torch.optim.SGD, or k_steps=0 for async training."
            )
        _check_policies(plan, strategy.mode)
        check_caches(plan, strategy, self.info)
        if self.info.role == WORKER and self.info.worker_index == 0:
            _tell_of_decay(plan)
            _tell_of_momentum(plan)
        if is_hybrid:
            return HybridOptimizer(optimizer, plan)
        return DistributedOptimizer(optimizer, plan, len(shares), has_network=strategy.mode == "geo")

    def distribute_scheduler(self, scheduler: Any) -> Any:
        """In geo mode, let each step of the scheduler count once per worker. In other modes it is unchanged."""
        if self.strategy is None:
            raise FleetError(
                "fleet.distributed_scheduler needs to know the strategy: call fleet.distributed_optimizer before it, "
                "or give the strategy to fleet.init"
            )
        if self.strategy.mode == "geo":
            count_globally(scheduler, lambda: self.num_workers)
        return scheduler

    @property
    def num_workers(self) -> int:
        """Workers of the job; of an elastic job, the present ones as far as known."""
        return self.info.num_workers

    @property
    def plan(self) -> Plan:
        if self.model is None or not self.optimizers:
            raise FleetError("call fleet.distributed_model and fleet.distributed_optimizer before this")
        if self._plan is None:
            shares = [optimizer.plan for optimizer in self.optimizers]
            self._plan = whole_plan(self.model, shares, self.info.num_servers)
        return self._plan


def _check_several(strategy: DistributedStrategy) -> None:
    """Raise an error if the strategy does not allow several optimizers, each of which pushes to its own tables."""
    configs = strategy.a_sync_configs
    options = {"gather": configs.gather > 1, "max_staleness": configs.max_staleness > 0}
    found = [f"a_sync_configs['{name}']={configs[name]}" for name, is_on in options.items() if is_on]
    if strategy.mode in ("geo", "hybrid"):
        found = [f"{strategy.mode} training"]
    if found:
        raise StrategyError(
            f"{found[0]} counts the pushes of one optimizer, and fleet.distributed_optimizer got another one. Give one "
            "optimizer with two param groups; where rows are to have another rule than the network, their group names "
            "it: {'params': rows, 'row_rule': 'adam'}."
        )


def _tell_of_decay(plan: Plan) -> None:
    """Tell the user of rows that decay because AdamW does so by default."""
    found = {name: group for name, group in plan.sparse.items() if has_plain_decay(group.spec.rule, group.group)}
    if found:
        decay = next(iter(found.values())).spec.rule.weight_decay
        tell(
            f"fleet: weight_decay={decay:g} acts on the rows of {', '.join(map(repr, found))} that an update touches. "
            "'row_weight_decay' in their param group sets another (0: none)."
        )


def _tell_of_momentum(plan: Plan) -> None:
    """Tell the user of rows with momentum, which acts differently from momentum in plain torch."""
    found = [name for name, group in plan.sparse.items() if group.spec.rule.momentum]
    if found:
        tell(
            f"fleet: momentum acts on the rows of {', '.join(map(repr, found))} in the updates that touch them, and "
            f"not in the steps between ({page('rows')}). To turn it off, put these tables into a param group with "
            "momentum=0."
        )


def _check_policies(plan: Plan, mode: str) -> None:
    """Raise an error for policies that geo mode cannot apply. Admission and statistics happen where rows are looked up,
    which in geo mode is not on the servers.

    The servers of geo mode do not update rows either: they add differences. No worker sees the sum, so bounds of
    weights could not hold.
    """
    ruled = [name for name, group in plan.sparse.items() if not group.spec.rule.row_rule.is_linear]
    if ruled and mode == "geo":
        raise StrategyError(
            f"table '{ruled[0]}' is trained by the rule {plan.sparse[ruled[0]].spec.rule.name!r}, and geo training "
            "sums differences and works with SGD only. Leave out row_rule and optimizer=, or use another mode."
        )
    bounded = [name for name, group in plan.sparse.items() if group.spec.rule.has_bounds]
    if bounded and mode == "geo":
        raise StrategyError(
            f"table '{bounded[0]}' has weight_bounds, and in geo training the servers add up differences of several "
            "workers, which no bounds hold. Use sync, half_async or async training, or leave weight_bounds out."
        )
    typed = [name for name, group in plan.sparse.items() if group.spec.format != FLOAT32]
    if typed and mode == "geo":
        found = plan.sparse[typed[0]].spec.format
        raise StrategyError(
            f"table '{typed[0]}' has dtype='{found.dtype}' and wire='{found.wire or found.dtype}', and geo training "
            "exchanges differences in float32. Use sync, half_async or async training, or leave dtype and wire out."
        )
    counted = [name for name, group in plan.sparse.items() if is_counted(group.spec)]
    if counted and mode == "geo":
        raise StrategyError(
            f"table '{counted[0]}' has an entry or shrink policy, and in geo training the servers do not see lookups. "
            "Use sync, half_async or async training, or leave the policies out."
        )
