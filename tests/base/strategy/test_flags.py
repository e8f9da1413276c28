"""Strategies from a command line: every collective field is a flag, and what is wrong is said at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from support.cases import each_of
from support.messages import naming

from torchfleet import options
from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.collective_fields import CONFIGS, FIELDS, OBJECTS, SWITCHES
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="train.py")
    options.add_arguments(made)
    return made


def strategy(*arguments: object) -> DistributedStrategy:
    return options.strategy_of(parser().parse_args([str(argument) for argument in arguments]))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What argparse says of a command line that it does not take."""
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


class TestFlags:
    def test_without_flags_all_is_default(self) -> None:
        assert strategy() == DistributedStrategy()

    @each_of("name", SWITCHES)
    def test_a_switch_is_a_flag(self, name: str) -> None:
        assert strategy(f"--{name}") == DistributedStrategy(**{name: True})
        assert strategy(f"--no-{name}") == DistributedStrategy()

    def test_every_field_has_a_flag_with_a_help_that_teaches(self) -> None:
        text = " ".join(parser().format_help().split())
        for name in (*FIELDS, *(f"{name}_configs" for name in CONFIGS), *OBJECTS):
            assert f"--{name}" in text
        for name, keys in {**CONFIGS, **OBJECTS}.items():
            for key, value in keys.items():
                assert value.only or f"{key}=" in text, (name, key)
        for name, key in FIELDS.items():
            assert name in options.HELP or key.only, name

    def test_a_dictionary_in_a_dictionary_is_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        plan = '{"plan": {"layers.*.up": "column"}, "tensor_parallel_degree": 2}'
        found = strategy("--tensor_parallel", "--tensor_parallel_configs", plan)
        assert found.tensor_parallel_configs.plan == {"layers.*.up": "column"}
        text = refused(capsys, "--tensor_parallel_configs", "plan=up")
        assert "plan" in text
        assert "JSON" in text
        assert "dictionary" in refused(capsys, "--tensor_parallel_configs", '{"plan": ["up"]}')

    def test_numbers_and_what_is_on_by_default(self) -> None:
        found = strategy("--fuse_grad_size_in_MB", 8, "--nccl_comm_num", 2, "--no-fuse_all_reduce_ops")
        assert found == DistributedStrategy(fuse_grad_size_in_MB=8, nccl_comm_num=2, fuse_all_reduce_ops=False)

    @each_of(
        ("name", "text", "expected"),
        [
            ("amp", '{"init_loss_scaling": 1024}', {"init_loss_scaling": 1024.0}),
            ("amp", ' {"custom_white_list": ["softmax"]}', {"custom_white_list": ["softmax"]}),
            ("amp", "init_loss_scaling=1024,dtype=bfloat16", {"init_loss_scaling": 1024.0, "dtype": "bfloat16"}),
            ("amp", "use_dynamic_loss_scaling=false", {"use_dynamic_loss_scaling": False}),
            ("amp", "use_pure_fp16", {"use_pure_fp16": True}),
            ("amp", "", {}),
            ("recompute", "checkpoints=layer1,layer2,enable_offload=1",
             {"checkpoints": ["layer1", "layer2"], "enable_offload": True}),
            ("recompute", "checkpoints=layer.*", {"checkpoints": ["layer.*"]}),
            ("recompute", "checkpoints=", {"checkpoints": []}),
            ("dgc", "sparsity=0.75,0.9375, 0.999,rampup_step=3", {"sparsity": [0.75, 0.9375, 0.999], "rampup_step": 3}),
            ("gradient_merge", "k_steps = 4, avg = False", {"k_steps": 4, "avg": False}),
            ("sharding", "stage=3,fuse_broadcast_MB=16", {"stage": 3, "segment_broadcast_MB": 16.0}),
            ("pipeline", "schedule_mode=F-then-B,stages=a,b", {"schedule_mode": "F-then-B", "stages": ["a", "b"]}),
        ],
    )  # fmt: skip
    def test_dictionaries(self, name: str, text: str, expected: dict[str, Any]) -> None:
        found = strategy(f"--{name}", f"--{name}_configs", text)
        assert found == DistributedStrategy(**{name: True, f"{name}_configs": expected})

    def test_degrees_need_no_switch(self) -> None:
        assert strategy("--hybrid_configs", "dp_degree=2").hybrid_configs["dp_degree"] == 2

    def test_fusions_and_threads(self) -> None:
        fusions = ("fuse_bn_act_ops", "fuse_all_optimizer_ops")
        found = strategy("--build_strategy", ",".join(fusions), "--execution_strategy", "num_threads=3")
        expected = {"build_strategy": dict.fromkeys(fusions, True), "execution_strategy": {"num_threads": 3}}
        assert found == DistributedStrategy(**expected)

    def test_flags_of_the_script_itself_stay_its_own(self) -> None:
        made = parser()
        made.add_argument("--lr", type=float)
        chosen = made.parse_args(["--lr", "0.5", "--amp"])
        assert (chosen.lr, options.strategy_of(chosen)) == (0.5, DistributedStrategy(amp=True))


