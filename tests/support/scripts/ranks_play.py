"""Plays the ranks of a collective job: what the launcher does about them can be seen on these.

ranks_play.py ACTION...   done one after the other by every rank; N@ACTION by rank N only, N.S@ACTION at start S only
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 1000.0  # longer than any test
TOLD = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TRAINING_ROLE", "PADDLE_TRAINER_ID", "FLEET_ROLE", "FLEET_SERVER_ENDPOINTS",
)  # fmt: skip


def main() -> None:
    rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    for action in sys.argv[1:]:
        who, _, rest = action.rpartition("@")
        if who not in ("", rank, f"{rank}.{start}"):
            continue
        name, _, value = rest.partition(":")
        print(f"{name} {value}".rstrip(), flush=True)
        act(name, value)


def act(name: str, value: str) -> None:
    if name == "sleep":
        time.sleep(float(value or SECONDS))
    elif name == "environment":
        print(json.dumps({name: os.environ[name] for name in TOLD if name in os.environ}), flush=True)
    elif name == "sum":
        add_up()
    elif name == "count":
        count(Path(value))
    elif name == "wait":  # for a file
        deadline = time.monotonic() + SECONDS
        while not Path(value).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    elif name == "status":
        Path(os.environ["FLEET_STATUS_FILE"]).write_text(
            json.dumps(
                {"role": "worker", "steps": 12, "samples": 1400, "samples_per_s_mean": 345.6, "metrics": {"loss": 0.25}}
            )
        )
    elif name == "child":  # as a data loader's worker would be
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({SECONDS})"])
    elif name == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif name == "signal":
        os.kill(os.getpid(), int(value))
    elif name == "exit":
        sys.exit(int(value or 0))


def add_up() -> None:
    """All ranks find each other: the sum of their numbers, and of a one from each."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    numbers = torch.tensor([dist.get_rank(), 1])
    dist.all_reduce(numbers)
    print(f"sum {numbers.tolist()}", flush=True)
    dist.destroy_process_group()


def count(folder: Path) -> None:
    """Training in small: 20 steps, each an exchange among all ranks, the state saved after each; goes on from there.

    A file `die` in the folder kills rank 1 after step 10, once. While there is a file `more`, it does not end.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), folder / "saved.json"
    step, total = json.loads(saved.read_text()) if saved.exists() else (0, 0)
    print(f"begins at step {step} with {dist.get_world_size()} ranks", flush=True)
    is_over = False
    while not is_over:
        numbers = torch.tensor([1, int((folder / "more").exists())])
        dist.all_reduce(numbers)
        step, total = step + 1, total + int(numbers[0])
        is_over = step >= 20 and not numbers[1]
        if rank == 0:
            (folder / "saved.part").write_text(json.dumps([step, total]))
            os.replace(folder / "saved.part", saved)
        dist.barrier()
        if rank == 1 and step == 10 and (folder / "die").exists():
            (folder / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01 if step < 20 else 0.1)  # then it only waits
    print(f"ends with {total} after {step} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
