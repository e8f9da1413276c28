"""DistributedStrategy: every setting is checked when it is set, and cannot change once it is used."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import each_of
from support.messages import naming

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.worker.client.connection import Patience

# The fields and keys that Paddle documents, all of which a script may set or must be told about.
A_SYNC_CONFIGS = {
    "k_steps",
    "max_merge_var_num",
    "send_queue_size",
    "independent_recv_thread",
    "min_send_grad_num_before_recv",
    "thread_pool_size",
    "send_wait_times",
    "launch_barrier",
    "heter_worker_device_guard",
}
SWITCHES = (
    "amp",
    "recompute",
    "gradient_merge",
    "lars",
    "lamb",
    "dgc",
    "localsgd",
    "adaptive_localsgd",
    "sharding",
    "pipeline",
    "tensor_parallel",
)
COLLECTIVE: dict[str, Any] = {  # a value other than the default
    **dict.fromkeys(SWITCHES, True),
    "amp_configs": {"init_loss_scaling": 1024.0},
    "recompute_configs": {"checkpoints": ["layer.*"]},
    "gradient_merge_configs": {"k_steps": 4},
    "lars_configs": {"lars_coeff": 0.01},
    "lamb_configs": {"exclude_from_weight_decay": ["bias"]},
    "dgc_configs": {"sparsity": [0.75, 0.9]},
    "localsgd_configs": {"k_steps": 4},
    "adaptive_localsgd_configs": {"init_k_steps": 4},
    "sharding_configs": {"stage": 3},
    "pipeline_configs": {"accumulate_steps": 4},
    "tensor_parallel_configs": {"tensor_parallel_degree": 2},
    "hybrid_configs": {"dp_degree": 2},
    "fuse_all_reduce_ops": False,
    "fuse_grad_size_in_MB": 64,
    "last_comm_group_size_MB": 2.0,
    "nccl_comm_num": 2,
    "sync_nccl_allreduce": False,
    "use_hierarchical_allreduce": True,
    "hierarchical_allreduce_inter_nranks": 8,
    "fp16_allreduce": True,
    "sync_batch_norm": True,
    "find_unused_parameters": True,
    "cudnn_exhaustive_search": True,
    "build_strategy": {"fuse_bn_act_ops": True},
    "execution_strategy": {"num_threads": 2},
}
NEVER: dict[str, Any] = {  # fields of Paddle's that PyTorch has no place for
    "fuse_grad_size_in_num": 4,
    "cudnn_batchnorm_spatial_persistent": True,
    "conv_workspace_size_limit": 1024,
}
DEFAULTS = {"a_sync": False, "rpc_retry_times": 3, "rpc_timeout": 30.0, "sync_timeout": 1800.0}


def settings() -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments that are valid together."""
    count = st.integers(1, 1 << 40)
    configs: dict[str, st.SearchStrategy[Any]] = {
        "max_merge_var_num": count,
        "send_queue_size": count,
        "min_send_grad_num_before_recv": count,
        "thread_pool_size": count,
        "send_wait_times": st.integers(0, 1 << 40),
        "independent_recv_thread": st.booleans(),
        "launch_barrier": st.booleans(),
        "heter_worker_device_guard": st.just("cpu"),
    }
    geo = st.fixed_dictionaries({"k_steps": count}, optional=configs)
    other = st.fixed_dictionaries({}, optional={**configs, "k_steps": st.just(0), "half_async": st.booleans()})
    seconds = st.one_of(st.floats(1e-9, 600_000.0), st.integers(1, 600_000))
    fields = {"rpc_retry_times": st.integers(0, 100), "rpc_timeout": seconds, "sync_timeout": seconds}
    return st.fixed_dictionaries(
        {"a_sync": st.booleans()}, optional={**fields, "a_sync_configs": st.one_of(geo, other)}
    )


