"""Predict with a saved CTR-DNN: in this process alone, or with the tables on servers.

python examples/ctr_dnn/infer.py --model model                                            no server needed
fleetrun --server_num 2 --worker_num 2 examples/ctr_dnn/infer.py --model model --distributed
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import torchfleet as fleet

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from model import CTRDNN, log_scale_of, slots
from prepare import parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder that train.py --save wrote to")
    parser.add_argument("--data", help="the folder that prepare.py made (default: ctr_data, generated if need be)")
    parser.add_argument("--distributed", action="store_true", help="leave the tables on the servers")
    parser.add_argument("--show", type=int, default=5, help="predictions to print")
    parser.add_argument(
        "--log_scale", action=argparse.BooleanOptionalAction, help="numbers as log(1 + x) (default: as the save says)"
    )
    options = parser.parse_args()
    files = parts(options.data, "test")
    options.log_scale = log_scale_of(options.model, options.log_scale)
    if options.distributed:
        fleet.init()
        infer = fleet.DistributedInfer(CTRDNN())
        infer.init_distributed_infer_env(dirname=options.model)
        if fleet.is_server():
            return
        predict, files = infer.predict, fleet.util.get_file_shard(files)
    else:
        predict = torch.no_grad()(fleet.load_inference_model(options.model, CTRDNN()))
    score(predict, files, options)
    if options.distributed:
        fleet.stop_worker()


def score(predict: object, files: list[str], options: argparse.Namespace) -> None:
    batches = fleet.data.FileBatches(
        files, batch_size=4096, use_var=slots(), data_format=fleet.CriteoFormat(log_scale=options.log_scale)
    )
    meter = fleet.metrics.AUC()
    shown = 0
    for batch in batches:
        logits = predict(batch)  # type: ignore[operator]
        meter.update(logits, batch["label"])
        chances = torch.softmax(logits, dim=1)[:, 1]
        for i in range(min(options.show - shown, batch.num_samples)):
            print(f"predicted {chances[i]:.4f}, clicked {batch['label'][i].item()}")
            shown += 1
    *_, positive, negative = meter.compute()[2]
    auc, num = fleet.metrics.auc(positive, negative), int(fleet.metrics.sum(positive.sum() + negative.sum()))
    print(f"AUC {auc:.6f} on {num:,} rows")


if __name__ == "__main__":
    main()
