"""What deep gradient compression costs in accuracy: DGC at sparsity 0.999 beside dense exchange, same seeds, two ranks.

python -m benchmarks.dgc_accuracy --json                                 1,797 digits of scikit-learn, 1.1 M parameters
python -m benchmarks.dgc_accuracy --task criteo --data kaggle.txt.xz     clicks, the last tenth of the rows held out
python -m benchmarks.dgc_accuracy --task criteo                          the same on generated rows
python -m benchmarks.dgc_accuracy --quick --json                         one seed, one epoch, to see that it works

Points are percent: of accuracy (digits), of AUC (criteo), on what was held out. `difference` is DGC's mean over seeds
less that of dense exchange, each run at its best epoch (chosen on the same rows: a little too good for both);
`difference_at_dense_best` is after as many epochs as the dense run of that seed needed: DGC may still be behind then.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import torchfleet as fleet
from benchmarks.rank_jobs import run_ranks
from benchmarks.timing import log, report
from examples.ctr_dnn.model import SLOTS, slots
from examples.ctr_dnn.prepare import generated, real

_WORKER = Path(__file__).with_name("dgc_accuracy_worker.py")
NUM_RANKS = 2
HASH_SIZE = 1 << 17
Arrays = dict[str, np.ndarray]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dgc_accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", default="digits", choices=["digits", "criteo"])
    parser.add_argument("--data", help="criteo: a file of raw rows, plain or compressed")
    parser.add_argument("--rows", type=int, default=50_000, help="criteo without --data: rows to make up")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="(default: 30 for digits, 12 for criteo)")
    parser.add_argument(
        "--lr", type=float, help="(default: 0.05 for digits, 0.1 for criteo, the best for dense exchange)"
    )
    parser.add_argument(
        "--sparsity", type=float, nargs="+", default=[0.999], help="several: a ramp, over --rampup_step"
    )
    parser.add_argument("--rampup_step", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.data and chosen.task != "criteo":
        parser.error("--data is for --task criteo")
    if chosen.data and not Path(chosen.data).is_file():
        parser.error(f"no file at {chosen.data}; leave --data out to make rows up")
    chosen.epochs = chosen.epochs or {"digits": 30, "criteo": 12}[chosen.task]
    chosen.lr = chosen.lr or {"digits": 0.05, "criteo": 0.1}[chosen.task]
    if chosen.quick:
        chosen.seeds, chosen.epochs, chosen.rows = 1, 1, min(chosen.rows, 2000)
    return chosen


def digits() -> tuple[Arrays, Arrays]:
    """Training and test arrays; every fifth image is held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = (found.data / 16.0).astype(np.float32), found.target.astype(np.int64)
    test = np.arange(len(labels)) % 5 == 4
    return {"dense": images[~test], "label": labels[~test]}, {"dense": images[test], "label": labels[test]}


def criteo(lines: list[bytes]) -> tuple[Arrays, Arrays]:
    """Training and test arrays; the last tenth is held out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        path.write_bytes(b"".join(lines))
        how = fleet.CriteoFormat(HASH_SIZE, log_scale=True)
        (batch,) = fleet.data.FileBatches([str(path)], batch_size=len(lines), use_var=slots(), data_format=how)
    ids = np.concatenate([batch[name].numpy() for name in SLOTS], axis=1).astype(np.int64)
    rows = {"ids": ids, "dense": batch["dense_input"].numpy(), "label": batch["label"].numpy().reshape(-1)}
    cut = len(lines) * 9 // 10
    train, test = ({name: array[part] for name, array in rows.items()} for part in (slice(cut), slice(cut, None)))
    return train, test


def data(chosen: argparse.Namespace) -> tuple[Arrays, Arrays]:
    if chosen.task == "digits":
        return digits()
    return criteo(list(real(chosen.data) if chosen.data else generated(chosen.rows, seed=1)))


def trained(chosen: argparse.Namespace, folder: str, sparsity: list[float], seed: int) -> dict[str, Any]:
    flags = ["--task", chosen.task, "--folder", folder, "--seed", str(seed), "--epochs", str(chosen.epochs)]
    flags += ["--lr", str(chosen.lr), "--sparsity", *map(str, sparsity), "--rampup_step", str(chosen.rampup_step)]
    return run_ranks([[sys.executable, str(_WORKER), *flags]] * NUM_RANKS, 1800)[0]


def main() -> None:
    chosen = options()
    runs: dict[str, list[list[float]]] = {"dense": [], "dgc": []}
    parameters = 0
    with tempfile.TemporaryDirectory() as folder:
        for part, arrays in zip(("train", "test"), data(chosen), strict=True):
            for name, array in arrays.items():
                np.save(Path(folder) / f"{part}-{name}.npy", array)
        for seed in range(chosen.seeds):
            for name, sparsity in (("dense", []), ("dgc", chosen.sparsity)):
                result = trained(chosen, folder, sparsity, seed)
                runs[name].append(result["points"])
                parameters = result["parameters"]
            best = {name: max(epochs[-1]) for name, epochs in runs.items()}
            log(f"  seed {seed}: dense {best['dense']:.3f}, dgc {best['dgc']:.3f} points")
    found = {name: [max(epochs) for epochs in all_epochs] for name, all_epochs in runs.items()}
    differences = [dgc - dense for dense, dgc in zip(found["dense"], found["dgc"], strict=True)]
    pairs = zip(runs["dense"], runs["dgc"], strict=True)
    as_soon = [dgc[dense.index(max(dense))] - max(dense) for dense, dgc in pairs]
    best_epochs = {name: [scores.index(max(scores)) + 1 for scores in all_epochs] for name, all_epochs in runs.items()}
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    report(
        {
            "dense_points": statistics.mean(found["dense"]),
            "dgc_points": statistics.mean(found["dgc"]),
            "difference": statistics.mean(differences),
            "standard_error": error,
            "difference_at_dense_best": statistics.mean(as_soon),
            "best_epochs": best_epochs,
            "runs": runs,
            "parameters": parameters,
            **{name: getattr(chosen, name) for name in ("task", "seeds", "epochs", "lr", "sparsity", "rampup_step")},
            "rows": "generated" if chosen.task == "criteo" and not chosen.data else chosen.data or "scikit-learn",
        },
        chosen.json,
    )


if __name__ == "__main__":
    main()
