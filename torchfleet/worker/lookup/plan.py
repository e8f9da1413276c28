"""The plan: which parameter goes to which table under which rule, derived from model and optimizer on every role."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from torchfleet.checkpoint.byte_words import num_words
from torchfleet.checkpoint.manifest import Parameter
from torchfleet.errors import ModelError
from torchfleet.tables.settings.spec import Rule, TableSpec
from torchfleet.worker.lookup.conversion import sparse_embeddings
from torchfleet.worker.lookup.dense_group import BytesGroup, DenseGroup, FixedGroup, Kept
from torchfleet.worker.lookup.embedding import SparseEmbedding
from torchfleet.worker.lookup.optimizer_rules import kept_rule_of, row_rule_of, rule_of, rule_text
from torchfleet.worker.row_state.table_rows import without_rows


@dataclass
class SparseGroup:
    """One sparse table, the embeddings that use it and the param group that trains it."""

    spec: TableSpec
    modules: list[SparseEmbedding]
    group: dict[str, Any]


@dataclass
class Plan:
    """All tables of a job."""

    dense: list[DenseGroup] = field(default_factory=list)
    sparse: dict[str, SparseGroup] = field(default_factory=dict)
    fixed: list[DenseGroup] = field(default_factory=list)  # parameters and buffers that are not trained
    _checked: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)  # options found right, by table

    @property
    def specs(self) -> list[TableSpec]:
        groups: list[DenseGroup | SparseGroup] = [*self.dense, *self.fixed, *self.sparse.values()]
        return [group.spec for group in groups]

    @property
    def layouts(self) -> dict[str, list[Parameter]]:
        """Per dense table: where each parameter lies."""
        return {group.spec.name: group.layout() for group in (*self.dense, *self.fixed)}

    def rates(self) -> dict[str, float]:
        """Today's learning rates: schedulers change them in the param groups."""
        groups: list[DenseGroup | SparseGroup] = [*self.dense, *self.sparse.values()]
        return {group.spec.name: float(group.group["lr"]) for group in groups}

    def check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError if an option other than the learning rate has changed: the tables keep theirs."""
        groups: list[DenseGroup | SparseGroup] = [*self.dense, *self.sparse.values()]
        for group in groups:
            options = _options(group.group)
            if not group.group.get("params") or self._checked.get(group.spec.name) == options:
                continue
            kept = group.spec.rule  # the rate may change; bounds are the table's, not the optimizer's
            asked = (rule_of if group.spec.is_dense else row_rule_of)(optimizer, group.group)
            now = msgspec.structs.replace(asked, lr=kept.lr, low=kept.low, high=kept.high)
            if now != kept:
                raise ModelError(
                    f"an option of table '{group.spec.name}' was changed from {kept} to {now}: servers "
                    "follow changes of lr only. (OneCycleLR and CyclicLR: cycle_momentum=False.)"
                )
            self._checked[group.spec.name] = options

    def describe(self) -> list[tuple[str, ...]]:
        """Rows of (table, kind, shape, rule, initializer, entry, parameters)."""
        lines: list[tuple[str, ...]] = []
        for dense in self.dense:
            lines.append(
                (
                    dense.spec.name,
                    "dense",
                    f"{dense.spec.size:,}",
                    rule_text(dense.spec.rule),
                    "worker 0",
                    "-",
                    ", ".join(dense.names),
                )
            )
        for name, sparse in self.sparse.items():
            size = "any id" if sparse.spec.kind == "sparse" else f"{sparse.spec.size:,} ids"
            first = sparse.spec.initializer
            is_given = sparse.modules[0].table_rows.first_values is not None
            start = "worker 0" if is_given else f"{first.name}({first.a:g}, {first.b:g})"
            lines.append(
                (
                    name,
                    sparse.spec.kind,
                    f"{size} x {sparse.spec.dim}",
                    rule_text(sparse.spec.rule),
                    start,
                    _policy_text(sparse.spec),
                    f"{len(sparse.modules)} lookups",
                )
            )
        return lines


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Those of a param group that may not change, as they are now: some can be changed in place."""
    fixed = {name: value for name, value in group.items() if name not in ("params", "lr")}
    return {name: tuple(map(float, value)) if name == "betas" else value for name, value in fixed.items()}


