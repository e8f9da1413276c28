"""The network of a saved model for other runtimes: ONNX, torch.export, and a Triton model repository."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchfleet.api.serving.network_graph import GraphOutput, dtype_named
from torchfleet.apps.serve.plain_network import Given, NetworkInput, PlainNetwork, plain_network
from torchfleet.base.errors import CheckpointError, FleetError, ModelError
from torchfleet.base.extras import required

INPUTS = "inputs.json"
SAMPLES = "samples"  # the dimension of a batch's samples
_MAX_BATCH = 4096
_TRITON_TYPES = {
    **{f"{kind}{bits}": f"TYPE_{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{"float16": "TYPE_FP16", "float32": "TYPE_FP32", "float64": "TYPE_FP64", "bool": "TYPE_BOOL"},
}
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class ExportedNetwork(msgspec.Struct):
    """What `inputs.json` says of an exported network."""

    inputs: list[NetworkInput]
    outputs: list[GraphOutput]


def export_onnx(folder: str, path: str, given: Given) -> ExportedNetwork:
    """Write the network as an ONNX file, and `inputs.json` beside it. Inputs and outputs have the names given there.

    given="ids": the rows of all tables are in the file. "rows": what lookups return is an input. Weights of more than
    2 GB are in a second file beside it.
    """
    for module in ("onnx", "onnxscript"):
        required(module, "an ONNX file", "onnx")
    network, program = exported_program(folder, given)
    described = ExportedNetwork(network.inputs, network.graph.outputs)
    names = [one.name for one in network.inputs], [output.name for output in network.graph.outputs]
    with _quiet():
        made = torch.onnx.export(program, dynamo=True, verbose=False, input_names=names[0], output_names=names[1])
    assert made is not None
    _folder_of(path).mkdir(parents=True, exist_ok=True)
    made.save(path)
    _write_inputs(_folder_of(path) / INPUTS, described)
    return described


def export_program(folder: str, path: str, given: Given) -> ExportedNetwork:
    """Write the network as torch.export saves programs, and `inputs.json` beside it. It is called with the inputs in
    their order."""
    network, program = exported_program(folder, given)
    described = ExportedNetwork(network.inputs, network.graph.outputs)
    _folder_of(path).mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)
    _write_inputs(_folder_of(path) / INPUTS, described)
    return described


def export_triton(folder: str, repository: str, name: str, version: int, given: Given) -> ExportedNetwork:
    """Write REPOSITORY/NAME/config.pbtxt and REPOSITORY/NAME/VERSION/model.onnx. The version must be new."""
    if not _MODEL_NAME.fullmatch(name):
        raise FleetError(f"--name: expected letters, digits, _, - and . as a model's name, found {name!r}")
    if version < 1:
        raise FleetError(f"--version: expected a number from 1 on, found {version}")
    place = Path(repository) / name
    if (place / str(version)).exists():
        raise CheckpointError(f"{place / str(version)} exists already: give another --version, or another --name")
    unfinished = place / f".{version}.unfinished"  # Triton looks at folders whose names are numbers
    try:
        described = export_onnx(folder, str(unfinished / "model.onnx"), given)
        _share_config(place, name, described, unfinished / INPUTS)
        os.replace(unfinished, place / str(version))
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return described


def _share_config(place: Path, name: str, described: ExportedNetwork, inputs: Path) -> None:
    """Write config.pbtxt and inputs.json, which all versions of a model share. An existing config is kept: it may have
    settings of the user. Raises CheckpointError if it is for other inputs or outputs.
    """
    config, known = place / "config.pbtxt", place / INPUTS
    if not config.exists():
        config.write_text(triton_config(name, described))
        os.replace(inputs, known)
        return
    if not known.exists() or known.read_bytes() != inputs.read_bytes():
        raise CheckpointError(
            f"{config} is for a network with other inputs or outputs than {known.name} of this one says. Versions of a "
            "model share it: give another --name"
        )
    inputs.unlink()


def triton_config(name: str, network: ExportedNetwork) -> str:
    """The text of config.pbtxt. Triton forms batches itself if every input has one entry per sample."""
    is_batched = all(one.shape[:1] == [SAMPLES] for one in network.inputs)
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {_MAX_BATCH if is_batched else 0}"]
    for one in network.inputs:
        lines.append(_tensor("input", one.name, one.dtype, one.shape[is_batched:]))
    for output in network.outputs:
        sizes: list[int | str] = [SAMPLES, *output.shape]
        lines.append(_tensor("output", output.name, output.dtype, sizes[is_batched:]))
    if is_batched:
        lines.append("dynamic_batching { }")
    return "\n".join(lines) + "\n"


def _tensor(kind: str, name: str, dtype: str, shape: list[int | str]) -> str:
    if dtype not in _TRITON_TYPES:
        raise ModelError(f"'{name}' is {dtype}, for which Triton has no type; it has {', '.join(_TRITON_TYPES)}")
    # A tensor of a batch needs a dimension: one number per sample is [1], reshaped to nothing.
    dims = [size if isinstance(size, int) else -1 for size in shape]
    reshape = "" if dims else " reshape { shape: [ ] }"
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    shown = ", ".join(map(str, dims or [1]))
    return f'{kind} [ {{ name: "{quoted}" data_type: {_TRITON_TYPES[dtype]} dims: [ {shown} ]{reshape} }} ]'


def exported_program(folder: str, given: Given) -> tuple[PlainNetwork, torch.export.ExportedProgram]:
    """The network and its program, which takes any number of samples. Sets the shapes of the network's inputs."""
    network = plain_network(folder, given)
    smaller, larger = _example(network, 3, 7), _example(network, 5, 11)
    shapes: list[dict[int, Any]] = []
    for one, first, second in zip(network.inputs, smaller, larger, strict=True):
        varies = [i for i, sizes in enumerate(zip(first.shape, second.shape, strict=True)) if sizes[0] != sizes[1]]
        named = {i: SAMPLES if first.shape[i] == 3 else f"{one.name}.{i}" for i in varies}
        one.shape = [named.get(i, size) for i, size in enumerate(first.shape)]
        shapes.append(dict.fromkeys(varies, torch.export.Dim.DYNAMIC))
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(network, tuple(smaller), dynamic_shapes=(tuple(shapes),), strict=False)
    except Exception as error:  # torch.export raises errors of many kinds
        why = " ".join(str(error).strip().splitlines()[:2])[:400]
        raise ModelError(f"torch.export cannot write the network: {type(error).__name__}: {why}") from None
    return network, program


def _example(network: PlainNetwork, num_samples: int, num_values: int) -> list[torch.Tensor]:
    """Inputs of this many samples; ragged features have `num_values` values."""
    graph, ragged = network.graph, {source.feature for source in network.graph.inputs if source.part == "offsets"}
    found: list[torch.Tensor] = []
    for source in graph.inputs:
        dtype = dtype_named(network.dtypes[source.feature])
        if source.part == "offsets":
            found.append(torch.arange(num_samples))
        elif source.feature in ragged:
            found.append(torch.zeros(num_values, dtype=dtype))
        else:
            found.append(torch.zeros(num_samples, *network.shapes[source.feature], dtype=dtype))
    return network.example_inputs(found)


def _folder_of(path: str) -> Path:
    return Path(path).absolute().parent


def _write_inputs(path: Path, described: ExportedNetwork) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings, since torch warns about its own functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
