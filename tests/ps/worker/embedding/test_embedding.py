"""Lookups: any ids in any shape, bags, padding, prediction without new rows, and the conversion of torch's
embeddings. One worker in sync mode: what torch would have read and learned is known exactly."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Servers, one_worker
from support.messages import names, naming
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchfleet
from torchfleet.base.errors import FleetError, ModelError, TableError

LARGE = 2**63 - 1
ODD_IDS = [0, -1, 1, LARGE, -LARGE - 1, 2**32, -(2**32), 2**62 + 7, 12345678901234567]


class One(torch.nn.Module):
    """A single table of rows for any ids."""

    def __init__(self, dim: int = 3, **options: Any) -> None:
        super().__init__()
        self.rows = torchfleet.nn.SparseEmbedding(dim, name="rows", **options)

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self.rows(*arguments)


class Of(torch.nn.Module):
    """A model around one embedding, of torch or ours."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.rows = embedding

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self.rows(*arguments)


def step(part: jobs.Part, *arguments: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """One update with loss = Σ weights · output; returns the output."""
    out = part.model(*arguments)
    (out if weights is None else out * weights).sum().backward()
    part.optimizer.step()
    part.optimizer.zero_grad()
    return out.detach()


# Ids of any shape and size


@each_of("shape", [(), (1,), (5,), (2, 3), (2, 3, 4), (1, 1, 1, 2)])
@each_of("dtype", [torch.int64, torch.int32, torch.uint8])
def test_the_output_has_the_shape_of_the_ids_and_a_dimension_more(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ids = torch.arange(max(1, int(np.prod(shape)))).reshape(shape).to(dtype)
    with one_worker(One(), num_servers=2) as part:
        out = step(part, ids)
        assert out.shape == (*shape, 3)
        first = jobs.first_rows(part, "rows", ids.flatten().tolist())
        assert torch.equal(out.reshape(-1, 3), first)
        assert torch.equal(part.rows("rows", ids.flatten().to(torch.int64)), first - 0.5)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4)])
def test_empty_ids_give_an_empty_output_and_a_step_that_changes_nothing(shape: tuple[int, ...]) -> None:
    with one_worker(One(), num_servers=2) as part:
        for _ in range(3):  # unforeseen, then foreseen
            assert step(part, torch.empty(shape, dtype=torch.int64)).shape == (*shape, 3)
        assert step(part, torch.tensor([4])).shape == (1, 3)
        assert part.stats()["steps"] == 4


def test_empty_ids_in_one_of_two_accumulated_batches() -> None:
    with one_worker(One()) as part:
        part.model(torch.empty(0, dtype=torch.int64)).sum().backward()
        part.model(torch.tensor([1, 2])).sum().backward()
        part.optimizer.step()
        assert torch.equal(part.rows("rows", [1, 2]), jobs.first_rows(part, "rows", [1, 2]) - 0.5)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_negative_and_huge_ids_have_rows_of_their_own(num_servers: int) -> None:
    ids = torch.tensor(ODD_IDS)
    weights = torch.arange(1.0, len(ids) + 1).unsqueeze(1)
    servers = Servers(num_servers)
    with one_worker(One(), servers=servers) as part:
        first = jobs.first_rows(part, "rows", ODD_IDS)
        assert len(first.unique(dim=0)) == len(ids), "the ids' first rows differ, so that mixed up ids would show"
        for i in range(3):
            out = step(part, ids, weights=weights)
            torch.testing.assert_close(out, first - 0.5 * i * weights, rtol=0, atol=1e-6)
    assert servers.num_rows("rows") == len(ids)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_gradients_of_repeated_ids_are_summed(num_servers: int) -> None:
    ids = torch.tensor([[7, 7, 9], [9, 7, 8]])
    with one_worker(One(), num_servers=num_servers) as part:
        first = jobs.first_rows(part, "rows", [7, 8, 9])
        step(part, ids)
        moved = 0.5 * torch.tensor([[3.0], [1.0], [2.0]])
        torch.testing.assert_close(part.rows("rows", [7, 8, 9]), first - moved, rtol=0, atol=1e-6)


