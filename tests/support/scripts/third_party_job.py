"""`third_party_job.py NAME MODE OUT`: a worker that trains a model of another library; its outcome is left in OUT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(name: str, mode: str, out: Path) -> None:
    os.chdir(out)  # RecBole writes its logs where it is started
    import torch
    from support.third_party.case import Port
    from support.third_party.cases import CASES

    import torchfleet as fleet

    torch.set_num_threads(1)
    (case,) = (case for case in CASES if f"{case.library} {case.name}" == name)
    outcome = case.train(Port(mode))
    (out / f"worker{fleet.worker_index()}.json").write_text(json.dumps([outcome.losses, outcome.score]))
    fleet.stop_worker()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
