"""SparseEmbedding called with slots: a Ragged, or a list of Ragged and blocks, against torch's EmbeddingBag; and how
well such lookups are foreseen. Numbers are to 1e-6: sums of a few numbers below 1, rounded once each on both sides."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import jobs
from support.cases import each_of
from support.jobs import Servers, one_worker
from support.messages import naming
from support.scripts import slotted
from support.scripts.slotted import ragged
from support.searches import examples

import torchfleet as fleet
from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.batch.foresight import Foresight
from torchfleet.ps.worker.batch.recipe import Replay

IDS = [0, 1, -1, 2, 2**63 - 1, -(2**63), 2**32, 10**15, 7, 12]  # the oracle knows them by their places
DIM = 3


class Slots(torch.nn.Module):
    def __init__(self, dim: int = DIM, **options: Any) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(dim, name="rows", **options)

    def forward(self, slots: Any) -> torch.Tensor:
        return self.rows(slots)


def train(part: jobs.Part, slots: Any, weights: torch.Tensor | None = None) -> torch.Tensor:
    """One update with loss = Σ weights · output; returns the output."""
    out = part.model(slots)
    (out if weights is None else out * weights).sum().backward()
    part.optimizer.step()
    part.optimizer.zero_grad()
    return out.detach()


def oracle(part: jobs.Part, pooling: str, padding: int | None) -> torch.nn.EmbeddingBag:
    """torch's bag with the rows that the ids start with."""
    bag = torch.nn.EmbeddingBag(len(IDS), DIM, mode=pooling, padding_idx=padding)
    bag.weight.data = jobs.first_rows(part, "rows", IDS)
    return bag


def places(slot: Any) -> Any:
    """The slot with ids in place of their places."""
    known = torch.tensor(IDS)
    if isinstance(slot, fleet.Ragged):
        return fleet.Ragged(known[slot.values], slot.offsets)
    return known[slot]


def pooled(bag: torch.nn.EmbeddingBag, slot: Any) -> torch.Tensor:
    if isinstance(slot, fleet.Ragged):
        return bag(slot.values, slot.offsets)
    return bag(slot.reshape(len(slot), -1) if len(slot) else slot.reshape(0, 1))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


PLACES = st.integers(0, len(IDS) - 1)


@st.composite
def some_batches(draw: st.DrawFn) -> list[list[Any]]:
    """Batches of any sizes, whose slots are of the same kinds throughout."""
    kinds = draw(st.lists(st.sampled_from([-1, 0, 1, 2, 3]), min_size=1, max_size=4))
    batches = []
    for num in draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)):
        slots: list[Any] = []
        for kind in kinds:
            if kind < 0:
                slots.append(ragged(draw(st.lists(st.lists(PLACES, max_size=4), min_size=num, max_size=num))))
            else:  # 0: one id per sample, without a second dimension
                wide = max(1, kind)
                ids = draw(st.lists(PLACES, min_size=num * wide, max_size=num * wide))
                block = torch.tensor(ids, dtype=torch.int64)
                slots.append(block.reshape(num, wide) if kind else block)
        batches.append(slots)
    return batches


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@settings(max_examples=examples(15))
@given(batches=some_batches(), padding=st.none() | PLACES)
def test_a_list_of_slots_reads_and_learns_as_torchs_bags(
    pooling: str, batches: list[list[Any]], padding: int | None
) -> None:
    model = Slots(pooling=pooling, padding_idx=None if padding is None else IDS[padding])
    servers = Servers(2)
    with one_worker(model, servers=servers) as part:
        bag = oracle(part, pooling, padding)
        reference = torch.optim.SGD(bag.parameters(), lr=0.5)
        seen: set[int] = set()
        for slots in batches:
            expected = torch.stack([pooled(bag, slot) for slot in slots], dim=1)
            weights = torch.sin(torch.arange(1.0, expected.numel() + 1)).view_as(expected) / 8
            out = train(part, [places(slot) for slot in slots], weights)
            assert out.shape == expected.shape == (len(pooled(bag, slots[0])), len(slots), DIM)
            assert_near(out, expected.detach())
            (expected * weights).sum().backward()
            reference.step()
            reference.zero_grad()
            for slot in slots:
                seen |= set((slot.values if isinstance(slot, fleet.Ragged) else slot.flatten()).tolist())
        seen -= {padding}
        assert_near(part.rows("rows", [IDS[i] for i in sorted(seen)]), bag.weight.detach()[sorted(seen)])
    assert servers.num_rows("rows") == len(seen)