def test_the_same_ids_in_two_tables_are_two_rows() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torchfleet.nn.SparseEmbedding(2, name="a")
            self.b = torchfleet.nn.SparseEmbedding(5, name="b")

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.a(ids).sum(dim=-1) - 2 * self.b(ids).sum(dim=-1)

    ids = torch.tensor([1, 2, 3])
    with one_worker(Two(), num_servers=2) as part:
        for _ in range(3):
            step(part, ids)
        torch.testing.assert_close(part.rows("a", ids), jobs.first_rows(part, "a", [1, 2, 3]) - 1.5, rtol=0, atol=1e-6)
        torch.testing.assert_close(part.rows("b", ids), jobs.first_rows(part, "b", [1, 2, 3]) + 3.0, rtol=0, atol=1e-6)


def test_the_same_table_twice_in_one_forward_sums_both_gradients() -> None:
    class Twice(One):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.rows(left).sum() + 10 * self.rows(right).sum()

    with one_worker(Twice()) as part:
        for _ in range(2):
            step(part, torch.tensor([1, 2]), torch.tensor([2, 3]))
        expected = jobs.first_rows(part, "rows", [1, 2, 3]) - torch.tensor([[1.0], [11.0], [10.0]])
        torch.testing.assert_close(part.rows("rows", [1, 2, 3]), expected, rtol=0, atol=1e-5)


def test_a_batch_of_another_size_is_looked_up() -> None:
    with one_worker(One(), num_servers=2) as part:
        for size in (8, 8, 8, 3, 1, 13):
            out = step(part, torch.arange(2 * size).reshape(size, 2))
            assert out.shape == (size, 2, 3)
        assert part.stats()["unforeseen_lookups"] == 1


def test_floating_point_ids_are_refused() -> None:
    with one_worker(One()) as part, pytest.raises(TypeError, match=naming("torch.float32")):
        part.model(torch.tensor([1.0]))


def test_ids_beyond_a_torch_embedding_are_refused_by_name() -> None:
    for wrong in (4, -1):
        with one_worker(Of(torch.nn.Embedding(4, 2, sparse=True))) as part:
            for _ in range(2):  # unforeseen, then foreseen
                with pytest.raises(TableError, match=naming("'rows'", 0, 3, wrong)):
                    part.model(torch.tensor([1, wrong]))
                part.optimizer.zero_grad()
                step(part, torch.tensor([1, 2]))


def test_ids_beyond_a_shared_table_name_all_modules_that_use_it() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torchfleet.nn.SparseEmbedding(2, name="both", num_embeddings=5)
            self.towers = torch.nn.ModuleList([torchfleet.nn.SparseEmbedding(2, name="both", num_embeddings=5)])

    with (
        one_worker(Two()) as part,
        pytest.raises(TableError, match=naming("'both'", "'a'", "'towers.0'")),
    ):
        part.model.towers[0](torch.tensor([5]))


def test_a_model_that_is_not_connected_says_what_to_call() -> None:
    with pytest.raises(ModelError, match=r"fleet\.init_worker"):
        One()(torch.tensor([1]))


# Bags


def bag_pair(mode: str, **options: Any) -> tuple[torch.nn.EmbeddingBag, torch.nn.EmbeddingBag]:
    torch.manual_seed(1)
    bag = torch.nn.EmbeddingBag(10, 3, mode=mode, sparse=True, **options)
    return bag, copy.deepcopy(bag)


