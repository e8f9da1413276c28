"""Training with a cache of rows against the same training without it: the servers' rows and state, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Part, Servers
from support.messages import naming

import torchfleet as fleet
from torchfleet.api import current_job
from torchfleet.base.errors import FleetError, ModelError, StrategyError
from torchfleet.ps.worker.cache.row_memory import RowMemory

SMALL = "15KB"  # fewer rows than ids: rows are evicted and come back
KINDS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "rowwise": lambda p: fleet.optim.RowWiseAdagrad(p, lr=0.1),
}


class Model(torch.nn.Module):
    """Two lookups in one table, one of them pooled, and a table of its own size."""

    def __init__(self, cache: str | None, device: str = "cpu") -> None:
        super().__init__()
        first = fleet.nn.Uniform(-0.1, 0.1)
        self.items = fleet.nn.SparseEmbedding(4, name="items", initializer=first, cache=cache)
        self.bags = fleet.nn.SparseEmbedding(4, name="items", initializer=first, cache=cache)
        self.tags = fleet.nn.SparseEmbedding(3, name="tags", num_embeddings=50, padding_idx=7, cache=cache)
        self.top = torch.nn.Linear(11, 1)
        self.to(device)

    def forward(self, ids: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, tags: torch.Tensor) -> Any:
        items = self.items(ids).sum(1)
        bags = self.bags((values, offsets))
        return self.top(torch.cat([items, bags, self.tags(tags).sum(1)], 1)).squeeze(1)


def batches(num: int = 12, seed: int = 0) -> Iterator[tuple[torch.Tensor, ...]]:
    draws = torch.Generator().manual_seed(seed)

    def ids(limit: int, *shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=draws) ** 3 * limit).long()

    for _ in range(num):
        offsets = torch.arange(0, 16, 2)
        yield ids(150, 8, 3) - 20, ids(150, 16), offsets, ids(50, 8, 2), torch.rand(8, generator=draws)


def train(part: Part, loader: Any, prefetch: bool = True) -> list[float]:
    losses = []
    device = part.model.top.weight.device
    for *inputs, target in part.prefetch(loader) if prefetch else loader:
        loss = (part.model(*inputs) - target.to(device)).square().mean()
        loss.backward()
        part.optimizer.step()
        part.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def held(servers: Servers) -> dict[str, dict[int, bytes]]:
    """All rows with their state, and the steps, as the servers have them."""
    found: dict[str, dict[int, bytes]] = {}
    for name in ("items", "tags"):
        found[name] = {-(1 << 60): b""}
        for number in range(len(servers)):
            table = servers.table(name, number)
            found[name][-(1 << 60) - number] = str(table.step).encode()
            for keys, rows, _ in table.chunks():
                found[name] |= {int(key): row.tobytes() for key, row in zip(keys.view(np.int64), rows, strict=True)}
    return found


def trained(cache: str | None, optimizer: str, mode: str, prefetch: bool, num_servers: int = 2) -> tuple[Any, Any]:
    servers = Servers(num_servers)
    torch.manual_seed(0)
    model, configs = Model(cache), {"max_staleness": 0} if mode == "async" else {}
    with jobs.one_worker(
        model, lambda model: KINDS[optimizer](model.parameters()), mode=mode, servers=servers, **configs
    ) as part:
        losses = []
        is_exact = mode == "sync" or cache is not None  # other modes pull rows before the step that changes them
        for *inputs, target in part.prefetch(list(batches())) if prefetch and is_exact else batches():
            loss = (part.model(*inputs) - target).square().mean()
            loss.backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            losses.append(loss.item())
            if mode in ("async", "hybrid") and (cache is None or mode == "async"):
                part.flush()  # what async mode has with no staleness at all
            if cache is not None and len(losses) > 1:
                assert {*part.stats()["cache"]} == {"items", "tags"}
    return losses, held(servers)


@each_of(
    "mode, optimizer, prefetch",
    [
        ("sync", "adam", True),
        ("sync", "sgd", False),
        ("sync", "momentum", True),
        ("sync", "adagrad", True),
        ("sync", "rowwise", True),
        ("half_async", "adam", True),
        ("async", "adam", True),
    ],
)
def test_rows_and_losses_are_those_without_the_cache_bit_for_bit(mode: str, optimizer: str, prefetch: bool) -> None:
    assert trained(SMALL, optimizer, mode, prefetch) == trained(None, optimizer, mode, prefetch)


def test_hybrid_training_has_the_same_rows(no_old_garbage: None) -> None:
    assert trained("1MB", "adam", "hybrid", True) == trained(None, "adam", "hybrid", True)


def test_rows_are_evicted_written_and_fetched_again() -> None:
    with jobs.one_worker(Model(SMALL), lambda model: KINDS["adam"](model.parameters()), num_servers=2) as part:
        train(part, list(batches()))
        found = part.stats()["cache"]["items"]
    size = RowMemory.bytes_per_row(part.job.plan.sparse["items"].spec)
    assert found["slots"] == 15 * 1024 // size
    assert found["rows"] <= found["slots"] < 140
    assert found["evicted"] > 0
    assert found["missed"] > found["rows"]  # some came twice


def test_servers_are_asked_only_for_rows_that_they_have() -> None:
    with jobs.one_worker(Model("1MB"), lambda model: KINDS["adam"](model.parameters()), num_servers=2) as part:
        train(part, list(batches()))
        before = part.stats()["cache"]["items"]
        part.worker.engine.caches["items"].empty()  # others may write rows from now on
        train(part, list(batches()))
        after = part.stats()["cache"]["items"]
    assert before["missed"] == before["rows"] > 50
    assert before["pulled"] == 0
    assert after["pulled"] == after["missed"] - before["missed"] == before["missed"]


@each_of("optimizer", ["sgd", "adagrad", "rowwise", "adam"])
def test_the_kernels_of_devices_have_the_rows_without_the_cache(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a GPU, by the twins of its kernels."""
    plain_losses, plain = trained(None, optimizer, "sync", True)
    monkeypatch.setattr(
        RowMemory, "is_exact", property(lambda memory: False, lambda memory, value: None), raising=False
    )
    losses, rows = trained(SMALL, optimizer, "sync", True)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    _check_alike(rows, plain, 1e-6)


