"""Peak memory of a rank by the length of its sequences, with context_parallel on 1, 2 and 4 ranks over gloo.

    python -m benchmarks.context_memory --json --plot docs/plots/context_parallel.png
    python -m benchmarks.context_memory --json --quick

Each point is a fresh start of its ranks: a causal transformer, batch 1, float32, one step of SGD. The figure is the
peak of a rank's resident memory above that before the step, the largest of its ranks.
"""

from __future__ import annotations

import argparse
import resource
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.rank_jobs import hand_over, run_ranks
from benchmarks.timing import log, report

WIDTH, HEADS, LAYERS, WORDS = 256, 4, 4, 512
_SECONDS = 300.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Without positions: memory is the point."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.words(ids))).flatten(0, 1), labels.flatten())


def rank(length: int) -> dict[str, Any]:
    import torchfleet as fleet

    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy(context_parallel=True, context_parallel_configs={"position_argument": ""})
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(Transformer())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    found: dict[str, Any] = {}
    for size in (64, 64, length):  # short sequences first: what is made once, as buckets are, is not counted
        before = _peak_mib()
        ids = torch.randint(WORDS, (1, size))
        loss = model(ids, ids.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = {"mib": _peak_mib() - before, "loss": float(loss.detach())}
    fleet.stop_worker()
    return found


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def plot(found: dict[int, dict[int, float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(6.5, 4.2))
    for size, by_length in found.items():
        panel.plot(list(by_length), list(by_length.values()), "o-", label=f"{size} rank{'s' * (size > 1)}")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    lengths = list(next(iter(found.values())))
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.set_xlabel("tokens of a sequence")
    panel.set_ylabel("peak of a rank in a step, MiB")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two short lengths, one and two ranks")
    parser.add_argument("--plot", help="a PNG to write")
    parser.add_argument("--rank", type=int, metavar="LENGTH", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        hand_over(rank(options.rank))
        return
    sizes, lengths = ([1, 2], [256, 512]) if options.quick else ([1, 2, 4], [1024, 2048, 4096])
    found: dict[int, dict[int, float]] = {size: {} for size in sizes}
    for size in sizes:
        for length in lengths:
            command = [sys.executable, "-m", "benchmarks.context_memory", "--rank", str(length)]
            ranks = run_ranks([command] * size, _SECONDS)
            found[size][length] = max(result["mib"] for result in ranks)
            log(f"{size} ranks, {length:,} tokens: {found[size][length]:,.0f} MiB, loss {ranks[0]['loss']:.4f}")
    if options.plot:
        plot(found, options.plot)
    flat = {f"mib_{size}_ranks_{length}": mib for size, by in found.items() for length, mib in by.items()}
    longest = lengths[-1]
    ratios = {f"ratio_{size}_ranks": found[size][longest] / found[1][longest] for size in sizes[1:]}
    report({**flat, **ratios}, options.json)


if __name__ == "__main__":
    main()