@each_of("mode", ["sum", "mean"])
@each_of(
    "arguments",
    [
        (torch.tensor([1, 2, 2, 9, 0, 5]), torch.tensor([0, 2, 2, 5])),  # an empty bag between
        (torch.tensor([1, 2]), torch.tensor([0, 2])),  # an empty bag at the end
        (torch.tensor([[1, 1, 3], [4, 5, 6]]),),
        (torch.tensor([[7]]),),
        (torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])),
    ],
)
def test_bags_equal_torch(mode: str, arguments: tuple[torch.Tensor, ...]) -> None:
    """1e-6: the sums and means are of at most three numbers around 1, rounded once each on both sides."""
    ours, plain = bag_pair(mode)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    with one_worker(Of(ours), num_servers=2) as part:
        for _ in range(3):
            expected = plain(*arguments)
            weights = torch.arange(1.0, expected.numel() + 1).view_as(expected)
            torch.testing.assert_close(step(part, *arguments, weights=weights), expected.detach(), rtol=0, atol=1e-5)
            (expected * weights).sum().backward()
            reference.step()
            reference.zero_grad()
        torch.testing.assert_close(part.rows("rows", range(10)), plain.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_padding_counts_neither_in_the_sum_nor_in_the_mean_of_a_bag(mode: str) -> None:
    ours, plain = bag_pair(mode, padding_idx=2)
    ids = torch.tensor([[1, 2, 3], [2, 2, 2], [4, 4, 2]])
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    with one_worker(Of(ours)) as part:
        for _ in range(3):
            expected = plain(ids)
            torch.testing.assert_close(step(part, ids), expected.detach(), rtol=0, atol=1e-6)
            expected.sum().backward()
            reference.step()
            reference.zero_grad()
        torch.testing.assert_close(part.rows("rows", range(10)), plain.weight.detach(), rtol=1e-6, atol=1e-6)


def test_sparse_embedding_pools_with_offsets() -> None:
    with one_worker(One(pooling="mean")) as part:
        first = jobs.first_rows(part, "rows", [-5, 10**15, 3])
        out = step(part, torch.tensor([-5, 10**15, 3]), torch.tensor([0, 2]))
        torch.testing.assert_close(out, torch.stack([first[:2].mean(dim=0), first[2]]), rtol=0, atol=1e-7)
        moved = torch.tensor([[0.25], [0.25], [0.5]])
        torch.testing.assert_close(part.rows("rows", [-5, 10**15, 3]), first - moved, rtol=0, atol=1e-7)


@pytest.mark.parametrize("offsets", [[1, 2], [0, 3, 2], [0, 9]])
def test_offsets_that_are_no_bags_are_refused(offsets: list[int]) -> None:
    with one_worker(One()) as part, pytest.raises(ModelError, match=naming(0, 4)):
        part.model(torch.tensor([1, 2, 3, 4]), torch.tensor(offsets))


@pytest.mark.parametrize(
    ("ids", "offsets", "text"),
    [([[1, 2]], [0], "ids"), ([1, 2], None, "offsets")],
)
def test_a_bag_says_which_ids_it_takes(ids: list[Any], offsets: list[int] | None, text: str) -> None:
    arguments = [torch.tensor(ids)] + ([] if offsets is None else [torch.tensor(offsets)])
    with one_worker(Of(bag_pair("sum")[0])) as part, pytest.raises(ModelError, match=text):
        part.model(*arguments)


# Padding


@pytest.mark.parametrize("padding", [0, 3, -1, LARGE])
def test_padding_reads_as_zeros_learns_nothing_and_takes_no_row(padding: int) -> None:
    servers = Servers(2)
    with one_worker(One(padding_idx=padding), servers=servers) as part:
        for _ in range(3):
            out = step(part, torch.tensor([padding, 5, padding]))
            assert not out[0].any()
            assert not out[2].any()
            assert out[1].any()
    assert servers.num_rows("rows") == 1


def test_only_padding_is_a_step_that_changes_nothing() -> None:
    servers = Servers(2)
    with one_worker(One(padding_idx=0), servers=servers) as part:
        for _ in range(3):
            assert not step(part, torch.zeros(4, dtype=torch.int64)).any()
    assert servers.num_rows("rows") == 0


def test_modules_of_one_table_have_their_own_padding() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torchfleet.nn.SparseEmbedding(2, name="both", padding_idx=1)
            self.b = torchfleet.nn.SparseEmbedding(2, name="both", padding_idx=2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.a(ids), self.b(ids)])

    with one_worker(Two()) as part:
        for _ in range(3):
            out = step(part, torch.tensor([1, 2]))
            assert not out[0, 0].any()
            assert not out[1, 1].any()
            assert out[0, 1].any()
            assert out[1, 0].any()


