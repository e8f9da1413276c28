"""Dictionaries of settings: read like any dictionary or by typed attributes, and assigned whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
from support.cases import each_of
from support.messages import naming

from torchfleet.base.errors import StrategyError, UnknownFieldError
from torchfleet.base.strategy.collective_fields import ALIASES, CONFIGS, OBJECTS, AmpConfigs, ShardingConfigs
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.strategy.execution import BuildStrategy

NAMES = ["a_sync_configs", *(f"{name}_configs" for name in CONFIGS)]


class TestReading:
    @each_of("name", NAMES)
    def test_attributes_and_items_are_the_same(self, name: str) -> None:
        configs = getattr(DistributedStrategy(), name)
        assert configs
        assert {key: getattr(configs, key) for key in configs} == configs

    def test_it_works_like_a_dictionary(self) -> None:
        configs = DistributedStrategy(lamb_configs={"lamb_weight_decay": 0.5}).lamb_configs
        plain = {"lamb_weight_decay": 0.5, "exclude_from_weight_decay": []}
        assert configs == plain
        assert plain == configs
        assert configs != {"lamb_weight_decay": 0.5}
        assert dict(configs) == {**configs} == dict(**configs) == configs.copy() == plain
        assert list(configs) == list(configs.keys()) == list(plain)
        assert list(configs.values()) == list(plain.values())
        assert configs.items() == plain.items()
        assert len(configs) == 2
        assert "lamb_weight_decay" in configs
        assert configs.get("no_such", 7) == 7
        assert isinstance(configs, Mapping)

    def test_it_prints_as_what_would_make_it(self) -> None:
        configs = DistributedStrategy(gradient_merge_configs={"k_steps": 4}).gradient_merge_configs
        assert repr(configs) == "GradientMergeConfigs({'k_steps': 4, 'avg': True})"

    def test_an_unknown_key_is_an_error_of_dictionaries_or_of_attributes(self) -> None:
        configs = DistributedStrategy().lamb_configs
        with pytest.raises(KeyError):
            configs["no_such"]
        with pytest.raises(UnknownFieldError, match=naming("lamb_configs", "'no_such'", "lamb_weight_decay")):
            getattr(configs, "no_such")  # noqa: B009
        assert not hasattr(configs, "no_such")

    def test_the_default_of_a_key_can_be_asked_of_its_class(self) -> None:
        assert AmpConfigs.init_loss_scaling.default == 32768.0
        assert "precision" in DistributedStrategy.amp.help


class TestAssigning:
    @each_of("name", NAMES)
    def test_what_was_read_can_be_assigned(self, name: str) -> None:
        strategy = DistributedStrategy()
        setattr(strategy, name, getattr(DistributedStrategy(), name))
        assert strategy == DistributedStrategy()

    def test_some_keys_can_be_changed_by_a_union(self) -> None:
        strategy = DistributedStrategy(lars_configs={"epsilon": 0.5})
        strategy.lars_configs |= {"lars_coeff": 0.25}
        assert (strategy.lars_configs.epsilon, strategy.lars_configs.lars_coeff) == (0.5, 0.25)
        strategy.lars_configs = {"lars_coeff": 0.125} | strategy.lars_configs
        assert strategy.lars_configs.lars_coeff == 0.25
        with pytest.raises(StrategyError, match=naming("'no_such'")):
            strategy.lars_configs |= {"no_such": 1}

    def test_keys_that_are_not_given_go_back_to_their_default(self) -> None:
        strategy = DistributedStrategy(lars_configs={"epsilon": 0.5})
        strategy.lars_configs = {"lars_coeff": 0.25}
        assert strategy.lars_configs.epsilon == 0.0

    @pytest.mark.parametrize("key", ["init_loss_scaling", "no_such"])
    def test_an_item_cannot_be_changed_in_place_and_the_way_out_is_told(self, key: str) -> None:
        strategy = DistributedStrategy()
        way_out = naming(f"amp_configs['{key}']", f"strategy.amp_configs = {{**strategy.amp_configs, '{key}': value}}")
        with pytest.raises(StrategyError, match=way_out):
            strategy.amp_configs[key] = 1024.0  # type: ignore[index]
        with pytest.raises(StrategyError, match=way_out):
            del strategy.amp_configs[key]  # type: ignore[attr-defined]
        assert strategy == DistributedStrategy()

    def test_an_attribute_cannot_be_changed_in_place_and_the_way_out_is_told(self) -> None:
        strategy = DistributedStrategy()
        with pytest.raises(StrategyError, match=naming("strategy.amp_configs")):
            setattr(strategy.amp_configs, "init_loss_scaling", 1024.0)  # noqa: B010
        with pytest.raises(StrategyError, match=naming("amp_configs", "'no_such'")):
            setattr(strategy.amp_configs, "no_such", 1024.0)  # noqa: B010
        assert strategy == DistributedStrategy()

    def test_lists_are_not_shared(self) -> None:
        given = ["softmax"]
        first = DistributedStrategy(amp_configs={"custom_white_list": given})
        second = DistributedStrategy(amp_configs=first.amp_configs)
        given.append("gelu")
        first.amp_configs.custom_black_list.append("mul")
        assert second.amp_configs.custom_white_list == ["softmax"]
        assert second.amp_configs.custom_black_list == []
        assert DistributedStrategy().amp_configs.custom_black_list == []

    @each_of(("name", "aliases"), ALIASES.items())
    def test_an_alias_is_a_name_of_a_key(self, name: str, aliases: Mapping[str, str]) -> None:
        for alias, key in aliases.items():
            assert key in CONFIGS[name]
            assert alias not in CONFIGS[name]

    def test_an_error_has_the_name_that_was_given(self) -> None:
        with pytest.raises(StrategyError, match=naming("sharding_configs['sharding_group_size']", 0)):
            ShardingConfigs({"sharding_group_size": -1})


class TestCopies:
    @pytest.mark.parametrize(
        "twin_of",
        [copy.copy, copy.deepcopy, lambda configs: pickle.loads(pickle.dumps(configs))],
        ids=["copy", "deepcopy", "pickle"],
    )
    def test_a_copy_is_equal_and_of_the_same_type(self, twin_of: Any) -> None:
        configs = DistributedStrategy(dgc_configs={"sparsity": [0.5]}).dgc_configs
        twin = twin_of(configs)
        assert twin == configs
        assert type(twin) is type(configs)

    def test_it_has_no_hash_because_it_has_lists(self) -> None:
        with pytest.raises(TypeError, match="unhashable"):
            hash(DistributedStrategy().amp_configs)


class TestObjects:
    def test_an_object_is_changed_before_it_is_assigned(self) -> None:
        flags = BuildStrategy()
        flags.fuse_bn_act_ops = True
        strategy = DistributedStrategy(build_strategy=flags)
        flags.fuse_bn_act_ops = False
        assert strategy.build_strategy.fuse_bn_act_ops
        assert vars(strategy.build_strategy) == {
            **dict.fromkeys(OBJECTS["build_strategy"], False),
            "fuse_bn_act_ops": True,
        }

    def test_an_unknown_field_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(StrategyError, match=naming("BuildStrategy", "'fuse'", "fuse_elewise_add_act_ops")):
            BuildStrategy(fuse=True)
        with pytest.raises(UnknownFieldError, match=naming("BuildStrategy", "'fuse'")):
            getattr(BuildStrategy(), "fuse")  # noqa: B009