class TestFields:
    @each_of("name", [*DEFAULTS, "a_sync_configs", *COLLECTIVE, *NEVER])
    def test_every_documented_field_exists(self, name: str) -> None:
        getattr(DistributedStrategy(), name)

    def test_every_documented_key_of_a_sync_configs_exists(self) -> None:
        assert set(DistributedStrategy().a_sync_configs) >= A_SYNC_CONFIGS

    @pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
    def test_a_field_that_is_not_given_has_its_default(self, name: str, value: Any) -> None:
        assert getattr(DistributedStrategy(), name) == value

    def test_attributes_and_keywords_mean_the_same(self) -> None:
        by_attribute = DistributedStrategy()
        by_attribute.a_sync = True
        by_attribute.a_sync_configs = {"k_steps": 100}
        by_attribute.rpc_retry_times = 5
        assert by_attribute == DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 100}, rpc_retry_times=5)

    def test_keys_that_are_not_given_keep_their_default(self) -> None:
        strategy = DistributedStrategy(a_sync_configs={"send_queue_size": 3})
        assert strategy.a_sync_configs == {
            "k_steps": 0,
            "half_async": False,
            "hybrid": False,
            "hybrid_keep_seconds": 10.0,
            "exchange": "auto",
            "balance": False,
            "quorum": 0,
            "quorum_max_age": 4,
            "max_merge_var_num": 1,
            "send_queue_size": 3,
            "independent_recv_thread": False,
            "min_send_grad_num_before_recv": 1,
            "thread_pool_size": 1,
            "send_wait_times": 1,
            "max_staleness": -1,
            "gather": 1,
            "gather_max_age": 4,
            "launch_barrier": True,
            "heter_worker_device_guard": "cpu",
        }

    def test_a_whole_number_of_seconds_is_accepted(self) -> None:
        assert DistributedStrategy(rpc_timeout=7).rpc_timeout == 7.0

    def test_no_retry_at_all_is_a_choice(self) -> None:
        assert DistributedStrategy(rpc_retry_times=0).rpc_retry_times == 0


