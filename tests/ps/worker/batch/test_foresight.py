"""One pull and one push per server and step, however many lookups the model makes; and what happens to lookups
that cannot be foreseen. Messages are counted where they arrive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Part, Servers, one_worker

import torchfleet

SLOTS = 6


class Slots(torch.nn.Module):
    """Six tables; `take` says how a batch reaches them."""

    def __init__(self, take: Callable[..., list[torch.Tensor]], padding_idx: int | None = None) -> None:
        super().__init__()
        self.slots = torch.nn.ModuleList(
            torchfleet.nn.SparseEmbedding(2, name=f"slot {i}", padding_idx=padding_idx) for i in range(SLOTS)
        )
        self.out = torch.nn.Linear(2 * SLOTS, 1)
        self.take = take

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        ids = self.take(*arguments, **named)
        rows = [slot(own).reshape(len(own), -1, 2).sum(dim=1) for slot, own in zip(self.slots, ids, strict=True)]
        return self.out(torch.cat(rows, dim=1))


def train(part: Part, *arguments: Any, **named: Any) -> None:
    part.model(*arguments, **named).sum().backward()
    part.optimizer.step()
    part.optimizer.zero_grad()


def columns(ids: torch.Tensor) -> list[torch.Tensor]:
    return [ids[:, i] for i in range(SLOTS)]


def new_ids(step: int, size: int = 4, width: int = SLOTS) -> torch.Tensor:
    """Ids that no step before had."""
    return torch.arange(size * width).reshape(size, width) + 1000 * step


def separate(step: int) -> list[torch.Tensor]:
    return [new_ids(step)[:, i].clone() for i in range(SLOTS)]


WAYS: dict[str, tuple[Callable[..., list[torch.Tensor]], Callable[[int], tuple[list[Any], dict[str, Any]]]]] = {
    "columns of one tensor": (columns, lambda step: ([new_ids(step)], {})),
    "a tensor per slot": (lambda *ids: list(ids), lambda step: (separate(step), {})),
    "keyword arguments": (
        lambda **ids: [ids[f"c{i}"] for i in range(SLOTS)],
        lambda step: ([], {f"c{i}": ids for i, ids in enumerate(separate(step))}),
    ),
    "a dictionary": (
        lambda batch: [batch[f"c{i}"] for i in range(SLOTS)],
        lambda step: ([{f"c{i}": ids for i, ids in enumerate(separate(step))}], {}),
    ),
    "nested lists and dictionaries": (
        lambda batch: [*batch["left"][0], *(pair["ids"] for pair in batch["right"])],
        lambda step: (
            [{"left": (separate(step)[:3], "a name", 7), "right": [{"ids": ids} for ids in separate(step)[3:]]}],
            {},
        ),
    ),
    "ranges of columns": (
        lambda ids: [ids[:, i : i + 2] for i in range(SLOTS)],
        lambda step: ([new_ids(step, width=SLOTS + 1)], {}),
    ),
    "a step in the columns": (
        lambda ids: [ids[:, i::3] for i in range(SLOTS)],
        lambda step: ([new_ids(step, width=12)], {}),
    ),
    "columns of three dimensions": (
        lambda ids: [ids[:, i // 3, i % 3] for i in range(SLOTS)],
        lambda step: ([new_ids(step).reshape(4, 2, 3)], {}),
    ),
    "transposed and unbound": (
        lambda ids: list(ids.t().unbind(0)),
        lambda step: ([new_ids(step)], {}),
    ),
    "32-bit ids": (columns, lambda step: ([new_ids(step).to(torch.int32)], {})),
    "views of a larger tensor": (columns, lambda step: ([torch.cat([new_ids(step)] * 3)[4:8]], {})),
}


@each_of("way", WAYS)
@each_of("num_servers", [1, 3])
def test_six_slots_cost_one_pull_and_one_push_per_server_from_the_third_step_on(way: str, num_servers: int) -> None:
    take, make = WAYS[way]
    servers = Servers(num_servers)
    with one_worker(Slots(take), servers=servers) as part:
        for step in range(5):
            pulls, pushes = servers.counts("PULL"), servers.counts("PUSH")
            arguments, named = make(step)
            train(part, *arguments, **named)
            if step >= 2:
                assert servers.counts("PULL") == [n + 1 for n in pulls], f"step {step}"
                assert servers.counts("PUSH") == [n + 1 for n in pushes], f"step {step}"
        assert part.stats()["unforeseen_lookups"] == SLOTS  # the first step's
        assert part.stats()["lookups"] == 5 * SLOTS


@pytest.mark.parametrize("mode", ["half_async", "async"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_every_mode_with_rows_on_servers_pulls_and_pushes_once(mode: str, prefetch: bool) -> None:
    servers = Servers(2)
    batches = [new_ids(step) for step in range(8)]
    configs = {"max_staleness": 0} if mode == "async" else {}
    with one_worker(Slots(columns), servers=servers, mode=mode, **configs) as part:
        for step, ids in enumerate(part.prefetch(batches) if prefetch else batches):
            if step == 3:
                part.flush()
                before = servers.counts("PULL"), servers.counts("PUSH")
            train(part, ids)
        num_pulls = 5 + 1  # steps 3 to 7, and the flush at the end, which asks for the dense parameters
        if mode == "async":
            num_pulls -= 2 * prefetch  # at step 3 the rows of steps 3 and 4 were under way already
            num_pulls += 5  # each step asks for the dense parameters, too
        part.flush()
        assert [b - a for a, b in zip(before[0], servers.counts("PULL"), strict=True)] == [num_pulls] * 2
        assert [b - a for a, b in zip(before[1], servers.counts("PUSH"), strict=True)] == [5, 5]


def test_geo_pulls_only_rows_it_does_not_hold() -> None:
    servers = Servers(2)
    with one_worker(Slots(columns), servers=servers, mode="geo", k_steps=100) as part:
        for step in (0, 1, 2):
            train(part, new_ids(step))
        before = servers.counts("PULL")
        train(part, new_ids(3))  # new rows: one message per server
        assert servers.counts("PULL") == [n + 1 for n in before]
        for _ in range(3):
            train(part, new_ids(3))
        assert servers.counts("PULL") == [n + 1 for n in before]
        assert servers.counts("PUSH") == [0, 0]


def test_ids_computed_inside_forward_are_counted_as_unforeseen_until_they_were_right_once() -> None:
    def take(ids: torch.Tensor) -> list[torch.Tensor]:
        return [*columns(ids)[:-1], ids[:, 0] * 1000 + ids[:, 1]]

    servers = Servers()
    with one_worker(Slots(take), servers=servers) as part:
        for step in range(5):
            pulls = servers.counts("PULL")[0]
            train(part, new_ids(step))
            if step:  # in the second step: what was foreseen, and the computed ids
                assert servers.counts("PULL")[0] == pulls + (2 if step == 1 else 1)
        assert part.stats()["unforeseen_lookups"] == SLOTS + 1


def test_a_lookup_outside_the_model_is_counted_as_unforeseen_and_works() -> None:
    with one_worker(Slots(columns)) as part:
        for _ in range(3):
            part.model.slots[0](torch.tensor([5])).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
        assert part.stats()["unforeseen_lookups"] == 3
        assert torch.allclose(part.rows("slot 0", [5]), jobs.first_rows(part, "slot 0", [5]) - 1.5)


def test_a_smaller_last_batch_and_a_larger_first_one_are_foreseen() -> None:
    servers = Servers(2)
    with one_worker(Slots(columns), servers=servers) as part:
        for step, size in enumerate([4, 4, 4, 1, 9, 3]):
            pulls = servers.counts("PULL")
            train(part, new_ids(step, size))
            if step >= 2:
                assert servers.counts("PULL") == [n + 1 for n in pulls], f"a batch of {size}"
        assert part.stats()["unforeseen_lookups"] == SLOTS


def test_another_layout_of_the_batch_is_learned_anew() -> None:
    """Columns of a wider tensor have other strides: once unforeseen, then foreseen; never wrong ids."""
    servers = Servers()
    with one_worker(Slots(columns), servers=servers) as part:
        for width in (SLOTS, SLOTS, SLOTS + 3, SLOTS + 3, SLOTS, SLOTS + 3):
            train(part, new_ids(0, width=width)[:, :])
        assert part.stats()["unforeseen_lookups"] <= 2 * SLOTS
        seen = {int(i) for width in (SLOTS, SLOTS + 3) for i in new_ids(0, width=width)[:, 0]}
    assert servers.num_rows("slot 0") == len(seen), "no rows for ids that were never looked up in this slot"


def test_padding_is_neither_pulled_nor_unforeseen() -> None:
    servers = Servers(2)
    with one_worker(Slots(columns, padding_idx=-1), servers=servers) as part:
        for step in range(4):
            ids = new_ids(step)
            ids[0] = -1
            train(part, ids)
        assert part.stats()["unforeseen_lookups"] == SLOTS
    assert servers.num_rows("slot 0") == 4 * 3


def test_an_input_that_no_table_uses_is_not_pulled() -> None:
    servers = Servers()
    with one_worker(Slots(lambda ids, others, x: columns(ids)), servers=servers) as part:
        for step in range(4):
            train(part, new_ids(step), new_ids(step) + 500, torch.rand(4, 3))
    assert servers.num_rows("slot 0") == 4 * 4


def test_prediction_over_parts_of_one_tensor_is_foreseen() -> None:
    """Each part is a batch of its own: one pull, and no rows of the parts before are kept."""
    servers = Servers()
    ids = torch.cat([new_ids(step) for step in range(6)])
    with one_worker(Slots(columns), servers=servers) as part:
        for piece in ids.split(4):
            train(part, piece)
        unforeseen, pulls = part.stats()["unforeseen_lookups"], servers.counts("PULL")[0]
        part.model.eval()
        with torch.no_grad():
            for piece in ids.split(4):
                part.model(piece)
        assert part.stats()["unforeseen_lookups"] == unforeseen
        assert servers.counts("PULL")[0] == pulls + 6 + 1  # and the servers' network, at the first call


def test_accumulated_batches_cost_a_pull_each_and_one_push() -> None:
    servers = Servers(2)
    ids = torch.cat([new_ids(step) for step in range(8)])
    for parts in (list(ids.split(4)), [piece.clone() for piece in ids.split(4)]):
        servers = Servers(2)
        with one_worker(Slots(columns), servers=servers) as part:
            for step in range(0, 8, 2):
                pulls, pushes = servers.counts("PULL"), servers.counts("PUSH")
                part.model(parts[step]).sum().backward()
                part.model(parts[step + 1]).sum().backward()
                part.optimizer.step()
                part.optimizer.zero_grad()
                if step >= 4:
                    assert servers.counts("PULL") == [n + 2 for n in pulls]
                    assert servers.counts("PUSH") == [n + 1 for n in pushes]


def test_samples_are_counted() -> None:
    with one_worker(Slots(columns)) as part:
        for size in (4, 4, 3):
            train(part, new_ids(0, size))
        assert part.stats()["samples"] == 11


def test_prefetch_yields_every_batch_in_order_and_ends() -> None:
    with one_worker(Slots(columns)) as part:
        for num in (0, 1, 2, 5):
            batches = [new_ids(step) for step in range(num)]
            found = list(part.prefetch(batches))
            assert len(found) == num
            assert all(a is b for a, b in zip(found, batches, strict=True))


def test_prefetch_left_early_and_begun_again_trains_on() -> None:
    with one_worker(Slots(columns), mode="async") as part:
        for _ in range(3):
            for step, ids in enumerate(part.prefetch([new_ids(step) for step in range(6)])):
                train(part, ids)
                if step == 2:
                    break
        part.flush()
        assert part.stats()["steps"] == 9


def test_ids_changed_in_place_after_they_were_foreseen_are_looked_up_as_they_are_now() -> None:
    """The index of a foreseen tensor is known beforehand; torch's count of changes says when it no longer holds."""
    model = Slots(lambda ids: [ids] * SLOTS)
    with one_worker(model, mode="async") as part:
        for ids in part.prefetch([new_ids(step) for step in range(4)]):
            ids.add_(100_000)
            train(part, ids)
            part.flush()
            with torch.no_grad():
                found = model.slots[0](ids.clone())
            assert torch.equal(found.reshape(-1, 2), part.rows("slot 0", ids.reshape(-1)))
        last = new_ids(3) + 100_000
        assert part.rows("slot 0", last.reshape(-1)).abs().min() > 0


