"""The roof of benchmarks.serving: the same HTTP server and batching around CTR-DNN in plain torch."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn

from torchfleet.api.serving.description import read_description
from torchfleet.apps.serve.endpoints.direct_http import DirectProtocol
from torchfleet.apps.serve.endpoints.http_app import ServingApp
from torchfleet.apps.serve.endpoints.inference_protocol import InferenceProtocol
from torchfleet.apps.serve.inference import Inference
from torchfleet.apps.serve.samples import BlockValues, JoinedBatch, Joiner, Samples, split_outputs
from torchfleet.apps.serve.serving_metrics import ServingMetrics
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.storage import Storage

SLOTS = tuple(f"C{i}" for i in range(1, 27))


class PlainModel(torch.nn.Module):
    """CTR-DNN with its rows in one torch.nn.Embedding."""

    def __init__(self, num_rows: int, dim: int = 10, hidden: int = 400) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(num_rows, dim)
        sizes = [26 * dim + 13, hidden, hidden, hidden, 2]
        layers: list[torch.nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
        self.tower = torch.nn.Sequential(*layers[:-1])

    def forward(self, batch: JoinedBatch) -> Any:
        assert isinstance(batch.values, BlockValues)
        ids = torch.from_numpy(batch.values.columns("int64", SLOTS))
        return self.tower(torch.cat([self.embedding(ids).flatten(1), batch.values["dense_input"]], dim=1))


class PlainServed:
    """Stands for a ServedModel."""

    is_remote = False

    def __init__(self, settings: ServeSettings, num_rows: int) -> None:
        self.described = read_description(Storage(settings.model))
        self.protocol = InferenceProtocol(self.described, ["output"], settings.max_batch)
        self.version = SimpleNamespace(number=1, created=0.0)
        self.predictor = self
        self._joiner, self._model = Joiner(self.described.features), PlainModel(num_rows).eval()

    def predict(self, requests: Sequence[Samples]) -> list[Any]:
        with torch.inference_mode():
            found = self._model(self._joiner.joined(requests)).numpy()
        return [(self.version, part) for part in split_outputs({"output": found}, requests)]


def main() -> None:
    model, port, num_rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    settings = ServeSettings(model, port=port).checked()
    served: Any = PlainServed(settings, num_rows)
    metrics = ServingMetrics(None, 0, 1)
    app = ServingApp(Inference(served, settings, metrics), settings, b"", metrics, None)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", port))
    config = uvicorn.Config(
        app,
        http=DirectProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,  # all of it as `fleet serve` has it
    )
    gc.collect()
    gc.freeze()
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