class TestRefusals:
    @pytest.mark.parametrize("name", ["a_synch", "k_steps", "xyz", "Amp"])
    def test_an_unknown_field_is_refused_with_the_nearest_or_with_all(self, name: str) -> None:
        known = {"a_synch": ["a_sync"], "Amp": ["amp"]}.get(name, ["a_sync_configs", "rpc_timeout"])
        with pytest.raises(StrategyError, match=naming(f"'{name}'", *known)):
            setattr(DistributedStrategy(), name, True)
        with pytest.raises(StrategyError, match=naming(f"'{name}'")):
            DistributedStrategy(**{name: True})

    def test_an_unknown_field_cannot_be_read_either(self) -> None:
        with pytest.raises(StrategyError, match=naming("'a_synch'", "a_sync")):
            _ = DistributedStrategy().a_synch

    @pytest.mark.parametrize("name", ["_values", "_used_by", "_a_sync"])
    def test_an_unknown_keyword_with_an_underscore_is_refused_too(self, name: str) -> None:
        with pytest.raises(StrategyError, match=name):
            DistributedStrategy(**{name: {}})

    @pytest.mark.parametrize("key", ["k_step", "", 3, None])
    def test_an_unknown_key_is_refused_with_the_nearest_or_with_all(self, key: Any) -> None:
        known = ["k_steps"] if key == "k_step" else ["k_steps", "send_queue_size"]
        with pytest.raises(StrategyError, match=naming("a_sync_configs", f"'{key}'", *known)):
            DistributedStrategy(a_sync_configs={key: 1})

    @each_of(
        ("name", "value", "expected"),
        [
            ("a_sync", 1, "bool"),
            ("a_sync", "yes", "bool"),
            ("a_sync", None, "bool"),
            ("a_sync_configs", None, "dictionary"),
            ("a_sync_configs", [("k_steps", 1)], "dictionary"),
            ("rpc_retry_times", "3", "int"),
            ("rpc_retry_times", 2.5, "int"),
            ("rpc_retry_times", True, "int"),
            ("rpc_timeout", "30", "float"),
            ("rpc_timeout", True, "float"),
            ("sync_timeout", None, "float"),
        ],
    )
    def test_a_wrong_type_is_refused_with_field_expectation_and_what_was_found(
        self, name: str, value: Any, expected: str
    ) -> None:
        strategy = DistributedStrategy()
        with pytest.raises(StrategyError) as caught:
            setattr(strategy, name, value)
        assert name in str(caught.value)
        assert expected in str(caught.value)
        assert repr(value) in str(caught.value)
        assert strategy == DistributedStrategy()

    @pytest.mark.parametrize("name", ["rpc_retry_times", "rpc_timeout", "sync_timeout"])
    def test_a_negative_number_is_refused(self, name: str) -> None:
        with pytest.raises(StrategyError, match=naming(name, "-1")):
            DistributedStrategy(**{name: -1})

    @pytest.mark.parametrize("name", ["rpc_timeout", "sync_timeout"])
    def test_a_time_out_of_zero_is_refused(self, name: str) -> None:
        with pytest.raises(StrategyError, match=naming(name, 0)):
            DistributedStrategy(**{name: 0})

    @pytest.mark.parametrize("name", ["rpc_timeout", "sync_timeout"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_time_out_that_is_none_is_refused(self, name: str, value: float) -> None:
        """Every wait has a time-out."""
        with pytest.raises(StrategyError, match=naming(name, value)):
            DistributedStrategy(**{name: value})

    def test_a_time_out_that_servers_refuse_is_refused_before_they_start(self) -> None:
        """A server takes no barrier of more than a week (MAX_BARRIER_SECONDS)."""
        with pytest.raises(StrategyError, match=naming("sync_timeout", 691200.0)):
            DistributedStrategy(sync_timeout=8 * 24 * 3600.0)

    @pytest.mark.parametrize("retries", [0, 1, 100, 5000])
    def test_every_number_of_retries_that_is_accepted_can_be_used(self, retries: int) -> None:
        try:
            strategy = DistributedStrategy(rpc_retry_times=retries)
        except StrategyError:
            return
        assert 0 <= Patience(30.0, strategy.rpc_retry_times).resend_at(0.0, 1, 30.0) <= 30.0

    @each_of(
        ("key", "value", "expected"),
        [
            ("k_steps", True, "int"),
            ("k_steps", 1.0, "int"),
            ("k_steps", "10", "int"),
            ("half_async", 1, "bool"),
            ("launch_barrier", None, "bool"),
            ("independent_recv_thread", 0, "bool"),
            ("heter_worker_device_guard", 0, "str"),
            ("send_queue_size", [4], "int"),
        ],
    )
    def test_a_wrong_type_of_a_key_is_refused_with_key_expectation_and_what_was_found(
        self, key: str, value: Any, expected: str
    ) -> None:
        with pytest.raises(StrategyError) as caught:
            DistributedStrategy(a_sync_configs={key: value})
        assert f"a_sync_configs['{key}']" in str(caught.value)
        assert expected in str(caught.value)
        assert repr(value) in str(caught.value)

    @each_of(
        ("key", "least"),
        [
            ("k_steps", 0),
            ("send_wait_times", 0),
            ("max_merge_var_num", 1),
            ("send_queue_size", 1),
            ("min_send_grad_num_before_recv", 1),
            ("thread_pool_size", 1),
        ],
    )
    def test_a_number_below_the_least_is_refused_with_both(self, key: str, least: int) -> None:
        assert DistributedStrategy(a_sync_configs={key: least}).a_sync_configs[key] == least
        with pytest.raises(StrategyError, match=naming(f"'{key}'", least, least - 1)):
            DistributedStrategy(a_sync_configs={key: least - 1})

    def test_a_refused_dictionary_changes_nothing(self) -> None:
        strategy = DistributedStrategy(a_sync_configs={"k_steps": 7})
        with pytest.raises(StrategyError):
            strategy.a_sync_configs = {"k_steps": 9, "send_queue_size": 0}
        assert strategy.a_sync_configs["k_steps"] == 7

    @each_of(("name", "value"), COLLECTIVE.items())
    def test_a_collective_field_in_a_job_with_servers_is_named(self, name: str, value: Any) -> None:
        strategy = DistributedStrategy(**{name: value})
        assert strategy != DistributedStrategy()
        with pytest.raises(StrategyError, match=naming(name, "is_collective=True")):
            strategy.freeze("the test")

    @pytest.mark.parametrize(("name", "value"), NEVER.items())
    def test_a_field_that_cannot_be_had_says_why(self, name: str, value: Any) -> None:
        default = getattr(DistributedStrategy(), name)
        with pytest.raises(StrategyError, match=naming(f"{name}={value!r}", f"{default!r}")):
            DistributedStrategy(**{name: value})

    @each_of("name", [*COLLECTIVE, *NEVER])
    def test_a_collective_field_takes_its_own_default(self, name: str) -> None:
        assert DistributedStrategy(**{name: getattr(DistributedStrategy(), name)}) == DistributedStrategy()

    @each_of(
        ("fields", "text"),
        [
            ({"amp": 1}, "amp bool 1"),
            ({"amp_configs": {"init_loss_scaling": 0}}, "amp_configs['init_loss_scaling']"),
            ({"amp_configs": {"init_loss_scaling": float("inf")}}, "amp_configs['init_loss_scaling']"),
            ({"amp_configs": {"dtype": "int8"}}, "'float16' 'bfloat16' 'float8' 'int8'"),
            ({"amp_configs": {"custom_white_list": "softmax"}}, "amp_configs['custom_white_list'] list"),
            ({"amp_configs": {"loss_scaling": 1}}, "'loss_scaling' init_loss_scaling"),
            ({"amp_configs": [1]}, "amp_configs"),
            ({"gradient_merge_configs": {"k_steps": 0}}, "gradient_merge_configs['k_steps'] 1 0"),
            ({"gradient_merge_configs": {"k_steps": 2.0}}, "int 2.0"),
            ({"recompute_configs": {"checkpoint_shape": [1]}}, "checkpoint_shape"),
            (
                {"sharding_configs": {"sharding_degree": 2, "sharding_group_size": 2}},
                "sharding_degree sharding_group_size",
            ),
            ({"adaptive_localsgd_configs": {"init_k_steps": 17}}, "16"),
            ({"build_strategy": {"fuse_everything": True}}, "'fuse_everything'"),
            ({"build_strategy": {"enable_inplace": True}}, "enable_inplace"),
            ({"execution_strategy": {"num_threads": -1}}, "num_threads 0"),
            ({"execution_strategy": 3}, "fleet.ExecutionStrategy"),
        ],
    )
    def test_a_wrong_value_of_a_collective_field_is_named(self, fields: dict[str, Any], text: str) -> None:
        with pytest.raises(StrategyError, match=naming(*text.split())):
            DistributedStrategy(**fields)

    def test_names_of_paddle_mean_the_same(self) -> None:
        ours = DistributedStrategy(sharding_configs={"segment_broadcast_MB": 8, "sharding_degree": 2})
        theirs = DistributedStrategy(sharding_configs={"fuse_broadcast_MB": 8, "sharding_group_size": 2})
        assert ours == theirs
        assert DistributedStrategy(pipeline_configs={"micro_batch": 4}).pipeline_configs["accumulate_steps"] == 4

    def test_degrees_are_printed_as_hybrid_configs_gives_them(self) -> None:
        hybrid = {"mp_degree": 2, "sharding_degree": 4}
        text = repr(DistributedStrategy(tensor_parallel=True, sharding=True, hybrid_configs=hybrid))
        printed = dict(line.split() for line in text.splitlines()[1:])
        assert printed["tensor_parallel_configs.tensor_parallel_degree"] == "2"
        assert printed["sharding_configs.sharding_degree"] == "4"

    def test_what_is_on_is_printed_and_nothing_else(self) -> None:
        text = repr(DistributedStrategy(dgc=True, dgc_configs={"rampup_step": 7}, nccl_comm_num=1))
        assert "dgc_configs.rampup_step" in text
        assert "amp_configs" not in text
        assert "nccl_comm_num" not in text

    def test_heter_workers_compute_blocks_for_a_gpu(self) -> None:
        made = DistributedStrategy(a_sync_configs={"heter_worker_device_guard": "gpu"})
        assert made.a_sync_configs.heter_worker_device_guard == "gpu"
        with pytest.raises(StrategyError, match=naming("heter_worker_device_guard", "'xpu'", "'gpu'")):
            DistributedStrategy(a_sync_configs={"heter_worker_device_guard": "xpu"})


class TestContradictions:
    @pytest.mark.parametrize(("key", "value"), [("k_steps", 20), ("half_async", True), ("hybrid", True)])
    def test_a_form_of_async_without_a_sync_names_both_and_the_way_out(self, key: str, value: Any) -> None:
        strategy = DistributedStrategy(a_sync_configs={key: value})
        with pytest.raises(StrategyError) as caught:
            strategy.freeze("the test")
        for part in (key, str(value), "a_sync=True", "Set a_sync=True", f"leave '{key}' out"):
            assert part in str(caught.value)

    def test_a_strategy_refused_for_a_contradiction_can_be_put_right(self) -> None:
        strategy = DistributedStrategy(a_sync_configs={"k_steps": 20})
        with pytest.raises(StrategyError):
            strategy.freeze("the test")
        strategy.a_sync = True
        strategy.freeze("the test")
        assert strategy.mode == "geo"

    def test_geo_with_half_async_names_both(self) -> None:
        with pytest.raises(StrategyError, match=naming("k_steps", "half_async")):
            DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 5, "half_async": True})

    def test_the_order_of_a_sync_and_its_configs_does_not_matter(self) -> None:
        strategy = DistributedStrategy()
        strategy.a_sync_configs = {"k_steps": 5}
        strategy.a_sync = True
        strategy.freeze("the test")
        assert strategy.mode == "geo"


