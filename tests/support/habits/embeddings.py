"""Every option of torch's embeddings and every form of calling them, trained by SGD for three steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from support.habits.habit import Group, Port
from support.habits.scripts import DIM, NUM_IDS, values

Inputs = tuple[Any, ...]

LAYERS = Group(
    "Options of Embedding",
    "Tables are moved by `sparse=1`. The plain twin has the layer's options, `sparse` left out.",
)
BAGS = Group("Options of EmbeddingBag", "As above.")
SPARSE = Group(
    "Embeddings that say sparse=True",
    "The plain twin is left at `sparse=False`, because torch refuses some options of sparse layers; with SGD both mean "
    "the same.",
)

BAG_COUNTS = (
    "torch counts the ids of a bag wrongly (it divides by the count of another id): "
    "a row's gradient is divided by how often its id occurs in the batch, as in Embedding"
)


class Top(torch.nn.Module):
    """A layer and what makes a number of its output."""

    def __init__(self, layer: torch.nn.Module, dim: int = DIM) -> None:
        super().__init__()
        self.layer, self.head = layer, torch.nn.Linear(dim, 1)

    def forward(self, *inputs: Any, **more: Any) -> torch.Tensor:
        return self.head(self.layer(*inputs, **more)).squeeze(-1)


def script(make: Callable[[], torch.nn.Module], calls: Sequence[Inputs], lr: float = 0.1) -> Callable[[Port], Any]:
    """Losses and final values of a model that is called with each of `calls`. A last dictionary has keywords."""

    def run(port: Port) -> Any:
        layer = make()
        if port.is_plain and isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            layer.sparse = False
        model: Any = Top(layer)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, optimizer = port(model, torch.optim.SGD(parameters, lr=lr))
        losses = []
        for inputs in calls:
            more = inputs[-1] if isinstance(inputs[-1], dict) else {}
            loss = model(*(inputs[:-1] if more else inputs), **more).square().sum() / 8
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, values(model)

    return run


def ids(*shape: int, kind: torch.dtype = torch.int64, low: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randint(low, NUM_IDS - 4, shape, generator=draw).to(kind)


def table() -> torch.Tensor:
    return torch.linspace(-1, 1, NUM_IDS * DIM).reshape(NUM_IDS, DIM).sin()


THREE: list[Inputs] = [(ids(6, 2),), (ids(5),), (ids(4, 2),)]
OFFSETS = torch.tensor([0, 2, 2, 5])  # the second bag is empty
BY_OFFSETS: list[Inputs] = [(ids(7), OFFSETS), (ids(9), OFFSETS), (ids(5), torch.tensor([0, 1]))]
embedding = partial(torch.nn.Embedding, NUM_IDS, DIM)
bag = partial(torch.nn.EmbeddingBag, NUM_IDS, DIM)


def add_options(group: Group, sparse: bool) -> None:
    """Options of Embedding, whose layer says `sparse` or not."""
    flag: dict[str, Any] = {"sparse": True} if sparse else {}
    made = partial(embedding, **flag)
    more = ("num_embeddings", "embedding_dim", *flag)

    def option(name: str, make: Callable[[], torch.nn.Module], *arguments: str, **settings: Any) -> None:
        group.add(name, script(make, THREE), arguments=(*arguments, *more), **settings)

    option("Embedding(n, d)", made, is_needed=True)
    option("padding_idx=0", partial(made, padding_idx=0), "padding_idx", is_needed=True)
    option("padding_idx=-1", partial(made, padding_idx=-1), "padding_idx")
    option("padding_idx, its row not zero", lambda: _with_filled_padding(made(padding_idx=0)), "padding_idx")
    option("max_norm=0.8", partial(made, max_norm=0.8), "max_norm")
    option("max_norm=0.8, norm_type=1", partial(made, max_norm=0.8, norm_type=1.0), "max_norm", "norm_type")
    option("max_norm=0.8, padding_idx=0", partial(made, max_norm=0.8, padding_idx=0), "max_norm", "padding_idx")
    option("norm_type=1 alone", partial(made, norm_type=1.0), "norm_type")
    option("scale_grad_by_freq", partial(made, scale_grad_by_freq=True), "scale_grad_by_freq")
    option("_weight=values", lambda: torch.nn.Embedding(NUM_IDS, DIM, _weight=table(), **flag), "_weight")
    option(
        "_weight=values, _freeze",
        lambda: torch.nn.Embedding(NUM_IDS, DIM, _weight=table(), _freeze=True, **flag),
        "_weight",
        "_freeze",
    )
    option(
        "from_pretrained(freeze=False)",
        lambda: torch.nn.Embedding.from_pretrained(table(), freeze=False, **flag),
        is_needed=True,
    )
    option("from_pretrained (frozen)", lambda: torch.nn.Embedding.from_pretrained(table(), **flag))
    option(
        "from_pretrained(max_norm=0.8)",
        lambda: torch.nn.Embedding.from_pretrained(table(), freeze=False, max_norm=0.8, **flag),
        "max_norm",
    )
    option("device='cpu'", partial(made, device="cpu"), "device")
    option("device='meta'", partial(made, device="meta"), "device")
    option("dtype=float64", lambda: _Narrowed(made(dtype=torch.float64)), "dtype")
    option("dtype=bfloat16", lambda: _Narrowed(made(dtype=torch.bfloat16)), "dtype")
    option("a subclass without a forward of its own", lambda: _Named(NUM_IDS, DIM, **flag))
    option("a subclass with a forward of its own", lambda: _Doubled(NUM_IDS, DIM, **flag))
    option("weight_norm", lambda: torch.nn.utils.parametrizations.weight_norm(made()))
    option("spectral_norm", lambda: torch.nn.utils.parametrizations.spectral_norm(made()))


def add_calls(group: Group) -> None:
    def call(name: str, *calls: Inputs, **settings: Any) -> None:
        group.add(name, script(embedding, calls), **settings)

    call("ids of int32", (ids(6, kind=torch.int32),), (ids(3, 2, kind=torch.int32),))
    call("ids without a dimension", (torch.tensor(3),), (torch.tensor(5),))
    call("ids of three dimensions", (ids(2, 3, 2),), (ids(3, 2, 2),), is_needed=True)
    call("no ids", (torch.zeros(0, dtype=torch.int64),), (ids(4),))
    call("ids that are not contiguous", (ids(4, 6).t()[::2],), (ids(6, 4)[:, ::2],))
    call("the ids by keyword", ({"input": ids(5)},), ({"input": ids(4)},))
    call("an id too large", (torch.tensor([NUM_IDS]),))
    call("a negative id", (torch.tensor([-1]),))
    call("ids of float32", (torch.tensor([1.0]),))


def add_bags(group: Group, sparse: bool) -> None:
    flag: dict[str, Any] = {"sparse": True} if sparse else {}
    made = partial(bag, **flag)
    more = ("num_embeddings", "embedding_dim", *flag)

    def option(
        name: str, make: Callable[[], torch.nn.Module], calls: Sequence[Inputs], *arguments: str, **settings: Any
    ) -> None:
        group.add(
            f"EmbeddingBag: {name}" if sparse else name, script(make, calls), arguments=(*arguments, *more), **settings
        )

    two: list[Inputs] = [(ids(4, 3),), (ids(3, 2),), (ids(4, 3),)]
    for mode in ("sum",) if sparse else ("sum", "mean", "max"):  # of sparse layers, what they refuse or not
        option(f"mode='{mode}', ids in rows", partial(made, mode=mode), two, "mode", is_needed=mode == "sum")
        option(f"mode='{mode}', offsets, empty bags", partial(made, mode=mode), BY_OFFSETS, "mode")
        option(f"mode='{mode}', padding_idx=0", partial(made, mode=mode, padding_idx=0), BY_OFFSETS, "padding_idx")
        option(
            f"mode='{mode}', include_last_offset",
            partial(made, mode=mode, include_last_offset=True),
            [(ids(7), torch.tensor([0, 2, 7])), (ids(5), torch.tensor([0, 0, 5]))],
            "include_last_offset",
        )
        option(
            f"mode='{mode}', scale_grad_by_freq",
            partial(made, mode=mode, scale_grad_by_freq=True),
            two,
            "scale_grad_by_freq",
            **({} if mode == "max" else {"differs": BAG_COUNTS}),
        )
        option(f"mode='{mode}', max_norm=0.8", partial(made, mode=mode, max_norm=0.8), two, "max_norm")
    option("max_norm=0.8, norm_type=1", partial(made, max_norm=0.8, norm_type=1.0), two, "max_norm", "norm_type")
    option("norm_type=1 alone", partial(made, norm_type=1.0), two, "norm_type")
    option(
        "per_sample_weights",
        partial(made, mode="sum"),
        [(ids(4, 3), {"per_sample_weights": torch.linspace(-1, 2, 12).view(4, 3)})] * 2,
    )
    option("per_sample_weights that are learned", lambda: _Weighed(made(mode="sum")), two)
    option(
        "offsets with per_sample_weights", partial(made, mode="sum"), [(ids(7), OFFSETS, torch.linspace(-1, 2, 7))] * 2
    )
    option(
        "padding_idx, its row not zero",
        lambda: _with_filled_padding(made(mode="sum", padding_idx=0)),
        two,
        "padding_idx",
    )
    option("_weight=values", lambda: torch.nn.EmbeddingBag(NUM_IDS, DIM, _weight=table(), **flag), two, "_weight")
    option(
        "from_pretrained(freeze=False)",
        lambda: torch.nn.EmbeddingBag.from_pretrained(table(), freeze=False, **flag),
        two,
    )
    option("from_pretrained (frozen)", lambda: torch.nn.EmbeddingBag.from_pretrained(table(), **flag), two)
    option("device='cpu'", partial(made, device="cpu"), two, "device")
    option("device='meta'", partial(made, device="meta"), two, "device")
    option("dtype=float64", lambda: _Narrowed(made(dtype=torch.float64)), two, "dtype")


def add_bag_calls(group: Group) -> None:
    def call(name: str, *calls: Inputs, **options: Any) -> None:
        group.add(name, script(partial(bag, mode="sum", **options), calls))

    call("ids and offsets of int32", (ids(7, kind=torch.int32), OFFSETS.to(torch.int32)))
    call("no ids, two empty bags", (torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])))
    call("input, offsets by keyword", ({"input": ids(7), "offsets": OFFSETS},))
    call("include_last_offset, ids behind the last offset", (ids(7), torch.tensor([0, 2, 5])), include_last_offset=True)
    call("offsets that do not begin with 0", (ids(7), torch.tensor([1, 3])))
    call("ids in rows and offsets", (ids(2, 3), OFFSETS))
    call("an id too large", (torch.tensor([[NUM_IDS]]),))


def _with_filled_padding(layer: Any) -> torch.nn.Module:
    with torch.no_grad():
        layer.weight[layer.padding_idx] = 0.5
    return layer


class _Narrowed(torch.nn.Module):
    """A layer of another type, whose output is float32."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.inner(*inputs).float()


class _Named(torch.nn.Embedding):
    """Has a method more."""

    def size(self) -> int:
        return self.num_embeddings


class _Doubled(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class _Weighed(torch.nn.Module):
    """A bag with a weight of each place that is learned."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.weights = layer, torch.nn.Parameter(torch.tensor([0.5, 1.0, -0.7]))

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        return self.inner(found, per_sample_weights=self.weights[: found.shape[1]].expand(found.shape).contiguous())


add_options(LAYERS, sparse=False)
add_calls(LAYERS)
add_bags(BAGS, sparse=False)
add_bag_calls(BAGS)
add_options(SPARSE, sparse=True)
add_bags(SPARSE, sparse=True)
