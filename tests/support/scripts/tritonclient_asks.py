"""Asks a running `fleet serve` by NVIDIA's tritonclient, and prints as JSON what came back. Imports nothing of ours.

python tritonclient_asks.py http|grpc ADDRESS REQUEST.npz
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import numpy as np

MODEL = "clicks"
TYPES = {"x": "FP32", "ids": "INT64"}


def inputs_of(client: Any, arrays: dict[str, Any], **form: bool) -> list[Any]:
    made = []
    for name, array in arrays.items():
        made.append(client.InferInput(name, list(array.shape), TYPES[name]))
        made[-1].set_data_from_numpy(array, **form)
    return made


def predictions(kind: str, client: Any, asked: Any, arrays: dict[str, Any]) -> list[Any]:
    """Of the same samples, in each form that the client has for tensors; and of a sample with strings as ids."""
    if kind == "grpc":
        forms: list[tuple[dict[str, bool], Any]] = [({}, client.InferRequestedOutput("output")), ({}, None)]
    else:
        both = (False, True)
        forms = [
            ({"binary_data": given}, client.InferRequestedOutput("output", binary_data=returned))
            for given in both
            for returned in both
        ]
    found = []
    for form, output in forms:
        outputs = None if output is None else [output]
        for _ in range(2):
            made = asked.infer(MODEL, inputs_of(client, arrays, **form), outputs=outputs, request_id="9")
            found.append(made.as_numpy("output").tolist())
    return found


def strings(client: Any, asked: Any) -> Any:
    ids = client.InferInput("ids", [1, 2], "BYTES")
    ids.set_data_from_numpy(np.array([["a", "größe"]], dtype=object))
    return asked.infer(MODEL, [ids]).as_numpy("output").tolist()  # x has a default


def refusal(client: Any, asked: Any) -> str:
    """The error of a request without ids."""
    number = client.InferInput("x", [1, 1], "FP32")
    number.set_data_from_numpy(np.zeros((1, 1), np.float32))
    try:
        asked.infer(MODEL, [number])
    except importlib.import_module("tritonclient.utils").InferenceServerException as error:
        return str(error)
    return ""


def main() -> None:
    kind, address, request = sys.argv[1:]
    client = importlib.import_module(f"tritonclient.{kind}")
    arrays = dict(np.load(request))
    with client.InferenceServerClient(address) as asked:
        described = asked.get_model_metadata(MODEL)
        found = {
            "is_live": asked.is_server_live(),
            "is_ready": asked.is_server_ready() and asked.is_model_ready(MODEL),
            "server": asked.get_server_metadata()["name"] if kind == "http" else asked.get_server_metadata().name,
            "output": described["outputs"][0]["name"] if kind == "http" else described.outputs[0].name,
            "predictions": predictions(kind, client, asked, arrays),
            "strings": strings(client, asked),
            "refusal": refusal(client, asked),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
