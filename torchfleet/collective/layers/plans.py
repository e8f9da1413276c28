"""Tensor parallelism by plan: layers of an unchanged model cut over ranks, by patterns of their names.

    strategy = fleet.DistributedStrategy(tensor_parallel=True, tensor_parallel_configs={
        "tensor_parallel_degree": 2, "plan": {"blocks.*.up": "column", "blocks.*.down": "row", "head": "vocab"}})

plan_styles.py has the words. A word may be followed by names of attributes: "column:head_dim" cuts between heads, whose
width is the attribute `head_dim` of the module around the layer; "divide:num_heads" divides an attribute of the module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.pages import page
from torchfleet.collective.layers import plan_styles as styles
from torchfleet.collective.layers.head_parallel import Heads
from torchfleet.collective.layers.parallel_random import CutRandom
from torchfleet.collective.module_names import matching

_WHERE = "tensor_parallel_configs['plan']"
_CUTTING = ("column", "row", "qkv", "vocab", "sequence", "heads")  # a module has at most one of them
WORDS = (*_CUTTING, "gather", "blocks", "divide")


class Planned(NamedTuple):
    """A word for one module."""

    name: str
    module: torch.nn.Module
    word: str
    attributes: tuple[str, ...]
    place: str = ""  # of a block: "first", "last", "first last" or ""


def planned(model: torch.nn.Module, plan: Mapping[str, Any], degree: int) -> list[Planned]:
    """The words of a plan for each module that they match. Raises an error for a plan that does not fit the model."""
    names = dict(model.named_modules(remove_duplicate=False))
    found: list[Planned] = []
    for pattern, words in plan.items():
        matched = matching(pattern, names, _WHERE)
        for word, attributes in _parsed(pattern, words):
            for name in matched:
                place = " ".join(["first"] * (name == matched[0]) + ["last"] * (name == matched[-1]))
                found.append(Planned(name, names[name], word, attributes, place if word == "blocks" else ""))
    found = _each_once(found)
    for one in found:
        _check(one, model, degree)
    _check_blocks(found)
    return found


def apply(found: list[Planned], mesh: DeviceMesh, random: CutRandom) -> None:
    """Cut the modules in place, before their parameters have values."""
    sequence = any(one.word in ("sequence", "blocks") for one in found)
    for one in found:
        for style in _styles(one, sequence, random):
            parallelize_module(one.module, mesh, style)
    if any(one.word == "vocab" and not isinstance(one.module, torch.nn.Embedding) for one in found):
        _enable_parallel_loss()


@cache
def _enable_parallel_loss() -> contextlib.ExitStack:
    """Enable loss_parallel in the whole process: a loss needs it in backward too, which begins outside of the model."""
    stack = contextlib.ExitStack()
    stack.enter_context(loss_parallel())
    return stack  # kept by the cache, so that it is never closed


def _parsed(pattern: str, words: Any) -> list[tuple[str, tuple[str, ...]]]:
    made = []
    for word in [words] if isinstance(words, str) else words if isinstance(words, (list, tuple)) else [None]:
        own, _, names = word.partition(":") if isinstance(word, str) else ("", "", "")
        if own not in WORDS or (own == "divide" and not names):
            raise StrategyError(
                f"{_WHERE}[{pattern!r}] must be one of {', '.join(WORDS[:-1])}, divide:NAME, or a list of them, found "
                f"{words!r}"
            )
        made.append((own, tuple(filter(None, names.split(",")))))
    return made


def _each_once(found: list[Planned]) -> list[Planned]:
    """`found` without repetitions. Raises StrategyError if a module has two words that cut it."""
    once = {(id(one.module), one.word, one.attributes): one for one in reversed(found)}
    cut: dict[int, Planned] = {}
    for one in reversed(once.values()):
        other = cut.setdefault(id(one.module), one) if one.word in _CUTTING else one
        if other is not one:
            raise StrategyError(
                f"{_WHERE}: '{one.name}' is both {other.word!r} and {one.word!r}: leave one of them out"
            )
    return list(reversed(once.values()))


def _check(one: Planned, model: torch.nn.Module, degree: int) -> None:
    name, module, word = one.name, one.module, one.word
    kind, dims = type(module).__name__, styles.weight_dims(module)
    is_embedding = isinstance(module, torch.nn.Embedding)
    fits = {
        "column": dims is not None,
        "row": dims is not None and not is_embedding,
        "qkv": dims is not None and not is_embedding,
        "vocab": type(module) is torch.nn.Embedding or isinstance(module, torch.nn.Linear),
        "heads": isinstance(module, torch.nn.MultiheadAttention),
        "sequence": not any(module.children()),
    }
    if not fits.get(word, True):
        raise ModelError(
            f"{_WHERE}: '{name}' is a {kind}, which {word!r} cannot cut: {page('collective/tensor_parallel')}"
        )
    if word in ("column", "row", "qkv") and dims is not None:
        width = module.get_parameter("weight").shape[dims[0 if word == "row" else 1]]
        pieces = _piece(one, model) * (3 if word == "qkv" else 1)
        _check_divisible(f"'{name}' has {width} {'in' if word == 'row' else 'out'}puts", width, pieces, degree)
    if isinstance(module, torch.nn.MultiheadAttention) and word == "heads":
        _check_divisible(f"'{name}' has {module.num_heads} heads", module.num_heads, 1, degree)
    if word == "divide":
        for attribute in one.attributes:
            value = getattr(module, attribute, None)
            if not isinstance(value, int):
                raise ModelError(f"{_WHERE}: '{name}', a {kind}, has no whole number '{attribute}', found {value!r}")
            _check_divisible(f"'{name}'.{attribute} is {value}", value, 1, degree)


def _piece(one: Planned, model: torch.nn.Module) -> int:
    """The width of a head, which is not cut: an attribute of the module around the layer; 1 if none is given."""
    if not one.attributes:
        return 1
    around = model.get_submodule(one.name.rpartition(".")[0])
    width = getattr(around, one.attributes[0], None)
    if not isinstance(width, int) or width < 1:
        raise ModelError(
            f"{_WHERE}: {type(around).__name__} has no whole number '{one.attributes[0]}', found {width!r}"
        )
    return width


def _check_divisible(what: str, number: int, piece: int, degree: int) -> None:
    if number % (piece * degree):
        unit = f" in pieces of {piece}" if piece > 1 else ""
        raise ModelError(
            f"{_WHERE}: {what}{unit}, which tensor_parallel_degree={degree} does not divide: use another degree"
        )


def _check_blocks(found: list[Planned]) -> None:
    """Every parameter inside of blocks must be in the plan: its gradient comes from one part of the sequence."""
    known = {id(one.module) for one in found if one.word in _CUTTING}
    blocks = [one for one in found if one.word == "blocks"]
    if not blocks and any(one.word == "sequence" for one in found):
        raise StrategyError(f"{_WHERE} has 'sequence' and no 'blocks': say between which modules the sequence is cut")
    for block in blocks:
        for name, module in block.module.named_modules():
            whole = module._parameters and id(module) not in known
            if whole and not any(id(outer) in known for outer in _around(block.module, name)):
                raise ModelError(
                    f"{_WHERE}: '{block.name}.{name}' works on a part of the sequence, and has no word: use 'sequence' "
                    "for a norm, 'column' or 'row' for a layer"
                )


def _around(block: torch.nn.Module, name: str) -> list[torch.nn.Module]:
    parts = name.split(".")
    return [block.get_submodule(".".join(parts[:length])) for length in range(1, len(parts))]


def _styles(one: Planned, sequence: bool, random: CutRandom) -> list[ParallelStyle]:
    if one.word == "blocks":
        return [styles.FirstBlock()] * ("first" in one.place) + [styles.LastBlock()] * ("last" in one.place)
    if one.word == "vocab":
        is_embedding = isinstance(one.module, torch.nn.Embedding)
        return [styles.VocabEmbedding() if is_embedding else styles.VocabLinear(sequence, random)]
    layers = {"column": styles.Column, "row": styles.Row, "qkv": styles.QKV}
    if one.word in layers:
        return [layers[one.word](sequence, random)]
    others = {"gather": lambda: styles.Gather(sequence), "sequence": styles.Sequence, "heads": Heads}
    return [others[one.word]() if one.word in others else styles.Divide(one.attributes)]
