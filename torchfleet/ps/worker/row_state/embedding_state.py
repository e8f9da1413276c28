"""An embedding's state_dict and load_state_dict, and its deepcopy."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from types import MethodType
from typing import Any

import numpy as np
import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Initializer, TableSpec, default_kind
from torchfleet.ps.worker.row_state.table_rows import TableRows, is_without_rows
from torchfleet.ps.worker.row_state.whole_rows import WholeRows

STATES = (None, "rows", "none")


class EmbeddingState(torch.nn.Module):
    """A layer whose rows are stored elsewhere, and appear as `weight` in a state.

    `state`: what state_dict holds. None: all rows as `weight` if the table has a declared size, otherwise an error;
    "rows": the existing rows, as `keys` and `weight`; "none": nothing.
    """

    dim: int
    name: str | None
    kind: str | None = None
    num_embeddings: int | None
    initializer: Initializer
    seed: int
    row_format: RowFormat
    padding_idx: int | None
    table_device: str | None = None
    weight: torch.nn.Parameter

    def __init__(self, padding_idx: int | None, state: str | None, num_embeddings: int | None) -> None:
        super().__init__()
        if state not in STATES:
            raise ModelError(f"SparseEmbedding(state=...): expected one of {STATES}, found {state!r}")
        if state == "rows" and num_embeddings is not None:
            raise ModelError(
                f"SparseEmbedding(state='rows') is for tables without a declared size, and num_embeddings is "
                f"{num_embeddings}: its state is all of its rows. Leave state out, or say 'none'."
            )
        self.state = state
        self.table_rows = TableRows(padding_idx)
        self.is_copy = False  # a copy.deepcopy of a distributed embedding: it reads, and learns nothing

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As torch.nn.Module._apply, which `to` and its like call. Raises ModelError in a job for another type than
        float32.
        """
        dtype = fn(torch.empty(0, device=self.weight.device)).dtype
        if dtype != torch.float32 and getattr(self.weight, "pending", None) is not None:
            raise ModelError(
                f"the rows of embedding '{self.name or ''}' are float32 in a model, and it is asked to be {dtype}. For "
                "mixed precision use torch.autocast; for a model of another type to predict with, "
                "fleet.to_plain(model).to(dtype)"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def table_spec(self, name: str) -> TableSpec:
        """The table's description, as far as the layer determines it: kind, shape, types and initial values."""
        kind = self.kind or default_kind(is_dense=False, has_size=self.num_embeddings is not None)
        size = self.num_embeddings or 0
        return TableSpec(
            name, kind, self.dim, size, initializer=self.initializer, seed=self.seed, format=self.row_format
        )

    @property
    def _spec(self) -> TableSpec:
        if self.name is None:
            raise ModelError(
                "the first values of a SparseEmbedding follow from the name of its table, and it has none yet: give "
                "it a name, or call fleet.distributed_model first"
            )
        return self.table_spec(self.name)

    def train(self, mode: bool = True) -> EmbeddingState:
        self.table_rows.end_reading()  # each evaluation begins with a call of eval()
        super().train(mode)
        return self

    def whole_weight(self) -> torch.Tensor | None:
        """All rows, for a computation with `weight` in eval mode; None where it is an error."""
        is_there = self.table_rows.engine is not None and self.num_embeddings is not None
        if self.training or not is_there or self.table_device is not None:
            return None
        return self.table_rows.for_reading(self._spec, self.weight.device)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if is_without_rows():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        if self.state == "none":
            return
        if self.state is None and self.num_embeddings is None:
            raise ModelError(
                f"state_dict(): table '{self.name or prefix[:-1]}' has rows for any id, on the servers, and cannot be "
                "one tensor. Save the model with fleet.save(dirname) or fleet.save_persistables; or say "
                "SparseEmbedding(..., state='rows') to have the ids and rows as `keys` and `weight`, or state='none' "
                "to leave them out; or declare its size (num_embeddings)."
            )
        rows = self.table_rows.whole_for(self._spec, destination)
        if rows.keys is not None:
            destination[prefix + "keys"] = rows.keys
        destination[prefix + "weight"] = rows.values

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As torch's own: adds mismatches to the lists, from which torch makes its error."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        names = {None: ["weight"], "rows": ["keys", "weight"], "none": []}[self.state]
        own = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
        missing_keys += [prefix + name for name in names if name not in own]
        unexpected_keys += [prefix + name for name in sorted(own - set(names))]
        if not names or not own.issuperset(names):
            return
        found = [state_dict[prefix + name] for name in names]
        error = self._problem(prefix, *found)
        if error:
            error_msgs.append(error)
        elif self.is_copy:
            print(
                f"load_state_dict: a copy of table '{self.name}' reads the rows of the servers as they are; those of "
                "the state are left out",
                file=sys.stderr,
                flush=True,
            )
        else:
            self._take(*(tensor.detach().cpu() for tensor in found))

    def _take(self, *found: torch.Tensor) -> None:
        keys = found[0] if len(found) > 1 else None
        rows = WholeRows(keys, found[-1].to(torch.float32).contiguous())
        table = self.table_rows
        if table.source is None:
            table.begin_with(rows)
        else:
            table.source.check_writable()
            table.loaded = rows

    def _problem(self, prefix: str, *found: Any) -> str:
        """Why this cannot be the state of the table; "" if it can."""
        key = prefix + "weight"
        if self.num_embeddings is None and len(found) == 1:
            return (
                f"{key}: table '{self.name}' has no declared size, so that rows go with their ids: say "
                "SparseEmbedding(..., state='rows'), or state='none' to leave them out. A model that servers saved is "
                "loaded by fleet.init_server(dirname)."
            )
        if not all(isinstance(tensor, torch.Tensor) for tensor in found):
            return f"{key}: expected tensors, found {', '.join(type(tensor).__name__ for tensor in found)}"
        return self._wrong_values(prefix, key, found[0] if len(found) > 1 else None, found[-1])

    def _wrong_values(self, prefix: str, key: str, keys: torch.Tensor | None, weight: torch.Tensor) -> str:
        shape = (self.num_embeddings or 0 if keys is None else len(keys), self.dim)
        if tuple(weight.shape) != shape:
            return (
                f"size mismatch for {key}: copying a param with shape {weight.shape} from checkpoint, the shape in "
                f"current model is {torch.Size(shape)}."
            )
        if keys is not None and (keys.dtype != torch.int64 or len(np.unique(keys.numpy())) < len(keys)):
            return f"{prefix}keys: expected ids of type int64, each once"
        if not bool(torch.isfinite(weight).all()):
            return f"{key}: NaN or infinity, which servers do not hold"
        padding = self.table_rows.padding if self.num_embeddings is not None else None
        if padding is not None and 0 <= padding < len(weight) and bool(weight[padding].any()):
            return f"{key}: the row of padding_idx={padding} is not zero, and servers read it as zeros"
        return ""

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingState:
        """Before the model is distributed, an independent embedding; afterwards, one that reads the same rows."""
        made = self.__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            if not (name == "forward" and self.is_copy):
                made.__dict__[name] = copy.deepcopy(value, memo)
        if self.table_rows.is_distributed:
            made.is_copy = True
            if hasattr(made.weight, "reader"):  # else fleet.to_plain has replaced it by a plain parameter
                read_by(made.weight, made)
            made.__dict__["forward"] = FrozenForward(made)
        return made

    def __getstate__(self) -> dict[str, Any]:
        if self.table_rows.is_distributed:
            raise ModelError(
                f"a distributed model cannot be pickled: the rows of '{self.name}' are on the servers. Save its "
                "state_dict(), or use fleet.save; fleet.to_plain(model) gives a model that can be."
            )
        return self.__dict__


def read_by(weight: Any, module: EmbeddingState) -> None:
    """Let a RowWeight be read as a whole, as this module says. The weight does not keep the module alive."""
    owner = weakref.ref(module)
    weight.reader = lambda: None if (found := owner()) is None else found.whole_weight()


class FrozenForward:
    """The forward of a copy: reads the current rows, which learn nothing from it."""

    def __init__(self, module: EmbeddingState) -> None:
        self._module = module
        functools.update_wrapper(self, MethodType(type(module).forward, module))  # callers look at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module = self._module
        if module.training and torch.is_grad_enabled() and module.weight.requires_grad:
            raise ModelError(
                f"'{module.name}' is part of a copy (copy.deepcopy, AveragedModel) of the distributed model: a copy "
                "reads the rows of the servers and cannot train them. Train the model itself; call the copy in eval "
                "mode or under torch.no_grad(), or freeze its rows with requires_grad_(False)."
            )
        with torch.no_grad():
            rows: torch.Tensor = type(module).forward(module, *args, **kwargs)
        return rows
