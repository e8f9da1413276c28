"""Paddle's strategy files: protobuf's text format is read as protobuf reads it, and a strategy means what it meant."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import each_of
from support.messages import naming

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.collective_fields import CONFIGS, FIELDS
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.strategy.paddle_fields import ABSENT
from torchfleet.base.strategy.prototxt import load
from torchfleet.base.strategy.textformat import Word, parse

# All fields at the defaults of Paddle 2.6, as protobuf prints them.
DEFAULTS = """
mode: COLLECTIVE
amp: false
recompute: false
localsgd: false
dgc: false
gradient_merge: false
lars: false
lamb: false
pipeline: false
elastic: false
auto: false
a_sync: true
sync_nccl_allreduce: true
nccl_comm_num: 1
use_hierarchical_allreduce: false
hierarchical_allreduce_inter_nranks: 1
sync_batch_norm: false
fuse_all_reduce_ops: true
fuse_grad_size_in_MB: 32
fuse_grad_size_in_TFLOPS: 50.0
cudnn_exhaustive_search: false
conv_workspace_size_limit: 512
cudnn_batchnorm_spatial_persistent: false
adaptive_localsgd: false
fp16_allreduce: false
sharding: false
last_comm_group_size_MB: 1.0
find_unused_parameters: false
tensor_parallel: false
without_graph_optimization: true
fuse_grad_size_in_num: 8
calc_comm_same_stream: false
asp: false
fuse_grad_merge: false
semi_auto: false
adam_d2sum: false
auto_search: false
heter_ccl_mode: false
is_fl_ps_mode: false
with_coordinator: false
qat: false
split_data: true
recompute_configs { enable_offload: false enable_tuning: false }
amp_configs { init_loss_scaling: 32768.0 incr_every_n_steps: 1000 decr_every_n_nan_or_inf: 2 incr_ratio: 2.0
  decr_ratio: 0.8 use_dynamic_loss_scaling: true use_pure_fp16: false use_fp16_guard: true use_optimizer_fp16: false
  use_pure_bf16: false }
localsgd_configs { k_steps: 1 begin_step: 1 }
gradient_merge_configs { k_steps: 1 avg: true }
dgc_configs { rampup_begin_step: 0 rampup_step: 1 }
pipeline_configs { micro_batch_size: 1 accumulate_steps: 1 schedule_mode: "1F1B" p2p_cache_shape: true
  enable_partial_send_recv: true }
a_sync_configs { k_steps: -1 max_merge_var_num: 1 send_queue_size: 16 independent_recv_thread: false
  min_send_grad_num_before_recv: 1 thread_pool_size: 1 send_wait_times: 1 runtime_split_send_recv: false
  launch_barrier: true heter_worker_device_guard: "cpu" lr_decay_steps: 10 use_ps_gpu: 0 use_gpu_graph: 0 }
lars_configs { lars_coeff: 0.001 lars_weight_decay: 0.0005 epsilon: 0.0 }
lamb_configs { lamb_weight_decay: 0.01 }
adaptive_localsgd_configs { init_k_steps: 1 begin_step: 1 }
sharding_configs { sharding_segment_strategy: "segment_broadcast_MB" segment_broadcast_MB: 32.0 sharding_degree: 8
  mp_degree: 1 dp_degree: 1 hybrid_dp: false gradient_merge_acc_step: 1 optimize_offload: false
  pp_allreduce_in_optimize: false pp_degree: 1 optimize_cast: false _dp_as_optimizer_sharding: false stage: 1
  enable_tuning: false use_calc_stream: false }
hybrid_configs { dp_degree: -1 mp_degree: 1 pp_degree: 1 sharding_degree: 1 sep_degree: 1
  mp_configs { sync_param: true sync_grad: false sync_moment: false sync_mode: "broadcast" need_broadcast_data: true }
  pp_configs { dp_comm_overlap: false delay_scale_loss: false enable_timer: false use_batch_p2p_comm: true }
  sharding_configs { tensor_fusion: false accumulate_steps: 1 comm_overlap: false fuse_optimizer: true } }
tensor_parallel_configs { tensor_parallel_degree: 1 tensor_init_seed: -1 }
trainer_desc_configs { }
fs_client_param { }
qat_configs { channel_wise_abs_max: true weight_bits: 8 activation_bits: 8 }
build_strategy { fuse_elewise_add_act_ops: false fuse_bn_act_ops: false fuse_relu_depthwise_conv: false
  fuse_broadcast_ops: false fuse_all_optimizer_ops: false enable_inplace: false enable_sequential_execution: false
  enable_backward_optimizer_op_deps: true cache_runtime_context: false fuse_bn_add_act_ops: true
  enable_auto_fusion: false enable_addto: false reduce_strategy: 0 }
