"""The copy of a network for a worker that joins: where the optimizer's state ends up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchfleet.api.hybrid.network_copy import NetworkCopy


def copy_of(device: str, kind: type[Any], **options: Any) -> tuple[NetworkCopy, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2, device=device)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    if device == "cpu":
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return NetworkCopy(model, SimpleNamespace(inner=optimizer, num_steps=1)), optimizer  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "options", "on_host"),
    [
        (torch.optim.Adam, {}, {"step"}),
        (torch.optim.Adam, {"capturable": True}, set()),
        (torch.optim.Adafactor, {}, {"step"}),  # its sums of rows and columns have not the shape of the parameter
    ],
    ids=["adam", "capturable", "adafactor"],
)
def test_state_is_where_the_optimizer_of_the_worker_that_joins_expects_it(
    kind: type[Any], options: dict[str, Any], on_host: set[str]
) -> None:
    """As torch's own load_state_dict places it; the meta device stands for a GPU."""
    sender, sending = copy_of("cpu", kind)
    receiver, receiving = copy_of("meta", kind, **options)
    receiver.restore_pieces([pieces[0] for pieces in sender.pieces(1, [0, 1])])
    for parameter in receiving.param_groups[0]["params"]:
        state = receiving.state[parameter]
        assert {key for key, value in state.items() if value.device.type == "cpu"} == on_host
        assert len(state) > 1

    _, loading = copy_of("meta", kind, **options)
    theirs = sending.state_dict()
    theirs["param_groups"][0].update(options)
    loading.load_state_dict(theirs)
    for parameter, own in zip(receiving.param_groups[0]["params"], loading.param_groups[0]["params"], strict=True):
        for key, value in loading.state[own].items():
            assert receiving.state[parameter][key].device == value.device
