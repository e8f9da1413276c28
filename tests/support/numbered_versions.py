"""Versions of a model in which everything can be computed from the number of the version, and a writer of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchfleet.apps.serve.model_version import ModelVersion
from torchfleet.apps.serve.versions.level_stack import LevelStack
from torchfleet.apps.serve.versions.version_store import VersionStore
from torchfleet.ps.checkpoint.manifest_parts import Parameter

KEYS = np.arange(300)
DIM = 4
PERIOD = 3  # each row changes in every third version; every eleventh time it is removed


def rows_at(version: int, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """What a version must answer."""
    changed = version - (version - keys) % PERIOD  # the last version that changed the row
    values = np.where(changed < 1, 0, changed).astype(np.float32)
    values[_is_gone(changed, keys)] = 0.0
    return np.repeat(values[:, None], DIM, 1)


def _is_gone(version: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    return (version + keys) % 11 == 0


def assert_version(version: ModelVersion, keys: npt.NDArray[np.int64]) -> None:
    """Rows and network of one version belong together."""
    found = version.rows("items", keys)
    np.testing.assert_array_equal(found, rows_at(version.number, keys))
    assert version.parameters()["w"].tolist() == [float(version.number)] * 8


class NumberedVersions:
    """Publishes versions 1, 2, ..."""

    def __init__(self, folder: Path) -> None:
        self.store, self.stack, self.number = VersionStore(folder, keep=3, spacing=0.0), LevelStack(folder), 0

    def publish(self) -> None:
        self.number += 1
        keys = KEYS[(self.number - KEYS) % PERIOD == 0]
        gone = _is_gone(np.full(len(keys), self.number), keys)
        values = np.full((len(keys) - gone.sum(), DIM), self.number, np.float32)
        with self.stack.writer() as writer:
            with writer.table("items", DIM, len(keys)) as table:
                table.add(keys[~gone].view(np.uint64), values)
                table.add_gone(keys[gone].view(np.uint64))
            self.stack.add(writer.finish())
        weights = np.full(8, self.number, np.float32)
        network = self.store.write_network(self.store.next_file(), [Parameter("w", [8], 0)], weights)
        self.store.publish(self.stack.levels, {"items": DIM}, network, float(self.number), "a test")
        self.store.remove_unused({level.file for level in self.stack.levels})

    def close(self) -> None:
        self.stack.close()
