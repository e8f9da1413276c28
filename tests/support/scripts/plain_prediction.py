"""A plain process that predicts from a saved model: no fleet.init, no server. Prints the scores' bits."""

from __future__ import annotations

import sys

import torch
from resuming import Model, batch_of

import torchfleet as fleet

model = fleet.load_inference_model(sys.argv[1], Model())
with torch.no_grad():
    print("scores", model(batch_of(0, 0)).numpy().tobytes().hex())