@each_of(
    ("fields", "mode"),
    [
        ({}, "sync"),
        ({"a_sync": True}, "async"),
        ({"a_sync": True, "a_sync_configs": {"half_async": True}}, "half_async"),
        ({"a_sync": True, "a_sync_configs": {"k_steps": 1}}, "geo"),
        ({"a_sync": True, "a_sync_configs": {"hybrid": True}}, "hybrid"),
        ({"a_sync": True, "a_sync_configs": {"k_steps": 0, "half_async": False}}, "async"),
    ],
)
def test_the_mode_follows_from_a_sync_k_steps_and_half_async(fields: dict[str, Any], mode: str) -> None:
    assert DistributedStrategy(**fields).mode == mode


class TestUse:
    @each_of("name", [*DEFAULTS, "a_sync_configs", "amp"])
    def test_no_field_changes_after_use_and_the_user_is_named(self, name: str) -> None:
        strategy = DistributedStrategy()
        strategy.freeze("fleet.distributed_optimizer")
        with pytest.raises(StrategyError, match=naming(name, "fleet.distributed_optimizer")):
            setattr(strategy, name, getattr(strategy, name))
        assert strategy == DistributedStrategy()

    def test_it_may_be_used_twice_and_the_first_user_is_named(self) -> None:
        strategy = DistributedStrategy()
        strategy.freeze("the first")
        strategy.freeze("the second")
        with pytest.raises(StrategyError, match="the first"):
            strategy.a_sync = True

    def test_a_distributed_optimizer_is_a_use(self) -> None:
        import torch

        from torchfleet.api.job.ps_job import ParameterServerJob
        from torchfleet.base.role.role_info import RoleInfo

        strategy = DistributedStrategy()
        job = ParameterServerJob(RoleInfo(), strategy)
        model = job.distribute_model(torch.nn.Linear(2, 1))
        job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(StrategyError, match="distributed_optimizer"):
            strategy.a_sync = True

    def test_two_strategies_that_differ_are_refused(self) -> None:
        from torchfleet.api.job.ps_job import ParameterServerJob
        from torchfleet.base.role.role_info import RoleInfo

        job = ParameterServerJob(RoleInfo(), DistributedStrategy(a_sync=True))
        job.use(DistributedStrategy(a_sync=True), "fleet.distributed_optimizer")
        with pytest.raises(StrategyError, match=naming("fleet.distributed_optimizer", "fleet.init")):
            job.use(DistributedStrategy(a_sync=False), "fleet.distributed_optimizer")


