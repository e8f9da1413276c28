"""Packages that `pip install torchfleet` leaves out. A test that needs one is skipped without it, and names its extra.

All processes of the tests read all files of tests: a package that few tests need is imported by those tests, when they
run, not at the top of their file.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

# What `import` finds, and the extra of pyproject.toml that brings it. All others come with `dev`.
EXTRAS = {
    "accelerate": "transformers",
    "cloudpickle": "notebook",
    "confluent_kafka": "kafka",
    "faiss": "index",
    "grpc": "grpc",
    "hnswlib": "index",
    "httptools": "serve",
    "lightning": "lightning",
    "mlflow": "mlflow",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "opentelemetry": "otel",
    "open_inference": "grpc",
    "playwright": "browser",
    "prometheus_client": "prometheus",
    "pyarrow": "parquet",
    "pytorch_forecasting": "ecosystem",
    "ray": "ray",
    "recbole": "ecosystem",
    "tensorboard": "tensorboard",
    "torch_geometric": "ecosystem",
    "torch_rechub": "ecosystem",
    "torchao": "fp8",
    "torchfm": "ecosystem",
    "transformers": "transformers",
    "uvicorn": "serve",
    "uvloop": "serve",
    "wandb": "wandb",
}
OTLP = "opentelemetry.exporter.otlp.proto.http"  # other packages bring a part of opentelemetry


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def is_of_an_extra(module: str | None) -> bool:
    """Whether an extra of pyproject.toml brings this module, so that it may be missing."""
    return module is not None and module.partition(".")[0] in EXTRAS


def reason(module: str) -> str:
    return f"needs torchfleet[{EXTRAS.get(module.partition('.')[0], 'dev')}]"


def needing(*modules: str) -> pytest.MarkDecorator:
    """A mark, of a test or as the `pytestmark` of a file: skipped unless these modules are installed."""
    absent = [module for module in modules if not is_installed(module)]
    return pytest.mark.skipif(bool(absent), reason=reason(absent[0]) if absent else "")


def needs(*modules: str) -> None:
    """In a test or a fixture: skip it unless these modules are installed."""
    for module in modules:
        if not is_installed(module):
            pytest.skip(reason(module), allow_module_level=True)


def skips_in_one_line(reasons: Iterable[str]) -> str:
    """How many tests were skipped, and why: `reasons` as pytest reports them, without what follows a colon."""
    short = [text.removeprefix("Skipped: ").split(":")[0].split(" (")[0] for text in reasons]
    counted = Counter(short).most_common()
    parts = [f"{num} {text.replace('needs ', 'need ', 1) if num > 1 else text}" for text, num in counted]
    return f"skipped {len(short)}: {', '.join(parts)}"


def imported(module: str) -> Any:
    """In a test or a fixture: the module, or a skip."""
    needs(module)
    return importlib.import_module(module)


class Late:
    """Stands for a module, which is imported when something of it is first used; if it is not there, that is a skip."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest", "is_hypothesis")):  # pytest asks whether this is a test or a fixture
            raise AttributeError(attribute)
        return getattr(imported(self._name), attribute)
