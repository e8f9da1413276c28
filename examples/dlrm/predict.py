"""Predict with a saved DLRM in one plain process: no server, no fleetrun.

python examples/dlrm/predict.py --model model
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.click_models import predict_clicks
from examples.dlrm.model import DLRM

if __name__ == "__main__":
    predict_clicks(DLRM, __doc__)
