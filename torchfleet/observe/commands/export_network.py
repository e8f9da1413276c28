"""`fleet export MODEL --onnx|--torch_export|--triton`: the network of a saved model for other runtimes."""

from __future__ import annotations

import argparse
from pathlib import PurePosixPath
from typing import Literal

from torchfleet.base.errors import FleetError

_TARGETS = ("onnx", "torch_export", "triton")


def add_network_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the network, for other runtimes (on this machine)")
    group.add_argument("--onnx", metavar="FILE", help="as an ONNX file")
    group.add_argument("--torch_export", metavar="FILE", help="as a program of torch.export (.pt2)")
    group.add_argument(
        "--triton", metavar="REPO", help="as a model of a Triton repository: config.pbtxt and model.onnx"
    )
    group.add_argument(
        "--inputs",
        choices=("ids", "rows"),
        help="what the network is given: ids (default), with all rows in the file; or the rows of its lookups, for "
        "tables that are served elsewhere. inputs.json beside the network names them",
    )
    group.add_argument("--name", help="with --triton: of the model (default: that of its folder)")
    group.add_argument("--version", type=int, metavar="N", help="with --triton: the version's folder (default: 1)")


def exports_network(options: argparse.Namespace) -> bool:
    """Whether the command is about the network. Raises FleetError if its options contradict each other."""
    given = [f"--{name}" for name in _TARGETS if getattr(options, name) is not None]
    about_triton = [f"--{name}" for name in ("name", "version") if getattr(options, name) is not None]
    about_network = [*about_triton, *(["--inputs"] if options.inputs is not None else [])]
    if not given:
        if about_network:
            raise FleetError(f"{about_network[0]} is about the network: add --onnx, --torch_export or --triton")
        return False
    others = ("table", "path", "named_table", "out", "format", "with_state", "with_statistics", "index", "metric")
    other = next((name for name in others if getattr(options, name)), None)
    if other is not None or len(given) > 1:
        both = given[1] if len(given) > 1 else f"rows ({other})"
        raise FleetError(f"{given[0]} and {both} are two exports: give two commands")
    if about_triton and options.triton is None:
        raise FleetError(f"{about_triton[0]} is for --triton, and this is {given[0]}")
    return True


def export_network(options: argparse.Namespace) -> int:
    from torchfleet.apps.serve.network_export import export_onnx, export_program, export_triton  # imports torch.export

    inputs: Literal["ids", "rows"] = options.inputs or "ids"
    if options.onnx is not None:
        made, place = export_onnx(options.model, options.onnx, inputs), options.onnx
    elif options.torch_export is not None:
        made, place = export_program(options.model, options.torch_export, inputs), options.torch_export
    else:
        name = options.name or PurePosixPath(options.model.rstrip("/")).name
        version = 1 if options.version is None else options.version
        made, place = export_triton(options.model, options.triton, name, version, inputs), f"{options.triton}/{name}"
    print(f"the network in {place}")
    for one in made.inputs:
        print(f"input  {one.name}: {one.dtype} {one.shape}")
    for output in made.outputs:
        print(f"output {output.name}: {output.dtype} {['samples', *output.shape]}")
    return 0
