"""Saving a model from worker 0: every server its tables, then the manifest that makes it the model."""

from __future__ import annotations

from torchfleet.checkpoint.manifest import (
    Manifest,
    Saved,
    Table,
    described,
    folder_of,
    next_save,
    remove_others,
    write_manifest,
)
from torchfleet.checkpoint.storage import Storage
from torchfleet.ps.client import Client
from torchfleet.ps.plan import Plan
from torchfleet.tables.rules import num_dense_states, num_states


def save_model(client: Client, plan: Plan, dirname: str, with_state: bool, timeout: float) -> None:
    """Returns when the whole model is on disk; an error leaves the model that was there before."""
    storage = Storage(dirname)
    for group in plan.fixed:
        client.set_dense(group.spec.name, group.values())  # buffers live on workers: the first one's are saved
    number = next_save(storage)
    saved = client.save(storage.path, folder_of(number), with_state, timeout)
    parts = [part for server in saved for part in server.parts]
    kind = "full" if with_state else "inference"
    manifest = Manifest(folder_of(number), number, kind, client.num_servers, _tables(plan, saved, with_state), parts)
    write_manifest(storage, manifest)
    remove_others(storage, manifest)


def _tables(plan: Plan, saved: list[Saved], with_state: bool) -> list[Table]:
    tables = []
    for spec in plan.specs:
        states = (num_dense_states if spec.kind == "dense" else num_states)(spec.rule) if with_state else 0
        step = max(server.steps[spec.name] for server in saved)
        rows = sum(server.rows[spec.name] for server in saved)
        tables.append(described(spec, states, step, rows, plan.layouts.get(spec.name, [])))
    return tables