@each_of("pooling", ["sum", "mean"])
@each_of("lists", [[[1, 2, 2], [], [5]], [[]], [[], [], []], [], [[9] * 50], [[], [3]], [[3], []]])
def test_one_slot_gives_one_row_per_sample(pooling: str, lists: list[list[int]]) -> None:
    with one_worker(Slots(pooling=pooling), num_servers=2) as part:
        bag = oracle(part, pooling, None)
        for _ in range(2):
            expected = pooled(bag, ragged(lists))
            out = train(part, places(ragged(lists)), torch.zeros(()))
            assert out.shape == (len(lists), DIM)
            torch.testing.assert_close(out, expected.detach(), rtol=1e-6, atol=1e-6)


def test_a_single_slot_in_a_list_keeps_its_dimension() -> None:
    with one_worker(Slots()) as part:
        slot = ragged([[1], [2, 3]])
        assert torch.equal(part.model([slot]), part.model(slot).unsqueeze(1))
        part.optimizer.zero_grad()


def test_a_block_by_itself_is_one_row_per_id_as_nn_embedding_has_it() -> None:
    with one_worker(Slots()) as part:
        plain = torch.nn.Embedding.from_pretrained(jobs.first_rows(part, "rows", range(6)), freeze=False)
        ids = torch.tensor([[1, 1], [5, 0]])
        expected = plain(ids)
        weights = torch.arange(1.0, 13).view(2, 2, 3) / 16
        assert_near(train(part, ids, weights), expected.detach())
        (expected * weights).sum().backward()
        assert plain.weight.grad is not None
        moved = plain.weight.detach() - 0.5 * plain.weight.grad
        assert_near(part.rows("rows", [0, 1, 5]), moved[[0, 1, 5]])


def test_a_sample_of_only_padding_is_zeros_and_makes_no_row() -> None:
    servers = Servers(2)
    with one_worker(Slots(pooling="mean", padding_idx=0), servers=servers) as part:
        for _ in range(3):
            out = train(part, [ragged([[0, 0], [0]]), torch.tensor([[0], [0]])])
            assert out.shape == (2, 2, DIM)
            assert not out.any()
    assert servers.num_rows("rows") == 0


def test_blocks_that_do_not_lie_in_one_piece_are_read_right() -> None:
    ids = torch.arange(12).reshape(3, 4)
    with one_worker(Slots()) as part:
        first = jobs.first_rows(part, "rows", range(12))
        for _ in range(2):
            out = part.model([ids[:, ::2], ids[:, 1], ids.t()[:3, :3]])
            expected = [first[ids[:, ::2]].sum(1), first[ids[:, 1]], first[ids.t()[:3, :3]].sum(1)]
            assert_near(out.detach(), torch.stack(expected, dim=1))
            part.optimizer.zero_grad()


def test_slots_of_32_and_64_bits_meet_in_one_lookup() -> None:
    with one_worker(Slots()) as part:
        out = part.model([torch.tensor([[-1], [5]], dtype=torch.int32), torch.tensor([[-1], [5]])]).detach()
        assert torch.equal(out[:, 0], out[:, 1])
        part.optimizer.zero_grad()


def test_a_converted_bag_takes_slots_too() -> None:
    class Of(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.rows = torch.nn.EmbeddingBag(10, DIM, mode="mean", sparse=True)

        def forward(self, slots: Any) -> torch.Tensor:
            return slotted.pooled(self.rows, slots)

    plain = Of()
    slots = [ragged([[1, 2], []]), ragged([[9, 9, 3], [4]])]
    with one_worker(Of()) as part:
        assert_near(part.model(slots).detach(), plain(slots).detach())
        assert_near(part.model(slots[0]).detach(), plain(slots[0]).detach())
        part.optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_prediction_with_slots_creates_no_row(mode: str) -> None:
    servers = Servers(2)
    with one_worker(Slots(), servers=servers, mode=mode) as part:
        train(part, [ragged([[1, 2], [3]])])
        part.flush()
        part.model.eval()
        out = part.model([ragged([[1, 100], [200], []])]).detach()
        part.model.train()
        assert_near(out[0, 0], part.rows("rows", [1])[0])
        assert not out[1:].any()
    assert servers.num_rows("rows") == 3


def test_the_gradient_of_a_slot_used_twice_counts_twice() -> None:
    with one_worker(Slots()) as part:
        slot = ragged([[1, 2], [2]])
        out = part.model([slot, slot])
        (out.sum() + 3 * part.model.rows(slot).sum()).backward()
        part.optimizer.step()
        moved = 0.5 * 5 * torch.tensor([[1.0], [2.0]])
        assert_near(part.rows("rows", [1, 2]), jobs.first_rows(part, "rows", [1, 2]) - moved)


# Mistakes


@each_of(
    ("slots", "text"),
    [
        ([], "slots"),
        ([ragged([[1], [2]]), ragged([[1]])], "[2, 1]"),
        ([torch.tensor([[1]]), ragged([])], "[1, 0]"),
        ([torch.zeros(2, 2, 2, dtype=torch.int64)], "(2, 2, 2)"),
        ([torch.tensor(1)], "()"),
        (fleet.Ragged(torch.tensor([1, 2]), torch.tensor([1])), "offsets 0"),
        (fleet.Ragged(torch.tensor([1, 2]), torch.tensor([0, 2, 1])), "offsets"),
        (fleet.Ragged(torch.tensor([1, 2]), torch.tensor([0, 3])), "offsets 2"),
        (fleet.Ragged(torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)), "offsets 2"),
    ],
)
def test_slots_that_are_no_batch_are_refused(slots: Any, text: str) -> None:
    with one_worker(Slots()) as part, pytest.raises(ModelError, match=naming(*text.split())):
        part.model(slots)