class TestFile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "strategy.yaml"
        amp = {"init_loss_scaling": 64.0, "incr_ratio": 4.0}
        fusion = {"fuse_bn_act_ops": True}
        DistributedStrategy(amp=True, amp_configs=amp, nccl_comm_num=2, build_strategy=fusion).save_to_yaml(path)
        return path

    def test_a_file_of_save_to_yaml_is_read(self, file: Path) -> None:
        assert strategy("--strategy", file) == DistributedStrategy.load_from_yaml(file)

    def test_a_file_of_paddle_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "strategy.prototxt"
        path.write_text("localsgd: true localsgd_configs { k_steps: 8 }")
        assert strategy("--strategy", path) == DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 8})

    def test_flags_override_a_file_key_by_key(self, file: Path) -> None:
        flags = ("--amp_configs", "incr_ratio=8", "--nccl_comm_num", 1, "--build_strategy", "fuse_all_optimizer_ops")
        assert strategy("--strategy", file, *flags) == DistributedStrategy(
            amp=True,
            amp_configs={"init_loss_scaling": 64.0, "incr_ratio": 8.0},
            build_strategy={"fuse_bn_act_ops": True, "fuse_all_optimizer_ops": True},
        )

    def test_a_strategy_of_the_file_can_be_switched_off(self, file: Path) -> None:
        found = strategy("--strategy", file, "--no-amp")
        assert not found.amp
        assert found.is_default("amp_configs"), "a dictionary without its switch would be refused"

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(StrategyError, match=naming("none.yaml")):
            strategy("--strategy", tmp_path / "none.yaml")


class TestRefusals:
    @each_of("name", [name for name in CONFIGS if name != "hybrid"])
    def test_a_dictionary_without_its_switch_names_both(self, name: str) -> None:
        with pytest.raises(StrategyError, match=naming(f"--{name}_configs", f"--{name}")):
            strategy(f"--{name}_configs", "{}")

    def test_a_dictionary_of_a_strategy_that_was_switched_off(self, tmp_path: Path) -> None:
        path = tmp_path / "strategy.yaml"
        DistributedStrategy(dgc=True).save_to_yaml(path)
        with pytest.raises(StrategyError, match=naming("--dgc_configs", "--dgc")):
            strategy("--strategy", path, "--no-dgc", "--dgc_configs", "rampup_step=2")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--amp_configs", '{"init_loss_scaling": 1024'), ["--amp_configs", "JSON", "key=value"]),
            (("--amp_configs", '{"init_loss": 1}'), ["init_loss", "init_loss_scaling"]),
            (("--amp_configs", "init_loss=1"), ["init_loss", "init_loss_scaling"]),
            (("--amp_configs", "init_loss_scaling"), ["key=value", "init_loss_scaling"]),
            (("--amp_configs", "dtype=float16,softmax"), ["no field 'softmax'", "custom_white_list"]),
            (("--amp_configs", "incr_ratio=2,incr_ratio=3"), ["once", "incr_ratio=3"]),
            (("--amp_configs", "incr_ratio=much"), ["incr_ratio", "a number", "much"]),
            (("--amp_configs", "incr_every_n_steps=1.5"), ["incr_every_n_steps", "whole number", "1.5"]),
            (("--amp_configs", "use_pure_fp16=maybe"), ["use_pure_fp16", "true or false", "maybe"]),
            (("--amp_configs", "dtype=int8"), ["dtype", "bfloat16", "float8", "int8"]),
            (("--localsgd_configs", "k_steps=0"), ["k_steps", "at least 1"]),
            (("--nccl_comm_num", "0"), ["nccl_comm_num", "at least 1"]),
            (("--nccl_comm_num", "two"), ["nccl_comm_num", "whole number", "two"]),
            (("--conv_workspace_size_limit", "1024"), ["conv_workspace_size_limit", "cuDNN"]),
            (("--build_strategy", "fuse_all"), ["fuse_all", "fuse_all_optimizer_ops"]),
            (("--build_strategy", "enable_inplace"), ["enable_inplace", "graph"]),
            (("--execution_strategy", "num_threads"), ["num_threads", "key=value"]),
            (("--ampp",), ["--ampp"]),
        ],
    )
    def test_a_wrong_flag_ends_the_script_with_what_was_expected(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: list[str]
    ) -> None:
        said = refused(capsys, *arguments)
        for word in words:
            assert word in said

    def test_a_field_that_cannot_be_changed_may_be_given_as_it_is(self) -> None:
        assert strategy("--conv_workspace_size_limit", 512) == DistributedStrategy()
