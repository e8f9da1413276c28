"""RecBole: its models, loaders and Trainer, on its MovieLens-100k."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import numpy as np
from support.third_party.case import SEED, Case, Outcome, Port, adagrad, recorded_losses
from support.third_party.movielens import folder

SETTINGS: dict[str, Any] = {
    "dataset": "ml-100k",
    "use_gpu": False,
    "gpu_id": "",
    "epochs": 1,
    "learner": "adagrad",
    "learning_rate": 0.05,
    "shuffle": False,
    "state": "ERROR",
    "show_progress": False,
    "save_dataset": False,
    "seed": SEED,
    "reproducibility": False,
    "eval_batch_size": 4096,
}
RANKED = {
    "eval_args": {"split": {"RS": [0.8, 0.1, 0.1]}, "order": "TO", "group_by": "user", "mode": "full"},
    "metrics": ["NDCG"],
    "valid_metric": "NDCG@10",
    "topk": [10],
}
CLICKED = {
    "threshold": {"rating": 4},
    "load_col": {"inter": ["user_id", "item_id", "rating", "timestamp"]},
    "eval_args": {"split": {"RS": [0.8, 0.1, 0.1]}, "order": "TO", "group_by": None, "mode": "labeled"},
    "metrics": ["AUC"],
    "valid_metric": "AUC",
    "train_neg_sample_args": None,
}


def with_old_names() -> None:
    """RecBole 1.2.1 sets aliases of NumPy that NumPy 2 has taken away, from names that it has taken away, too."""
    for name, kind in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_, "bool8": np.bool_}.items():
        if not hasattr(np, name):
            setattr(np, name, kind)


def train(port: Port, name: str, size: int, **settings: Any) -> Outcome:
    """RecBole's quick start without its logger: the optimizer of its Trainer and its loader are prepared."""
    with_old_names()
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer, init_seed

    with tempfile.TemporaryDirectory() as checkpoints:
        places = {"data_path": str(folder()), "checkpoint_dir": checkpoints}
        sizes = {"train_batch_size": size // port.num_workers, "user_inter_num_interval": "[0,60]"}
        config = Config(model=name, config_dict={**SETTINGS, **places, **sizes, **settings})
        init_seed(SEED, False)
        train_data, _, test_data = data_preparation(config, create_dataset(config))
        init_seed(SEED, False)
        model = get_model(name)(config, train_data._dataset)
        trainer = get_trainer(config["MODEL_TYPE"], name)(config, model)
        trainer.optimizer = adagrad(model)
        model, trainer.optimizer, train_data = port(model, trainer.optimizer, train_data)
        with recorded_losses() as losses:
            trainer.fit(train_data, verbose=False, saved=False, show_progress=False)
        port.finish()
        found = trainer.evaluate(test_data, load_best_model=False, show_progress=False)
    return Outcome(losses, float(next(iter(found.values()))))


def ranker(name: str, size: int, **settings: Any) -> Any:
    return functools.partial(train, name=name, size=size, **RANKED, **settings)


def clicker(name: str, size: int, **settings: Any) -> Any:
    return functools.partial(train, name=name, size=size, **CLICKED, **settings)


NEGATIVES = "its loader draws the samples that were not clicked, and each worker draws its own"
CASES = (
    Case(
        "DeepFM, its Trainer",
        "recbole",
        clicker("DeepFM", 512, embedding_size=8, mlp_hidden_size=[16], dropout_prob=0.0),
        "batch norm sees half a batch on each worker",
        sync_band=0.1,
        score_band=0.03,
    ),
    Case(
        "NeuMF, its Trainer",
        "recbole",
        ranker("NeuMF", 512, mf_embedding_size=8, mlp_embedding_size=8, mlp_hidden_size=[16], dropout_prob=0.0),
        NEGATIVES,
        sync_band=0.1,
        score_band=0.03,
    ),
    Case(
        "BPR, its Trainer", "recbole", ranker("BPR", 512, embedding_size=8), NEGATIVES, sync_band=0.1, score_band=0.03
    ),
    Case(
        "SASRec, its Trainer",
        "recbole",
        ranker(
            "SASRec",
            512,
            loss_type="CE",
            train_neg_sample_args=None,
            MAX_ITEM_LIST_LENGTH=10,
            hidden_size=16,
            inner_size=16,
            n_layers=1,
            n_heads=2,
            hidden_dropout_prob=0.0,
            attn_dropout_prob=0.0,
        ),
        "the last batch does not divide",
        sync_band=0.02,
        score_band=0.02,
    ),
)
