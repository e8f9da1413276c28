"""The plan: which parameter goes to which table with which rule, derived from model and optimizer in every role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from torchfleet.base.errors import ModelError, TableError
from torchfleet.ps.checkpoint.manifest import Parameter
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.embedding.conversion import sparse_embeddings
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.lookup.dense_group import DenseGroup, block_spec, check_buffers, fixed_groups
from torchfleet.ps.worker.lookup.optimizer_rules import kept_rule_of, needs_row_decay, row_rule_of, rule_of, rule_text


@dataclass
class SparseGroup:
    """One sparse table, the embeddings that use it and the param group that trains it."""

    spec: TableSpec
    modules: list[SparseEmbedding]
    group: dict[str, Any]
    own: torch.optim.Optimizer | None = None  # SparseEmbedding(optimizer=...), whose group this is


@dataclass
class Plan:
    """All tables of a job, or those of one of its optimizers."""

    dense: list[DenseGroup] = field(default_factory=list)
    sparse: dict[str, SparseGroup] = field(default_factory=dict)
    fixed: list[DenseGroup] = field(default_factory=list)  # parameters and buffers that are not trained
    num_groups: int = 0  # param groups of the optimizer, if this is one optimizer's share
    # options that were accepted, by table
    _checked: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    # all param groups, with their options when they were last checked
    _accepted: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list, repr=False)

    @property
    def specs(self) -> list[TableSpec]:
        groups: list[DenseGroup | SparseGroup] = [*self.dense, *self.fixed, *self.sparse.values()]
        return [group.spec for group in groups]

    @property
    def layouts(self) -> dict[str, list[Parameter]]:
        """Per dense table: the place of each parameter."""
        return {group.spec.name: group.layout() for group in (*self.dense, *self.fixed)}

    def rates(self) -> dict[str, float]:
        """The current learning rates: schedulers change them in the param groups."""
        rates: dict[str, float] = {}
        groups: tuple[DenseGroup | SparseGroup, ...] = (*self.dense, *self.sparse.values())
        for group in groups:
            rates[group.spec.name] = float(group.group["lr"])
        return rates

    def check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError if an option other than the learning rate has changed: the tables cannot follow."""
        for known, accepted in self._accepted:
            if _options(known) != accepted:
                break
        else:
            if self._accepted:
                return
        groups: tuple[DenseGroup | SparseGroup, ...] = (*self.dense, *self.sparse.values())
        found_options: dict[int, dict[str, Any]] = {}  # by param group, which many tables share
        for group in groups:
            options = found_options.get(id(group.group))
            if options is None:
                options = found_options[id(group.group)] = _options(group.group)
            own = group.own if isinstance(group, SparseGroup) else None
            is_trained = own is not None or bool(group.group.get("params"))
            if not is_trained or self._checked.get(group.spec.name) == options:
                continue
            kept = group.spec.rule  # the rate may change; bounds belong to the table, not the optimizer
            found = rule_options(group.modules, group.group) if isinstance(group, SparseGroup) else group.group
            asked = (rule_of if group.spec.is_dense else row_rule_of)(own or optimizer, found)
            now = msgspec.structs.replace(asked, lr=kept.lr, low=kept.low, high=kept.high)
            if now != kept:
                raise ModelError(_changed(group.spec.name, kept, now))
            self._checked[group.spec.name] = options
        if all(group.spec.name in self._checked for group in groups):  # not while parameters are swapped
            seen = {id(group.group): group.group for group in groups}
            self._accepted = [(group, found_options[number]) for number, group in seen.items()]

    def describe(self) -> list[tuple[str, ...]]:
        """Rows of (table, kind, shape, rule, initializer, entry, parameters)."""
        lines: list[tuple[str, ...]] = []
        for dense in self.dense:
            lines.append(
                (
                    dense.spec.name,
                    dense.spec.kind,
                    f"{dense.spec.size:,}",
                    rule_text(dense.spec.rule),
                    "worker 0",
                    "-",
                    ", ".join(dense.names),
                )
            )
        for name, sparse in self.sparse.items():
            size = "any id" if not sparse.spec.has_size else f"{sparse.spec.size:,} ids"
            first = sparse.spec.initializer
            is_given = sparse.modules[0].table_rows.first_values is not None
            start = "worker 0" if is_given else f"{first.name}({first.a:g}, {first.b:g})"
            lines.append(
                (
                    name,
                    sparse.spec.kind,
                    f"{size} x {sparse.spec.dim}{_type_text(sparse.spec)}",
                    rule_text(sparse.spec.rule),
                    start,
                    _policy_text(sparse.spec),
                    f"{len(sparse.modules)} lookups",
                )
            )
        return lines


