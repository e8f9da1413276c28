"""One run of examples/ctr_dnn with some workers in some mode, real or simulated: what it learned, and how fast."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "ctr_dnn" / "train.py"
PREPARE = SCRIPT.with_name("prepare.py")
MODES = ("sync", "half_async", "async", "gather", "hybrid", "geo")
PARTS = 160  # files of the training set; a fifth as many of the test set, so that 32 workers have one each
RATE = 1e-3  # of Adam, for the network and for the rows


@dataclass(frozen=True)
class Setting:
    """What is run. `batch`: samples of one worker in one step. `link`, `jitter`: of a simulation. `row_rate`: of Adam,
    for the rows."""

    data: str
    mode: str
    workers: int
    seed: int
    servers: int = 2
    batch: int = 1000
    epochs: int = 3
    simulated: bool = False
    link: str = ""
    jitter: float = 0.0
    row_rate: float = RATE

    @property
    def name(self) -> str:
        return f"{self.mode} × {self.workers}{' simulated' if self.simulated else ''}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """Test AUC after each epoch; samples/s of all workers together, the median of the epochs after the first."""

    auc: list[float]
    samples_per_s: float


def prepared(folder: Path, num_rows: int, source: str | None = None) -> str:
    """Training and test files in `folder`: of `source`, a file of raw Criteo rows, or made up."""
    command = [sys.executable, str(PREPARE), "--out", str(folder), "--parts", str(PARTS)]
    command += ["--data", source] if source else ["--rows", str(num_rows)]
    subprocess.run(command, check=True, timeout=1200, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return str(folder)


def script_flags(setting: Setting) -> list[str]:
    """Flags of train.py. A batch of sync mode is that of all workers together."""
    batch = setting.batch * (setting.workers if setting.mode == "sync" else 1)
    flags = ["--data", setting.data, "--mode", "async" if setting.mode == "gather" else setting.mode]
    flags += ["--batch_size", str(batch), "--epochs", str(setting.epochs), "--seed", str(setting.seed)]
    flags += ["--print_period", "0"]
    if setting.mode == "gather":
        flags += ["--gather", str(setting.workers)]
    if setting.mode != "geo":  # its SGD has rates of its own
        flags += ["--lr", str(RATE), "--embedding_lr", str(setting.row_rate)]
    return flags


def run(setting: Setting) -> Outcome:
    """Raises SystemExit with the end of the output if the job fails."""
    with tempfile.TemporaryDirectory() as log_dir:
        launch = ["--server_num", str(setting.servers), "--worker_num", str(setting.workers), "--log_dir", log_dir]
        if setting.simulated:
            launch += ["--simulate", *(["--link", setting.link] if setting.link else [])]
            launch += ["--jitter", str(setting.jitter)] if setting.jitter else []
        command = [sys.executable, "-m", "torchfleet.launch", *launch, str(SCRIPT), *script_flags(setting)]
        # One core per worker, so that eight of them on sixteen cores do not take each other's.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False, env=environment)
        logs = [path.read_text() for path in sorted((Path(log_dir) / "latest").glob("workerlog.*"))]
    if done.returncode or len(logs) != setting.workers:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return outcome(logs, setting)


def run_beside_copies(setting: Setting) -> Outcome:
    """As `run`, with the median speed of as many copies at a time as a real job has processes, while cores last. A core
    computes slower while others compute: they share caches, memory and clock rate."""
    num = min(setting.workers + setting.servers, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num) as pool:
        found = list(pool.map(run, [setting] * num))
    return Outcome(found[0].auc, statistics.median(each.samples_per_s for each in found))


def outcome(logs: list[str], setting: Setting) -> Outcome:
    """From the workers' logs. Each prints the AUC of all, and its own speed; in sync mode that of all."""
    speeds = [[_number(found) for found in re.findall(r"epoch \d+: ([0-9,]+) samples/s", log)] for log in logs]
    auc = [float(found) for found in re.findall(r"test AUC ([0-9.]+)", logs[0])]
    if len(auc) != setting.epochs or any(len(found) != setting.epochs for found in speeds):
        raise SystemExit(f"expected {setting.epochs} epochs in every worker's log, found:\n{logs[0][-2000:]}")
    combine = statistics.mean if setting.mode == "sync" else sum
    together = [float(combine(found)) for found in zip(*speeds, strict=True)]
    return Outcome(auc, statistics.median(together[1:] or together))


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _python_path() -> str:
    return os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path)
