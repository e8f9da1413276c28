"""On which device a process computes, by its role and its index on its machine."""

from __future__ import annotations

import pytest
import torch
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import FleetError
from torchfleet.base.own_device import device_of
from torchfleet.base.role.role_info import SERVER, WORKER, RoleInfo

SERVERS = ("a:7000",)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that this machine has two GPUs. Nothing is computed on them."""
    monkeypatch.delenv("FLEET_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def worker(index: int, *hosts: str, num: int = 4) -> RoleInfo:
    endpoints = tuple(f"{host}:{port}" for port, host in enumerate(hosts, 1))
    return RoleInfo(WORKER, index, num, server_endpoints=SERVERS, worker_endpoints=endpoints)


@pytest.mark.usefixtures("two_gpus")
class TestWithGpus:
    @pytest.mark.parametrize(("index", "gpu"), [(0, 0), (1, 1), (2, 0), (3, 1)])
    def test_workers_share_the_gpus_in_turn(self, index: int, gpu: int) -> None:
        assert device_of(worker(index)) == torch.device("cuda", gpu)

    @pytest.mark.parametrize(("index", "gpu"), [(0, 0), (1, 0), (2, 1), (3, 1)])
    def test_workers_are_counted_on_their_own_machine(self, index: int, gpu: int) -> None:
        assert device_of(worker(index, "a", "b", "a", "b")) == torch.device("cuda", gpu)

    def test_a_server_computes_on_the_cpu(self) -> None:
        assert device_of(RoleInfo(SERVER, server_endpoints=SERVERS)) == torch.device("cpu")

    def test_a_rank_has_the_gpu_of_its_local_rank(self) -> None:
        assert device_of(RoleInfo(WORKER, 5, 8, is_collective=True, local_rank=1)) == torch.device("cuda", 1)

    def test_a_rank_without_a_gpu_is_an_error(self) -> None:
        with pytest.raises(FleetError, match=naming(2, "FLEET_DEVICE=cpu")):
            device_of(RoleInfo(WORKER, 2, 3, is_collective=True, local_rank=2))

    def test_a_variable_keeps_every_job_off_the_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLEET_DEVICE", "cpu")
        assert device_of(worker(0)) == torch.device("cpu")

    def test_a_process_alone_has_the_first_gpu(self) -> None:
        fleet.init()
        assert fleet.device() == torch.device("cuda", 0)


def test_without_gpus_everything_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fleet.init()
    assert fleet.device() == torch.device("cpu")
    assert device_of(RoleInfo(WORKER, 2, 3, is_collective=True, local_rank=2)) == torch.device("cpu")
