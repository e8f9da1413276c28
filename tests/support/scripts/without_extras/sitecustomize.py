"""Python imports this when it starts with this folder on PYTHONPATH. Packages that FLEET_TEST_WITHOUT names are then
not found, as in an environment that does not have them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

_WITHOUT = frozenset(os.environ.get("FLEET_TEST_WITHOUT", "").split())


class WithoutThem(PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in _WITHOUT else PathFinder.find_spec(fullname, path)


sys.meta_path[:] = [WithoutThem if finder is PathFinder else finder for finder in sys.meta_path]
