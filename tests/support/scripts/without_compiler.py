"""Imported by scripts that tests start as processes: what torch.compile needs is not imported.

Methods of torch.optim.Optimizer are marked as never to be compiled; the first call of one imports all of torch._dynamo
to say so, which takes nearly two seconds of a core, a third of the start of such a process. Here they are marked by
hand: they do what they always do. With a torch that does it in another way this changes nothing.
"""

from __future__ import annotations

import torch

for _name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    _method = getattr(getattr(torch.optim.Optimizer, _name), "__wrapped__", None)
    if _method is not None:
        setattr(_method, "__dynamo_disable", _method)