def _check_alike(found: dict[str, dict[int, bytes]], expected: dict[str, dict[int, bytes]], atol: float) -> None:
    for name, rows in expected.items():
        assert found[name].keys() == rows.keys()
        for key, row in rows.items():
            if key > -(1 << 60):
                own = np.frombuffer(found[name][key], np.float32)
                np.testing.assert_allclose(own, np.frombuffer(row, np.float32), atol=atol)


def test_a_prediction_a_save_and_a_state_have_the_rows_of_the_cache(tmp_path: Path) -> None:
    states, saved = [], []
    for cache in (None, SMALL):
        torch.manual_seed(0)
        with jobs.one_worker(Model(cache), num_servers=2) as part:
            train(part, list(batches(4)))
            with torch.no_grad():
                predicted = part.model(*next(batches())[:-1])
            train(part, list(batches(3, seed=5)))
            part.model.eval()
            again = part.model(*next(batches())[:-1])
            part.model.train()
            train(part, list(batches(2, seed=6)))
            part.worker.save(str(tmp_path / str(cache)), "full")
            train(part, list(batches(2, seed=7)))
            part.worker.save(str(tmp_path / str(cache)), "delta")
            states.append((predicted, again, part.model.tags.state_dict()["weight"]))
            model = fleet.load_inference_model(str(tmp_path / str(cache)), Model(None))
            saved.append(model(*next(batches())[:-1]))
    for plain, cached in zip(*states, strict=True):
        assert torch.equal(plain, cached)
    assert torch.equal(*saved)


def test_rows_that_are_loaded_replace_those_of_the_cache() -> None:
    results = []
    for cache in (None, "1MB"):
        torch.manual_seed(0)
        servers = Servers(2)
        with jobs.one_worker(Model(cache), servers=servers) as part:
            train(part, list(batches(3)))
            state = part.model.tags.state_dict()
            state["weight"] = torch.full_like(state["weight"], 0.25)
            state["weight"][7] = 0.0  # padding
            part.model.tags.load_state_dict(state)
            train(part, list(batches(3, seed=4)))
        results.append(held(servers))
    assert results[0] == results[1]


def test_clipped_and_accumulated_gradients_are_those_without_the_cache() -> None:
    results = []
    for cache in (None, SMALL):
        torch.manual_seed(0)
        servers = Servers(2)
        with jobs.one_worker(Model(cache), lambda model: KINDS["adam"](model.parameters()), servers=servers) as part:
            loader = list(batches(6))
            for first, second in zip(loader[::2], loader[1::2], strict=True):
                for *inputs, target in (first, second):
                    (part.model(*inputs) - target).square().mean().backward()
                (0.01 * part.model.tags.batch_rows().square().sum()).backward()
                torch.nn.utils.clip_grad_norm_(part.model.parameters(), 0.1)
                part.optimizer.step()
                part.optimizer.zero_grad()
        table = servers.table("items")
        results.append({int(key): row for keys, rows, _ in table.chunks() for key, row in zip(keys, rows, strict=True)})
    plain, cached = results
    assert plain.keys() == cached.keys()
    for key, row in plain.items():  # a norm is summed in the order of the rows, which differs
        np.testing.assert_allclose(cached[key], row, atol=1e-6)


def test_an_id_out_of_range_is_an_error_after_which_training_goes_on() -> None:
    with jobs.one_worker(Model(SMALL), num_servers=2) as part:
        train(part, list(batches(2)))
        *inputs, _ = next(batches())
        with pytest.raises(FleetError, match=naming("tags", "50")):
            part.model(*inputs[:3], inputs[3] + 50)
        part.optimizer.zero_grad()
        assert len(train(part, list(batches(2)))) == 2


