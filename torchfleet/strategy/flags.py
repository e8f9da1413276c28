"""Every collective field of DistributedStrategy as a flag of a script's command line.

parser = argparse.ArgumentParser()
torchfleet.options.add_arguments(parser)
strategy = torchfleet.options.strategy_of(parser.parse_args())

train.py --amp --amp_configs init_loss_scaling=1024,dtype=bfloat16 --recompute --recompute_configs checkpoints=layer*
train.py --strategy strategy.yaml --no-amp
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torchfleet.errors import StrategyError
from torchfleet.strategy.distributed_strategy import DistributedStrategy
from torchfleet.strategy.fields import ALIASES, CONFIGS, FIELDS, SWITCHES, BuildStrategy, ExecutionStrategy, Key

_OBJECTS: dict[str, dict[str, Key]] = {
    "build_strategy": BuildStrategy._KEYS,
    "execution_strategy": ExecutionStrategy._KEYS,
}
_DICTIONARIES: dict[str, dict[str, Key]] = {
    **{f"{name}_configs": keys for name, keys in CONFIGS.items()},
    **_OBJECTS,
}

HELP = {
    "amp": "mixed precision: matrix products in half precision, with loss scaling for float16",
    "recompute": "keep fewer activations: the modules of recompute_configs run a second time in the backward pass",
    "gradient_merge": "exchange gradients and step once in k_steps batches, as if the batch were k times as large",
    "lars": "layer-wise learning rates for large batches; the optimizer must be SGD with momentum",
    "lamb": "layer-wise learning rates for very large batches; the optimizer must be Adam",
    "dgc": "send only the largest gradients (slow networks); the optimizer must be SGD with momentum",
    "localsgd": "every rank trains alone, parameters are averaged every k_steps (slow networks)",
    "adaptive_localsgd": "localsgd whose interval follows the loss and the learning rate",
    "sharding": "cut optimizer state (stage 1), gradients (2) and parameters (3) over the ranks",
    "pipeline": "different layers on different ranks; micro-batches flow through them",
    "tensor_parallel": "large layers cut over ranks that work on the same batch",
    "fp16_allreduce": "gradients cross the network in half precision: half the bytes",
    "use_hierarchical_allreduce": "add gradients up inside groups of ranks first, then among the groups",
    "sync_batch_norm": "batch norm over the batches of all ranks: for small batches per rank",
    "find_unused_parameters": "for models that leave out some parameters in some steps; costs time",
    "cudnn_exhaustive_search": "let cuDNN time its algorithms: for inputs of one size",
    "fuse_all_reduce_ops": "exchange gradients in buckets, not one by one",
    "fuse_grad_size_in_MB": "size of those buckets",
    "nccl_comm_num": "communicators that take turns, so that exchanges overlap",
    "sync_nccl_allreduce": "a communicator waits for its last bucket before it takes the next",
    "hierarchical_allreduce_inter_nranks": "ranks of a group of use_hierarchical_allreduce: those of one machine",
    "hybrid_configs": "how many ranks for data, tensor, pipeline and sharding parallelism",
    "build_strategy": "operator fusion through torch.compile: fuse_bn_act_ops, ...",
    "execution_strategy": "threads of a rank on the CPU",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for all collective fields; a wrong value ends the script with what was expected."""
    group = parser.add_argument_group(
        "strategy",
        "How ranks work together. KEY=VALUE,... may also be a JSON object; in a list, the elements after the first "
        "stand without KEY=: checkpoints=layer1,layer2,enable_offload=true",
    )
    text = "read fields from YAML (save_to_yaml) or Paddle's .prototxt; flags override it, dictionaries key by key"
    group.add_argument("--strategy", metavar="FILE", type=Path, help=text)
    for name, key in FIELDS.items():
        if isinstance(key.default, bool):
            text = f"{_text(name, key)} (default: {'on' if key.default else 'off'})"
            group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            text = f"{_text(name, key)} (default: {key.default})"
            group.add_argument(f"--{name}", type=_field(name), metavar=type(key.default).__name__.upper(), help=text)
        if name in CONFIGS:
            _add_dictionary(group, f"{name}_configs")
    for name in ("hybrid_configs", *_OBJECTS):
        _add_dictionary(group, name)


