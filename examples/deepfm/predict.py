"""Predict with a saved DeepFM in one plain process: no server, no fleetrun.

python examples/deepfm/predict.py --model model
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.click_models import predict_clicks
from examples.deepfm.model import DeepFM

if __name__ == "__main__":
    predict_clicks(DeepFM, __doc__)
