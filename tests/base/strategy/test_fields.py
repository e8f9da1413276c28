"""Declared fields: what a class declares is all that its objects have, and each value is checked."""

from __future__ import annotations

from typing import Any

import pytest
from support.cases import each_of
from support.messages import naming

from torchfleet.base.errors import StrategyError, UnknownFieldError
from torchfleet.base.strategy.configs import Configs, ConfigsField, aliases_of
from torchfleet.base.strategy.fields import Field, Fields, Key, ListKey, Switch, fields_of


class NoiseConfigs(Configs, field="noise_configs", aliases={"sigma": "scale"}):
    scale = Key(1.0, at_least=0.0, at_most=8.0)
    kind = Key("normal", choices=("normal", "uniform"))
    seeds = ListKey(int, [1])
    device = Key("cpu", only="noise is made on the CPU")


class NoiseFields(Fields):
    noise = Switch("add noise to gradients")
    noise_configs = ConfigsField(NoiseConfigs)
    noise_steps = Field(10, "steps with noise", at_least=1)


class MoreFields(NoiseFields):
    decay = Field(0.5)


def test_a_class_has_the_fields_that_it_declares_and_inherits() -> None:
    assert list(fields_of(MoreFields)) == ["noise", "noise_configs", "noise_steps", "decay"]
    assert list(fields_of(NoiseFields)) == ["noise", "noise_configs", "noise_steps"]
    assert list(fields_of(NoiseConfigs)) == ["scale", "kind", "seeds", "device"]
    assert aliases_of(NoiseConfigs) == {"sigma": "scale"}


def test_values_are_the_defaults_until_they_are_set() -> None:
    fields = MoreFields(decay=1)
    assert (fields.noise, fields.noise_steps, fields.decay) == (False, 10, 1.0)
    assert fields.noise_configs == {"scale": 1.0, "kind": "normal", "seeds": [1], "device": "cpu"}
    fields.noise, fields.noise_configs = True, {"sigma": 2}
    assert (fields.noise, fields.noise_configs.scale) == (True, 2.0)
    assert not MoreFields().noise


@each_of(
    ("name", "value", "text"),
    [
        ("noise", 1, "noise expects a bool, found 1"),
        ("noise_steps", True, "noise_steps expects a int, found True"),
        ("noise_steps", 0, "noise_steps must be at least 1, found 0"),
        ("noise_configs", 3, "noise_configs expects a dictionary, found 3"),
        ("noise_configs", {"scale": "1"}, "noise_configs['scale'] expects a float, found '1'"),
        ("noise_configs", {"sigma": 9}, "noise_configs['sigma'] must be at most 8, found 9.0"),
        ("noise_configs", {"scale": float("nan")}, "noise_configs['scale'] must be a finite number, found nan"),
        ("noise_configs", {"kind": "x"}, "noise_configs['kind'] must be one of 'normal', 'uniform', found 'x'"),
        ("noise_configs", {"seeds": 1}, "noise_configs['seeds'] expects a list, found 1"),
        (
            "noise_configs",
            {"device": "cuda"},
            "noise_configs['device']='cuda' is not supported: noise is made on the CPU. Leave it at 'cpu'.",
        ),
        (
            "noise_configs",
            {"sigma": 1, "scale": 1},
            "noise_configs: 'scale' and 'scale' are two names of one key; give one of them",
        ),
        (
            "noise_configs",
            {"scales": 1},
            "noise_configs has no field 'scales'; did you mean 'scale'?",
        ),
        ("noises", True, "NoiseFields has no field 'noises'; did you mean 'noise'?"),
    ],
)
def test_a_wrong_value_is_refused_and_changes_nothing(name: str, value: Any, text: str) -> None:
    fields = NoiseFields()
    before = dict(vars(fields))
    with pytest.raises(StrategyError) as caught:
        setattr(fields, name, value)
    assert str(caught.value) == text
    assert vars(fields) == before
    with pytest.raises(StrategyError):
        NoiseFields(**{name: value})


def test_an_unknown_field_cannot_be_read() -> None:
    with pytest.raises(UnknownFieldError, match=naming("NoiseFields", "'noises'")):
        getattr(NoiseFields(), "noises")  # noqa: B009
    assert not hasattr(NoiseFields(), "noises")