class TestCopies:
    def test_the_dictionary_that_was_read_cannot_be_changed(self) -> None:
        """A write into a copy would be lost without a word, a write into the original would not be checked."""
        strategy = DistributedStrategy()
        with pytest.raises(StrategyError, match=naming("strategy.a_sync_configs", "'k_steps'")):
            strategy.a_sync_configs["k_steps"] = 5
        assert strategy.a_sync_configs["k_steps"] == 0
        assert DistributedStrategy().a_sync_configs["k_steps"] == 0

    def test_changing_the_dictionary_that_was_given_changes_nothing(self) -> None:
        given_configs = {"k_steps": 5}
        strategy = DistributedStrategy(a_sync=True, a_sync_configs=given_configs)
        given_configs["k_steps"] = 6
        assert strategy.a_sync_configs["k_steps"] == 5

    def test_changing_the_empty_dictionary_that_was_given_changes_nothing(self) -> None:
        given_configs: dict[str, Any] = {}
        strategy = DistributedStrategy(amp_configs=given_configs)
        given_configs["use_pure_fp16"] = True
        assert not strategy.amp_configs["use_pure_fp16"]

    @pytest.mark.parametrize(
        "twin_of",
        [copy.copy, copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))],
        ids=["copy", "deepcopy", "pickle"],
    )
    def test_a_copy_is_equal_and_changes_alone(self, twin_of: Any) -> None:
        strategy = DistributedStrategy(a_sync=True, rpc_timeout=5.0)
        twin = twin_of(strategy)
        assert twin == strategy
        twin.a_sync = False
        assert strategy.a_sync


