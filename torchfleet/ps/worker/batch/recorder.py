"""Recording of a model's call: how each tensor was computed from the inputs, or why the record cannot be used."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from torchfleet.ps.worker.batch.op_lookup import look_up_one_at_a_time
from torchfleet.ps.worker.batch.recipe import Constant, Input, Node, Recipe, Result, in_nests, nearest
from torchfleet.ps.worker.batch.window import Window

_MOST_FUNCTIONS = 256  # functions in one recipe
_MOST_TENSORS = 100_000  # tensors in one recording
_SAME, _LIFT, _EMPTY = "aten::detach", "aten::lift_fresh", ("aten::empty", "aten::new_empty")


class Refusal(NamedTuple):
    """Why ids cannot be known before the model computes them, and what the model's author can do."""

    why: str
    what_to_do: str


RANDOM = Refusal(
    "the ids are drawn at random in forward", "draw them before the call and give them to the model as an input"
)
ROWS = Refusal(
    "the ids are computed from the rows of another lookup",
    "nothing, if this is intended: these rows can be requested only after the other lookup has returned",
)
PARAMETERS = Refusal(
    "the ids are computed from parameters of the model",
    "nothing, if this is intended: training changes the parameters until the moment of the lookup",
)
IN_PLACE = Refusal(
    "a tensor that the ids come from is changed in place in forward",
    "write out of place: torch.where or masked_fill instead of x[mask] = 0, x + 1 instead of x += 1",
)
OUTSIDE = Refusal(
    "the ids are not computed by functions of torch (numpy, a custom kernel, another process)",
    "compute them with torch, or before the call, and give them to the model as an input",
)
LONG = Refusal(
    f"the ids take more than {_MOST_FUNCTIONS} functions to compute",
    "compute them before the call and give them to the model as an input",
)

Mark = Node | Refusal
_Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records how every tensor was made, between `begin` and `end`.

    A tensor is identified by its memory: the last tensor made at an address is the one that is there. Memory written
    without torch may be mistaken for the tensor that was there before, so a recipe is tested before it is used.
    """

    supports_higher_order_operators = True  # they pass through

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = {place: tensor.shape for place, tensor in tensors.items()}
        self._inputs: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for place, tensor in tensors.items():
            if tensor.numel() and _key_of(tensor) is not None:
                self._inputs.setdefault(_storage(tensor), []).append((place, tensor))
        self._marks: dict[_Key, Mark] = {}
        self._by_storage: dict[int, set[_Key]] = {}

    def begin(self) -> None:
        look_up_one_at_a_time()
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop, unless another mode is on top of this one: an interrupted call leaves such modes behind."""
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and len(self._marks) < _MOST_TENSORS:
            self._note(func, args, kwargs, out)
        return out

    def recipe(self, ids: torch.Tensor) -> Recipe | Refusal:
        """How these ids were computed."""
        mark = self._mark(ids)
        if isinstance(mark, Refusal):
            return mark
        places = _places(mark) or list(self._shapes)[:1]  # e.g. an arange over the samples: its length is an input's
        return Recipe(mark, {place: self._shapes[place] for place in places})

    def refuse(self, tensor: torch.Tensor, refusal: Refusal) -> None:
        """Mark everything computed from this tensor as having no recipe."""
        self._put(tensor, refusal)

    def _note(self, func: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        schema = func._schema
        if schema.is_mutable:
            for argument, value in zip(schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    in_nests(self._note_change, value)
            in_nests(self._note_change, kwargs.get("out"))
            return
        if schema.name == _SAME:
            self._put(out, self._mark(args[0]))
            return
        if schema.name == _LIFT:  # made from Python numbers or numpy memory
            inside = isinstance(out, torch.Tensor) and _storage(out) in self._inputs
            self._put(out, self._mark(out) if inside else Constant(out))
            return
        mark = self._result(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            self._put(out, mark)
        elif isinstance(out, (list, tuple)):
            for i, tensor in enumerate(out):
                own = Result(mark.func, mark.args, mark.kwargs, i, mark.size) if isinstance(mark, Result) else mark
                self._put(tensor, own)

    def _result(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Mark:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return RANDOM
        if func._schema.name.startswith(_EMPTY):
            return OUTSIDE
        found: list[Mark] = []

        def mark(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            found.append(self._mark(value))
            return found[-1]

        nodes = in_nests(mark, tuple(args)), in_nests(mark, kwargs)
        refusal = next((one for one in found if isinstance(one, Refusal)), None)
        if refusal is not None:
            return refusal
        size = 1 + sum(one.size for one in found if isinstance(one, Result))
        return Result(func, *nodes, None, size) if size <= _MOST_FUNCTIONS else LONG

    def _mark(self, tensor: torch.Tensor) -> Mark:
        key = _key_of(tensor)
        if key is None:
            return OUTSIDE
        known = self._marks.get(key)
        if isinstance(known, Refusal):
            return known
        windows = [(place, Window.of(tensor, base)) for place, base in self._inputs.get(_storage(tensor), [])]
        place = nearest(Input(place, window) for place, window in windows if window is not None)
        if place is not None:
            return place
        if known is not None:
            return known
        return PARAMETERS if tensor.requires_grad else Constant(tensor)

    def _note_change(self, tensor: Any) -> None:
        """Record an in-place write, which changes every tensor with the same memory."""
        if not isinstance(tensor, torch.Tensor) or _key_of(tensor) is None:
            return
        storage = _storage(tensor)
        for key in self._by_storage.get(storage, ()):
            self._marks[key] = IN_PLACE
        for _, base in self._inputs.pop(storage, []):
            self._put(base, IN_PLACE)
        self._put(tensor, IN_PLACE)

    def _put(self, tensor: Any, mark: Mark) -> None:
        key = _key_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if key is not None:
            self._marks[key] = mark
            self._by_storage.setdefault(_storage(tensor), set()).add(key)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _key_of(tensor: torch.Tensor) -> _Key | None:
    """A tensor's address and layout; None if it has no memory of its own."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except RuntimeError:  # a wrapper subclass
        return None


def _places(node: Node) -> set[str]:
    """The batch's tensors that a recipe reads."""
    if isinstance(node, Input):
        return {node.place}
    places: set[str] = set()
    if isinstance(node, Result):
        in_nests(lambda found: places.update(_places(found)) if isinstance(found, Node) else None, node.args)
        in_nests(lambda found: places.update(_places(found)) if isinstance(found, Node) else None, node.kwargs)
    return places


# torch.compile's stance is global to the process: while any owner is about to record a call, calls are not compiled.
_stance_lock = threading.RLock()  # a garbage collection inside may finalize an owner
_owners: set[int] = set()
_stance: Any = None  # leaving it restores the previous stance


def hold_compiler(owner: object) -> None:
    """Disable compilation until every owner has let go or is collected: a recorder only sees single functions.

    Does nothing if the compiler is not imported.
    """
    global _stance
    with _stance_lock:
        if "torch._dynamo" in sys.modules and _stance is None:
            _stance = torch.compiler.set_stance("force_eager")
        if id(owner) not in _owners:
            _owners.add(id(owner))
            weakref.finalize(owner, _remove_owner, id(owner))


def let_compiler_go(owner: object) -> None:
    """Allow compilation again, unless another owner disables it. Does nothing if `owner` has not disabled it."""
    _remove_owner(id(owner))


def _remove_owner(number: int) -> None:
    global _stance
    with _stance_lock:
        _owners.discard(number)
        if not _owners and _stance is not None:
            stance, _stance = _stance, None
            stance.__exit__(None, None, None)
