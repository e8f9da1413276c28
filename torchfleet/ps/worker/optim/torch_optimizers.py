"""torch's optimizers that servers run, each with parameters or, for one table, without."""

from __future__ import annotations

import torch

from torchfleet.ps.worker.optim.without_parameters import MayLackParameters


class SGD(MayLackParameters, torch.optim.SGD):
    """torch.optim.SGD."""


class Adagrad(MayLackParameters, torch.optim.Adagrad):
    """torch.optim.Adagrad."""


class Adam(MayLackParameters, torch.optim.Adam):
    """torch.optim.Adam; on rows, torch.optim.SparseAdam."""


class AdamW(MayLackParameters, torch.optim.AdamW):
    """torch.optim.AdamW; on rows, torch.optim.SparseAdam with decoupled weight decay."""


class SparseAdam(MayLackParameters, torch.optim.SparseAdam):
    """torch.optim.SparseAdam."""


class RMSprop(MayLackParameters, torch.optim.RMSprop):
    """torch.optim.RMSprop."""