# Prediction


@each_of("mode", ["sync", "half_async", "async", "geo"])
@each_of("how", ["eval", "no_grad"])
def test_prediction_creates_no_rows_and_reads_unseen_ids_as_zeros(mode: str, how: str) -> None:
    servers = Servers(2)
    with one_worker(One(), servers=servers, mode=mode) as part:
        for _ in range(3):
            step(part, torch.tensor([1, 2]))
        part.flush()
        known = part.rows("rows", [2])[0]
        for _ in range(2):
            if how == "eval":
                part.model.eval()
                out = part.model(torch.tensor([2, 100, 101])).detach()
                part.model.train()
            else:
                with torch.no_grad():
                    out = part.model(torch.tensor([2, 100, 101]))
            assert torch.equal(out[0], known)
            assert not out[1:].any()
    assert servers.num_rows("rows") == 2


@pytest.mark.parametrize("mode", ["sync", "geo"])
@pytest.mark.parametrize("predicted", [slice(4, 6), slice(0, 10)], ids=["the same view", "another view of its storage"])
def test_training_on_a_tensor_that_was_predicted_before_creates_its_rows(mode: str, predicted: slice) -> None:
    """As in a loop that measures the loss before it trains, on parts of one tensor."""
    ids = torch.arange(10)
    with one_worker(One(), mode=mode) as part:
        with torch.no_grad():
            assert not part.model(ids[predicted]).any()
        assert torch.equal(part.model(ids[4:6]).detach(), jobs.first_rows(part, "rows", [4, 5]))
        part.optimizer.zero_grad()


def test_prediction_again_on_the_same_tensor_reads_the_rows_of_today() -> None:
    ids = torch.tensor([1, 2])
    with one_worker(One(), mode="half_async") as part:
        step(part, ids)
        part.model.eval()
        before = part.model(ids).detach().clone()
        other = part.worker._connect()  # another worker's update
        other.push("rows", ids.numpy(), np.ones((2, 3), np.float32)).result()
        other.close()
        torch.testing.assert_close(part.model(ids).detach(), before - 0.5, rtol=0, atol=1e-6)