def make_plan(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_servers: int, steps_here: bool = False
) -> Plan:
    """The tables for this model and optimizer; an error where torch's meaning could not be kept.

    `steps_here`: dense parameters are stepped by the optimizer itself, which may then be any; their tables keep them.
    """
    plan = Plan()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embeddings = sparse_embeddings(model)
    dense_rule = kept_rule_of if steps_here else rule_of
    owners = {id(module.weight): name for name, modules in embeddings.items() for module in modules}
    for number, group in enumerate(optimizer.param_groups):
        dense = []
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ModelError(
                    "the optimizer holds a parameter that is not in the model. Make the optimizer after "
                    "`model = fleet.distributed_model(model)`, from model.parameters()."
                )
            if id(parameter) in owners:
                _add_sparse(plan, owners[id(parameter)], embeddings, optimizer, group, num_servers)
            elif parameter.requires_grad:
                dense.append(parameter)
        if dense:
            _check_float32(dense, names)
            size = sum(parameter.numel() for parameter in dense)
            name = f"dense.{number}"
            while name in embeddings:  # a module's path may look like it
                name += "'"
            spec = TableSpec(name, "dense", size=size, rule=dense_rule(optimizer, group), num_shards=num_servers)
            plan.dense.append(DenseGroup(spec, [names[id(p)] for p in dense], dense, group))
    for name in embeddings:
        if name not in plan.sparse and not any(module.weight.requires_grad for module in embeddings[name]):
            plan.sparse[name] = _sparse_group(name, embeddings[name], Rule("sgd", 0.0), {"lr": 0.0}, num_servers)
        if name not in plan.sparse:
            raise ModelError(f"embedding '{name}' is in no param group of the optimizer: give it model.parameters()")
    trained = {id(parameter) for group in plan.dense for parameter in group.parameters} | set(owners)
    plan.fixed = _fixed_groups(model, trained, num_servers)
    return plan


def _fixed_groups(model: torch.nn.Module, trained: set[int], num_servers: int) -> list[DenseGroup]:
    """A table for the float32 parameters and buffers that are not trained, one for those of other types."""
    _refuse_extra_state(model)
    found = {id(tensor): (name, tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    kept = dict(named for number, named in found.items() if number not in trained and named[1].numel())
    groups: list[DenseGroup] = []
    floats = [name for name, tensor in kept.items() if tensor.dtype == torch.float32]
    # Buffers that no state_dict has, such as those made anew from others, are no part of a model.
    with without_rows():
        saved = set(model.state_dict())
    others = [name for name, tensor in kept.items() if tensor.dtype != torch.float32 and name in saved]
    _check_kept({name: kept[name] for name in (*floats, *others)})
    if floats:
        spec = TableSpec("dense.fixed", "dense", size=sum(kept[n].numel() for n in floats), num_shards=num_servers)
        groups.append(FixedGroup(spec, floats, Kept(model, floats), {"lr": 0.0}))
    if others:
        size = sum(num_words(kept[name].nbytes) for name in others)
        spec = TableSpec("dense.bytes", "dense", size=size, num_shards=num_servers)
        groups.append(BytesGroup(spec, others, Kept(model, others), {"lr": 0.0}))
    return groups


def _check_kept(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "a meta tensor" if tensor.is_meta else str(tensor.layout)
            raise ModelError(
                f"'{name}' is {kind}, and only plain tensors can be saved and sent to all workers: keep its parts "
                "(indices and values, say) as buffers of their own, or make it non-persistent"
            )


def _refuse_extra_state(model: torch.nn.Module) -> None:
    """What a module's get_extra_state adds is neither parameter nor buffer: it would be lost in silence."""
    with without_rows():
        state = model.state_dict()
    for name, value in state.items():
        if name.endswith("_extra_state") and isinstance(value, torch.Tensor):
            raise ModelError(
                f"'{name}' comes from get_extra_state, and only parameters and buffers are saved: hold the tensor "
                "with register_buffer"
            )


def _add_sparse(
    plan: Plan,
    name: str,
    embeddings: dict[str, list[SparseEmbedding]],
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    num_servers: int,
) -> None:
    if name in plan.sparse:
        if plan.sparse[name].group is not group:
            raise ModelError(
                f"embeddings of table '{name}' are in two param groups: one table has one rule. Put them into one."
            )
        return
    rule = row_rule_of(optimizer, group)
    for option in ("momentum", "weight_decay"):
        if getattr(rule, option):
            raise ModelError(
                f"{option}={getattr(rule, option)} cannot act on the sparse rows of '{name}', which are touched only "
                f"now and then. Put the embeddings into a param group of their own with {option}=0: "
                f"[{{'params': dense}}, {{'params': sparse, '{option}': 0}}]."
            )
    plan.sparse[name] = _sparse_group(name, embeddings[name], rule, group, num_servers)


def _sparse_group(
    name: str, modules: list[SparseEmbedding], rule: Rule, group: dict[str, Any], num_servers: int
) -> SparseGroup:
    first = modules[0]
    low, high = first.weight_bounds
    spec = TableSpec(
        name,
        "sparse" if first.num_embeddings is None else "array",
        dim=first.dim,
        size=first.num_embeddings or 0,
        rule=msgspec.structs.replace(rule, low=low, high=high),
        initializer=first.initializer,
        seed=first.seed,
        num_shards=num_servers,
        entry=first.entry,
        shrink=first.shrink,
    )
    return SparseGroup(spec, modules, group)


def _policy_text(spec: TableSpec) -> str:
    """What admission and eviction were told, as it was written."""
    told = {**msgspec.to_builtins(spec.entry), **msgspec.to_builtins(spec.shrink)}
    return ", ".join(f"{name}={value}" for name, value in told.items()) or "every id"


def _check_float32(parameters: list[torch.nn.Parameter], names: dict[int, str]) -> None:
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"parameter '{names[id(parameter)]}' is {parameter.dtype}: servers hold float32. Use model.float()."
            )
