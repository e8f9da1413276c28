"""Copies of a distributed model: their own dense parameters, the same rows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support import jobs
from support.jobs import Net, fleet_optimizer, make_batch, one_worker
from support.messages import naming
from torch.optim.swa_utils import AveragedModel, update_bn

import torchfleet
from torchfleet.base.errors import ModelError

SGD = fleet_optimizer("sgd", lr=0.1)


def predicted(model: torch.nn.Module, seed: int = 9) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(make_batch(seed))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_copy_has_its_own_dense_parameters_and_reads_the_live_rows(mode: str) -> None:
    with one_worker(Net(), SGD, mode=mode) as part:
        before = copy.deepcopy(part.model)  # also after the first call, with all hooks of the engine
        part.step(make_batch(0))
        part.flush()
        copied = copy.deepcopy(copy.deepcopy(part.model))
        assert torch.equal(predicted(copied), predicted(part.model))
        expected = Net()
        expected.load_state_dict(before.state_dict())  # the first dense values, and today's rows
        assert torch.equal(before.items.table_rows.whole(before.items._spec).values, expected.items.weight)
        assert not torch.equal(expected.hidden.weight, part.model.hidden.weight)
        torch.testing.assert_close(predicted(before), predicted(expected), rtol=0, atol=1e-6)


def test_a_copy_does_not_train_rows_and_says_so() -> None:
    with one_worker(Net(), SGD) as part:
        teacher = copy.deepcopy(part.model)
        rows = part.rows("words", range(jobs.NUM_WORDS))
        with pytest.raises(ModelError, match=naming("copy", "eval")):
            teacher(make_batch(0))
        teacher.requires_grad_(False)
        loss = (part.model(make_batch(0)) - teacher(make_batch(0))).square().mean() + teacher(make_batch(1)).sum()
        loss.backward()
        part.optimizer.step()
        words = set(make_batch(0)["words"].flatten().tolist())
        changed = (part.rows("words", range(jobs.NUM_WORDS)) != rows).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) <= words  # and none of batch 1's alone


def test_a_copy_in_a_step_leaves_the_models_parameters_alone() -> None:
    """In async mode a call of the model writes what the servers have sent into it, and autograd would notice."""
    with one_worker(Net(), SGD, mode="async") as part:
        teacher = copy.deepcopy(part.model).requires_grad_(False)
        for seed in range(4):
            output = part.model(make_batch(seed))
            target = teacher(make_batch(seed))
            (output - target - 1).square().mean().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()


def test_averaged_models_average_dense_parameters_and_read_the_live_rows() -> None:
    with one_worker(Net(), SGD) as part:
        averaged = AveragedModel(part.model)
        weights = []
        for seed in range(3):
            part.step(make_batch(seed))
            averaged.update_parameters(part.model)
            weights.append(part.model.hidden.weight.detach().clone())
        torch.testing.assert_close(averaged.module.hidden.weight, torch.stack(weights).mean(dim=0))
        update_bn([make_batch(0)], averaged)
        state = averaged.state_dict()
        assert torch.equal(state["module.items.weight"], part.rows("items", range(jobs.NUM_ITEMS)))
        plain = AveragedModel(Net())
        plain.load_state_dict(state)
        torch.testing.assert_close(predicted(averaged), predicted(plain), rtol=0, atol=1e-6)


def test_loading_into_a_copy_leaves_the_rows_alone_and_says_so(capfd: Any) -> None:
    with one_worker(Net(), SGD) as part:
        copied, rows = copy.deepcopy(part.model), part.rows("items", range(jobs.NUM_ITEMS))
        state = {name: torch.zeros_like(value) for name, value in part.model.state_dict().items()}
        copied.load_state_dict(state)
        assert "'items'" in capfd.readouterr().err
        assert not copied.hidden.weight.any()
        assert part.model.hidden.weight.any()
        assert torch.equal(part.rows("items", range(jobs.NUM_ITEMS)), rows)


def test_a_copy_that_is_made_before_init_worker_reads_the_rows_afterwards() -> None:
    part = jobs.make_part(Net, SGD, jobs.strategy(), jobs.roles(1, 1)[0])
    averaged = AveragedModel(part.model)
    servers = jobs.Servers(1)
    servers.make_tables(part.job)
    part.worker = jobs.Worker(part.job, servers)
    assert torch.equal(predicted(averaged), predicted(part.model))
    part.worker.stop()


def test_a_model_can_be_distributed_again_and_its_copy_cannot() -> None:
    model = Net()
    with one_worker(model, SGD) as part:
        part.step(make_batch(0))
        state, copied = part.model.state_dict(), copy.deepcopy(part.model)
    with pytest.raises(ModelError, match=naming("'items'")):
        jobs.make_part(lambda: copied, SGD, jobs.strategy(), jobs.roles(1, 1)[0])
    again = jobs.make_part(lambda: model, SGD, jobs.strategy(), jobs.roles(1, 1)[0])
    again.model.load_state_dict(state)
    assert torch.equal(again.model.state_dict()["words.weight"], state["words.weight"])


def test_a_layer_that_is_copied_before_the_model_is_distributed_has_rows_of_its_own() -> None:
    layer = torchfleet.nn.SparseEmbedding(2, num_embeddings=3)
    layer.load_state_dict({"weight": torch.ones(3, 2)})
    model = torch.nn.ModuleList([layer, copy.deepcopy(layer)])
    with one_worker(model, SGD) as part:
        assert {module.name for module in part.model} == {"0", "1"}
        model[1](torch.tensor([0])).sum().backward()
        part.optimizer.step()
        state = part.model.state_dict()
        assert state["0.weight"].eq(1).all()
        assert state["1.weight"][0].ne(1).all()


def test_a_distributed_model_is_not_pickled_and_says_what_to_do() -> None:
    text = naming("state_dict()", "fleet.to_plain")
    with one_worker(Net(), SGD) as part, pytest.raises(ModelError, match=text):
        pickle.dumps(part.model.items)
    pickle.loads(pickle.dumps(torchfleet.nn.SparseEmbedding(2)))
