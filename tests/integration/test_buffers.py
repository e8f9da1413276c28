"""Buffers of several workers, such as the statistics of batch norms: after a barrier all have those of worker 0."""

from __future__ import annotations

import threading

import torch
from support import jobs
from support.cases import each_of
from support.jobs import Part, Servers


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))


def statistics(part: Part) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in part.model.named_buffers()}


@each_of("mode", ["sync", "half_async", "async", "geo"])
def test_a_barrier_gives_all_workers_the_buffers_of_worker_0(mode: str) -> None:
    both_have_them = threading.Barrier(2)

    def body(part: Part) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(part.index)
        found = []
        for _ in range(2):
            for _ in range(3 if mode == "sync" else 3 + part.index):
                part.model(torch.rand(8, 3)).square().mean().backward()
                part.optimizer.step()
                part.optimizer.zero_grad()
            found.append(statistics(part))
            part.barrier()
            found.append(statistics(part))
            both_have_them.wait(jobs.SECONDS)  # worker 0 would send newer ones at its next barrier
        return found

    first, second = jobs.run(body, make_model, jobs.sgd, mode=mode, num_workers=2).results
    for before in (0, 2):
        assert not torch.equal(first[before]["1.running_mean"], second[before]["1.running_mean"])
        torch.testing.assert_close(second[before + 1], first[before], rtol=0, atol=0)
        torch.testing.assert_close(first[before + 1], first[before], rtol=0, atol=0)


def test_eval_on_one_worker_waits_for_nobody() -> None:
    def body(part: Part) -> None:
        part.model(torch.rand(8, 3)).square().mean().backward()
        part.optimizer.step()
        if part.index == 1:
            part.model.eval()
            with torch.no_grad():
                part.model(torch.rand(8, 3))

    jobs.run(body, make_model, jobs.sgd, num_workers=2)


def test_values_that_nobody_changes_are_not_sent_at_a_barrier() -> None:
    servers = Servers(num_workers=2)

    def body(part: Part) -> None:
        for _ in range(3):
            part.barrier()

    def frozen() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 2).requires_grad_(False), torch.nn.Linear(2, 1))

    jobs.run(body, frozen, jobs.sgd, num_workers=2, servers=servers)
    assert servers.counts("SET") == [2]  # the first values of the trained and of the frozen parameters
