"""CTR-DNN on a GPU with its tables in GPU memory, beside torch's own embedding. Part of benchmarks.gpu.

26 ids of dim 16, 13 numbers, three layers of 400; 10 million ids, Zipf 1.15; Adam; the network in bfloat16.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import torchfleet as fleet
from benchmarks.gpu_tables import BLOCK, free_memory, graph_of, milliseconds, zipf_ranks
from benchmarks.timing import log

SLOTS, DIM, DENSE, WIDTH = 26, 16, 13, 400
NUM_BATCHES = 4
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids, dense, labels


class Tower(torch.nn.Module):
    """The network above the rows."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (SLOTS * DIM + DENSE, WIDTH, WIDTH, WIDTH)
        pairs = itertools.pairwise(sizes)
        layers = [layer for a, b in pairs for layer in (torch.nn.Linear(a, b), torch.nn.ReLU())]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))

    def forward(self, rows: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.layers(torch.cat([rows.flatten(1), dense], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits.float(), labels)


class CtrDnn(torch.nn.Module):
    """Rows by `embedding`, and the tower."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding, self.tower = embedding, Tower()

    def forward(self, ids: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.tower(self.embedding(ids), dense, labels)
        return found


def batches(size: int, keys: torch.Tensor, as_numbers: bool) -> list[Inputs]:
    """Batches of ids drawn from `keys`; `as_numbers`: their places among the keys, for a table that has no hash."""
    made = []
    order = torch.randperm(len(keys), device="cuda")
    for _ in range(NUM_BATCHES):
        numbers = order[zipf_ranks(size * SLOTS, len(keys), 1.15)]
        ids = (numbers if as_numbers else keys[numbers]).view(size, SLOTS)
        made.append((ids, torch.rand(size, DENSE, device="cuda"), torch.randint(0, 2, (size,), device="cuda").float()))
    return made


def turns(step: Callable[[Inputs], None], own: list[Inputs]) -> Callable[[], None]:
    """A call that steps with the next batch."""
    at = [0]

    def call() -> None:
        at[0] += 1
        step(own[at[0] % len(own)])

    return call


def captured(step: Callable[[Inputs], None], own: list[Inputs]) -> Callable[[Inputs], None]:
    """`step` as a CUDA graph, whose inputs are copied in."""
    ids, dense, labels = (tensor.clone() for tensor in own[0])
    replay = graph_of(lambda: step((ids, dense, labels)))

    def call(inputs: Inputs) -> None:
        for to, tensor in zip((ids, dense, labels), inputs, strict=True):
            to.copy_(tensor)
        replay()

    return call


def our_step(num_rows: int, keys: torch.Tensor, compiled: bool) -> Callable[[Inputs], None]:
    """A training step through torchfleet's API, the table filled with these keys."""
    torch.manual_seed(0)
    fleet.reset()  # the job of the variant before
    fleet.init(is_collective=True)
    embedding = fleet.nn.SparseEmbedding(DIM, name="rows", device="cuda", capacity=2 * num_rows)
    model = fleet.distributed_model(CtrDnn(embedding))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=True)
    optimizer = fleet.distributed_optimizer(adam)
    table = embedding.table_rows.engine.rows["rows"].table
    for start in range(0, len(keys), BLOCK):
        table.find(keys[start : start + BLOCK], insert=True)
    called: Any = torch.compile(model) if compiled else model

    def step(inputs: Inputs) -> None:
        called(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_step(num_rows: int) -> Callable[[Inputs], None]:
    """The same with torch.nn.Embedding and SparseAdam, whose ids are row numbers."""
    torch.manual_seed(0)
    model = CtrDnn(torch.nn.Embedding(num_rows, DIM, sparse=True)).cuda()
    dense = torch.optim.Adam(model.tower.parameters(), lr=1e-3, fused=True)
    sparse = torch.optim.SparseAdam(model.embedding.parameters(), lr=1e-3)

    def step(inputs: Inputs) -> None:
        model(*inputs).backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()

    return step


def tower_step(size: int) -> Callable[[Inputs], None]:
    """The network alone, on fixed rows that get gradients."""
    torch.manual_seed(0)
    tower = Tower().cuda()
    adam = torch.optim.Adam(tower.parameters(), lr=1e-3, fused=True, capturable=True)
    rows = torch.rand(size, SLOTS, DIM, device="cuda", requires_grad=True)

    def step(inputs: Inputs) -> None:
        tower(rows, *inputs[1:]).backward()
        adam.step()
        adam.zero_grad()
        rows.grad = None

    return step


def measure_ctr(sizes: list[int], num_rows: int, variants: list[str]) -> dict[str, Any]:
    """Samples per second by batch size and variant: eager, graph, compiled, compiled_graph, torch, tower."""
    found: dict[str, Any] = {}
    keys = torch.randint(-(1 << 62), 1 << 62, (num_rows,), device="cuda")
    for size in sizes:
        torch.manual_seed(1)
        own, numbered = batches(size, keys, as_numbers=False), batches(size, keys, as_numbers=True)
        for variant in variants:
            try:
                if variant == "torch":
                    call = turns(torch_step(num_rows), numbered)
                elif variant.startswith("tower"):
                    step = tower_step(size)
                    call = turns(captured(step, own) if variant == "tower_graph" else step, own)
                else:
                    step = our_step(num_rows, keys, "compiled" in variant)
                    call = turns(captured(step, own) if "graph" in variant else step, own)
                found[f"{variant}_{size}"] = size / milliseconds(call) * 1e3
                log(f"batch {size}, {variant}: {found[f'{variant}_{size}'] / 1e6:.2f} M samples/s")
            except Exception as error:  # a variant that fails must not hide the others
                log(f"batch {size}, {variant}: failed")
                traceback.print_exception(error)  # with the errors before it: that of a capture hides the first one
            call = step = None  # type: ignore[assignment]
            free_memory()
    return found
