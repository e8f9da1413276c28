"""DLRM with its embeddings on parameter servers: clicks on generated or real Criteo rows.

python examples/dlrm/train.py                                                one process
fleetrun --server_num 2 --worker_num 2 examples/dlrm/train.py                servers and workers on this machine
fleetrun --server_num 2 --worker_num 2 examples/dlrm/train.py --mode hybrid  another mode
... --data kaggle.txt.xz                                                     raw rows of the Criteo challenge
... --tables cuda                                                            rows in GPU memory, no servers
... --save model                                                             then: predict.py --model model
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.click_models import train_clicks
from examples.dlrm.model import DLRM

if __name__ == "__main__":
    train_clicks(DLRM, __doc__, geo_lr=None, on_device=DLRM)
