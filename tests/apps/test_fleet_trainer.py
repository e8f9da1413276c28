"""FleetTrainer against transformers.Trainer: the same model and data, and as many samples per update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.extras import needing
from support.messages import naming
from support.paths import ROOT
from support.planned_models import same
from support.scripts.launching import forked_fleetrun

import torchfleet as fleet
from torchfleet.api import process_role
from torchfleet.base.errors import FleetError, StrategyError

pytestmark = [
    needing("transformers", "accelerate"),
    pytest.mark.xdist_group("transformers"),  # imported once, which takes seconds
]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "fleet_trainer_job.py"
PATIENCE = 200.0  # seconds of ranks that all import transformers


@pytest.fixture(scope="module")
def work() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        from support.scripts import fleet_trainer_job

        yield fleet_trainer_job


@pytest.fixture(autouse=True)
def _one_job() -> Iterator[None]:
    with jobs.clean_facade():
        yield


def plain(work: Any, folder: Path, **options: Any) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """Answers of the model that transformers.Trainer alone trains, and what it logged."""
    from transformers import Trainer

    model = work.job.make_model()
    trainer = Trainer(model, work.arguments(folder, **options), train_dataset=work.job.Sentences())
    trainer.train()
    return work.job.answers(model), steps_of(trainer)


def steps_of(trainer: Any) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if "loss" in line]


def test_it_trains_saves_and_goes_on_as_the_trainer_does(work: Any, tmp_path: Path) -> None:
    expected, logged = plain(work, tmp_path / "plain")
    trainer = work.trainer(tmp_path / "fleet", "none", work.job.BATCH, save_strategy="epoch")
    trainer.train()
    torch.testing.assert_close(work.job.answers(trainer.model), expected, rtol=0, atol=1e-6)
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in steps_of(trainer)] == pytest.approx([line[name] for line in logged], abs=1e-5)
    groups = [len(group["params"]) for group in trainer.optimizer.param_groups]
    assert all(groups), f"weights that decay and others, found {groups}"
    fleet.stop_worker()

    middle = tmp_path / "fleet" / "checkpoint-4"
    again = work.trainer(tmp_path / "again", "none", work.job.BATCH)
    again.train(resume_from_checkpoint=str(middle))
    torch.testing.assert_close(work.job.answers(again.model), expected, rtol=0, atol=1e-6)
    assert again.state.global_step == 8
    fleet.stop_worker()

    restored = work.job.BertForSequenceClassification.from_pretrained(tmp_path / "fleet" / "checkpoint-8")
    torch.testing.assert_close(work.job.answers(restored), expected, rtol=0, atol=1e-6)


def test_merged_gradients_are_clipped_once_and_survive_the_trainers_zero_grad(work: Any, tmp_path: Path) -> None:
    expected, logged = plain(work, tmp_path / "plain")
    trainer = work.trainer(tmp_path / "fleet", "gradient_merge", work.job.BATCH)
    trainer.train()
    torch.testing.assert_close(work.job.answers(trainer.model), expected, rtol=0, atol=1e-5)
    norms = [line.get("grad_norm") for line in steps_of(trainer)]
    assert norms[1::2] == pytest.approx([line["grad_norm"] for line in logged], abs=1e-5)
    assert norms[::2] == [None, *norms[1:-1:2]], "in between, the norm of the last update; none before the first"
    fleet.stop_worker()


@pytest.mark.parametrize(
    ("options", "strategy", "text"),
    [
        ({"gradient_accumulation_steps": 4}, {}, "gradient_accumulation_steps=4 gradient_merge=True 'k_steps': 4"),
        ({"bf16": True}, {"amp": True}, "bf16=True amp=True bfloat16"),
        ({"gradient_checkpointing": True}, {"recompute": True}, "gradient_checkpointing=True recompute=True"),
        ({}, {"pipeline": True}, "pipeline=True collective/pipeline"),
        ({"eval_strategy": "epoch"}, {"context_parallel": True}, "context_parallel=True eval_strategy"),
        ({"max_grad_norm": 0.7}, {"dgc": True}, "max_grad_norm=0.7 dgc=True 'local_grad_clip_norm': 0.7"),
    ],
)
def test_what_both_sides_would_do_is_refused(
    work: Any, tmp_path: Path, options: dict[str, Any], strategy: dict[str, Any], text: str
) -> None:
    if "recompute" in strategy:
        strategy = work.STRATEGIES["recompute"]
    with pytest.raises(StrategyError, match=naming(*text.split())):
        fleet.transformers.FleetTrainer(
            work.job.make_model(),
            work.arguments(tmp_path, **options),
            strategy=fleet.DistributedStrategy(**strategy),
            train_dataset=work.job.Sentences(),
        )
    assert not process_role.is_set_up()


def test_a_checkpoint_of_another_trainer_is_refused(work: Any, tmp_path: Path) -> None:
    plain(work, tmp_path, save_strategy="epoch", num_train_epochs=1)
    trainer = work.trainer(tmp_path / "fleet", "none", work.job.BATCH)
    with pytest.raises(FleetError, match=naming("checkpoint-4", "'fleet'", "from_pretrained")):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    fleet.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("transformers_imported")
def test_two_ranks_train_to_the_result_of_one_process_under_every_strategy(work: Any, tmp_path: Path) -> None:
    out = tmp_path / "found.pt"
    work.job.make_model().save_pretrained(tmp_path / "first")
    with forked_fleetrun(tmp_path / "log", "--nproc_per_node", "2", str(SCRIPT), str(out)) as started:
        assert started.wait(PATIENCE) == 0, started.output
    found = torch.load(out, weights_only=True)
    expected, logged = plain(work, tmp_path / "plain")
    alone, _ = plain(work, tmp_path / "sgd", **work.OPTIONS["localsgd"])
    lamb = work.trainer(tmp_path / "lamb", "lamb", work.job.BATCH)
    lamb.train()
    oracles = {"localsgd": alone, "lamb": work.job.answers(lamb.model)}
    fleet.stop_worker()
    for name in work.STRATEGIES:
        atol = 2e-2 if name == "amp" else 1e-5  # bfloat16
        torch.testing.assert_close(found[name]["answers"], oracles.get(name, expected), rtol=0, atol=atol, msg=name)
    same(found["texts"], work.train_texts(tmp_path / "texts"), "context_parallel", 1e-5)
    assert found["none"]["losses"] == pytest.approx([line["loss"] for line in logged], abs=1e-5)
