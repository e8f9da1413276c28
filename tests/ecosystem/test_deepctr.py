"""deepctr-torch's models, as they are, trained by a fleet: what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.extras import Late, needing
from support.grids import first_of
from torch.nn import functional as F

import torchfleet as fleet
from examples.deepctr.data import SPARSE, feature_columns, generated
from torchfleet.base.errors import ModelError

oracle = Late("sklearn.metrics")

pytestmark = [
    needing("deepctr_torch", "sklearn"),
    pytest.mark.xdist_group("deepctr"),  # imported once, which takes seconds
]

LARGEST, BATCH, STEPS, WORKERS = 500, 64, 6, 2
MODELS: dict[str, dict[str, Any]] = {
    "DeepFM": {},
    "DCN": {"cross_num": 2, "cross_parameterization": "matrix"},
    "xDeepFM": {"cin_layer_size": (8, 8)},
}
Inputs = tuple[torch.Tensor, torch.Tensor]  # features in the order of the model's columns, clicks


def make_model(name: str, seed: int = 1024, with_l2: bool = False) -> Any:
    """`with_l2`: as it comes. Else without the L2 terms, which go over whole tables: DCN has no argument for all."""
    columns = feature_columns(4, LARGEST)
    import deepctr_torch.models

    kind = getattr(deepctr_torch.models, name)
    model = kind(columns, columns, dnn_hidden_units=(16, 8), init_std=0.05, seed=seed, **MODELS[name])
    if not with_l2:
        model.regularization_weight.clear()
    return model


def made_sparse(model: Any) -> Any:
    """What a user adds: deepctr-torch makes its embeddings with sparse=False."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.sparse = True
    return model


def adagrad(model: torch.nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """Rows without a gradient keep their value, in torch's dense tables too."""
    return torch.optim.Adagrad(model.parameters(), lr=lr)


def rows_of(num: int, seed: int = 0) -> Inputs:
    columns, clicked = generated(num, LARGEST, seed)
    order = [*SPARSE, *(name for name in columns if name not in SPARSE)]
    return torch.from_numpy(np.stack([columns[name] for name in order], axis=1)), torch.from_numpy(clicked)


def train(model: Any, optimizer: torch.optim.Optimizer, batches: list[Inputs]) -> list[float]:
    """A loop as anybody writes it; the losses."""
    losses = []
    for x, y in batches:
        loss = F.binary_cross_entropy(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def predicted(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(x).squeeze(1)


def fit(model: Any, optimizer: torch.optim.Optimizer, batch: int, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """deepctr-torch's own loop, whose loss is a sum over the batch; what the model then predicts of the inputs."""
    model.compile(optimizer, "binary_crossentropy", metrics=["binary_crossentropy", "auc"])
    model.fit([x.numpy()], y.numpy(), batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return model.predict([x.numpy()], batch_size=1000)


@pytest.fixture
def inputs() -> Iterator[Inputs]:
    with jobs.clean_facade():
        yield rows_of(BATCH * STEPS)


@pytest.mark.parametrize("name", first_of(list(MODELS)))
def test_its_own_fit_in_one_process_trains_to_the_result_of_torch(name: str, inputs: Inputs) -> None:
    plain = make_model(name)
    expected = fit(plain, adagrad(plain), BATCH, *inputs)
    fleet.init()
    model = fleet.distributed_model(made_sparse(make_model(name)))
    optimizer = fleet.distributed_optimizer(adagrad(model))
    fleet.init_worker()
    found = fit(model, optimizer, BATCH, *inputs)
    fleet.stop_worker()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 0.1, "nothing was learned"


@pytest.mark.parametrize("name", first_of(list(MODELS)))
def test_two_workers_with_half_of_each_batch_train_to_the_result_of_torch(name: str, inputs: Inputs) -> None:
    x, y = inputs
    plain = make_model(name)
    expected = train(plain, adagrad(plain), list(zip(x.split(BATCH), y.split(BATCH), strict=True)))

    def body(part: jobs.Part) -> tuple[list[float], torch.Tensor]:
        halves = [half[part.index :: WORKERS].split(BATCH // WORKERS) for half in inputs]
        losses = train(part.model, part.optimizer, list(zip(*halves, strict=True)))
        part.barrier()
        return losses, predicted(part.model, x)

    run = jobs.run(body, lambda: made_sparse(make_model(name)), adagrad, num_workers=WORKERS)
    np.testing.assert_allclose(np.mean([losses for losses, _ in run.results], axis=0), expected, rtol=0, atol=1e-5)
    for _, found in run.results:
        torch.testing.assert_close(found, predicted(plain, x), rtol=0, atol=1e-5)


def test_its_fit_by_two_workers_equals_torch_at_half_its_learning_rate(inputs: Inputs) -> None:
    """A worker's loss is the sum of its samples; a step of all workers is made with the mean of what they found."""
    x, y = inputs
    plain = make_model("DeepFM")
    expected = fit(plain, jobs.sgd(plain, lr=1e-3), BATCH, x, y)

    def body(part: jobs.Part) -> np.ndarray:
        own = [half[part.index :: WORKERS] for half in inputs]
        fit(part.model, part.optimizer, BATCH // WORKERS, *own)
        part.barrier()
        return part.model.predict([x.numpy()], batch_size=1000)

    run = jobs.run(body, lambda: made_sparse(make_model("DeepFM")), lambda m: jobs.sgd(m, lr=2e-3), num_workers=WORKERS)
    np.testing.assert_allclose(run.results[0], expected, rtol=0, atol=1e-5)


@pytest.mark.long
def test_async_training_by_two_workers_is_as_good_as_torch_from_another_seed() -> None:
    (x, y), (test_x, test_y) = rows_of(8_000), rows_of(4_000, seed=1)

    def auc(model: Any) -> float:
        return float(oracle.roc_auc_score(test_y.numpy(), predicted(model, test_x).numpy()))

    def shuffled(seed: int, share: slice, size: int) -> list[Inputs]:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[share]
        return [(x[at], y[at]) for at in order.split(size)]

    def plain_auc(seed: int) -> float:
        model = make_model("DeepFM", seed)
        train(model, adagrad(model), shuffled(seed, slice(None), 2 * BATCH))
        return auc(model)

    turns = jobs.Turns(WORKERS)

    def body(part: jobs.Part) -> float:
        for batch in shuffled(0, slice(part.index, None, WORKERS), BATCH):
            with turns.of(part):
                train(part.model, part.optimizer, [batch])
        part.barrier()
        part.flush()  # the network as it is now that both are done
        return auc(part.model)

    plain = [plain_auc(seed) for seed in range(3)]
    run = jobs.run(body, lambda: made_sparse(make_model("DeepFM", 0)), adagrad, mode="async", num_workers=WORKERS)
    assert min(plain) > 0.6
    assert run.results[0] > min(plain) - (max(plain) - min(plain)), plain


def test_l2_terms_on_embeddings_which_no_server_sees_are_refused(inputs: Inputs) -> None:
    def as_it_comes() -> None:
        model = fleet.distributed_model(made_sparse(make_model("DeepFM", with_l2=True)))
        optimizer = fleet.distributed_optimizer(adagrad(model))
        fleet.init_worker()
        fit(model, optimizer, BATCH, *inputs)

    fleet.init()
    with pytest.raises(ModelError, match="row_weight_decay"):
        as_it_comes()
