"""Local SGD: ranks train alone and average their parameters every k steps.

    steps 1 … begin_step - 1     gradients are averaged in every step, as in plain data parallelism
    from step begin_step on      p_i = SGD(p_i, g_i) on each rank i by itself; after every k_steps-th of these steps
                                 p = Σ_i p_i / N on all ranks

k_steps = 1 equals data parallelism: SGD is linear in gradients and momentum, so that the mean of steps is the step of
the mean; momentum buffers are never exchanged, and their mean is what the one buffer of data parallelism would be.
Therefore the optimizer must be torch.optim.SGD. Parameters are exchanged, in flat buckets of fuse_grad_size_in_MB;
buffers, such as running statistics, stay each rank's own (sync_batch_norm makes them equal). Each rank clips by its own
norm and exchanges nothing for it: with amp in float16 a rank may skip a step alone. fleet.save also averages, including
momentum and the running statistics of norms, so that the save is one model.

Source: Lin et al. 2018, Don't Use Large Mini-Batches, Use Local SGD (post-local SGD); Stich 2018. Composes with amp,
recompute, gradient_merge, sync_batch_norm and compilation; not with strategies that exchange gradients in another way,
shard the model or replace the optimizer's rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.nn.modules.batchnorm import _NormBase

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.buckets import average
from torchfleet.collective.strategy import JobView, Strategy
from torchfleet.collective.tensors.local_tensors import is_local
from torchfleet.collective.world import World


class LocalSGD(Strategy):
    field = "localsgd"
    accepts_local_parameters = False
    trains_alone = True  # also before `begin_step`, when the gradients, and so their norms, are equal on all ranks

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        self._axis = world.axis("data")
        self._bucket_bytes = settings.fuse_grad_size_in_MB << 20
        self._num_steps = 0  # of the job
        self._num_alone = 0  # since the parameters were last equal on all ranks
        self.interval = self._first_interval()

    def _first_interval(self) -> int:
        return self.settings.localsgd_configs.k_steps

    @property
    def _begin_step(self) -> int:
        return self.settings.localsgd_configs.begin_step

    def joined(self, job: JobView) -> None:
        self._model = job.model

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        if type(inner) is not torch.optim.SGD:
            raise StrategyError(
                f"{self.field}=True needs a torch.optim.SGD, found {type(inner).__name__}: the mean of parameters that "
                f"ranks have trained alone is meant for SGD. Use it, or leave {self.field} out."
            )
        self._groups, self._inner = inner.param_groups, inner
        apart = {name for parameter, name in names.items() if is_local(parameter)}
        # By name: an optimizer may step on float32 copies, which have no mark.
        self._common = dict.fromkeys(parameter for parameter, name in names.items() if name not in apart)  # in order
        return inner

    @property
    def is_local(self) -> bool:
        """Whether the next step is made without an exchange."""
        return self._num_steps + 1 >= self._begin_step

    def exchanges(self) -> bool:
        return not self.is_local

    def after_step(self) -> None:
        """Count a step, also a skipped one: all ranks must average at the same time."""
        self._num_alone += int(self.is_local)
        self._num_steps += 1
        if self._num_alone >= self.interval:
            self.average()

    def average(self) -> None:
        """Set parameters to their mean over the ranks. All ranks call it together."""
        self._num_alone = 0
        if self._axis.group is None:
            return
        average(self._parameters(), [self._axis], self._bucket_bytes)

    def _parameters(self) -> Iterator[torch.Tensor]:
        """The parameters that data parallelism keeps equal on all ranks (not those of layers sharded over ranks)."""
        for group in self._groups:
            yield from (parameter.detach() for parameter in group["params"] if parameter in self._common)

    def before_save(self) -> None:
        """Average parameters, momentum and running statistics, so that a save is one model; training continues from the
        mean.

        Other buffers cannot be averaged: the first rank's are saved.
        """
        if self._axis.group is None:
            return
        average(self._statistics(), [self._axis], self._bucket_bytes)  # of each rank's own batches in every step
        if self._num_steps >= self._begin_step:
            LocalSGD.average(self)  # without computing a new interval
            average(self._momenta(), [self._axis], self._bucket_bytes)

    def _statistics(self) -> Iterator[torch.Tensor]:
        for module in self._model.modules():
            if isinstance(module, _NormBase) and module.running_mean is not None and module.running_var is not None:
                yield from (module.running_mean, module.running_var)

    def _momenta(self) -> Iterator[torch.Tensor]:
        """All momentum buffers, in the order of the groups; zeros if this rank has none yet (amp skipped its steps)."""
        for group in self._groups:
            for parameter in group["params"]:
                if group["momentum"] and parameter.requires_grad and parameter in self._common:
                    state = self._inner.state[parameter]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    yield state["momentum_buffer"]

    def state(self) -> dict[str, torch.Tensor]:
        return {"num_steps": torch.tensor(self._num_steps), "num_alone": torch.tensor(self._num_alone)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._num_steps = int(state.get("num_steps", self._num_steps))
        self._num_alone = int(state.get("num_alone", self._num_alone))
