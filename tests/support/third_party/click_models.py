"""torchfm, torch-rechub and deepctr-torch: models of clicks, by loops of their own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from support.third_party.case import SEED, Case, Outcome, Port, adagrad, auc, recorded_losses
from support.third_party.movielens import BATCH, NUM_TRAIN, split
from torch.utils.data import DataLoader, TensorDataset

BATCH_NORM = "batch norm sees half a batch on each worker"
EPS = 1e-4  # biases in front of batch norm have gradients of pure rounding, which Adagrad would make whole steps of


def own_loop(port: Port, model: Any) -> Outcome:
    """The loop of torchfm's example."""
    (ids, liked), (test_ids, test_liked), _ = split()
    loader: Any = DataLoader(TensorDataset(ids, liked), BATCH // port.num_workers)
    model, optimizer, loader = port(model, adagrad(model, eps=EPS), loader)
    criterion = torch.nn.BCELoss()
    with recorded_losses() as losses:
        model.train()
        for fields, target in loader:
            loss = criterion(model(fields), target)
            model.zero_grad()
            loss.backward()
            optimizer.step()
    port.finish()
    model.eval()
    with torch.no_grad():
        return Outcome(losses, auc(model(test_ids), test_liked))


def torchfm_deepfm(port: Port) -> Outcome:
    from torchfm.model.dfm import DeepFactorizationMachineModel

    torch.manual_seed(SEED)
    return own_loop(port, DeepFactorizationMachineModel(split()[2], embed_dim=8, mlp_dims=(16,), dropout=0.0))


def torchfm_ffm(port: Port) -> Outcome:
    from torchfm.model.ffm import FieldAwareFactorizationMachineModel

    torch.manual_seed(SEED)
    return own_loop(port, FieldAwareFactorizationMachineModel(split()[2], embed_dim=4))


def ctr_trainer(port: Port, model: Any, columns: dict[str, torch.Tensor], size: int) -> Outcome:
    """torch-rechub's CTRTrainer, which makes the optimizer: model and optimizer are put back into it."""
    from torch_rechub.trainers import CTRTrainer
    from torch_rechub.utils.data import DataGenerator

    liked = torch.cat([split()[0][1], split()[1][1]])
    x = {name: column.numpy() for name, column in columns.items()}
    train, _, _ = DataGenerator({n: c[:size] for n, c in x.items()}, liked[:size].numpy()).generate_dataloader(
        x_val={n: c[size:] for n, c in x.items()},
        y_val=liked[size:].numpy(),
        x_test={n: c[size:] for n, c in x.items()},
        y_test=liked[size:].numpy(),
        batch_size=BATCH // port.num_workers,
    )
    loader: Any = DataLoader(train.dataset, BATCH // port.num_workers)  # rechub's own order is drawn
    trainer = CTRTrainer(model, torch.optim.Adagrad, {"lr": 0.05, "eps": EPS}, n_epoch=1)
    trainer.model, trainer.optimizer, loader = port(trainer.model, trainer.optimizer, loader)
    with recorded_losses() as losses:
        trainer.fit(loader)
    port.finish()
    trainer.model.eval()
    with torch.no_grad():
        return Outcome(losses, auc(trainer.model({n: c[size:] for n, c in columns.items()}), liked[size:]))


def rechub_deepfm(port: Port) -> Outcome:
    from torch_rechub.basic.features import SparseFeature
    from torch_rechub.models.ranking import DeepFM

    torch.manual_seed(SEED)
    (ids, _), (test_ids, _), sizes = split()
    features = [SparseFeature(name, size, embed_dim=8) for name, size in zip("abc", sizes, strict=True)]
    model = DeepFM(features, features, {"dims": [16], "dropout": 0.0, "activation": "relu"})
    return ctr_trainer(port, model, dict(zip("abc", torch.cat([ids, test_ids]).T, strict=True)), NUM_TRAIN)


def rechub_din(port: Port) -> Outcome:
    from torch_rechub.basic.features import SequenceFeature, SparseFeature
    from torch_rechub.models.ranking import DIN

    torch.manual_seed(SEED)
    (ids, _), (test_ids, _), sizes = split()
    every = torch.cat([ids, test_ids])
    target = SparseFeature("film", sizes[1], embed_dim=8)
    history = SequenceFeature("films", sizes[1], embed_dim=8, pooling="concat", shared_with="film")
    model = DIN(
        [SparseFeature("user", sizes[0], embed_dim=8)],
        [history],
        [target],
        mlp_params={"dims": [16], "dropout": 0.0},
        attention_mlp_params={"dims": [8], "activation": "dice"},
    )
    columns = {"user": every[:, 0], "film": every[:, 1], "films": _films_before(every)}
    return ctr_trainer(port, model, columns, NUM_TRAIN)


def _films_before(ids: torch.Tensor, num: int = 5) -> torch.Tensor:
    """The films that the user of each rating has rated before, the last ones first; 0 where there are none."""
    seen: dict[int, list[int]] = {}
    found = torch.zeros(len(ids), num, dtype=torch.int64)
    for at, (user, film, _) in enumerate(ids.tolist()):
        films = seen.setdefault(user, [])
        last = films[-num:][::-1]
        found[at, : len(last)] = torch.tensor(last, dtype=torch.int64)
        films.append(film)
    return found


def deepctr_deepfm(port: Port) -> Outcome:
    """Its own fit, whose loss is a sum over the batch, over this worker's share of the samples."""
    from deepctr_torch.inputs import SparseFeat
    from deepctr_torch.models import DeepFM

    (ids, liked), (test_ids, test_liked), sizes = split()
    columns = [SparseFeat(name, size, embedding_dim=8) for name, size in zip("abc", sizes, strict=True)]
    model: Any = DeepFM(
        columns, columns, dnn_hidden_units=(16,), l2_reg_linear=0, l2_reg_embedding=0, init_std=0.05, seed=SEED
    )
    model, optimizer = port(model, adagrad(model))
    index, num = port.share()
    own = [ids[index::num, column : column + 1].numpy() for column in range(3)]
    model.compile(optimizer, "binary_crossentropy")
    with recorded_losses() as losses:
        model.fit(own, liked[index::num].numpy(), batch_size=BATCH // num, epochs=1, verbose=0, shuffle=False)
    port.finish()
    found = model.predict([test_ids[:, column : column + 1].numpy() for column in range(3)], batch_size=1000)
    return Outcome(losses, auc(torch.from_numpy(found).squeeze(1), test_liked))


# Batch norm divides by small variances: rounding grows over fifty steps.
normed = functools.partial(Case, reason=BATCH_NORM, relative=1e-5, sync_band=0.1, score_band=0.04)
CASES = (
    normed("DeepFM, own loop", "torchfm", torchfm_deepfm),
    Case("FFM, own loop", "torchfm", torchfm_ffm),
    normed("DeepFM, CTRTrainer", "torch_rechub", rechub_deepfm),
    normed("DIN, CTRTrainer", "torch_rechub", rechub_din),
    Case("DeepFM, fit", "deepctr_torch", deepctr_deepfm, has_summed_loss=True),
)