class TestPrinting:
    def test_it_prints_as_a_table_of_everything_in_force(self) -> None:
        strategy = DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 25}, rpc_timeout=4.0)
        first, *lines = repr(strategy).splitlines()
        assert first == "DistributedStrategy"
        shown = dict(line.split() for line in lines)
        configs = {f"a_sync_configs.{key}": str(value) for key, value in strategy.a_sync_configs.items()}
        fields = {"a_sync": "True", "rpc_retry_times": "3", "rpc_timeout": "4.0", "sync_timeout": "1800.0"}
        assert shown == {"mode": "geo", **fields, **configs}
        assert shown["a_sync_configs.k_steps"] == "25"

    def test_its_columns_stand_under_each_other(self) -> None:
        lines = repr(DistributedStrategy()).splitlines()[1:]
        assert len({line.rindex("  ") for line in lines}) == 1


class TestEquality:
    @given(settings(), settings())
    def test_strategies_are_equal_exactly_if_their_settings_are(
        self, fields: dict[str, Any], other_fields: dict[str, Any]
    ) -> None:
        first, second = DistributedStrategy(**fields), DistributedStrategy(**other_fields)
        assert (first == second) == (repr(first) == repr(second))
        assert first == DistributedStrategy(**fields)

    def test_use_does_not_matter_to_equality(self) -> None:
        used = DistributedStrategy()
        used.freeze("the test")
        assert used == DistributedStrategy()

    @pytest.mark.parametrize("other", [None, {}, "sync", object()])
    def test_nothing_else_is_equal_to_a_strategy(self, other: Any) -> None:
        assert DistributedStrategy() != other

    def test_it_has_no_hash_because_it_can_change(self) -> None:
        with pytest.raises(TypeError, match="unhashable"):
            hash(DistributedStrategy())


