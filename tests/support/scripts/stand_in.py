"""Plays the roles of a job without torch, in a second: what the launcher does about processes can be seen on these.

stand_in.py SERVER WORKER   each an action, or several with commas between them, done one after the other
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 1000.0  # longer than any test


def main() -> None:
    server, worker = sys.argv[1:3]
    index = int(os.environ.get("FLEET_WORKER_INDEX", "0"))
    for action in (server if os.environ["FLEET_ROLE"] == "SERVER" else worker).split(","):
        name, _, value = action.partition(":")
        print(f"{name} {value}", flush=True)
        if name == "sleep":
            time.sleep(float(value or SECONDS))
        elif name == "touch":
            Path(value).touch()
        elif name == "touch_own":  # of every worker its own file
            Path(f"{value}{index}").touch()
        elif name == "until":
            wait_until(Path(value).exists, f"{value} is not there")
        elif name == "serve":
            serve()
        elif name == "reach":
            reach()
        elif name == "async":  # what a worker of this mode tells the launcher
            tell({"role": "worker", "mode": "async"})
        elif name == "leave":  # what such a worker tells the launcher before it tells the servers to stop
            tell({"role": "worker", "mode": "async", "left": True})
        elif name == "child":  # as a data loader's worker would be
            subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({SECONDS})"])
        elif name == "die" and index == int(value or 0) and "FLEET_RESTART" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "signal":
            os.kill(os.getpid(), int(value))
        elif name == "role":  # as fleet.init() would find it
            from torchfleet.base.role.role_makers import PaddleCloudRoleMaker

            print(PaddleCloudRoleMaker().read(), flush=True)
        elif name == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif name == "exit":
            sys.exit(int(value or 0))


def tell(status: dict[str, object]) -> None:
    """Replace the status at once: the launcher may be reading it."""
    path = Path(os.environ["FLEET_STATUS_FILE"])
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(status))
    new.replace(path)


def serve() -> None:
    from torchfleet.ps.server.job.main import main as run

    place = os.environ["FLEET_SERVER_ENDPOINTS"].split(",")[int(os.environ["FLEET_SERVER_INDEX"])]
    sys.exit(run(["--endpoint", f"tcp://{place}", "--num_workers", os.environ["FLEET_NUM_WORKERS"]]))


def reach() -> None:
    """Until server 0 can be connected to."""
    host, _, port = os.environ["FLEET_SERVER_ENDPOINTS"].split(",")[0].rpartition(":")

    def is_reached() -> bool:
        with socket.socket() as there:
            return there.connect_ex((host, int(port))) == 0

    wait_until(is_reached, "the server cannot be reached")


def wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            sys.exit(otherwise)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
