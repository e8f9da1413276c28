"""The names of fleet.optim, once: optim.py reads this file, and so do type checkers and editors."""

from torchfleet.ps.worker.optim.ftrl import FTRL as FTRL
from torchfleet.ps.worker.optim.lion import Lion as Lion
from torchfleet.ps.worker.optim.rowwise_adagrad import RowWiseAdagrad as RowWiseAdagrad
from torchfleet.ps.worker.optim.torch_optimizers import (
    Adagrad as Adagrad,
    Adam as Adam,
    AdamW as AdamW,
    RMSprop as RMSprop,
    SGD as SGD,
    SparseAdam as SparseAdam,
)
