"""Names that are listed in a stub file and imported when they are first used."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import torchfleet
from torchfleet.base import lazy_names

PUBLIC = {"torchfleet": "__init__.pyi", "torchfleet.nn": "nn.pyi", "torchfleet.data": "data/__init__.pyi"}
FOLDER = Path(torchfleet.__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_every_listed_name_is_what_its_module_defines(name: str) -> None:
    module = import_module(name)
    places = lazy_names.names_of(FOLDER / PUBLIC[name])
    assert module.__all__ == sorted(places) == [name for name in dir(module) if not name.startswith("__")]
    for found, place in places.items():
        defined = import_module(place)
        assert getattr(module, found) is (defined if place == f"{name}.{found}" else getattr(defined, found))


@pytest.mark.parametrize("name", PUBLIC)
def test_another_name_is_an_attribute_error(name: str) -> None:
    module = import_module(name)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018
    assert not hasattr(module, "__wrapped__")


def test_an_error_names_the_nearest_public_name() -> None:
    with pytest.raises(AttributeError, match="'SparseEmbedding'"):
        torchfleet.nn.SparseEmbeding  # noqa: B018


@pytest.mark.slow
def test_a_name_is_imported_when_it_is_first_used_and_then_kept() -> None:
    code = """
import sys, torchfleet as fleet, torchfleet.nn, torchfleet.data
assert "torch" not in sys.modules and "save" not in vars(fleet)
fleet.hash_string
assert "torch" not in sys.modules
fleet.save
assert "torch" in sys.modules and vars(fleet)["save"] is sys.modules["torchfleet.api.saves"].save
fleet.nn.SparseEmbedding, fleet.data.from_arrow
assert "torchfleet.collective.layers.tensor_parallel" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


@pytest.mark.slow
def test_a_collective_job_loads_nothing_of_servers() -> None:
    """numba, ZeroMQ and the tables are 70 MiB of a rank."""
    code = """
import sys, torch, torchfleet as fleet
fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(sharding=True))
model = fleet.distributed_model(torch.nn.Linear(2, 2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for x in fleet.prefetch([torch.ones(1, 2)]):
    model(x).sum().backward()
    optimizer.step()
    fleet.report(loss=1.0)
fleet.stop_worker()
assert not {"numba", "zmq", "torchfleet.ps.tables", "torchfleet.ps.server"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env={**os.environ, "FLEET_DEVICE": "cpu"})