class EvalAndTrain(torch.nn.Module):
    """A frozen table in eval mode beside one that trains; `order` says which is looked up first."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.frozen = torchfleet.nn.SparseEmbedding(2, name="frozen")
        self.trained = torchfleet.nn.SparseEmbedding(2, name="trained")
        self.order = order

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.order == "frozen first":
            frozen = self.frozen(ids)
            return frozen, self.trained(ids)
        trained = self.trained(ids)
        return self.frozen(ids), trained


@pytest.mark.parametrize("order", ["frozen first", "trained first"])
def test_an_embedding_in_eval_mode_creates_no_rows_while_another_one_trains(order: str) -> None:
    servers = Servers()
    with one_worker(EvalAndTrain(order), servers=servers) as part:
        part.model.frozen.eval()
        for i in range(3):
            ids = torch.tensor([10 * i, 10 * i + 1])
            frozen, trained = part.model(ids)
            assert not frozen.any(), f"step {i}"
            assert torch.equal(trained.detach(), jobs.first_rows(part, "trained", ids.tolist())), f"step {i}"
            trained.sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
    assert servers.num_rows("frozen") == 0
    assert servers.num_rows("trained") == 6


def test_prefetched_batches_of_a_model_in_eval_mode_create_no_rows() -> None:
    servers = Servers()
    batches = [torch.tensor([10 * i, 10 * i + 1]) for i in range(5)]
    with one_worker(One(), servers=servers, mode="async") as part:
        for ids in part.prefetch(batches):
            step(part, ids)
        part.flush()
        assert servers.num_rows("rows") == 10
        part.model.eval()
        for ids in part.prefetch([ids + 1000 for ids in batches]):
            with torch.no_grad():
                assert not part.model(ids).any()
    assert servers.num_rows("rows") == 10


# Conversion of torch's embeddings


def test_converted_embeddings_start_with_their_weights_and_hold_none() -> None:
    weights = torch.arange(12.0).reshape(6, 2)
    with one_worker(Of(torch.nn.Embedding.from_pretrained(weights, freeze=False, sparse=True)), num_servers=2) as part:
        assert isinstance(part.model.rows, torchfleet.nn.SparseEmbedding)
        assert part.model.rows.weight.shape == (0, 2)
        assert torch.equal(part.rows("rows", range(6)), weights)
        assert torch.equal(part.model(torch.tensor([5, 0, 5])).detach(), weights[[5, 0, 5]])


def test_a_torch_embedding_without_sparse_stays_a_dense_parameter() -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(6, 2)
    plain = copy.deepcopy(embedding)
    with one_worker(Of(embedding), num_servers=2) as part:
        assert part.model.rows is embedding
        assert not part.job.plan.sparse
        assert part.job.plan.dense[0].names == ["rows.weight"]
        step(part, torch.tensor([1, 1, 3]))
        plain(torch.tensor([1, 1, 3])).sum().backward()
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
        torch.testing.assert_close(embedding.weight, plain.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("given", ["all parameters", "those that need a gradient"])
def test_a_frozen_torch_embedding_is_read_and_not_trained(given: str) -> None:
    weights = torch.arange(12.0).reshape(6, 2)

    class Frozen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Embedding.from_pretrained(weights, freeze=True, sparse=True)
            self.out = torch.nn.Linear(2, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.rows(ids))

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        every = given == "all parameters"
        return torch.optim.SGD([p for p in model.parameters() if every or p.requires_grad], lr=0.5)

    with one_worker(Frozen(), make) as part:
        for _ in range(3):
            step(part, torch.tensor([1, 2]))
        assert torch.equal(part.rows("rows", range(6)), weights)


def test_a_sparse_embedding_whose_weight_needs_no_gradient_is_not_trained() -> None:
    model = Of(torchfleet.nn.SparseEmbedding(2, name="rows"))
    model.rows.weight.requires_grad_(False)
    model.scale = torch.nn.Parameter(torch.ones(()))
    model.forward = lambda ids: model.rows(ids) * model.scale  # type: ignore[method-assign]
    with one_worker(model) as part:
        for _ in range(3):
            step(part, torch.tensor([1, 2]))
        assert torch.equal(part.rows("rows", [1, 2]), jobs.first_rows(part, "rows", [1, 2]))


def test_the_row_of_a_padding_id_reads_as_in_torch_where_it_is_not_zero() -> None:
    """torch's padding_idx keeps a row from learning; what it reads as is its value, here as set by the user."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(4, 2, padding_idx=1, sparse=True)
    torch.nn.init.normal_(embedding.weight)
    plain = copy.deepcopy(embedding)
    ids = torch.tensor([0, 1, 2])
    with contextlib.suppress(ModelError), one_worker(Of(embedding)) as part:  # refused is good as well
        assert torch.equal(part.model(ids).detach(), plain(ids).detach()), "zeros without a word are not"


def test_one_torch_embedding_under_two_names_is_one_table() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = torch.nn.Embedding(5, 2, sparse=True)
            self.c = torch.nn.Embedding(5, 2, sparse=True)
            self.c.weight = self.a.weight  # another module, the same weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.a(ids) + self.b(ids) + self.c(ids)

    with one_worker(Tied()) as part:
        first = part.rows("a", range(5))
        assert len(part.job.plan.sparse) == 1
        step(part, torch.tensor([3]))
        assert torch.allclose(part.rows("a", [3]), first[3] - 1.5)


