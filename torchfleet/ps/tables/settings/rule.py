"""The optimizers that servers run: the settings of one (Rule), and the interface of each (RowRule).

RULES has them by name. A rule is a class in a file of its own in tables/rules, and one line in
tables/rules/__init__.py: code that trains, warms up, saves, loads or maps a torch optimizer asks the rule object, and
does not depend on its name.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError

MAX_FLOAT = 3.4028234663852886e38  # the largest float32

Floats = npt.NDArray[np.float32]
RULES: dict[str, RowRule] = {}  # by the name that Rule gives


def expect(condition: bool, text: str) -> None:
    """Raise TableError with this text unless the condition holds."""
    if not condition:
        raise TableError(text)


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """An optimizer as the servers run it. The fields are those of torch.optim's class of the same name.

    `momentum` and `nesterov` act where the rule supports them. On rows every rule is lazy: an update changes the values
    and the state of the rows that it touches, and of no others. `weight_decay` is lazy on rows too; on a dense table it
    acts on the whole block. `low` and `high` bound sparse weights after each update. `options` are (name, value) pairs
    of settings that only this rule has; the rule declares their defaults and ranges.
    """

    name: str = "sgd"
    lr: float = 0.01
    eps: float = 1e-10
    beta1: float = 0.9
    beta2: float = 0.999
    lr_decay: float = 0.0
    initial_accumulator: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decoupled_decay: bool = False
    low: float = -math.inf
    high: float = math.inf
    options: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        expect(self.name in RULES, f"rule.name must be one of {tuple(RULES)}, found {self.name!r}")
        for field in ("lr", "eps", "lr_decay", "initial_accumulator", "weight_decay"):
            if not 0 <= (found := getattr(self, field)) <= MAX_FLOAT:
                raise TableError(f"rule.{field} must be a finite float32 number >= 0, found {found}")
        for field in ("beta1", "beta2", "momentum"):
            if not 0 <= (found := getattr(self, field)) < 1:
                raise TableError(f"rule.{field} must be in [0, 1), found {found}")
        expect(self.low < self.high, f"rule.low must be below rule.high, found {self.low} and {self.high}")
        expect(not self.nesterov or self.momentum > 0, "rule.nesterov needs rule.momentum > 0")
        for name, value in self.options:
            known = self.row_rule.options
            expect(name in known, f"rule.options of '{self.name}' are {tuple(known)}, found {name!r}")
            low, high = self.row_rule.ranges.get(name, (-MAX_FLOAT, MAX_FLOAT))
            expect(
                low <= value <= high,
                f"rule.options: {name!r} of '{self.name}' must be {_span(low, high)}, found {value}",
            )
        self.row_rule.check(self)

    @property
    def has_bounds(self) -> bool:
        return self.low > -math.inf or self.high < math.inf

    @functools.cached_property
    def row_rule(self) -> RowRule:
        """The object that applies this rule."""
        return RULES[self.name]

    def option(self, name: str) -> float:
        """The value of a setting that only this rule has."""
        return dict(self.options).get(name, self.row_rule.options[name])


def _span(low: float, high: float) -> str:
    """A range for display."""
    return "a finite float32" if low == -MAX_FLOAT else f"a number from {low:g} to {high:g}"


class RowRule(ABC):
    """How one optimizer updates values: its formula, the state that it keeps per value, and the torch optimizer that it
    implements.

    A rule object has no state of its own; `rule` holds the settings of a table.
    """

    num_states: int  # numbers of state per value
    squares: tuple[int, ...] = ()  # which of them are sums of squares, never negative; -1 is the last
    options: Mapping[str, float] = {}  # settings that only this rule has, with their defaults: Rule.options
    ranges: Mapping[str, tuple[float, float]] = {}  # the least and the largest value of an option, if it has a range
    row_settings: Mapping[str, Any] = {}  # fields of Rule for rows whose param group gives only this rule's name
    optimizers: tuple[str, ...] = ()  # full names of the optimizer classes that it implements: "torch.optim.sgd.SGD"
    torch_states: tuple[str, ...] = ()  # these optimizers' names for the state of a parameter, in the rule's order
    counts_steps: bool = True  # whether these optimizers also keep "step"
    is_linear: bool = False  # updates are linear in the gradients: geo training may add differences instead
    samples: tuple[Mapping[str, Any], ...] = (
        {},
    )  # fields of Rule that together use all of its kernels, to warm them up

    def num_value_states(self, rule: Rule) -> int:
        """Numbers of state per value of a sparse row."""
        return self.num_states

    def num_row_states(self, rule: Rule) -> int:
        """Numbers of state of a sparse row as a whole, behind those of its values."""
        return 0

    def num_dense_states(self, rule: Rule) -> int:
        """Numbers of state per value of a dense block."""
        return self.num_value_states(rule)

    def state_names(self, rule: Rule) -> tuple[str, ...]:
        """Those of `torch_states` that an optimizer with these settings keeps, in the rule's order."""
        return self.torch_states[: self.num_dense_states(rule)]

    def check(self, rule: Rule) -> None:  # noqa: B027  (a rule may leave it out)
        """Raise TableError for settings that contradict each other."""

    def initial_state(self, rule: Rule) -> float:
        """The initial state of a new row or block."""
        return 0.0

    def rate(self, rule: Rule, lr: float, step: int) -> float:
        """The learning rate of update number `step` (1, 2, ...), given the requested `lr`."""
        return lr

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float] | None:
        """Bounds on the magnitude of values and of each number of state after one update.

        `held`: the bounds before it; `grad`: a bound on its gradients. Returns None if no bound is known: then every
        update is tried on a copy first. Rounding may double what is added. For rows, no later update with the same
        bounds adds more.
        """
        return None

    def refused_on_rows(self, rule: Rule) -> str:
        """The name of a field of `rule` that this rule cannot apply to rows; "" if it can apply all."""
        return "momentum" if rule.momentum else ""

    def settings(self, optimizer: str, group: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of Rule, except name and rate, from the param group of an optimizer. `optimizer` is the entry of
        `optimizers` that its class is or derives from. Raises ModelError if the rule does not support what the group
        asks for.
        """
        return {}

    @abstractmethod
    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        """Update the distinct rows numbered `at` by one gradient each; layout is (width, offset) of the store.

        A row is `width` numbers of the store. Its values start at `offset`, followed by their state and the row's own.
        """

    def group_kernel(self, rule: Rule) -> int | None:
        """The number in kernels/table_groups.py of the kernel that `apply_to_rows` calls; None: it has none."""
        return None

    @abstractmethod
    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        """Update a flat block; `states` has one row of len(weights) per number of state."""


def learning_rate(rule: Rule, lr: float | None, step: int) -> float:
    """The rate of update number `step`, from the rate of the push, or from the table's own if `lr` is None. Raises
    TableError for a rate that is negative or not finite.
    """
    asked = rule.lr if lr is None else lr
    if not 0 <= asked <= MAX_FLOAT:
        raise TableError(f"a learning rate must be a finite float32 number >= 0, found {asked}")
    return rule.row_rule.rate(rule, asked, step)
