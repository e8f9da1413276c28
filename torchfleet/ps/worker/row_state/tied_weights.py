"""Weights that several modules of a model hold: an embedding among them whose weight another layer computes with."""

from __future__ import annotations

from collections.abc import Callable

import torch


def tied_elsewhere(model: torch.nn.Module, is_sparse: Callable[[torch.nn.Module], bool]) -> dict[str, list[str]]:
    """By the path of an embedding that `is_sparse`: the weights of other modules that are the same tensor as its own.

    Other embeddings that are sparse do not count: they look up in one table.
    """
    holders: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not is_sparse(module):
            for name, parameter in module.named_parameters(recurse=False):
                holders.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if is_sparse(module) and id(module.weight) in holders:
            found[path] = holders[id(module.weight)]
    return found
