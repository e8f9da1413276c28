"""Reads versions of a model as fast as it can, and checks each answer against what its version must hold.

python reading_versions.py FOLDER: until FOLDER/end exists. FOLDER/reads-PID tells that it has begun.
Prints one line of JSON: answers, versions, wrong answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from support.numbered_versions import KEYS, assert_version

from torchfleet.apps.serve.versions.mapped_model import MappedModel


def main(folder: Path) -> None:
    model, seen, wrong, num = MappedModel(folder, follow=False), set(), [], 0
    rng = np.random.default_rng()
    while not (folder / "end").exists():
        version = model.current()
        try:
            assert_version(version, rng.choice(KEYS, 64))
        except AssertionError as error:
            wrong.append(f"version {version.number}: {error}"[:500])
        seen.add(version.number)
        num += 1
        if num == 1:
            (folder / f"reads-{os.getpid()}").touch()
        time.sleep(0.001)  # the writer and the other readers have the same cores
    print(json.dumps({"num": num, "versions": sorted(seen), "wrong": wrong}))
    model.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