execution_strategy { num_threads: 1 num_iteration_per_drop_scope: 10 num_iteration_per_run: 1
  use_thread_barrier: false }
gradient_scale_configs { scale_strategy: "avg" scale_gradient: false }
"""


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    """The strategy that a text stands for."""

    def of(text: str) -> DistributedStrategy:
        path = tmp_path / "strategy.prototxt"
        path.write_text(text)
        return DistributedStrategy(**load(path))

    return of


class TestTextFormat:
    @each_of(
        ("text", "expected"),
        [
            ("", {}),
            ("# nothing\n\n  # but a comment", {}),
            ("a: 1 b: 2", {"a": [1], "b": [2]}),
            ("a: 1, b: 2; c: 3", {"a": [1], "b": [2], "c": [3]}),
            ("a: 1 # one\na: 2", {"a": [1, 2]}),
            ("a: [1, 2, 3]", {"a": [1, 2, 3]}),
            ("a: [] b: 1", {"b": [1]}),
            ("a: [{ b: 1 }, { b: 2 }]", {"a": [{"b": [1]}, {"b": [2]}]}),
            ("a { b { c: true } }", {"a": [{"b": [{"c": ["true"]}]}]}),
            ("a: { b: 1 }", {"a": [{"b": [1]}]}),
            ("a < b: 1 >", {"a": [{"b": [1]}]}),
            ("a {}", {"a": [{}]}),
            ("a: 'x\"y' b: \"it's\"", {"a": ['x"y'], "b": ["it's"]}),
            ('a: "one " \'two\'\n  "three"', {"a": ["one twothree"]}),
            (r'a: "\n\t\\\"\x41\101\303\251"', {"a": ['\n\t\\"AAé']}),
            ('a: "# no comment { }"', {"a": ["# no comment { }"]}),
            ("a: 0x1F b: 017 c: -5 d: - 5", {"a": [31], "b": [15], "c": [-5], "d": [-5]}),
            ("a: [1.5, .5, 5., 1e-3, 2.5f, 3F]", {"a": [1.5, 0.5, 5.0, 0.001, 2.5, 3.0]}),
            ("a: inf b: -Infinity", {"a": [math.inf], "b": [-math.inf]}),
            ("information: 1", {"information": [1]}),
            ("nano: 1", {"nano": [1]}),
        ],
    )  # fmt: skip
    def test_what_protobuf_reads_is_read(self, text: str, expected: dict[str, Any]) -> None:
        assert parse(text) == expected

    def test_a_word_is_told_from_quoted_text_and_a_whole_number_from_a_float(self) -> None:
        found = parse('a: true b: "true" c: 1 d: 1.0 e: nan')
        assert isinstance(found["a"][0], Word)
        assert not isinstance(found["b"][0], Word)
        assert (type(found["c"][0]), type(found["d"][0])) == (int, float)
        assert math.isnan(found["e"][0])

    @each_of(
        ("text", "line", "expected", "found"),
        [
            ("a", 1, "':' or '{'", "end of the file"),
            ("a 1", 1, "':' or '{'", "'1'"),
            ("a:\n\nb: 1", 3, "name of a field", "':'"),
            ("a {\n b: 1\n", 3, "'}'", "end of the file"),
            ("a { b: 1 >", 1, "name of a field", "'>'"),
            ("}", 1, "name of a field", "'}'"),
            ("a: [1 2]", 1, "',' or ']'", "'2'"),
            ("a: [1,", 1, "a value", "end of the file"),
            ("a: 1\nb: @", 2, "field or a value", "'@'"),
            ('a: "open', 1, "field or a value", "'\"'"),
            ('a: "line\nbreak"', 1, "field or a value", "'\"'"),
            (r'a: "\q"', 1, "escape", r"\\q"),
            (r'a: "\377"', 1, "UTF-8", "377"),
            ("[extension]: 1", 1, "name of a field", "'['"),
            ("a: 12abc", 1, "field or a value", "'1'"),
            ("a: { " * 60, 1, "at most 50", "a"),
        ],
    )
    def test_what_is_no_text_format_is_refused_with_its_line(
        self, text: str, line: int, expected: str, found: str
    ) -> None:
        with pytest.raises(StrategyError) as caught:
            parse(text)
        assert f"line {line}" in str(caught.value)
        assert expected in str(caught.value)
        assert found in str(caught.value)

    @given(st.text(alphabet="ab:{}<>[],;#\"'\\ \n01.-ex", max_size=40))
    def test_any_text_is_read_or_refused(self, text: str) -> None:
        with contextlib.suppress(StrategyError):
            assert isinstance(parse(text), dict)


class TestStrategy:
    def test_defaults_of_paddle_are_our_defaults(self, loaded: Any) -> None:
        assert loaded(DEFAULTS) == DistributedStrategy()

    def test_older_defaults_are_accepted_too(self, loaded: Any) -> None:
        older = "conv_workspace_size_limit: 4000 cudnn_batchnorm_spatial_persistent: true mode: 1"
        assert loaded(f"{older} without_graph_optimization: false model_parallel: false") == DistributedStrategy()

    def test_an_empty_file_is_the_default(self, loaded: Any) -> None:
        assert loaded("") == DistributedStrategy()

    def test_switches_and_their_dictionaries(self, loaded: Any) -> None:
        found = loaded("""
            amp: true
            amp_configs { init_loss_scaling: 1024 decr_ratio: 0.25
                          custom_white_list: "softmax" custom_white_list: "gelu" custom_black_list: ["mul"] }
            recompute: true
            recompute_configs { checkpoints: ["layer.0", "layer.1"] enable_offload: true }
            gradient_merge: true gradient_merge_configs: { k_steps: 4 avg: false }
            dgc: true dgc_configs { rampup_begin_step: 10 sparsity: 0.75 sparsity: 0.9375 sparsity: 0.999 }
            fp16_allreduce: 1 nccl_comm_num: 2 fuse_grad_size_in_MB: 16
            build_strategy { fuse_bn_act_ops: true fuse_bn_add_act_ops: true }
            execution_strategy { num_threads: 4 }
        """)
        assert found == DistributedStrategy(
            amp=True,
            amp_configs={
                "init_loss_scaling": 1024.0, "decr_ratio": 0.25, "custom_white_list": ["softmax", "gelu"],
                "custom_black_list": ["mul"],
            },
            recompute=True,
            recompute_configs={"checkpoints": ["layer.0", "layer.1"], "enable_offload": True},
            gradient_merge=True,
            gradient_merge_configs={"k_steps": 4, "avg": False},
            dgc=True,
            dgc_configs={"rampup_begin_step": 10, "sparsity": [0.75, 0.9375, 0.999]},
            fp16_allreduce=True,
            nccl_comm_num=2,
            fuse_grad_size_in_MB=16,
            build_strategy={"fuse_bn_act_ops": True},
            execution_strategy={"num_threads": 4},
        )  # fmt: skip

    @pytest.mark.parametrize("name", [name for name in CONFIGS if name != "hybrid"])
    def test_a_dictionary_whose_switch_is_off_is_skipped(self, loaded: Any, name: str) -> None:
        for key in (*CONFIGS[name], "no_such_key"):
            assert loaded(f"{name}_configs {{ {key}: 7 }}") == DistributedStrategy()
            assert loaded(f"{name}: false {name}_configs {{ {key}: 7 }}") == DistributedStrategy()

    def test_amp_without_decr_ratio_has_that_of_paddle(self, loaded: Any) -> None:
        assert loaded("amp: true").amp_configs["decr_ratio"] == 0.8
        assert loaded("amp: true amp_configs { incr_ratio: 4 }").amp_configs["decr_ratio"] == 0.8

    def test_floats_as_older_protobuf_printed_them(self, loaded: Any) -> None:
        found = loaded(
            "lars: true lars_configs { lars_coeff: 0.0010000000474974513 lars_weight_decay: 0.0005000000237 }"
        )
        assert (found.lars_configs["lars_coeff"], found.lars_configs["lars_weight_decay"]) == (0.001, 0.0005)

    def test_the_queue_length_that_paddle_writes_unasked_leaves_the_default(self, loaded: Any) -> None:
        configs = loaded("a_sync: true a_sync_configs { k_steps: 0 send_queue_size: 16 }").a_sync_configs
        assert configs.send_queue_size == 2
        strategy = loaded("a_sync: true a_sync_configs { k_steps: 100 send_queue_size: 16 }")
        strategy.freeze("a test")  # in geo training, another length than the default would be refused
        assert loaded("a_sync_configs { k_steps: 0 send_queue_size: 8 }").a_sync_configs.send_queue_size == 8

    @pytest.mark.parametrize(
        ("text", "mode"),
        [
            ("a_sync: true", "sync"),
            ("a_sync: true a_sync_configs { k_steps: -1 }", "sync"),
            ("a_sync: true a_sync_configs { k_steps: 0 }", "async"),
            ("a_sync_configs { k_steps: 0 }", "async"),
            ("a_sync: false a_sync_configs { k_steps: 0 }", "sync"),
            ("a_sync: false", "sync"),
            ("a_sync: true a_sync_configs { k_steps: 100 send_queue_size: 32 }", "geo"),
        ],
    )
    def test_modes_of_parameter_servers(self, loaded: Any, text: str, mode: str) -> None:
        assert loaded(text).mode == mode

    def test_degrees_switch_their_strategies_on(self, loaded: Any) -> None:
        found = loaded("""
            tensor_parallel: false
            hybrid_configs { dp_degree: 2 mp_degree: 2 pp_degree: 2 sharding_degree: 2 }
            pipeline_configs { accumulate_steps: 8 micro_batch_size: 2 }
            sharding_configs { sharding_degree: 8 }
            tensor_parallel_configs { tensor_parallel_degree: 1 }
        """)
        assert (found.tensor_parallel, found.pipeline, found.sharding) == (True, True, True)
        assert found.hybrid_configs["dp_degree"] == 2
        assert found.pipeline_configs["accumulate_steps"] == 8
        assert found.is_default("sharding_configs"), "its degree is not in use beside that of hybrid_configs"

    def test_older_names_of_keys(self, loaded: Any) -> None:
        found = loaded("sharding: true sharding_configs { broadcast_MB: 16 sharding_group_size: 4 }")
        assert (found.sharding_configs["segment_broadcast_MB"], found.sharding_configs["sharding_degree"]) == (16.0, 4)
        assert loaded("pipeline: true pipeline_configs { micro_batch: 4 }").pipeline_configs["accumulate_steps"] == 4


class TestLoading:
    def test_the_strategy_loads_files_of_paddle(self, tmp_path: Path) -> None:
        """By name, and by the ending of a file's name."""
        path = tmp_path / "strategy.prototxt"
        path.write_text("lars: true lars_configs { epsilon: 0.5 }")
        expected = DistributedStrategy(lars=True, lars_configs={"epsilon": 0.5})
        assert DistributedStrategy.load_from_prototxt(path) == expected
        assert DistributedStrategy.load_from_yaml(str(path)) == expected

    def test_what_was_loaded_can_be_saved_as_our_own(self, loaded: Any, tmp_path: Path) -> None:
        found = loaded("amp: true dgc: true dgc_configs { sparsity: [0.75, 0.999] }")
        found.save_to_yaml(tmp_path / "it.yaml")
        assert DistributedStrategy.load_from_yaml(tmp_path / "it.yaml") == found

    def test_a_file_is_put_into_the_strategy_that_loads_it(self, tmp_path: Path) -> None:
        """As protobuf merges: what the file does not name stays, keys of dictionaries too."""
        path = tmp_path / "paddle.prototxt"
        path.write_text("amp: true amp_configs { incr_ratio: 4.0 decr_ratio: 0.5 } fuse_grad_size_in_MB: 16")
        strategy = DistributedStrategy(lars=True, amp=True, amp_configs={"init_loss_scaling": 1024.0})
        assert strategy.load_from_prototxt(path) is strategy
        both = {"init_loss_scaling": 1024.0, "incr_ratio": 4.0}
        assert strategy == DistributedStrategy(lars=True, amp=True, amp_configs=both, fuse_grad_size_in_MB=16)

    def test_a_wrong_file_changes_nothing_and_a_used_strategy_no_more(self, tmp_path: Path) -> None:
        path, strategy = tmp_path / "paddle.prototxt", DistributedStrategy(lars=True)
        path.write_text("amp: true nccl_comm_num: 99")
        with pytest.raises(StrategyError, match="nccl_comm_num"):
            strategy.load_from_prototxt(path)
        assert strategy == DistributedStrategy(lars=True)
        path.write_text("amp: true")
        strategy.lock("fleet.init")
        with pytest.raises(StrategyError, match=naming("fleet.init")):
            strategy.load_from_prototxt(path)


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("mode: PS", ["mode", "PS", "is_collective"]),
            ("elastic: true", ["elastic", "--max_restart"]),
            ("auto: true", ["auto", "switch on"]),
            ("asp: true", ["asp", "torch.ao"]),
            ("qat: true", ["qat", "torch.ao"]),
            ("fuse_grad_size_in_TFLOPS: 20", ["fuse_grad_size_in_TFLOPS", "20", "fuse_grad_size_in_MB"]),
            ("amp: true amp_configs { custom_black_varnames: 'x' }", ["amp_configs.custom_black_varnames"]),
            ("sharding: true sharding_configs { mp_degree: 2 }", ["sharding_configs.mp_degree", "hybrid_configs"]),
            ("sharding: true sharding_configs { optimize_offload: true }", ["sharding_configs.optimize_offload"]),
            ("hybrid_configs { sep_degree: 2 }", ["hybrid_configs.sep_degree", "2"]),
            ("hybrid_configs { pp_configs { profiling: true } }", ["hybrid_configs.pp_configs.profiling"]),
            ("gradient_scale_configs { scale_strategy: 'sum' }", ["gradient_scale_configs.scale_strategy", "sum"]),
            ("build_strategy { fuse_gemm_epilogue: true }", ["build_strategy.fuse_gemm_epilogue"]),
            ("fs_client_param { uri: 'hdfs:' }", ["fs_client_param"]),
            ("amp_confgs { }", ["amp_confgs", "spelling"]),
            ("ampp: true", ["ampp", "spelling"]),
            ("amp: true amp_configs { init_loss: 1 }", ["amp_configs.init_loss", "spelling"]),
            ("amp: 2", ["amp", "true or false", "2"]),
            ("amp: 'true'", ["amp", "true or false"]),
            ("amp { }", ["amp", "true or false"]),
            ("amp_configs: 3", ["amp_configs", "braces", "3"]),
            ("nccl_comm_num: 1.5", ["nccl_comm_num", "whole number", "1.5"]),
            ("amp: true amp: false", ["amp", "2 times"]),
            ("lars: true lars_configs { lars_coeff: 'x' }", ["lars_configs.lars_coeff", "number"]),
            ("sharding: true sharding_configs { broadcast_MB: 1 segment_broadcast_MB: 2 }", ["two names"]),
            ("amp", ["line 1"]),
        ],
    )  # fmt: skip
    def test_what_cannot_be_had_is_named_with_the_reason(self, loaded: Any, text: str, words: list[str]) -> None:
        with pytest.raises(StrategyError) as caught:
            loaded(text)
        for word in ["strategy.prototxt", *words]:
            assert word in str(caught.value)

    def test_limits_of_values_are_those_of_the_strategy(self, loaded: Any) -> None:
        with pytest.raises(StrategyError, match=naming("k_steps", 1)):
            loaded("localsgd: true localsgd_configs { k_steps: 0 }")

    @pytest.mark.parametrize("content", [None, b"\xff\xfe"])
    def test_a_file_that_cannot_be_read(self, tmp_path: Path, content: bytes | None) -> None:
        path = tmp_path / "it.prototxt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(StrategyError, match=naming("it.prototxt")):
            load(path)

    def test_no_field_is_both_known_and_absent(self) -> None:
        assert not set(FIELDS) & set(ABSENT[""])
        for name, keys in CONFIGS.items():
            assert not set(keys) & set(ABSENT.get(f"{name}_configs", {}))


def test_a_plan_is_no_field_of_paddles(tmp_path: Path) -> None:
    (tmp_path / "own.prototxt").write_text('tensor_parallel: true\ntensor_parallel_configs { plan: "up" }\n')
    with pytest.raises(StrategyError, match=naming("tensor_parallel_configs.plan", "YAML")):
        load(tmp_path / "own.prototxt")


@pytest.mark.parametrize("key", ["exchange: 'servers'", "balance: true", "quorum: 2", "quorum_max_age: 1"])
def test_settings_of_hybrid_mode_are_no_keys_of_paddles(tmp_path: Path, key: str) -> None:
    path = tmp_path / "s.prototxt"
    path.write_text(f"a_sync: true\na_sync_configs {{ k_steps: 0 {key} }}\n")
    with pytest.raises(StrategyError, match=naming(key.partition(":")[0])):
        load(path)
