"""Names that a strategy's settings give: patterns of module names, parts of names of parameters, classes of modules.

    encoder.layer.*.attention     `*` stands for one component of a module's name, or a fragment of one, `**` for zero
                                  or more components
    bias                          where parameters are named: a part of their names
    torch.nn.BatchNorm2d          the class, or its name: all modules of this class, and of subclasses; where parameters
                                  are named, their parameters

A name that selects nothing is an error, which says what there is. Paddle's names select nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from torchfleet.base.errors import ModelError
from torchfleet.base.near_names import near_names
from torchfleet.base.strategy.fields import class_name

_PADDLE = re.compile(r"\.(?P<kind>[wb])_\d+$")  # linear_0.w_0, batch_norm_3.b_0
_OF_PADDLE = {"w": "weight", "b": "bias"}


def matching(pattern: str, names: Iterable[str] | Mapping[str, torch.nn.Module], where: str) -> list[str]:
    """The names that the pattern matches, in order; given the modules by name, the pattern may name a class. Raises
    ModelError, beginning with `where`, if no name matches.
    """
    every, regex = list(names), _regex(pattern)
    found = [name for name in every if regex.fullmatch("." + name)]
    modules = names if isinstance(names, Mapping) else {}
    found = found or [name for name, module in modules.items() if pattern in _classes(module)]
    if not found:
        # Names that differ only in numbers are listed as one pattern.
        patterns = [re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in every]
        raise ModelError(f"{where}: no module of the model matches {pattern!r}. {_instead(pattern, patterns, modules)}")
    return found


def parameters_named(entries: Sequence[str], model: torch.nn.Module, where: str) -> set[str]:
    """The names of the parameters that the entries select: by a part of their names, or by the class of a module that
    they are in. Raises ModelError, beginning with `where`, for an entry that selects none.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    selected: set[str] = set()
    for entry in entries:
        prefixes = tuple(f"{path}." if path else "" for path, module in modules.items() if entry in _classes(module))
        found = {name for name in names if entry in name or name.startswith(prefixes)}
        if not found:
            raise ModelError(
                f"{where}: no parameter of the model has {entry!r} in its name, and no module with parameters is of "
                f"such a class. {_instead(entry, names, modules)}"
            )
        selected |= found
    return selected


def _regex(pattern: str) -> re.Pattern[str]:
    """Matches a name with a leading dot, so that every component has one."""
    regexes = (r"(?:\.[^.]+)*" if name == "**" else r"\." + _component(name) for name in pattern.split("."))
    return re.compile("".join(regexes))


def _component(name: str) -> str:
    return "[^.]+" if name == "*" else re.escape(name).replace(r"\*", "[^.]*")


def _classes(module: torch.nn.Module) -> list[str]:
    """The names of its class, and of those that this one is made of, up to torch.nn.Module."""
    return [class_name(kind) for kind in type(module).__mro__ if issubclass(kind, torch.nn.Module)][:-1]


def _instead(name: str, names: Iterable[str], modules: Mapping[str, torch.nn.Module]) -> str:
    """What to write in place of a name that selects nothing."""
    of_paddle = _PADDLE.search(name)
    advice = ""
    if of_paddle:
        advice = f"{of_paddle[0][1:]!r} is Paddle's name, which is {_OF_PADDLE[of_paddle['kind']]!r} here. "
    wanted = _bare(_PADDLE.sub("", name))
    classes = dict.fromkeys(
        own for module in modules.values() for own in _classes(module)[:1] if wanted and wanted in _bare(own)
    )
    if classes:
        advice += f"For all modules of a class, name the class: {', '.join(map(repr, classes))}. "
    near = near_names(name, names)
    return f"{advice}Near names: {near}." if near else f"{advice}The model has nothing that could be named."


def _bare(name: str) -> str:
    """`batch_norm_0`, `BatchNorm` and `batch_norm` are alike. Of a class the last component counts."""
    return re.sub(r"[^a-z]", "", name.rpartition(".")[2].lower())
