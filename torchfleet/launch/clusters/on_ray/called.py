"""`python -m torchfleet.launch.clusters.on_ray.called`: calls the function that fleet.ray.run sent.

It runs in a process of the job. The driver sends the function over Ray's own channel: only a user who may already run
arbitrary code on that cluster can send one.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from torchfleet.launch.clusters.on_ray.ray_node import FUNCTION, RESULT


def main() -> None:
    path = Path(os.environ[FUNCTION])
    pickle = import_module("ray.cloudpickle")
    function, arguments = pickle.loads(path.read_bytes())
    result = pickle.dumps(function(*arguments))
    path.with_name(path.name + RESULT).write_bytes(result)


if __name__ == "__main__":
    main()
