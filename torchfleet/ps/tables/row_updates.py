"""Updates of rows by the rule of their table: in a store of float32, in one of narrower types, and on copies."""

from __future__ import annotations

import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels import rows
from torchfleet.ps.kernels.team import TEAM
from torchfleet.ps.tables.rows.keymap import FEWEST_SHARED, Keys, Rows
from torchfleet.ps.tables.rows.narrow_rows import NarrowRows
from torchfleet.ps.tables.rows.row_form import Layout, RowForm
from torchfleet.ps.tables.rules.decay import decayed
from torchfleet.ps.tables.settings.spec import Floats, TableSpec
from torchfleet.ps.tables.update_bounds import signed


class RowUpdates:
    """Updates of rows that are stored as float32."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec, self._row_rule = spec, spec.rule.row_rule

    def change(
        self, store: Floats, layout: Layout, keys: Keys, at: Rows, grads: Floats, rate: float | None, step: int
    ) -> None:
        """Update the distinct rows numbered `at` of a store, whose keys are `keys`, by the rule. If `rate` is None, add
        `grads` to them instead.
        """
        if rate is None:
            rows.sgd(store, *layout, at, grads, -1.0, -np.inf, np.inf)
            return
        rule, apply = self._spec.rule, self._row_rule.apply_to_rows
        if rule.weight_decay:
            grads = decayed(rule, store, layout, at, grads, rate)
        if len(at) < 2 * FEWEST_SHARED:
            apply(rule, store, layout, at, grads, rate, step)
            return

        def work(start: int, stop: int) -> None:
            apply(rule, store, layout, at[start:stop], grads[start:stop], rate, step)

        TEAM.share(work, len(at), FEWEST_SHARED)  # rows are distinct: threads change different ones

    def change_copies(
        self, copies: Floats, keys: Keys, at: Rows, grads: Floats, rate: float | None, step: int
    ) -> float:
        """Apply `change` to the rows numbered `at` of the wide rows `copies`. Returns the largest magnitude in these
        rows. Raises TableError if a result is not finite. `keys` and `grads` have one row per copy.
        """
        num_words = copies.shape[1]
        RowUpdates.change(self, copies.reshape(-1), (num_words, 0), keys[at], at, grads[at], rate, step)
        made = np.ascontiguousarray(copies[at])
        largest = rows.largest(made)
        if not largest < np.inf:
            row = int(at[np.flatnonzero(~np.isfinite(made).all(axis=1))[0]])
            raise TableError(
                f"table '{self._spec.name}': the row for key {signed(keys, row)} would become NaN or infinite, by "
                f"gradients up to {rows.largest(grads):.3g} times a rate of {1.0 if rate is None else rate:.3g}; "
                "nothing was applied. Lower the learning rate, or clip the gradients."
            )
        return largest


class NarrowUpdates(RowUpdates):
    """Updates of rows that are stored in fewer bits: computed in float32, stored by stochastic rounding."""

    def __init__(self, spec: TableSpec, narrow: NarrowRows) -> None:
        super().__init__(spec)
        self._narrow = narrow

    def change(
        self, store: Floats, layout: Layout, keys: Keys, at: Rows, grads: Floats, rate: float | None, step: int
    ) -> None:
        def change(wide: Floats, wide_layout: Layout, wide_at: Rows, some: slice) -> None:
            RowUpdates.change(self, wide, wide_layout, keys[some], wide_at, grads[some], rate, step)

        self._narrow.change(store, layout, keys, at, change, step)


def row_updates(spec: TableSpec, form: RowForm) -> RowUpdates:
    """The updates of a table whose rows have this form."""
    return RowUpdates(spec) if form.narrow is None else NarrowUpdates(spec, form.narrow)