def _changed(table: str, kept: Rule, now: Rule) -> str:
    names = [name for name in kept.__struct_fields__ if getattr(kept, name) != getattr(now, name)]
    changes = ", ".join(f"{name} from {getattr(kept, name)} to {getattr(now, name)}" for name in names)
    is_cycled = not {"momentum", "beta1"}.isdisjoint(names)
    cure = "cycle_momentum=False is needed in OneCycleLR and CyclicLR" if is_cycled else "Change lr alone"
    return (
        f"{cure}: an option of table '{table}' was changed, {changes}, and servers follow changes of lr only. For "
        "another value of it, begin the job with it."
    )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a param group that may not change, copied: some can be changed in place."""
    options: dict[str, Any] = {}
    for name, value in group.items():
        if name not in ("params", "lr"):
            options[name] = tuple(map(float, value)) if name == "betas" else value
    return options


def make_plan(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_servers: int, steps_here: bool = False
) -> Plan:
    """The tables for this model and the one optimizer that trains it."""
    share = make_share(model, optimizer, num_servers, steps_here)
    return whole_plan(model, [share], num_servers)


def make_share(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    num_servers: int,
    steps_here: bool = False,
    others: Sequence[Plan] = (),
) -> Plan:
    """The tables for the parameters of one optimizer. Raises an error if torch's semantics cannot be kept.

    `steps_here`: the optimizer itself steps the dense parameters, and may be any optimizer; their tables only keep
    them. `others`: the shares of the optimizers before it.
    """
    check_buffers(model)
    plan = Plan(num_groups=len(optimizer.param_groups))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embeddings = sparse_embeddings(model)
    dense_rule = kept_rule_of if steps_here else rule_of
    owners = {id(module.weight): name for name, modules in embeddings.items() for module in modules}
    first = sum(share.num_groups for share in others)
    for number, group in enumerate(optimizer.param_groups, first):
        dense = []
        for parameter in group["params"]:
            _check_parameter(parameter, names, owners, others)
            if id(parameter) in owners:
                _add_sparse(plan, owners, owners[id(parameter)], embeddings, optimizer, group, num_servers)
            elif parameter.requires_grad:
                dense.append(parameter)
        if dense:
            _check_float32(dense, names)
            size = sum(parameter.numel() for parameter in dense)
            name = f"dense.{number}"
            while name in embeddings:  # a module's path may look like this name
                name += "'"
            spec = block_spec(name, size, num_servers, dense_rule(optimizer, group))
            plan.dense.append(DenseGroup(spec, [names[id(p)] for p in dense], dense, group))
    return plan


def whole_plan(model: torch.nn.Module, shares: Sequence[Plan], num_servers: int) -> Plan:
    """All tables of a job, from the shares of its optimizers. A single share becomes the whole.

    Embeddings that are not trained go with the first optimizer.
    """
    first, embeddings = shares[0], sparse_embeddings(model)
    for name, modules in embeddings.items():
        is_planned = any(name in share.sparse for share in shares)
        if not is_planned and not any(module.weight.requires_grad for module in modules):
            first.sparse[name] = _sparse_group(name, modules, Rule(lr=0.0), {"lr": 0.0}, num_servers)
        elif not is_planned:
            held = "the optimizer: give it" if len(shares) == 1 else "any optimizer: give them"
            raise ModelError(f"embedding '{name}' is in no param group of {held} model.parameters()")
    dense = [group for share in shares for group in share.dense]
    weights = {id(module.weight) for modules in embeddings.values() for module in modules}
    trained = {id(parameter) for group in dense for parameter in group.parameters} | weights
    whole = first
    if len(shares) > 1:
        whole = Plan(dense, {name: group for share in shares for name, group in share.sparse.items()})
    whole.fixed = fixed_groups(model, trained, num_servers)
    return whole


def _check_parameter(
    parameter: torch.Tensor, names: dict[int, str], owners: dict[int, str], others: Sequence[Plan]
) -> None:
    if id(parameter) not in names:
        raise ModelError(
            "the optimizer holds a parameter that is not in the model. Make the optimizer after "
            "`model = fleet.distributed_model(model)`, from model.parameters()."
        )
    taken = [p for share in others for group in share.dense for p in group.parameters]
    is_taken = any(p is parameter for p in taken) or any(owners.get(id(parameter)) in share.sparse for share in others)
    if is_taken:
        raise ModelError(
            f"parameter '{names[id(parameter)]}' is in two optimizers, and its table has one rule: give each optimizer "
            "parameters of its own"
        )


def _add_sparse(
    plan: Plan,
    owners: dict[int, str],
    name: str,
    embeddings: dict[str, list[SparseEmbedding]],
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    num_servers: int,
) -> None:
    if name in plan.sparse:
        if plan.sparse[name].own is None and plan.sparse[name].group is not group:
            raise ModelError(
                f"embeddings of table '{name}' are in two param groups: one table has one rule. Put them into one."
            )
        return
    own = embeddings[name][0].optimizer
    if own is not None and any(module.weight.requires_grad for module in embeddings[name]):
        rule = _named(name, own, own.param_groups[0])
        plan.sparse[name] = _sparse_group(name, embeddings[name], rule, own.param_groups[0], num_servers)
        plan.sparse[name].own = own
        for module in embeddings[name]:
            if module.optimizer is not None and module.optimizer is not own:  # an equal one: schedulers act on either
                module.optimizer.param_groups = own.param_groups
        return
    rule = _named(name, optimizer, rule_options(embeddings[name], group))
    is_apart = all(id(parameter) in owners for parameter in group["params"])
    refused = rule.row_rule.refused_on_rows(rule) or ("weight_decay" if needs_row_decay(rule, group, is_apart) else "")
    if refused:
        decay = " Or give the group 'row_weight_decay', which acts on the rows that an update touches (0: on none)."
        raise ModelError(
            f"{refused}={getattr(rule, refused)} cannot act on the sparse rows of '{name}', which are touched only now "
            f"and then. Put the embeddings into a param group of their own with {refused}=0: "
            f"[{{'params': dense}}, {{'params': sparse, '{refused}': 0}}].{decay if refused == 'weight_decay' else ''}"
        )
    plan.sparse[name] = _sparse_group(name, embeddings[name], rule, group, num_servers)


def rule_options(modules: list[SparseEmbedding], group: dict[str, Any]) -> dict[str, Any]:
    """The options of a table's rule. A table on a device ignores `capturable`: a CUDA graph can capture its updates
    without it.
    """
    return {**group, "capturable": False} if modules[0].table_device is not None else group


def _named(table: str, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """`row_rule_of`, with errors about settings that name the table."""
    try:
        return row_rule_of(optimizer, group)
    except TableError as error:
        raise ModelError(f"table '{table}': {error}") from None


def _sparse_group(
    name: str, modules: list[SparseEmbedding], rule: Rule, group: dict[str, Any], num_servers: int
) -> SparseGroup:
    first = modules[0]
    shown = next((module.weight for module in modules if module.weight.requires_grad), None)
    for module in modules:
        module.row_weight.is_shown = module.weight is shown
    low, high = first.weight_bounds
    spec = msgspec.structs.replace(
        first.table_spec(name),
        rule=msgspec.structs.replace(rule, low=low, high=high),
        num_shards=num_servers,
        entry=first.entry,
        shrink=first.shrink,
        storage=first.storage,
    )
    return SparseGroup(spec, modules, group)


def _type_text(spec: TableSpec) -> str:
    """The type of the values, if it is not float32."""
    return f" {spec.format.dtype}" if spec.format.is_narrow else ""


def _policy_text(spec: TableSpec) -> str:
    """The admission and eviction policies, as they were written."""
    told = {**msgspec.to_builtins(spec.entry), **msgspec.to_builtins(spec.shrink)}
    return ", ".join(f"{name}={value}" for name, value in told.items()) or "every id"


def _check_float32(parameters: list[torch.nn.Parameter], names: dict[int, str]) -> None:
    for parameter in parameters:
        if parameter.is_meta:
            raise ModelError(
                f"parameter '{names[id(parameter)]}' is on the meta device, and has no numbers that servers could "
                "begin with. Give the model memory and values first: model.to_empty(device='cpu'), then its "
                "initialization."
            )
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"parameter '{names[id(parameter)]}' is {parameter.dtype}: servers hold float32. Use model.float()."
            )
