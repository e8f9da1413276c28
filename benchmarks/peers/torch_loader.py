"""Plain torch: a DataLoader, torch.nn.Embedding(sparse=True), SparseAdam for its rows and Adam for the tower."""

from __future__ import annotations

import torch

from benchmarks.peers import clicks
from benchmarks.peers.torch_clicks import Clicks, parts, plain_rows, stepping, test_auc, trainer


def main() -> None:
    chosen = clicks.options()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    model = Clicks(plain_rows(chosen), chosen)
    rows = torch.optim.SparseAdam(list(model.rows.parameters()), lr=clicks.ADAM)
    step = stepping(rows, torch.optim.Adam(model.tower.parameters(), lr=clicks.ADAM))
    warm, own, num = parts(chosen)
    found = clicks.timed(trainer(model, step, iter), warm, own, num)
    clicks.tell({**found, "auc": test_auc(model, chosen)})


if __name__ == "__main__":
    main()
