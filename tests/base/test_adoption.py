"""An optimizer in the place of the user's: schedulers, hooks, closures and saved options see no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer

from torchfleet.base.adoption import AdoptedOptimizer


class Stepping(AdoptedOptimizer):
    """Its step is a step of the user's optimizer."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._begin_step(closure)
        self._user.step()
        self.after_step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load_in_place(self, super().load_state_dict, state_dict)


@pytest.fixture
def user() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=1.0)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.filterwarnings("error")  # torch's, of a scheduler that saw no step of the optimizer
def test_a_scheduler_works_whether_it_was_made_before_or_after(user: torch.optim.Optimizer, is_first: bool) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(user, 1, 0.5) if is_first else None
    adopted = Stepping(user)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(adopted, 1, 0.5)
    adopted.step()
    scheduler.step()
    assert adopted.param_groups[0]["lr"] == user.param_groups[0]["lr"] == 0.5
    adopted.step()
    assert adopted.param_groups[0]["params"][0].tolist() == [-0.5, -0.5]


def test_hooks_of_either_time_are_called_once_per_step(user: torch.optim.Optimizer) -> None:
    calls: list[str] = []
    user.register_step_pre_hook(lambda *_: calls.append("before"))
    adopted = Stepping(user)
    adopted.register_step_post_hook(lambda *_: calls.append("after"))
    adopted.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("where", ["step_pre", "step_post"])
def test_hooks_for_all_optimizers_are_called_and_those_that_come_later_too(
    user: torch.optim.Optimizer, where: str
) -> None:
    adopted, calls = Stepping(user), []
    adopted.step()
    register = getattr(torch_optimizer, f"register_optimizer_{where}_hook")
    hook = register(lambda optimizer, *_: calls.append(type(optimizer).__name__))
    adopted.step()
    hook.remove()
    adopted.step()
    assert calls.count("Stepping") == 1


def test_a_profiler_sees_the_step(user: torch.optim.Optimizer) -> None:
    adopted = Stepping(user)
    with torch.profiler.profile() as profiler:
        adopted.step()
    assert "Optimizer.step#Stepping.step" in {event.name for event in profiler.events()}


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(user: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        assert Stepping(user).step(torch.is_grad_enabled) is True


def test_loaded_options_are_in_the_groups_that_others_hold(user: torch.optim.Optimizer) -> None:
    adopted = Stepping(user)
    held, saved = adopted.param_groups[0], adopted.state_dict()
    saved["param_groups"][0]["lr"] = 0.25
    adopted.load_state_dict(saved)
    assert adopted.param_groups[0] is user.param_groups[0] is held
    assert held["lr"] == 0.25


def test_after_step_is_called_at_the_end(user: torch.optim.Optimizer) -> None:
    calls: list[list[float]] = []
    adopted = Stepping(user)
    adopted.after_step = lambda: calls.append(adopted.param_groups[0]["params"][0].tolist())
    adopted.step()
    assert calls == [[0.0, 0.0]]