def test_a_slot_of_numbers_is_refused() -> None:
    numbers = fleet.Ragged(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
    for wrong in (numbers, [numbers], [ragged([[1]]), torch.tensor([[1.0]])]):
        with one_worker(Slots()) as part, pytest.raises(TypeError, match=naming("torch.float32")):
            part.model(wrong)


@each_of("wrong", [{"C1": ragged([[1], [2]]), "C2": ragged([[1], [2]])}, None, 3, [3], [None]])
def test_what_is_no_slot_is_refused_as_such(wrong: Any) -> None:
    """Such as the whole batch instead of one of its slots."""
    with one_worker(Slots()) as part, pytest.raises((ModelError, TypeError)):
        part.model(wrong)


# Foresight


def random_slots(rng: np.random.Generator, num: int, num_slots: int) -> list[fleet.Ragged]:
    return [ragged([rng.integers(0, 1000, rng.integers(1, 6)).tolist() for _ in range(num)]) for _ in range(num_slots)]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_ragged_slots_of_changing_sizes_are_foreseen_after_the_first_step(at_once: bool, num_servers: int) -> None:
    class Each(Slots):
        def forward(self, slots: Any) -> torch.Tensor:
            return self.rows(slots) if at_once else torch.stack([self.rows(slot) for slot in slots])

    rng = np.random.default_rng(0)
    servers = Servers(num_servers)
    with slotted.job(Each(), servers=servers) as part:
        train(part, random_slots(rng, 4, 5))
        unforeseen = fleet.stats()["worker"]["unforeseen_lookups"]
        assert unforeseen == (1 if at_once else 5)
        for num in (4, 7, 1, 12, 3):
            pulls = servers.counts("PULL")
            train(part, random_slots(rng, num, 5))
            assert servers.counts("PULL") == [n + 1 for n in pulls]
        assert fleet.stats()["worker"]["unforeseen_lookups"] == unforeseen


MANY = [fleet.Slot("label", dim=1), *(fleet.Slot(f"C{i}") for i in range(4)), fleet.Slot("history", dim=4)]


def many_file(folder: Path, num: int) -> str:
    rng = np.random.default_rng(1)
    samples = [
        {
            "label": [int(rng.integers(7000, 7050))],
            **{f"C{i}": rng.integers(1000 * i, 1000 * i + 50, rng.integers(0, 4)).tolist() for i in range(4)},
            "history": rng.integers(5000, 5050, 4).tolist(),
        }
        for _ in range(num)
    ]
    return slotted.write(folder / "many", samples)


@pytest.mark.parametrize("kind", ["queue", "memory"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_slots_of_a_dataset_are_foreseen_from_the_third_batch_on(tmp_path: Path, kind: str, mode: str) -> None:
    """The rows of the second batch are thought of before the first one is looked up."""
    data = slotted.dataset(kind, [many_file(tmp_path, 100)], 8, MANY)
    counts = []
    with slotted.job(Slots(), mode=mode) as part:
        for batch in fleet.prefetch(data):
            train(part, [batch[f"C{i}"] for i in range(4)])
            counts.append(fleet.stats()["worker"]["unforeseen_lookups"])
    assert len(counts) == 13
    assert counts[-1] == counts[1] <= 2


class Windows(Slots):
    """Part of a block: a window on one slot, whose neighbours in memory change their sizes."""

    def forward(self, batch: Any) -> torch.Tensor:
        return self.rows(batch["history"][:, 1:3]).sum(dim=1)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_window_on_a_slot_is_foreseen_there_and_not_in_its_neighbours(tmp_path: Path, prefetch: bool) -> None:
    data = slotted.dataset("queue", [many_file(tmp_path, 60)], 8, MANY)
    servers, wanted = Servers(), set()
    with slotted.job(Windows(), servers=servers) as part:
        for number, batch in enumerate(fleet.prefetch(data) if prefetch else data):
            wanted |= set(batch["history"][:, 1:3].flatten().tolist())
            train(part, batch)
            if number >= 2:
                assert fleet.stats()["worker"]["unforeseen_lookups"] <= 2
    assert servers.num_rows("rows") == len(wanted), "rows were made for ids that nobody looked up"


def test_slots_that_are_empty_at_first_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Two empty slots lie at the same place in memory. One table must not get rows for the other's ids."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = fleet.nn.SparseEmbedding(2, name="a")
            self.b = fleet.nn.SparseEmbedding(2, name="b")

        def forward(self, batch: Any) -> torch.Tensor:
            return self.a([batch["p"], batch["q"]]) + self.b([batch["p"], batch["r"]])

    use_var = [fleet.Slot(name) for name in "pqr"]
    samples = [{"p": [1], "q": [], "r": []}] * 2 + [{"p": [1], "q": [10 + i], "r": [100 + i]} for i in range(6)]
    data = slotted.dataset("queue", [slotted.write(tmp_path / "few", samples)], 2, use_var)
    servers = Servers()
    with slotted.job(Two(), servers=servers) as part:
        for batch in data:
            train(part, batch)
    assert (servers.num_rows("a"), servers.num_rows("b")) == (7, 7)


def test_ids_changed_in_place_after_they_were_foreseen_are_read_anew() -> None:
    with one_worker(Slots(), mode="async") as part:
        batches = [[ragged([[i], [i + 1]])] for i in range(5)]
        for batch in part.prefetch(batches):
            batch[0].values.add_(100)
            first = jobs.first_rows(part, "rows", batch[0].values.tolist())
            assert_near(part.model(batch)[:, 0].detach(), first)
            part.optimizer.zero_grad()


def test_foresight_may_be_asked_while_another_thread_teaches_it() -> None:
    """Threads of one worker share it: here the other thread's lesson comes exactly in the middle of the question."""
    foresight = Foresight()
    ids = torch.arange(3)
    foresight.learn(Replay({"a": ids}), "rows", [ids], None, None)

    class Interrupted(dict[str, torch.Tensor]):
        def get(self, place: str, default: Any = None) -> Any:
            assert place == "a"
            other = torch.arange(3)
            others = {f"other {len(foresight.ways)}": other}
            foresight.learn(Replay(others), "rows", [other], None, None)
            foresight.learn(Replay({place: self[place]}), f"table {len(foresight.ways)}", [self[place]], None, None)
            return super().get(place, default)

    found = foresight.keys(Replay(Interrupted(a=ids)))
    assert found["rows"].keys.tolist() == [0, 1, 2]


@pytest.mark.parametrize("how", ["positional", "keyword", "slot"])
def test_samples_of_ragged_slots_are_counted_as_samples(tmp_path: Path, how: str) -> None:
    """Not as ids, of which there are more."""
    path = slotted.write(tmp_path / "few", [{"C0": [1, 2, 3]}] * 6)
    data = slotted.dataset("queue", [path], 4, [fleet.Slot("C0")])

    class Model(Slots):
        def forward(self, batch: Any) -> torch.Tensor:
            return self.rows(batch if isinstance(batch, fleet.Ragged) else batch["C0"])

    with slotted.job(Model()) as part:
        for batch in data:
            if how == "keyword":
                part.model(batch=batch)
            else:
                part.model(batch["C0"] if how == "slot" else batch)
            part.optimizer.zero_grad()
        assert fleet.stats()["worker"]["samples"] == 6


def test_no_thread_loses_another_ones_count_of_samples() -> None:
    """Both threads count at the same time: the size of a batch is asked for when both have begun."""
    both = threading.Barrier(2)

    class Sized(dict[str, torch.Tensor]):
        @property
        def num_samples(self) -> int:
            both.wait(jobs.SECONDS)
            return 5

    with one_worker(Slots()) as part:
        part.worker.engine.on_first_call = None  # the description of the inputs would ask one thread once more
        jobs.in_threads(lambda i: part.worker.engine.enter(None, (Sized(a=torch.arange(5)),), {}), 2)
        assert part.stats()["samples"] == 10