def test_torch_embeddings_of_one_weight_keep_their_own_padding_and_pooling() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single = torch.nn.Embedding(5, 2, sparse=True)
            self.padded = torch.nn.Embedding(5, 2, padding_idx=0, sparse=True)
            self.bag = torch.nn.EmbeddingBag(5, 2, mode="sum", sparse=True)
            self.padded.weight = self.bag.weight = self.single.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.single(ids).sum(dim=1) + 3 * self.padded(ids).sum(dim=1) + 10 * self.bag(ids)

    torch.manual_seed(0)
    model = Tied()
    with torch.no_grad():
        model.single.weight[0] = 0
    plain = copy.deepcopy(model)
    ids = torch.tensor([[0, 1], [2, 2]])
    expected = plain(ids)
    expected.sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    with one_worker(model) as part:
        out = step(part, ids)
        assert out.shape == expected.shape
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(part.rows("single", range(5)), plain.single.weight.detach())


def test_a_sparse_embedding_in_a_list_called_dense_trains() -> None:
    """Tables of dense parameters have names too: no name of a module may stand in their way."""

    class Lists(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.ModuleList([torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1)])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.dense[1](self.dense[0](ids))

    with one_worker(Lists()) as part:
        step(part, torch.tensor([1, 2]))


def test_describe_names_tables_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    with jobs.clean_facade():
        torchfleet.init()
        model = torchfleet.distributed_model(jobs.Net())
        torchfleet.distributed_optimizer(torch.optim.Adam(model.parameters()))
        torchfleet.init_worker()
        configuration = capsys.readouterr().out
        text = torchfleet.describe()
        torchfleet.stop_worker()
    assert names(configuration, "worker 0", "sync")
    for word in ("items", "words", "tags", "dense.0", "hidden.weight", "adam(lr=0.001)", "40 ids x 4", "worker 0"):
        assert word in text


# A DataLoader


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_data_loader_trains_to_the_result_of_torch(num_workers: int, prefetch: bool) -> None:
    rng = np.random.default_rng(0)
    rows = [
        rng.integers(0, jobs.NUM_ITEMS // 2, (22, 2)),
        rng.integers(0, jobs.NUM_WORDS, (22, 4)),
        rng.normal(size=22),
    ]
    dataset = TensorDataset(*(torch.from_numpy(part) for part in rows))

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = torch.nn.Embedding(jobs.NUM_ITEMS, 2, sparse=True)
            self.words = torch.nn.EmbeddingBag(jobs.NUM_WORDS, 4, sparse=True)
            self.out = torch.nn.Linear(8, 1)

        def forward(self, items: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
            return self.out(torch.cat([self.items(items).flatten(1), self.words(words)], dim=1)).squeeze(1)

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(dataset, 5, shuffle=True, generator=generator, num_workers=num_workers)  # last batch: 2 rows

    def train(model: torch.nn.Module, optimizer: Any, batches: Any) -> None:
        for items, words, label in batches:
            F.mse_loss(model(items, words), label.float()).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = Small()
    plain = copy.deepcopy(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    with one_worker(model, lambda made: torch.optim.SGD(made.parameters(), lr=0.1), num_servers=2) as part:
        for _ in range(2 if num_workers == 0 else 1):
            train(part.model, part.optimizer, part.prefetch(loader()) if prefetch else loader())
            train(plain, reference, loader())
        torch.testing.assert_close(
            part.rows("items", range(jobs.NUM_ITEMS)), plain.items.weight.detach(), rtol=0, atol=1e-6
        )
        torch.testing.assert_close(
            part.rows("words", range(jobs.NUM_WORDS)), plain.words.weight.detach(), rtol=0, atol=1e-6
        )
        torch.testing.assert_close(part.model.out.weight, plain.out.weight, rtol=0, atol=1e-6)
        assert part.stats()["unforeseen_lookups"] <= 2 + 2 * prefetch  # each table in the first step, or the first two


def test_an_error_in_a_lookup_leaves_the_worker_usable() -> None:
    with one_worker(Of(torch.nn.Embedding(4, 2, sparse=True))) as part:
        with pytest.raises(FleetError):
            part.model(torch.tensor([9]))
        step(part, torch.tensor([1]))
        step(part, torch.tensor([2]))
        with pytest.raises(FleetError):  # now foreseen, and refused
            part.model(torch.tensor([9]))
        part.optimizer.zero_grad()
        assert step(part, torch.tensor([3])).shape == (1, 2)
