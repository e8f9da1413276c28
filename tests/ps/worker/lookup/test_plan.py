"""Which parameter goes to which table, and what cannot be distributed: named, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Net
from support.messages import names, naming

import torchfleet
from torchfleet.api.job.ps_job import ParameterServerJob
from torchfleet.base.errors import ModelError
from torchfleet.ps.tables.settings.spec import Initializer, Rule
from torchfleet.ps.worker.lookup.plan import Plan

SparseEmbedding = torchfleet.nn.SparseEmbedding


def plan_of(model: torch.nn.Module, make: Callable[[Any], torch.optim.Optimizer] = jobs.sgd) -> Plan:
    return jobs.make_part(lambda: model, make, jobs.strategy(), jobs.roles(1, 2)[0]).job.plan


class Pair(torch.nn.Module):
    """Two embeddings and a dense layer."""

    def __init__(self, left: torch.nn.Module, right: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.left = left
        if right is not None:
            self.right = right
        self.out = torch.nn.Linear(2, 1)


# What is made


def test_dense_parameters_of_a_group_are_one_table_and_embeddings_one_each() -> None:
    plan = plan_of(Net(), lambda model: torch.optim.Adam(model.parameters(), lr=0.2, betas=(0.8, 0.9), eps=1e-5))
    rule = Rule("adam", 0.2, 1e-5, 0.8, 0.9)
    (dense,) = plan.dense
    assert dense.names == ["hidden.weight", "hidden.bias", "out.weight", "out.bias"]
    assert (dense.spec.name, dense.spec.kind, dense.spec.size) == ("dense.0", "dense", 18 * 6 + 6 + 6 + 1)
    assert dense.spec.rule == rule
    specs = {name: group.spec for name, group in plan.sparse.items()}
    assert {name: (spec.kind, spec.size, spec.dim) for name, spec in specs.items()} == {
        "items": ("array", 40, 4),
        "words": ("array", 30, 3),
        "tags": ("array", 20, 2),
    }
    assert all(spec.rule == rule for spec in specs.values())
    assert all(spec.num_shards == 2 for spec in plan.specs)


def test_a_param_group_is_a_table_with_its_own_rule() -> None:
    def make(model: Net) -> torch.optim.Optimizer:
        groups = [
            {"params": [model.hidden.weight], "momentum": 0.9, "nesterov": True, "lr": 0.3},
            {"params": [model.hidden.bias, model.out.weight, model.out.bias], "weight_decay": 0.1},
            {"params": jobs.split_parameters(model)[1]},
        ]
        return torch.optim.SGD(groups, lr=0.01)

    plan = plan_of(Net(), make)
    assert [group.names for group in plan.dense] == [["hidden.weight"], ["hidden.bias", "out.weight", "out.bias"]]
    assert plan.dense[0].spec.rule == Rule("sgd", 0.3, momentum=0.9, nesterov=True)
    assert plan.dense[1].spec.rule == Rule("sgd", 0.01, weight_decay=0.1)
    assert plan.rates() == {"dense.0": 0.3, "dense.1": 0.01, "items": 0.01, "words": 0.01, "tags": 0.01}


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (
            lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.3, eps=1e-3),
            Rule("adagrad", 0.1, 1e-3, lr_decay=0.2, initial_accumulator=0.3),
        ),
        (lambda p: torch.optim.SparseAdam(p, lr=0.1), Rule("adam", 0.1, 1e-8)),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.5), foreach=False), Rule("adam", 0.5, 1e-8)),
        (lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.0), Rule("adam", 0.5, 1e-8, decoupled_decay=True)),
    ],
)
def test_the_rule_has_the_options_of_the_optimizer(make: Callable[[Any], torch.optim.Optimizer], rule: Rule) -> None:
    plan = plan_of(Pair(SparseEmbedding(2)), lambda model: make(list(model.parameters())))
    assert plan.sparse["left"].spec.rule == rule
    assert plan.dense[0].spec.rule == rule


def test_unnamed_embeddings_are_named_by_their_place_and_named_ones_by_their_name() -> None:
    inner = torch.nn.ModuleDict({"a": SparseEmbedding(2), "b": SparseEmbedding(2, name="shared")})
    plan = plan_of(Pair(inner, SparseEmbedding(2, name="shared")))
    assert set(plan.sparse) == {"left.a", "shared"}
    assert len(plan.sparse["shared"].modules) == 2


def test_initializers_become_those_of_the_table() -> None:
    made = {
        "constant": (torchfleet.nn.Constant(0.5), Initializer("constant", 0.5)),
        "uniform": (torchfleet.nn.Uniform(-1, 2), Initializer("uniform", -1.0, 2.0)),
        "normal": (torchfleet.nn.Normal(1, 2), Initializer("normal", 1.0, 2.0)),
        "truncated": (torchfleet.nn.TruncatedNormal(), Initializer("truncated_normal", 0.0, 1.0)),
    }
    model = torch.nn.ModuleDict({name: SparseEmbedding(2, initializer=given) for name, (given, _) in made.items()})
    plan = plan_of(model)
    assert {name: group.spec.initializer for name, group in plan.sparse.items()} == {
        name: expected for name, (_, expected) in made.items()
    }


def test_a_dense_parameter_that_needs_no_gradient_has_no_place_on_the_servers() -> None:
    model = Net()
    model.hidden.weight.requires_grad_(False)
    assert plan_of(model).dense[0].names == ["hidden.bias", "out.weight", "out.bias"]


def test_all_parameters_of_a_plan_appear_in_its_description() -> None:
    text = "\n".join(" ".join(line) for line in plan_of(Net()).describe())
    for word in ("dense.0", "hidden.weight", "items", "40 ids x 4", "sgd(lr=0.5)", "worker 0"):
        assert word in text
    text = "\n".join(" ".join(line) for line in plan_of(Pair(SparseEmbedding(2))).describe())
    assert names(text, "x 2")
    assert "uniform(-0.05, 0.05)" in text


# Optimizers and options that the servers do not have

UNSUPPORTED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "LBFGS": (torch.optim.LBFGS, "LBFGS SGD Adagrad Adam AdamW RowWiseAdagrad FTRL RMSprop Lion"),
    "Adamax": (torch.optim.Adamax, "Adamax"),
    "NAdam": (torch.optim.NAdam, "NAdam"),
    "RMSprop maximize": (lambda p: torch.optim.RMSprop(p, maximize=True), "RMSprop(maximize=True)"),
    "SGD maximize": (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "SGD(maximize=True)"),
    "Adagrad maximize": (lambda p: torch.optim.Adagrad(p, maximize=True), "Adagrad(maximize=True)"),
    "Adam maximize": (lambda p: torch.optim.Adam(p, maximize=True), "Adam(maximize=True)"),
    "Adam amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), "Adam(amsgrad=True)"),
    "AdamW amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW(amsgrad=True)"),
    "Adam capturable": (lambda p: torch.optim.Adam(p, capturable=True), "Adam(capturable=True)"),
    "SGD differentiable": (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "SGD(differentiable=True)"),
    "SparseAdam maximize": (lambda p: torch.optim.SparseAdam(p, maximize=True), "SparseAdam(maximize=True)"),
}


@each_of("case", UNSUPPORTED)
@each_of("model", [lambda: torch.nn.Linear(2, 1), lambda: Pair(SparseEmbedding(2))])
def test_an_unsupported_optimizer_or_option_is_named(case: str, model: Callable[[], torch.nn.Module]) -> None:
    make, text = UNSUPPORTED[case]
    with pytest.raises(ModelError, match=naming(*text.split())):
        plan_of(model(), lambda made: make(list(made.parameters())))


@each_of(
    ("make", "option"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01), "weight_decay"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.01), "weight_decay"),
        (torch.optim.AdamW, "weight_decay"),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.01), "weight_decay"),
        (lambda p: torch.optim.RMSprop(p, weight_decay=0.01), "weight_decay"),
        (lambda p: torchfleet.optim.RowWiseAdagrad(p, weight_decay=0.01), "weight_decay"),
        (lambda p: torchfleet.optim.Lion(p, weight_decay=0.01), "weight_decay"),
    ],
)
def test_weight_decay_on_rows_is_refused_with_the_way_out(
    make: Callable[[Any], torch.optim.Optimizer], option: str
) -> None:
    with pytest.raises(ModelError, match=naming("'left'", f"{option}=0")):
        plan_of(Pair(SparseEmbedding(2)), lambda model: make(list(model.parameters())))


def test_adamw_decays_rows_in_a_group_of_their_own() -> None:
    """AdamW decays by default, so that its default must be of use on rows."""

    def apart(model: Pair, **rows: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": model.left.parameters(), **rows}, {"params": model.out.parameters()}])

    assert plan_of(Pair(SparseEmbedding(2)), apart).sparse["left"].spec.rule.weight_decay == 0.01
    none = plan_of(Pair(SparseEmbedding(2)), lambda model: apart(model, row_weight_decay=0.0))
    assert none.sparse["left"].spec.rule.weight_decay == 0.0


def test_a_float64_parameter_is_named() -> None:
    with pytest.raises(ModelError, match=naming("'out.weight'", "torch.float64", "float32", "model.float()")):
        plan_of(Pair(SparseEmbedding(2)).double())


def test_a_float64_embedding_is_named() -> None:
    """Its rows would come back as float32, without a word."""
    model = Pair(torch.nn.Embedding(4, 2, sparse=True, dtype=torch.float64))
    with pytest.raises(ModelError, match=naming("left", "float64")):
        plan_of(model)


def test_an_optimizer_of_another_model_is_an_error_that_says_the_order() -> None:
    model = Net()
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(ModelError, match=naming("fleet.distributed_model(model)")):
        plan_of(model, lambda made: optimizer)


def test_an_embedding_in_no_group_is_named() -> None:
    with pytest.raises(ModelError, match=naming("'left'")):
        plan_of(Pair(SparseEmbedding(2)), lambda model: torch.optim.SGD(model.out.parameters(), lr=0.1))


def test_a_table_in_two_groups_is_named() -> None:
    model = Pair(SparseEmbedding(2, name="both"), SparseEmbedding(2, name="both"))
    groups = [{"params": [model.left.weight]}, {"params": [model.right.weight], "lr": 0.5}]
    with pytest.raises(ModelError, match=naming("'both'")):
        plan_of(model, lambda made: torch.optim.SGD(groups, lr=0.1))


@pytest.mark.parametrize(
    ("left", "right", "field"),
    [
        (SparseEmbedding(2, name="both"), SparseEmbedding(3, name="both"), "dim"),
        (SparseEmbedding(2, name="both", seed=1), SparseEmbedding(2, name="both", seed=2), "seed"),
        (
            SparseEmbedding(2, name="both"),
            SparseEmbedding(2, name="both", initializer=torchfleet.nn.Constant(0)),
            "initializer",
        ),
        (torch.nn.Embedding(4, 2, sparse=True), SparseEmbedding(2, name="left"), "num_embeddings"),
    ],
)
def test_modules_that_share_a_table_must_agree_on_it(left: torch.nn.Module, right: torch.nn.Module, field: str) -> None:
    with pytest.raises(ModelError, match=naming(field)):
        plan_of(Pair(left, right))


@pytest.mark.parametrize(
    ("embedding", "text"),
    [
        (lambda: torch.nn.Embedding(4, 2, sparse=True, max_norm=1.0), "'left' max_norm=1.0"),
        (lambda: torch.nn.EmbeddingBag(4, 2, sparse=True, max_norm=1.0), "'left' max_norm=1.0"),
        (
            lambda: torch.nn.EmbeddingBag(4, 2, sparse=True, mode="max", scale_grad_by_freq=True),
            "'left' scale_grad_by_freq=True 'sum' 'mean'",
        ),
    ],
)
def test_an_option_of_an_embedding_that_servers_do_not_have_is_named(
    embedding: Callable[[], torch.nn.Module], text: str
) -> None:
    with pytest.raises(ModelError, match=naming(*text.split())):
        plan_of(Pair(embedding()))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dim": 0}, "dim 1 0"),
        ({"dim": 2, "pooling": "median"}, "pooling 'sum' 'mean' 'max' 'median'"),
        ({"dim": 2, "entry": object()}, "fleet.CountFilterEntry"),
    ],
)
def test_a_wrong_option_of_sparse_embedding_is_refused_when_it_is_made(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=naming(*text.split())):
        SparseEmbedding(**options)


def test_a_model_that_is_itself_a_torch_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match="module"):
        plan_of(torch.nn.Embedding(4, 2, sparse=True))


def test_a_job_has_one_model_and_each_parameter_one_optimizer() -> None:
    job = ParameterServerJob(jobs.roles(1, 1)[0], None)
    with pytest.raises(ModelError, match=naming("fleet.distributed_model")):
        job.distribute_optimizer(torch.optim.SGD(Net().parameters(), lr=0.1))
    model = job.distribute_model(Net())
    with pytest.raises(ModelError, match="model"):
        job.distribute_model(Net())
    job.distribute_optimizer(jobs.sgd(model))
    with pytest.raises(ModelError, match=naming("'items.weight'")):
        job.distribute_optimizer(jobs.sgd(model))
