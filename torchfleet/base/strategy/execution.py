"""BuildStrategy and ExecutionStrategy: operator fusion and the number of threads of a rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.fields import Field, Fields
from torchfleet.base.strategy.paddle_fields import reasons

OwnObject = TypeVar("OwnObject", bound="ObjectFields")


class ObjectFields(Fields):
    """Fields set by keyword or attribute. The object is created separately and assigned to a field of
    DistributedStrategy.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def _where(self, name: str) -> str:
        return f"{type(self).__name__}.{name}"


class ObjectField(Field[OwnObject]):
    """A field that holds an ObjectFields. A dictionary of its fields, as read from a file, can be assigned too."""

    def __init__(self, kind: type[OwnObject], help: str) -> None:
        super().__init__(kind(), help)
        self.kind = kind

    def __set__(self, instance: Fields, value: OwnObject | Mapping[str, Any]) -> None:
        instance._assign(self.name, value)

    def initial(self) -> OwnObject:
        return self.kind()

    def checked(self, where: str, value: Any) -> OwnObject:
        if isinstance(value, Mapping):
            value = self.kind(**{str(name): item for name, item in value.items()})
        if not isinstance(value, self.kind):
            raise StrategyError(f"{where} expects a fleet.{self.kind.__name__}, found {value!r}")
        return copy.deepcopy(value)  # not the caller's object


_GRAPHS = "eager PyTorch has no graph of operators to change; torch.compile chooses by itself"


class BuildStrategy(ObjectFields):
    """Operator fusion. Any of the first five compiles the model with torch.compile, which fuses what it can."""

    _PADDLE_NAMES = reasons("build_strategy")

    fuse_elewise_add_act_ops = Field(False)
    fuse_bn_act_ops = Field(False)
    fuse_bn_add_act_ops = Field(False)
    fuse_relu_depthwise_conv = Field(False)
    allow_cuda_graph_capture = Field(False)  # also launch the kernels as one CUDA graph
    fuse_all_optimizer_ops = Field(False)  # the optimizer's own fused or foreach kernels
    fuse_broadcast_ops = Field(False)  # no effect: initial values are always broadcast in one go
    enable_inplace = Field(False, only=_GRAPHS)
    memory_optimize = Field(False, only=_GRAPHS)
    enable_addto = Field(False, only=_GRAPHS)
    enable_sequential_execution = Field(False, only=_GRAPHS)


class ExecutionStrategy(ObjectFields):
    """How a rank computes. num_threads: threads of torch on the CPU (0: torch decides)."""

    num_threads = Field(0, at_least=0)
    num_iteration_per_drop_scope = Field(10, only="eager PyTorch has no scopes")
    num_iteration_per_run = Field(1, only="the loop is the script's own")
    use_thread_barrier = Field(False, only="eager PyTorch has one thread per rank")
