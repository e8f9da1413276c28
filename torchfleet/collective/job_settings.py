"""The strategy of a job and its ranks: when a strategy may be given, and when it is too late."""

from __future__ import annotations

import torch

from torchfleet.base.errors import StrategyError
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.build import check
from torchfleet.collective.world import World, degrees


def use_execution(settings: DistributedStrategy) -> None:
    """Apply the settings of this process: its threads, and cuDNN's choice of algorithms."""
    torch.backends.cudnn.benchmark = settings.cudnn_exhaustive_search
    if settings.execution_strategy.num_threads:
        torch.set_num_threads(settings.execution_strategy.num_threads)


class JobSettings:
    """Holds the strategy and the ranks of a job. The ranks meet as soon as the strategy is known, or else when they are
    first needed, under the default strategy.

    A strategy that is given later, with the optimizer as in Paddle, is accepted if everything that was made under the
    default can be rebuilt.
    """

    def __init__(self, info: RoleInfo) -> None:
        self.info = info
        self._settings: DistributedStrategy | None = None
        self._is_assumed = False  # the user gave no settings: they are the defaults
        self._world: World | None = None

    def use(self, settings: DistributedStrategy | None, user: str) -> None:
        """Set the strategy, which `user` got: init, distributed_model or distributed_optimizer. Raises StrategyError if
        the user gave a different strategy before."""
        if settings is None or settings == self._settings:
            return
        if self._settings is not None and not self._is_assumed:
            raise StrategyError(
                f"{user}: this strategy differs from the one given earlier. Pass one to fleet.init, and none here."
            )
        check(settings)
        if self._world is not None:
            self._check_late(settings, self._world, user)
        settings.lock(user)
        self._settings, self._is_assumed = settings, False
        if self._world is not None:
            use_execution(settings)
            self._settings_changed(user)

    def _check_late(self, settings: DistributedStrategy, world: World, user: str) -> None:
        """Check a strategy that is given after the ranks have met under the defaults."""
        reason = self._reason_not_to_change()
        if degrees(settings, world.size) != world.degrees or settings.context_parallel:
            reason = "it lays the ranks out in another way"
        elif settings.sync_timeout != self.settings.sync_timeout:
            reason = f"sync_timeout={settings.sync_timeout} counts from then on"
        if reason:
            raise StrategyError(
                f"{user} got a strategy after the ranks have met without one, and {reason}: give it to "
                "fleet.init(is_collective=True, strategy=strategy), and leave it out here"
            )

    def _reason_not_to_change(self) -> str:
        """Why the strategy can no longer be changed; "" if it can."""
        return ""

    def _settings_changed(self, user: str) -> None:
        """Rebuild what was made under the defaults."""

    def _begin(self) -> None:
        if self._world is None:
            use_execution(self.settings)
            self._world = World(self.info, self.settings)

    @property
    def settings(self) -> DistributedStrategy:
        if self._settings is None:
            self.use(DistributedStrategy(), "fleet.distributed_model")
            self._is_assumed = True
        assert self._settings is not None
        return self._settings

    @property
    def world(self) -> World:
        self._begin()
        assert self._world is not None
        return self._world
