"""examples/bert: masking as the paper has it, the model's parts, training under strategies, going on from a save."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import processes
from support.messages import naming
from support.paths import ROOT
from support.ranks import Ranks
from torch.nn import functional as F

from benchmarks.gpu_training import Limit, largest_batch
from examples.bert.data import MASK, NUM_SPECIAL, START, UNKNOWN, Batches, Text, generated, read_text
from examples.bert.model import IGNORED, SIZES, Bert, masked_loss

# Data


def test_masking_is_80_10_10():
    """Over 15,300 words to be told: within four standard deviations, which are 0.3 percentage points at most."""
    text = Text(np.full(101 * 1020, 50, np.int32), 1000)
    batch = Batches(text, 1020, 102, seed=1).at(0)
    ids, positions, labels = batch["input_ids"], batch["positions"], batch["labels"]
    assert positions.shape == labels.shape == (1020, 15)
    assert all(len(set(row.tolist())) == 15 for row in positions)
    assert positions.min() >= 1
    assert (ids[:, 0] == START).all()
    assert (labels == 50).all()
    shown = ids.gather(1, positions)
    shares = [(shown == MASK).float().mean(), ((shown != MASK) & (shown != 50)).float().mean()]
    assert shares == pytest.approx([0.8, 0.1], abs=0.013)
    left = torch.ones_like(ids, dtype=torch.bool).scatter(1, positions, False)[:, 1:]
    assert (ids[:, 1:][left] == 50).all(), "all other words are as they were"


def test_readers_share_an_epoch_and_every_step_can_be_had_again():
    text = Text(np.arange(12 * 7, dtype=np.int32) + NUM_SPECIAL, 100)
    readers = [Batches(text, 2, 8, 1, reader, 3) for reader in range(3)]
    assert readers[0].steps_per_epoch == 2
    epochs = [
        torch.cat([original(reader.at(step))[:, 1] for step in steps for reader in readers])
        for steps in ((0, 1), (2, 3))
    ]
    assert epochs[0].sort().values.tolist() == list(range(NUM_SPECIAL, 12 * 7 + NUM_SPECIAL, 7))
    assert not torch.equal(*epochs), "the next epoch has another order"
    assert torch.equal(*(epoch.sort().values for epoch in epochs))
    for one, other in zip(readers[1](1, 4), Batches(text, 2, 8, 1, 1, 3)(1, 4), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def original(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["input_ids"].scatter(1, batch["positions"], batch["labels"])


def test_a_text_becomes_its_most_frequent_words(tmp_path: Path):
    (tmp_path / "text").write_text("a b a c a b d")
    text = read_text(tmp_path / "text", NUM_SPECIAL + 2)
    assert text.ids.tolist() == [3, 4, 3, UNKNOWN, 3, 4, UNKNOWN]
    assert text.vocab_size == NUM_SPECIAL + 2
    assert read_text(tmp_path / "text", 100, max_bytes=5).ids.tolist() == [3, 4, 3]


def test_a_text_too_short_says_so():
    with pytest.raises(ValueError, match=naming(100, 14, 8, "--batch_size")):
        Batches(generated(100, 43), 8, 8, 0, 0, 2)


# Model


def test_scores_at_positions_are_those_of_the_whole():
    torch.manual_seed(0)
    model = Bert(SIZES["tiny"], 100, 16).eval()
    ids, positions = torch.randint(0, 100, (2, 16)), torch.tensor([[1, 5], [0, 15]])
    everywhere, there = model(ids).logits, model(ids, positions).logits
    expected = everywhere.gather(1, positions[:, :, None].expand(-1, -1, 100))
    torch.testing.assert_close(there, expected)
    labels = torch.tensor([[7, IGNORED], [3, 99]])
    loss = F.cross_entropy(expected[labels != IGNORED], torch.tensor([7, 3, 99])).item()
    assert model(ids, positions, labels).loss.item() == pytest.approx(loss)
    assert masked_loss(there, labels).item() == pytest.approx(loss)


def test_the_decoder_is_tied_unless_told_otherwise():
    for tied in (True, False):
        model = Bert(SIZES["tiny"], 100, 16, tied=tied)
        assert (model.head.decoder.weight is model.embeddings.word.weight) == tied


@pytest.mark.parametrize(("size", "millions"), [("base", 109), ("large", 335)])
def test_sizes_are_the_papers(size: str, millions: int):
    """The paper says 110 and 340 million, with embeddings of segments and the head for next sentences."""
    with torch.device("meta"):
        model = Bert(SIZES[size], 30_522)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


# Training

SMALL = "--vocab_size 103 --num_words 20000 --length 16 --batch_size 8 --lr 3e-3 --warmup 2 --dropout 0 --log_every 1"


def run(flags: list[str], ends_after_save: bool = False) -> dict[str, Any]:
    """The script on this rank: losses by step, and what it printed."""
    train = importlib.import_module("examples.bert.train")
    if ends_after_save:
        save = train.fleet.save

        def save_and_end(*args: Any) -> None:
            save(*args)
            raise KeyboardInterrupt

        train.fleet.save = save_and_end
    sys.argv = ["train.py", *flags]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(KeyboardInterrupt):
        train.main()
    found = re.findall(r"step +(\d+) loss ([\d.]+) \| [\d,]+ tokens/s", said.getvalue())
    return {"losses": {int(step): float(loss) for step, loss in found}, "said": said.getvalue()}


def losses(ranks: Ranks, size: int, *flags: str, last: bool = False) -> list[float]:
    """Of the rank that has them: the first, or the last of a pipeline."""
    results = ranks.run(run, size, flags=[*SMALL.split(), "--steps", "4", *flags])
    return list(results[-1 if last else 0]["losses"].values())


@pytest.mark.long
def test_two_ranks_learn_the_topics_with_recomputation(ranks: Ranks):
    """The loss begins at ln(103) = 4.6."""
    flags = [*SMALL.split(), "--steps", "60", "--recompute", "--recompute_configs", "enable_offload=true"]
    first, second = ranks.run(run, 2, flags=flags)
    assert first["losses"][1] == pytest.approx(4.63, abs=0.1)
    held_out = re.search(r"held out: loss ([\d.]+), ([\d.]+)% of", first["said"])
    assert held_out is not None
    assert float(held_out[1]) < 4.0
    assert float(held_out[2]) > 10
    assert second["said"] == "", "only the first rank speaks"


def plain() -> list[float]:
    """The same four steps in one process, in plain PyTorch."""
    torch.manual_seed(0)
    text = generated(20_000, 103, 0)
    cut = len(text.ids) - int(0.05 * len(text.ids))
    batches = Batches(Text(text.ids[:cut], 103), 8, 16, 0)
    model, found = Bert(SIZES["tiny"], 103, 16, 0.0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for step, share in enumerate((0.5, 1.0, 1.0, 0.5)):  # two steps up, two steps down
        optimizer.param_groups[0]["lr"] = 3e-3 * share
        loss = model(**batches.at(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor_parallel --tensor_parallel_configs tensor_parallel_degree=2",
        "--pipeline --pipeline_configs accumulate_steps=4",
    ],
    ids=["tensor_parallel", "pipeline"],
)
def test_a_model_cut_over_two_ranks_has_the_losses_of_one(ranks: Ranks, flags: str):
    """Printed with four digits; sums are taken in another order."""
    assert losses(ranks, 2, *flags.split(), last="--pipeline" in flags) == pytest.approx(plain(), abs=2e-4)


@pytest.mark.parametrize("flags", ["--sharding --sharding_configs stage=3 --recompute", "--gradient_merge"])
def test_strategies_that_change_nothing_have_the_losses_of_plain_training(ranks: Ranks, flags: str):
    assert losses(ranks, 2, *flags.split()) == pytest.approx(losses(ranks, 2), abs=2e-4)


@pytest.mark.parametrize("flags", ["--lamb", "--localsgd --localsgd_configs k_steps=2"])
def test_strategies_with_their_own_rules_run(ranks: Ranks, flags: str):
    found = losses(ranks, 2, *flags.split())
    assert len(found) == 4
    assert all(0 < loss < 10 for loss in found)


@pytest.mark.long
def test_a_job_goes_on_from_its_save(ranks: Ranks, tmp_path: Path):
    flags = [*SMALL.split(), "--steps", "6", "--save_every", "3"]
    whole = ranks.run(run, 2, flags=[*flags, "--save", str(tmp_path / "whole")])[0]
    again = [*flags, "--save", str(tmp_path / "again")]
    begun = ranks.run(run, 2, flags=again, ends_after_save=True)[0]
    rest = ranks.run(run, 2, flags=again)[0]
    assert (list(begun["losses"]), list(rest["losses"])) == ([1, 2, 3], [4, 5, 6])
    assert begun["losses"] | rest["losses"] == whole["losses"]
    assert "step 3" in rest["said"]


# The benchmark that uses the model


@pytest.mark.parametrize(("cap", "expected"), [(10_000, 98), (100_000, 400), (1450, 14), (160, 1), (140, 0)])
def test_the_largest_batch_is_found(cap: int, expected: int):
    """Memory of 100 for each sample and 50 beside, with a little more for large batches."""
    asked: list[int] = []

    def peak(size: int) -> int | None:
        asked.append(size)
        needed = 50 + 100 * size + (60 if size > 20 else 0)
        return needed if needed <= cap else None

    found = largest_batch(peak, 8, most=400, limit=Limit(60))
    assert expected * 23 / 24 - 1 <= found <= expected
    assert len(asked) < 14
    assert largest_batch(peak, 4, most=400, limit=Limit(0)) in (0, 1, 2, 4), "time is up after the first that fits"


@pytest.mark.slow
@pytest.mark.long
def test_the_gpu_benchmark_reports_all_its_figures_on_a_cpu():
    command = [sys.executable, "-m", "benchmarks.collective_gpu", "--cpu", "--json"]
    for part in ("recompute", "precision", "overhead"):
        command += ["--part", part]
    done = processes.run(command, cwd=ROOT, stderr=subprocess.PIPE, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["recompute.offload_batch"] == found["most"]
    speeds = [found[f"overhead.bert_base_2x16_{who}_samples_per_s"] for who in ("hand", "ours")]
    assert found["overhead.bert_base_2x16_overhead_percent"] == pytest.approx(100 * (speeds[0] / speeds[1] - 1))
    for name in ("float32", "amp_float16", "pure_bfloat16", "amp_sharding_3"):
        assert found[f"precision.{name}_samples_per_s"] > 0
