"""The description of a version of a model, in files that several processes share. This module does not import torch, so
that the writer of versions starts two seconds sooner.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchfleet.apps.serve.versions.level_file import Level, open_own
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.checkpoint.manifest_parts import Parameter

CURRENT = "current.json"


class Network(msgspec.Struct, frozen=True):
    """The file with the numbers of the network, and what they belong to."""

    file: str
    size: int  # float32 numbers
    parameters: list[Parameter]  # each with its start in the file


class DescribedModel(msgspec.Struct, frozen=True):
    """The file with the serving.json of the save that a version comes from: features and graph."""

    file: str
    sha256: str  # of its contents


class Description(msgspec.Struct, frozen=True):
    """All that a process needs to read a version."""

    number: int
    created: float
    source: str  # where its newest contents come from, for people
    tables: dict[str, int]  # name and numbers of a row
    levels: list[Level]  # newest first
    network: Network
    restored: int = 0  # the number of the version that this one restores; 0: none
    model: DescribedModel | None = None  # None: there was no save to take it from

    @property
    def files(self) -> set[str]:
        model = set() if self.model is None else {self.model.file}
        return {self.network.file, *model, *(level.file for level in self.levels)}


def read_current(folder: Path) -> Description | None:
    """Return the description of the current version, or None before the first version."""
    try:
        with open_own(folder, CURRENT) as file:
            return msgspec.json.decode(file.read(), type=prepared(Description))
    except FileNotFoundError:
        return None
