"""Texts about a job for users: the settings at its start, its tables, and a summary at its end."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from torchfleet.base.monitor.freshness import advice, in_short
from torchfleet.base.pages import page
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.worker.embedding.embedding_choice import Choice
from torchfleet.ps.worker.lookup.plan import Plan

_MOST_NAMES = 3
_WORTH_TELLING = 0.02  # share of the time that unforeseen lookups took


def configuration(info: RoleInfo, strategy: DistributedStrategy) -> str:
    """The settings of a worker at its start: one line with those that differ from their defaults, or a table of all."""
    counted = f"{_counted(info.num_servers, 'server')}, {_counted(info.num_workers, 'worker')}"
    place = "one process" if info.is_local else counted
    sockets = "sockets of this user" if info.socket_dir else "plain"
    security = "in process" if info.is_local else "keys" if info.key_dir else sockets
    title = f"torchfleet worker {info.worker_index}"
    if not info.verbose:
        changed = strategy.changed_values()
        changed.pop("a_sync", None)  # the mode implies it
        return ", ".join([f"{title}: {place} ({security})", strategy.mode, *(f"{n}={v}" for n, v in changed.items())])
    table = Table(title=title, title_justify="left")
    table.add_column("setting")
    table.add_column("value", overflow="fold")
    table.add_row("fleet", f"{place} ({security})")
    for line in repr(strategy).splitlines()[1:]:
        name, _, value = line.strip().partition(" ")
        table.add_row(name, value.strip())
    return _text(table)


def _counted(num: int, role: str) -> str:
    return f"{num} {role}{'s' * (num != 1)}"


def embeddings(choice: Choice) -> str:
    """One line: how many embeddings go to the servers, which stay dense and why, and how to change that."""
    num, stay = len(choice.chosen), list(choice.dense.items())
    rows = f" ({choice.num_rows:,} rows)" if num else ""
    text = f"fleet: {num or 'no'} torch embedding{'s are' if num != 1 else ' is'} on the servers{rows}"
    if stay:
        named = [f"'{path}' ({why})" for path, why in stay[:_MOST_NAMES]]
        more = [f"{len(stay) - _MOST_NAMES} more"] if len(stay) > _MOST_NAMES else []
        text += f"; {len(stay)} stay{'s' * (len(stay) == 1)} dense: {', '.join([*named, *more])}"
        if choice.sparse is None and len(stay) > len(choice.tied):
            text += '. To move them: sparse=True in the layer, or fleet.distributed_model(model, sparse="auto")'
    return text


def tables(plan: Plan, info: RoleInfo, servers: list[dict[str, Any]]) -> str:
    """The plan, and the rows and bytes on each server if `servers` has them."""
    planned = Table(title="plan", title_justify="left")
    for heading in ("table", "kind", "size", "optimizer", "first values", "entry", "parameters"):
        planned.add_column(heading, overflow="fold")
    for line in plan.describe():
        planned.add_row(*line)
    held = Table(title="servers", title_justify="left")
    for heading in ("server", "table", "kind", "rows", "bytes", "updates"):
        held.add_column(heading, overflow="fold")
    for i, server in enumerate(servers):
        where = info.server_endpoints[i] if info.server_endpoints else "in process"
        for name, found in server["tables"].items():
            held.add_row(
                f"{i} ({where})", name, found["kind"], f"{found['rows']:,}", f"{found['bytes']:,}", str(found["step"])
            )
    return _text(planned) + (_text(held) if servers else "")


def summary(stats: dict[str, Any]) -> str:
    """A short summary at the end of training: this worker's work, and the staleness of the network and of the rows over
    all servers.
    """
    worker = stats["worker"]
    first = f"{stats['mode']}: {worker['steps']:,} steps, {worker['samples']:,} samples on this worker"
    if worker["unforeseen_wait"] >= _WORTH_TELLING:
        first += (
            f"; {worker['unforeseen_lookups']:,} of {worker['lookups']:,} lookups were unforeseen and took "
            f"{100 * worker['unforeseen_wait']:.0f} % of the time: their ids were not known before the model was "
            f"called, so that each waited for its rows ({page('lookups')})"
        )
    lines = [first, in_short(stats["staleness_dense"], stats["staleness_sparse"])]
    if stats["dropped"]:
        lines.append(f"{stats['dropped']:,} gradients of the network were too old and dropped, counted on each server")
    if "quorum" in stats:
        lines.append(_counted_samples(stats["quorum"]))
    return "\n".join(filter(None, [*lines, advice(stats["staleness_dense"])]))


def _counted_samples(quorum: dict[str, Any]) -> str:
    """With a quorum: how many samples, over all workers, had late or dropped gradients of the network."""
    samples, gradients = quorum["samples"], quorum["gradients"]
    total, late = sum(samples.values()), samples["late"] + samples["waiting"]
    if not total:  # sync_mean="workers": workers do not report samples
        return (
            f"quorum {quorum['quorum']}: of {sum(gradients.values()):,} gradients of the network "
            f"{gradients['late'] + gradients['waiting']:,} were late and {gradients['dropped']:,} dropped"
        )
    return (
        f"quorum {quorum['quorum']}: of {total:,.0f} samples {late:,.0f} ({late / total:.1%}) were late and "
        f"{samples['dropped']:,.0f} ({samples['dropped'] / total:.1%}) dropped: not in the network, but in the rows"
    )


def _text(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=120, markup=False, emoji=False, highlight=False).print(table)  # names are not markup
    return out.getvalue()
