"""Which of torch's embeddings go to the servers: those that say so, those that are large enough; and the line that
worker 0 prints about it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.messages import names, naming

import torchfleet as fleet
from torchfleet.api.job.printing import embeddings
from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.embedding.conversion import check_on_servers
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.embedding.embedding_choice import AUTO_BYTES, Choice, choose


class Scaled(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


class Model(torch.nn.Module):
    """Embeddings of all kinds, none of them with sparse=True but `items`."""

    def __init__(self) -> None:
        super().__init__()
        rows = AUTO_BYTES // 4 // 4
        self.items = torch.nn.Embedding(6, 4, sparse=True)
        self.words = torch.nn.Embedding(rows, 4)
        self.bags = torch.nn.EmbeddingBag(rows, 4, mode="sum")
        self.places = torch.nn.Embedding(rows - 1, 4)
        self.again = torch.nn.Embedding(rows, 4)
        self.again.weight = self.words.weight
        self.frozen = torch.nn.Embedding.from_pretrained(torch.ones(rows, 4))
        self.tied = torch.nn.Embedding(rows, 4)
        self.head = torch.nn.Linear(4, rows, bias=False)
        self.head.weight = self.tied.weight
        self.scaled = Scaled(rows, 4)
        self.normed = torch.nn.Embedding(rows, 4, max_norm=1.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return sum(part(ids).sum() for part in (self.items, self.words, self.bags, self.places, self.frozen))


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    yield
    fleet.reset()


def chosen(sparse: Any) -> tuple[list[str], dict[str, str]]:
    model = Model()
    found = choose(model, sparse)
    return [path for path, module in model.named_modules() if module in found.chosen], found.dense


def test_only_those_that_say_so_unless_asked() -> None:
    names, dense = chosen(None)
    assert names == ["items"]
    assert list(dense) == ["words", "bags", "places", "again", "frozen", "tied", "scaled", "normed"]
    assert dense["words"] == dense["tied"] == "65,536 x 4"


def test_auto_takes_what_is_large_and_trained_and_says_why_others_stay() -> None:
    names, dense = chosen("auto")
    assert names == ["items", "words", "bags", "again"]
    values = {
        "places": "65,535 x 4",
        "frozen": "frozen",
        "tied": "'head.weight'",
        "scaled": "Scaled.forward",
        "normed": "max_norm=1.0",
    }
    assert set(dense) == set(values)
    assert all(value in dense[path] for path, value in values.items())


def test_a_number_takes_all_with_so_many_rows() -> None:
    names, dense = chosen(65_535)
    assert names == ["items", "words", "bags", "places", "again", "frozen"]
    assert list(dense) == ["scaled", "normed", "tied"]
    assert chosen(65_537)[0] == ["items"]


@pytest.mark.parametrize("wrong", ["all", 0, -1, 1.5, True, [3]])
def test_other_values_are_refused(wrong: Any) -> None:
    fleet.init()
    with pytest.raises(ModelError, match=naming("sparse=", '"auto"', None)):
        fleet.distributed_model(Model(), sparse=wrong)


def test_a_forward_that_would_be_lost_is_refused() -> None:
    fleet.init()
    with pytest.raises(ModelError, match=naming("'0'", "Scaled.forward")):
        fleet.distributed_model(torch.nn.Sequential(Scaled(5, 2, sparse=True)))


def test_a_collective_job_has_no_servers_to_move_to() -> None:
    fleet.init(is_collective=True)
    with pytest.raises(ModelError, match="collective"):
        fleet.distributed_model(torch.nn.Linear(2, 2), sparse="auto")


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.bags = torch.nn.Embedding(50, 4), torch.nn.EmbeddingBag(50, 4, mode="mean")
        self.head = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.items(ids).sum(1) + self.bags(ids))


def train(model: torch.nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(8):
        ids = torch.randint(50, (16, 3), generator=torch.Generator().manual_seed(step))
        loss = (model(ids) - ids.float().mean(1, keepdim=True) / 10).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_dense_embeddings_that_were_moved_train_as_in_torch_and_load_again(tmp_path: Path) -> None:
    """With SGD a row that no step looks up would not change in torch either. The saved model knows that they are
    tables: it loads into the model as it is written, and into one that is asked for its number."""
    torch.manual_seed(0)
    plain = Sum()
    ours, anew = copy.deepcopy(plain), Sum()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    fleet.init()
    model = fleet.distributed_model(ours, sparse=50)
    assert isinstance(model.items, SparseEmbedding)
    assert isinstance(model.bags, SparseEmbedding)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-5)
    fleet.save_inference_model(str(tmp_path))
    fleet.stop_worker()
    ids = torch.arange(48).view(16, 3)
    loaded = fleet.load_inference_model(str(tmp_path), anew)
    torch.testing.assert_close(loaded(ids), plain(ids))


def test_worker_0_says_in_one_line_what_was_moved(capsys: pytest.CaptureFixture[str]) -> None:
    for index in (0, 1):
        fleet.init(fleet.UserDefinedRoleMaker(index, "worker", 2, ["127.0.0.1:1"]))
        fleet.distributed_model(jobs.Net())
        fleet.reset()
    fleet.init(fleet.UserDefinedRoleMaker(0, "server", 2, ["127.0.0.1:1"]))
    fleet.distributed_model(jobs.Net())
    fleet.reset()
    told = capsys.readouterr().out
    assert names(told, 3, 90)
    assert told.count("\n") == 1
    fleet.init()
    fleet.distributed_model(torch.nn.Sequential(fleet.nn.SparseEmbedding(2, name="own"), torch.nn.Linear(2, 1)))
    assert capsys.readouterr().out == "", "the user knows what they wrote"


def test_the_line_is_short_and_says_how_to_change_it() -> None:
    many = {f"slot.{i}": "10 x 4" for i in range(30)}
    line = embeddings(Choice(None, [], many))
    assert names(line, 30, "'slot.0' (10 x 4)", "'slot.1' (10 x 4)", "'slot.2' (10 x 4)", 27)
    assert names(line, "sparse=True", 'fleet.distributed_model(model, sparse="auto")')
    assert "slot.3" not in line
    one = Choice("auto", [torch.nn.Embedding(1200, 4)], {"pos": "tied to 'lm_head'"})
    line = embeddings(one)
    assert names(line, 1, "1,200", "'pos' (tied to 'lm_head')")
    assert "distributed_model" not in line


def test_a_table_on_a_device_is_refused_in_a_job_with_servers() -> None:
    model = torch.nn.ModuleDict({"rows": SparseEmbedding(4, device="cpu")})
    with pytest.raises(ModelError, match="'rows'"):
        check_on_servers(model)
