"""All models of other libraries."""

from __future__ import annotations

from support.third_party import click_models, graph_models, recbole_models, trainer_models

CASES = (*click_models.CASES, *recbole_models.CASES, *graph_models.CASES, *trainer_models.CASES)