def _add_dictionary(group: argparse._ArgumentGroup, name: str) -> None:
    keys = {key: value for key, value in _DICTIONARIES[name].items() if not value.only}
    listed = ", ".join(f"{key}={_shown(value)}" for key, value in keys.items())
    metavar = "NAME,..." if name == "build_strategy" else "KEY=VALUE,..."
    text = f"{HELP[name]} ({listed})" if name in HELP else f"defaults: {listed}"
    group.add_argument(f"--{name}", type=_dictionary(name), metavar=metavar, help=text.replace("%", "%%"))


def strategy_of(options: argparse.Namespace) -> DistributedStrategy:
    """The strategy that the flags describe. A dictionary for a strategy that is off is an error that names both."""
    strategy = DistributedStrategy.load_from_yaml(options.strategy) if options.strategy else DistributedStrategy()
    for name in FIELDS:
        value = getattr(options, name)
        if value is not None:
            setattr(strategy, name, value)
        if value is False and name in CONFIGS:
            setattr(strategy, f"{name}_configs", {})  # those of a file, which would now be without their switch
    for name in _DICTIONARIES:
        given = getattr(options, name)
        if given is None:
            continue
        switch = name.removesuffix("_configs")
        if switch in SWITCHES and not getattr(strategy, switch):
            raise StrategyError(f"--{name} was given without --{switch}: add --{switch}, or leave --{name} out")
        now = getattr(strategy, name)
        setattr(strategy, name, {**(vars(now) if name in _OBJECTS else now), **given})
    return strategy


def _text(name: str, key: Key) -> str:
    return HELP.get(name, f"cannot be changed: {key.only}").replace("%", "%%")


def _shown(key: Key) -> str:
    if isinstance(key.default, tuple):
        return f"[{','.join(map(str, key.default))}]"
    if isinstance(key.default, bool):
        return str(key.default).lower()
    return "|".join(map(str, key.choices)) if key.choices else str(key.default)


def _field(name: str) -> Any:
    def number(text: str) -> Any:
        return _checked(name, _converted(name, FIELDS[name].default, text))

    return number


def _dictionary(name: str) -> Any:
    def dictionary(text: str) -> dict[str, Any]:
        given = _json(name, text) if text.lstrip().startswith("{") else _pairs(name, text)
        aliases = ALIASES.get(name.removesuffix("_configs"), {})
        return {aliases.get(key, key): value for key, value in _checked(name, given).items()}

    return dictionary


def _checked(name: str, value: Any) -> Any:
    """As DistributedStrategy checks it, while the command line is read."""
    try:
        DistributedStrategy(**{name: value})
    except StrategyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def _json(name: str, text: str) -> dict[str, Any]:
    try:
        given: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{name} begins like a JSON object and is none ({error}): write '{{\"key\": value}}', or key=value,..."
        ) from None
    return given


def _pairs(name: str, text: str) -> dict[str, Any]:
    """`key=value,...`; a word alone is a further element of the list before it, or a flag that is switched on."""
    given: dict[str, Any] = {}
    last = ""
    for item in filter(None, (part.strip() for part in text.split(","))):
        word, equals, value = (part.strip() for part in item.partition("="))
        if not equals and isinstance(given.get(last), list):
            given[last].append(_converted(f"{name}['{last}']", _element(_key(name, last)), word))
            continue
        key, last = _key(name, word), word
        if word in given or not (equals or isinstance(key.default, bool)):
            raise argparse.ArgumentTypeError(f"{name} expects every key once, as key=value, found '{item}' in '{text}'")
        if isinstance(key.default, tuple):
            given[word] = [_converted(f"{name}['{word}']", _element(key), value)] if value else []
        else:
            given[word] = _converted(f"{name}['{word}']", key.default, value if equals else "true")
    return given


def _key(name: str, given: str) -> Key:
    keys, aliases = _DICTIONARIES[name], ALIASES.get(name.removesuffix("_configs"), {})
    own = aliases.get(given, given)
    if own not in keys:
        raise argparse.ArgumentTypeError(
            f"{name} has no field '{given}'; it has {', '.join(sorted({*keys, *aliases}))}"
        )
    return keys[own]


def _element(key: Key) -> Any:
    return key.default[0] if key.default else ""


def _converted(name: str, default: Any, text: str) -> Any:
    kind = type(default)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise argparse.ArgumentTypeError(f"{name} expects true or false, found '{text}'")
        return text.lower() in ("true", "1")
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{name} expects {expected}, found '{text}'") from None