@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("is_ahead_first", [False, True])
def test_plain_calls_and_batches_brought_ahead_are_both_foreseen(is_ahead_first: bool, is_computed: bool) -> None:
    """A warm-up before, or validation between, must not spoil what is foreseen of batches that are brought ahead."""

    def take(x: torch.Tensor) -> list[torch.Tensor]:
        return [x[:, i].long() for i in range(SLOTS)] if is_computed else columns(x)

    with one_worker(Slots(take), mode="async") as part:
        engine = part.worker.engine

        def run(first: int, is_ahead: bool) -> int:
            """How many lookups of eight steps were unforeseen."""
            before = engine.foresight.num_unforeseen
            batches = [(new_ids(step).float() if is_computed else new_ids(step),) for step in range(first, first + 8)]
            for (x,) in engine.prefetch(batches) if is_ahead else batches:
                train(part, x)
            return engine.foresight.num_unforeseen - before

        run(0, is_ahead_first)
        assert run(10, not is_ahead_first) <= 3 * SLOTS  # its first batches
        assert run(20, True) <= 2 * SLOTS  # the first two are asked for before a call has shown how
        assert run(30, False) == 0
        assert run(40, True) <= 2 * SLOTS


class Later(torch.nn.Module):
    """Looks ids up in `other` once it `is_late`; they are computed by `compute`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = torchfleet.nn.SparseEmbedding(2), torchfleet.nn.SparseEmbedding(2)
        self.out = torch.nn.Linear(2, 1)
        self.is_late, self.compute = False, lambda ids: 2 * ids + 1

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.first(ids)
        return self.out(found + self.other(self.compute(ids)) if self.is_late else found)


@each_of("num_optimizers", [1, 2])
def test_ids_that_a_later_call_computes_are_recorded_whatever_the_number_of_optimizers(num_optimizers: int) -> None:
    def make(model: Any) -> Any:
        if num_optimizers == 1:
            return jobs.sgd(model)
        rows = [*model.first.parameters(), *model.other.parameters()]
        return [torch.optim.SGD(rows, lr=0.1), torch.optim.SGD(model.out.parameters(), lr=0.1)]

    with one_worker(Later(), make) as part:
        counts = []
        for step in range(20):
            part.model.is_late = step > 3
            part.model(torch.arange(4) + 10 * step).sum().backward()
            for optimizer in part.optimizer if num_optimizers > 1 else [part.optimizer]:
                optimizer.step()
                optimizer.zero_grad()
            counts.append(part.stats()["unforeseen_lookups"])
        assert counts[-1] == counts[-5]
        assert not part.stats()["unforeseen"]


def test_a_recipe_that_is_given_up_frees_its_tensors() -> None:
    """A constant of forward belongs to the recipes in which it was recorded."""
    made: list[weakref.ref[torch.Tensor]] = []

    def compute(ids: torch.Tensor) -> torch.Tensor:
        constant = torch.tensor([len(made)] * 4)
        made.append(weakref.ref(constant))
        return ids + constant

    with one_worker(Later()) as part:
        part.model.is_late, part.model.compute = True, compute
        for step in range(100):
            train(part, torch.arange(4) + 10 * step)
        gc.collect()
        assert sum(tensor() is not None for tensor in made) <= 4  # those of recipes in use, and of the last call
