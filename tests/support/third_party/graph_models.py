"""PyG: knowledge graphs and graph networks, by loops of their own."""

from __future__ import annotations

from typing import Any

import torch
from support.third_party.case import SEED, Case, Outcome, Port, adagrad, auc, recorded_losses
from torch.utils.data import DataLoader, TensorDataset

# A batch is a power of two: TransE's gradients are sums of plus and minus one sample's share, which then cancel
# exactly. What rounding leaves of them otherwise, Adagrad would make steps of.
NUM_NODES, NUM_RELATIONS, NUM_EDGES, BATCH, EPOCHS = 600, 4, 3200, 128, 4


def graph(seed: int = 0, num: int = NUM_EDGES) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads, relations and tails: each relation leads to nodes of its own."""
    draw = torch.Generator().manual_seed(seed)
    heads = torch.randint(NUM_NODES, (num,), generator=draw)
    relations = torch.randint(NUM_RELATIONS, (num,), generator=draw)
    own = NUM_NODES // NUM_RELATIONS
    tails = relations * own + torch.randint(own, (num,), generator=draw)
    return heads, relations, tails


def transe(port: Port) -> Outcome:
    """As PyG's example: model.loader makes triplets, model.loss draws the wrong ones."""
    from torch_geometric.nn import TransE

    torch.manual_seed(SEED)
    model: Any = TransE(NUM_NODES, NUM_RELATIONS, hidden_channels=16, sparse=True)
    loader: Any = model.loader(*graph(), batch_size=BATCH // port.num_workers, shuffle=False)
    model, optimizer, loader = port(model, adagrad(model, 0.1), loader)
    torch.manual_seed(SEED)
    with recorded_losses() as losses:
        model.train()
        for _ in range(EPOCHS):
            for heads, relations, tails in loader:
                optimizer.zero_grad()
                loss = model.loss(heads, relations, tails)
                loss.backward()
                optimizer.step()
    port.finish()
    model.eval()
    heads, relations, tails = graph(1)
    wrong = torch.randint(NUM_NODES, tails.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        scores = torch.cat([model(heads, relations, tails), model(heads, relations, wrong)])
    return Outcome(losses, auc(scores, torch.arange(2 * len(heads)) < len(heads)))


class Linked(torch.nn.Module):
    """Nodes have no features: an embedding stands for them. GraphSAGE is PyG's own."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GraphSAGE

        self.nodes = torch.nn.Embedding(NUM_NODES, 16)
        self.layers = GraphSAGE(16, 16, num_layers=2, out_channels=16)

    def forward(self, edges: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        found = self.layers(self.nodes(torch.arange(NUM_NODES)), edges)
        return (found[asked[:, 0]] * found[asked[:, 1]]).sum(1)


def asked_edges(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs that are linked, and as many that are drawn; 1 for those that are."""
    heads, relations, tails = graph(seed)
    heads, tails = heads[relations == 0], tails[relations == 0]
    wrong = torch.randint(NUM_NODES, tails.shape, generator=torch.Generator().manual_seed(seed + 5))
    pairs = torch.cat([torch.stack([heads, tails], 1), torch.stack([heads, wrong], 1)])
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    order = order[: len(order) // BATCH * BATCH]
    return pairs[order], (order < len(heads)).float()


def graphsage(port: Port) -> Outcome:
    torch.manual_seed(SEED)
    model: Any = Linked()
    pairs, linked = asked_edges(0)
    edges = pairs[linked > 0].T
    loader: Any = DataLoader(TensorDataset(pairs, linked), BATCH // port.num_workers)
    model, optimizer, loader = port(model, adagrad(model, 0.05), loader)
    with recorded_losses() as losses:
        for _ in range(EPOCHS):
            for asked, target in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.binary_cross_entropy_with_logits(model(edges, asked), target)
                loss.backward()
                optimizer.step()
    port.finish()
    model.eval()
    pairs, linked = asked_edges(1)
    with torch.no_grad():
        return Outcome(losses, auc(model(edges, pairs), linked))


def lightgcn(port: Port) -> Outcome:
    """As PyG's example: the whole table goes through the graph in each step, so that it stays dense."""
    from torch_geometric.nn import LightGCN

    torch.manual_seed(SEED)
    model: Any = LightGCN(NUM_NODES, embedding_dim=16, num_layers=2)
    pairs, linked = asked_edges(0)
    edges = pairs[linked > 0].T
    wrong = torch.randint(NUM_NODES, (edges.shape[1],), generator=torch.Generator().manual_seed(9))
    triples = torch.stack([edges[0], edges[1], wrong], 1)
    triples = triples[: len(triples) // BATCH * BATCH]
    loader: Any = DataLoader(TensorDataset(triples), BATCH // port.num_workers)
    model, optimizer, loader = port(model, adagrad(model, 0.05), loader, sparse=None)
    both = torch.cat([edges, edges.flip(0)], dim=1)
    with recorded_losses() as losses:
        for _ in range(EPOCHS):
            for (rows,) in loader:
                asked = torch.cat([rows[:, :2], rows[:, [0, 2]]]).T
                optimizer.zero_grad()
                right, drawn = model(both, asked).chunk(2)
                loss = model.recommendation_loss(right, drawn, node_id=asked.unique(), lambda_reg=0.0)
                loss.backward()
                optimizer.step()
    port.finish()
    model.eval()
    pairs, linked = asked_edges(1)
    with torch.no_grad():
        return Outcome(losses, auc(model(both, pairs.T), linked))


CASES = (
    Case(
        "TransE(sparse=True), model.loss",
        "torch_geometric",
        transe,
        "the model draws the wrong triplets inside its loss, and each worker draws its own",
        sync_band=0.05,
        score_band=0.03,
    ),
    Case("GraphSAGE and Embedding, own loop", "torch_geometric", graphsage),
    Case("LightGCN, own loop", "torch_geometric", lightgcn, relative=1e-5),
)
