"""examples/resnet: networks are those of the paper, images are shared out, ranks learn, under every strategy, and go on
from a save."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extras import imported
from support.messages import lines_naming, naming
from support.paths import ROOT
from support.ranks import Ranks
from support.scripts.launching import forked_fleetrun

from examples.resnet import data
from examples.resnet.model import resnet50, resnet_small

pytestmark = pytest.mark.xdist_group("example_resnet")

SCRIPT = ROOT / "examples" / "resnet" / "train.py"
# 8 layers on 8 × 8 pixels: seconds on one core. Convolutions in half precision are emulated, very slowly, on a CPU.
TINY = ("--model", "small", "--blocks", "1", "--image_size", "8", "--classes", "4")
AMP = ("--amp", "--amp_configs", "custom_black_list=conv2d")


def example(arguments: list[str]) -> dict[str, Any]:
    """What train.py prints on this rank."""
    out, sys.argv = io.StringIO(), [str(SCRIPT), *arguments]
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return {"output": out.getvalue()}


def train(ranks: Ranks, *arguments: object, size: int = 2) -> str:
    """What rank 0 printed."""
    first, *_ = ranks.run(example, size, arguments=[str(argument) for argument in (*TINY, *arguments)])
    return str(first["output"])


def final(output: str) -> tuple[float, float]:
    """(acc1, acc5)"""
    (found,) = re.findall(r"^final accuracy: acc1 (\d+\.\d+) %, acc5 (\d+\.\d+) %$", output, re.MULTILINE)
    return float(found[0]), float(found[1])


class TestModels:
    def test_resnet50_is_that_of_the_paper(self) -> None:
        model = resnet50()
        assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
        assert (
            sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 49 + 4
        )  # and the head; shortcuts
        with torch.no_grad():
            before = model.stage3(model.stage2(model.stage1(model.stem(torch.zeros(1, 3, 64, 64)))))
            assert before.shape == (1, 1024, 4, 4)
            assert model.head(model.stage4(before)).shape == (1, 1000)

    def test_the_small_one_has_six_layers_per_block_and_two(self) -> None:
        for blocks, layers in ((1, 8), (3, 20)):
            model = resnet_small(10, blocks)
            convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
            assert sum(convolution.kernel_size == (3, 3) for convolution in convolutions) + 1 == layers
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert sum(parameter.numel() for parameter in model.parameters()) == 272_474


class TestData:
    def test_made_up_images_are_the_same_whenever_they_are_asked_for(self) -> None:
        one, again = (data.Generated(100, 4, 16)[37] for _ in range(2))
        assert torch.equal(one[0], again[0])
        assert one[1] == 37 % 4
        assert one[0].shape == (3, 16, 16)
        assert not torch.equal(one[0], data.Generated(100, 4, 16, part=1)[37][0])
        assert not torch.equal(one[0], data.Generated(100, 4, 16)[41][0])  # of the same class

    def test_shares_of_the_ranks_make_up_the_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        images = data.Generated(24, 24, 8)  # a class of its own for each
        seen = []
        for share in range(3):
            monkeypatch.setattr(data.fleet, "data_shard", lambda share=share: (share, 3), raising=False)
            batches = data.loader(images, 4, train=True, seed=0, processes=0)
            seen += [int(label) for _, labels in batches for label in labels]
            assert len(batches) == 2
        assert sorted(seen) == list(range(24))

    def test_more_ranks_than_images_for_one_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(data.fleet, "data_shard", lambda: (0, 4), raising=False)
        with pytest.raises(SystemExit, match=naming(2, 16)):
            data.loader(data.Generated(8, 2, 8), 16, train=True, seed=0, processes=0)

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for part in ("train", "val"):
            for label, name in enumerate(("cat", "dog")):
                (tmp_path / part / name).mkdir(parents=True)
                np.save(tmp_path / part / name / "1.npy", np.full((12, 20, 3), 100 * label, np.uint8))
        return tmp_path

    def test_a_folder_of_arrays(self, folder: Path) -> None:
        (folder / "train" / "cat" / "notes.txt").write_text("no image")
        train, test, num_classes = data.datasets(str(folder), 0, 0, size=8)
        assert (len(train), len(test), num_classes) == (2, 2, 2)  # type: ignore[arg-type]
        image, label = test[1]
        assert (image.shape, label) == ((3, 8, 8), 1)
        expected = ((100 / 255 - data.MEAN) / data.SPREAD).expand(3, 8, 8)
        assert torch.allclose(image, expected, atol=1e-5)

    def test_an_image_is_cut_to_its_middle(self, folder: Path) -> None:
        wide = np.zeros((8, 24, 3), np.uint8)
        wide[:, 8:16] = 255
        np.save(folder / "val" / "cat" / "1.npy", wide)
        image, _ = data.datasets(str(folder), 0, 0, size=8)[1][0]
        assert torch.allclose(image, ((1 - data.MEAN) / data.SPREAD).expand(3, 8, 8), atol=1e-5)

    def test_pictures_need_pillow(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "train" / "cat" / "2.png").write_bytes(b"")
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(SystemExit, match="pip install pillow"):
            data.datasets(str(folder), 0, 0, size=8)

    def test_a_picture_is_read_as_an_array_is(self, folder: Path) -> None:
        pillow = imported("PIL.Image")
        array = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
        np.save(folder / "val" / "cat" / "1.npy", array)
        pillow.fromarray(array).save(folder / "val" / "cat" / "2.png")
        images = data.datasets(str(folder), 0, 0, size=8)[1]
        assert torch.equal(images[0][0], images[1][0])

    def test_what_is_wrong_with_a_folder_is_said(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match=naming("none/train", "<class>/<image>")):
            data.datasets(str(tmp_path / "none"), 0, 0, size=8)
        np.save(folder / "train" / "cat" / "1.npy", np.zeros((8, 8), np.float32))
        with pytest.raises(SystemExit, match=naming("1.npy", "float32", "(8, 8)")):
            data.datasets(str(folder), 0, 0, size=8)[0][0]
        (folder / "val" / "dog" / "1.npy").unlink()
        (folder / "val" / "dog").rmdir()
        with pytest.raises(SystemExit, match=naming("val", "dog")):
            data.datasets(str(folder), 0, 0, size=8)


SCHEDULES = ("constant", "constant:1", "step", "cosine", "cosine:0.5")


def rates() -> dict[str, Any]:
    """The learning rate of every step, 3 epochs of 10, for each of SCHEDULES."""
    names, found = runpy.run_path(str(SCRIPT)), {}
    for schedule in SCHEDULES:
        sys.argv = [str(SCRIPT), "--schedule", schedule, "--epochs", "3"]
        share = names["rate_of"](names["parse"](), 10)
        found[schedule] = torch.tensor([share(step) for step in range(30)], dtype=torch.float64)
    return found


class TestTraining:
    def test_schedules(self, ranks: Ranks) -> None:
        (found,) = ranks.run(rates, 1)
        for schedule in SCHEDULES:
            name, _, warm_up = schedule.partition(":")
            begin = round(10 * float(warm_up or 0))
            done = (np.arange(30) - begin) / (30 - begin)
            expected = {
                "constant": np.ones(30),
                "cosine": (1 + np.cos(np.pi * done)) / 2,
                "step": np.select([done < 1 / 3, done < 2 / 3, done < 8 / 9], [1, 0.1, 0.01], 0.001),
            }[name]
            expected[:begin] = np.arange(1, begin + 1) / max(1, begin)
            np.testing.assert_allclose(found[schedule], expected, err_msg=schedule)

    def test_two_ranks_learn_with_mixed_precision(self, ranks: Ranks) -> None:
        output = train(
            ranks, "--images", 256, "--epochs", 2, "--batch_size", 8, "--lr", 0.05, "--print_period", 8, *AMP
        )
        assert "2 ranks" in output
        assert "amp" in output
        steps = re.findall(
            r"^epoch (\d) step (\d+)/16: loss \d+\.\d+, acc1 .*, acc5 100.00 %, [\d,]+ images/s", output, re.M
        )
        assert steps == [("1", "8"), ("1", "16"), ("2", "8"), ("2", "16")]
        assert final(output)[0] >= 90.0, output  # of 4 classes

    @pytest.mark.long
    def test_a_job_goes_on_from_its_save_as_if_it_had_not_ended(self, ranks: Ranks, tmp_path: Path) -> None:
        flags = ("--images", 64, "--batch_size", 16, "--schedule", "constant:2", "--print_period", 1)
        whole = train(ranks, *flags, "--epochs", 3)
        first = train(ranks, *flags, "--epochs", 1, "--save", tmp_path / "model")
        second = train(ranks, *flags, "--epochs", 3, "--save", tmp_path / "model")
        assert lines_naming(second, "epoch 1", "step 2")
        assert losses(first) + losses(second) == losses(whole)
        assert final(second) == final(whole)
        third = train(ranks, *flags, "--epochs", 3, "--save", tmp_path / "model", size=1)
        assert losses(third) == [], "there is nothing left to train"
        assert final(third) == final(whole)

    @pytest.mark.parametrize(
        "flags",
        [
            "--gradient_merge --gradient_merge_configs k_steps=2",
            "--recompute --recompute_configs checkpoints=stage1,stage2",
            "--lars --sync_batch_norm",
            "--lamb",
            "--dgc --dgc_configs sparsity=0.75,0.9,rampup_step=2",
            "--localsgd --localsgd_configs k_steps=2",
            "--adaptive_localsgd --adaptive_localsgd_configs init_k_steps=2",
            "--fp16_allreduce --no-fuse_all_reduce_ops",
            "--sharding --sharding_configs stage=2",
            "--pipeline --pipeline_configs accumulate_steps=2,stages=stage2",
        ],
    )
    def test_every_strategy_is_a_flag(self, ranks: Ranks, flags: str) -> None:
        """Each trains and tells its accuracy; that it computes what it should is tested where it is made."""
        output = train(ranks, "--images", 64, "--epochs", 1, "--batch_size", 16, "--lr", 0.01, *flags.split())
        assert flags.split(maxsplit=1)[0].removeprefix("--") in output, "the job says which strategies are on"
        assert final(output)[1] == 100.0  # 4 classes are always among the five best
        assert len(losses(output)) == 2

    @pytest.mark.slow
    def test_started_by_fleetrun(self, tmp_path: Path) -> None:
        flags = (*TINY, "--images", "64", "--epochs", "2", "--batch_size", "16", *AMP)
        with forked_fleetrun(tmp_path / "log", "--nproc_per_node", "2", str(SCRIPT), *flags, FLEET_DEVICE="cpu") as job:
            assert job.wait() == 0, job.output
        first, second = ((tmp_path / "log" / "latest" / f"workerlog.{rank}").read_text() for rank in range(2))
        assert final(first)[1] == 100.0
        assert "epoch" not in second, "rank 0 speaks for all"

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ("--schedule linear", ["--schedule", "cosine", "linear"]),
            ("--schedule cosine:soon", ["--schedule", "EPOCHS", "soon"]),
            ("--epochs 0", ["--epochs", "at least 1"]),
            ("--dgc_configs rampup_step=2", ["--dgc_configs", "--dgc"]),
            ("--images 8", ["8 images per rank", "--batch_size"]),
        ],
    )
    def test_mistakes_are_named(self, ranks: Ranks, flags: str, words: list[str]) -> None:
        said = ranks.run(failing, 1, arguments=[*TINY, *flags.split()])[0]["said"]
        for word in words:
            assert word in said


def failing(arguments: list[str]) -> dict[str, Any]:
    """What train.py says when it ends with an error."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            example(arguments)
        except (Exception, SystemExit) as error:
            print(error, file=said)
    return {"said": said.getvalue()}


def losses(output: str) -> list[str]:
    """Of every step and test, without the speeds."""
    return re.findall(r"^epoch \d.*?acc5 [\d.]+", output, re.MULTILINE)