class TestYaml:
    @given(fields=settings())
    def test_what_was_saved_is_loaded(self, tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]) -> None:
        path = tmp_path_factory.getbasetemp() / "strategy.yaml"
        strategy = DistributedStrategy(**fields)
        strategy.save_to_yaml(path)
        loaded = DistributedStrategy.load_from_yaml(path)
        assert loaded == strategy
        assert repr(loaded) == repr(strategy)

    def test_a_file_is_replaced_at_once_as_other_ranks_may_be_reading_it(self, tmp_path: Path) -> None:
        path = tmp_path / "strategy.yaml"
        DistributedStrategy(rpc_retry_times=4).save_to_yaml(path)
        before = path.read_bytes()
        with path.open("rb") as opened_before:
            DistributedStrategy(rpc_retry_times=5).save_to_yaml(path)
            assert opened_before.read() == before
        assert DistributedStrategy.load_from_yaml(path).rpc_retry_times == 5
        assert [file.name for file in tmp_path.iterdir()] == ["strategy.yaml"], "nothing unfinished is left"

    def test_a_pipe_is_written_to(self) -> None:
        read, write = os.pipe()
        try:
            DistributedStrategy(rpc_retry_times=4).save_to_yaml(f"/dev/fd/{write}")
            assert b"rpc_retry_times: 4" in os.read(read, 1000)
        finally:
            os.close(read)
            os.close(write)

    def test_only_what_differs_from_the_defaults_is_saved(self, tmp_path: Path) -> None:
        DistributedStrategy(rpc_retry_times=4).save_to_yaml(tmp_path / "strategy.yaml")
        assert (tmp_path / "strategy.yaml").read_text() == "rpc_retry_times: 4\n"

    def test_switches_are_saved_before_dictionaries(self, tmp_path: Path) -> None:
        configs: dict[str, Any] = {
            "lamb_configs": {"lamb_weight_decay": 0.5},
            "build_strategy": {"memory_optimize": False},
        }
        DistributedStrategy(lamb=True, sync_batch_norm=True, a_sync=True, **configs).save_to_yaml(tmp_path / "it.yaml")
        assert (tmp_path / "it.yaml").read_text() == (
            "a_sync: true\nlamb: true\nsync_batch_norm: true\nlamb_configs:\n  lamb_weight_decay: 0.5\n"
            "  exclude_from_weight_decay: []\n"
        )

    def test_a_used_strategy_can_be_saved_and_is_loaded_unused(self, tmp_path: Path) -> None:
        strategy = DistributedStrategy()
        strategy.freeze("the test")
        strategy.save_to_yaml(tmp_path / "strategy.yaml")
        loaded = DistributedStrategy.load_from_yaml(str(tmp_path / "strategy.yaml"))
        loaded.a_sync = True

    def test_a_file_written_by_hand_is_loaded(self, tmp_path: Path) -> None:
        (tmp_path / "strategy.yaml").write_text(
            "# geo\na_sync: true\na_sync_configs:\n  k_steps: 100\nrpc_timeout: 5\n"
        )
        loaded = DistributedStrategy.load_from_yaml(tmp_path / "strategy.yaml")
        assert loaded == DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 100}, rpc_timeout=5.0)

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("a_synch: true\n", "a_synch"),
            ("a_sync: 1\n", "a_sync"),
            ("a_sync: 'true'\n", "a_sync"),
            ("a_sync_configs: {k_step: 1}\n", "k_step"),
            ("a_sync_configs: [1]\n", "a_sync_configs"),
            ("amp: 1\n", "amp"),
            ("1: 2\n", "1"),
            ("rpc_timeout: .nan\n", "rpc_timeout"),
            ("_used_by: somebody\n", "_used_by"),
            ("self: 1\n", "self"),
        ],
    )
    def test_an_unknown_or_wrong_setting_in_a_file_is_named(self, tmp_path: Path, text: str, named: str) -> None:
        (tmp_path / "strategy.yaml").write_text(text)
        with pytest.raises(StrategyError, match=named):
            DistributedStrategy.load_from_yaml(tmp_path / "strategy.yaml")

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"true\n",
            b"- a_sync\n",
            b"a_sync: [\n",
            b"a_sync: true\n  b: 1\n",
            b"--- 1\n--- 2\n",
            b"\xff\xfe\x00",
            b"\x00",
            b"? [1]\n: 2\n",
            b"a_sync: !!python/object/apply:os.getpid []\n",
            b"a_sync: 2001-99-99\n",
            b"a_sync: 0b_\n",
            b"a_sync: !!int x\n",
        ],
    )
    def test_a_file_that_is_no_strategy_is_an_error_that_names_it(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "odd.yaml"
        path.write_bytes(content)
        with pytest.raises(StrategyError, match=r"odd\.yaml"):
            DistributedStrategy.load_from_yaml(path)

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StrategyError, match=r"missing\.yaml"):
            DistributedStrategy.load_from_yaml(tmp_path / "missing.yaml")
        with pytest.raises(StrategyError, match=naming(tmp_path)):
            DistributedStrategy.load_from_yaml(tmp_path)