@each_of("prefetch", [False, True])
def test_a_lookup_for_training_after_the_worker_was_stopped_is_an_error(prefetch: bool) -> None:
    with jobs.one_worker(Model("1MB"), num_servers=1) as part:
        train(part, list(batches(2)))
    with pytest.raises(FleetError, match=naming("fleet.stop_worker()")):
        train(part, list(batches(1, seed=1)), prefetch)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    servers = Servers(1)
    with jobs.one_worker(Model("1MB"), servers=servers) as part:
        train(part, list(batches(2)))
        part.flush()
        before = held(servers)
        *inputs, _ = next(batches())
        (part.model(*inputs) * torch.inf).sum().backward()
        with pytest.raises(FleetError, match=naming("items")):
            part.optimizer.step()
        part.optimizer.zero_grad()
        part.flush()
        assert held(servers) == before


def test_a_cache_smaller_than_a_batch_is_an_error_that_names_the_table() -> None:
    with jobs.one_worker(Model("600"), num_servers=1) as part:
        with pytest.raises(ModelError, match=naming("items", "cache")):
            train(part, list(batches(2)))
        part.optimizer.zero_grad()


def test_jobs_in_which_a_cache_is_not_exact_are_refused() -> None:
    def setup(model: torch.nn.Module, mode: str, num_workers: int = 1, **configs: Any) -> None:
        jobs.make_part(lambda: model, jobs.sgd, jobs.strategy(mode, **configs), jobs.roles(num_workers, 1)[0])

    def embedding(**more: Any) -> torch.nn.Module:
        return torch.nn.Sequential(
            fleet.nn.SparseEmbedding(4, name="items", cache="1MB", **more), torch.nn.Linear(4, 1)
        )

    for mode in ("sync", "async", "half_async", "hybrid"):
        with pytest.raises(StrategyError, match=naming("items", "2 workers")):
            setup(embedding(), mode, num_workers=2)
    with pytest.raises(StrategyError, match=naming("items", "geo")):
        setup(embedding(), "geo")
    with pytest.raises(StrategyError, match=naming("items", "gather")):
        setup(embedding(), "async", gather=2)
    with pytest.raises(ModelError, match=naming("items", "entry")):
        setup(embedding(entry=fleet.CountFilterEntry(2)), "sync")
    with pytest.raises(ModelError, match=naming("items", "bfloat16")):
        setup(embedding(dtype="bfloat16"), "sync")
    for wrong in (0, "much", -5, True):
        with pytest.raises(ModelError, match=naming("cache")):
            fleet.nn.SparseEmbedding(4, cache=wrong)


def test_the_rows_of_a_pass_are_there_before_it() -> None:
    loader = list(batches(6))
    with jobs.clean_facade(), jobs.one_worker(Model("1MB"), num_servers=2) as part:
        current_job.current.job = part.job
        part.job._worker = part.worker
        with pytest.raises(FleetError, match=naming("ids")):
            fleet.begin_pass([batch[:-1] for batch in loader])
        tags = {"tags": torch.cat([batch[3] for batch in loader]).unique()}
        assert fleet.begin_pass([None], ids=lambda _: tags)["tags"] == len(tags["tags"][tags["tags"] != 7])
        train(part, loader[:1])
        rows = fleet.begin_pass(loader)
        before = part.stats()["cache"]
        train(part, loader)
        fleet.end_pass()
        after = part.stats()["cache"]
        ids = torch.cat([torch.cat([batch[0].flatten(), batch[1]]) for batch in loader]).unique()
        assert rows["items"] == len(ids)
        assert {name: found["missed"] for name, found in after.items()} == {
            name: found["missed"] for name, found in before.items()
        }
        held_now = part.worker.client.pull("items", ids.numpy(), create=False).result()
        cache = part.worker.engine.caches["items"]
        batch = cache.prepare([(ids, None)])
        cache.wait_for(batch)
        assert np.array_equal(held_now, batch.values(batch.index_of([ids], None)).numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise", "adam"])
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
def test_rows_of_a_gpu_are_those_without_the_cache(optimizer: str, ids_on: str) -> None:
    results = []
    for cache, device in ((None, "cpu"), ("24KB", "cuda")):
        torch.manual_seed(0)
        servers = Servers(2)
        model = Model(cache, device)
        where = ids_on if device == "cuda" else "cpu"
        with jobs.one_worker(model, lambda model: KINDS[optimizer](model.parameters()), servers=servers) as part:
            loader = [tuple(tensor.to(where) for tensor in batch) for batch in batches(40)]
            losses = train(part, loader)
        results.append((losses, held(servers)))
    (plain_losses, plain), (losses, rows) = results
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
    _check_alike(rows, plain, 2e-5)
