"""Recomputation and offload: which modules, that training is bit-equal, what is kept where and when."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import each_of
from support.messages import naming
from support.ranks import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategies.mixed_precision.op_lists import OpLists
from torchfleet.collective.strategies.recomputation import offload as offload_module
from torchfleet.collective.strategies.recomputation.offload import Offload
from torchfleet.collective.strategies.recomputation.recompute import Recompute, chosen, recompute

CPU = torch.device("cpu")
WIDTH, DEPTH = 8, 5


class Block(nn.Module):
    """Random numbers, running statistics and an argument by keyword: all that a second run could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(x + self.dropout(self.outer(torch.relu(self.inner(x)))))
        return x if residual is None else x + 0.1 * residual


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        for layer in self.layer:
            x = layer(x, residual=residual)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.encoder, self.last = nn.Linear(4, WIDTH), Encoder(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.encoder(self.first(x)))


def made(checkpoints: list[str] | None = None, offload: bool = False) -> Net:
    torch.manual_seed(1)
    net = Net()
    if checkpoints is not None:
        recompute_of(checkpoints, offload).convert(net)
    return net


def recompute_of(checkpoints: list[str], offload: bool = False) -> Recompute:
    configs = {"checkpoints": checkpoints, "enable_offload": offload}
    strategy = DistributedStrategy(recompute=True, recompute_configs=configs)
    return Recompute(strategy, SimpleNamespace(device=CPU))  # type: ignore[arg-type]


def trained(net: nn.Module, called: Callable[..., torch.Tensor] | None = None, steps: int = 3) -> dict[str, Any]:
    """Parameters and buffers after some steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(3)  # of the dropout
    for _ in range(steps):
        (called or net)(torch.randn(6, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


# Which modules


@each_of(
    ("patterns", "expected"),
    [
        (["encoder.layer.*"], [f"encoder.layer.{i}" for i in range(DEPTH)]),
        (["encoder.layer.1", "last"], ["encoder.layer.1", "last"]),
        (["encoder.layer.*", "encoder.layer.2.inner"], [f"encoder.layer.{i}" for i in range(DEPTH)]),
        (["**.inner"], [f"encoder.layer.{i}.inner" for i in range(DEPTH)]),
        (["encoder.**.out*"], [f"encoder.layer.{i}.outer" for i in range(DEPTH)]),
        (["*"], ["first", "encoder", "last"]),
        (["**"], ["first", "encoder", "last"]),
        (["encoder.**"], ["encoder"]),
    ],
)
def test_patterns_name_modules(patterns: list[str], expected: list[str]):
    net = Net()
    names = {id(module): name for name, module in net.named_modules()}
    assert [names[id(module)] for module in chosen(net, patterns)] == expected


@each_of("pattern", ["encoder.layer", "encoder.layer.[03]", "layer.*", "encoder.*.*.*.*", "Encoder", "."])
def test_other_names_match_nothing(pattern: str):
    with pytest.raises(ModelError, match=naming("recompute_configs['checkpoints']", f"'{pattern}'")):
        chosen(Net(), [pattern])


def test_a_pattern_that_matches_nothing_lists_near_names():
    with pytest.raises(ModelError, match=naming("'encoder.layers.*'", "'encoder.layer.*'")):
        chosen(Net(), ["encoder.layers.*"])


def test_a_list_of_modules_is_not_a_module_that_runs():
    with pytest.raises(ModelError, match=naming("'encoder.layer'", "ModuleList", "'encoder.layer.*'")):
        chosen(Net(), ["encoder.layer"])


def test_a_module_with_two_names_is_wrapped_once():
    block = nn.Linear(2, 2)
    net = nn.Sequential(block, nn.ReLU(), block)
    assert chosen(net, ["0", "2"]) == [block]


def test_without_names_it_says_what_to_give():
    with pytest.raises(StrategyError, match=naming("checkpoints", "[]", "encoder.layer.*")):
        recompute_of([])


# Training is the same


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("checkpoints", [["encoder.layer.*"], ["first", "encoder.layer.1", "**.inner"]])
def test_training_is_bit_equal(checkpoints: list[str], offload: bool):
    assert_equal(trained(made(checkpoints, offload)), trained(made()))


@pytest.mark.parametrize("offload", [False, True])
def test_named_modules_run_twice_and_the_others_once(offload: bool):
    net = made(["encoder.layer.*"], offload)
    counts = {"inner": 0, "last": 0}
    net.encoder.layer[2].inner.register_forward_hook(lambda *_: counts.update(inner=counts["inner"] + 1))
    net.last.register_forward_hook(lambda *_: counts.update(last=counts["last"] + 1))
    trained(net, steps=1)
    assert counts == {"inner": 2, "last": 1}
    with torch.no_grad():
        net(torch.randn(6, 4))
    assert counts == {"inner": 3, "last": 2}


def test_fewer_activations_are_kept():
    assert kept_bytes(made(["encoder.layer.*"])) < 0.4 * kept_bytes(made())


def kept_bytes(net: nn.Module) -> int:
    """Of what the graph of a forward pass keeps alive, apart from parameters."""
    own = {tensor.data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = net(torch.randn(64, 4))
    assert output.requires_grad
    return sum(sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_second_run_has_the_precision_of_the_first(dtype: torch.dtype):
    """Also with the function lists of amp, which are changes of the dispatcher."""

    def under_amp(net: nn.Module) -> Callable[..., torch.Tensor]:
        def called(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype):
                return net(x).float()

        return called

    try:
        for white, black, kind in (([], [], dtype), (["add"], ["linear"], torch.float32)):
            lists = OpLists(white, black, "cpu", dtype)  # in force as long as it is there
            with torch.autocast("cpu", dtype):
                assert nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == kind, lists
            plain, again = made(), made(["encoder.layer.*"])
            expected = trained(plain, under_amp(plain))
            assert_equal(trained(again, under_amp(again)), expected)
    finally:
        OpLists([], [], "cpu", dtype)  # torch chooses again, in this process


def test_a_copy_computes_with_its_own_parameters():
    net = made(["encoder.layer.*"])
    twin = copy.deepcopy(net)
    assert_equal(trained(twin), trained(made()))
    assert_equal(net.state_dict(), made().state_dict())


def test_a_forward_that_somebody_replaced_is_kept():
    plain, again = made(), made()
    for net in (plain, again):
        block = net.encoder.layer[1]
        block.forward = lambda x, residual=None, block=block: torch.tanh(Block.forward(block, x, residual))
    recompute(again.encoder.layer[1])
    assert_equal(trained(again), trained(plain))


# Offload


class Watched(Offload):
    """Writes down what happens, and how many inputs are on the device then."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.order: list[tuple[str, int]] = []
        self.most = 0
        self._numbers: dict[int, int] = {}
        self._all: list[weakref.ref[Any]] = []

    def _pack(self, tensor: torch.Tensor, block: Any) -> Any:
        kept = super()._pack(tensor, block)
        if kept is not tensor:
            self._all.append(weakref.ref(kept))
            self._note("out", kept)
        return kept

    def _unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, torch.Tensor):
            self._note("use", kept)
        return super()._unpack(kept)

    def _bring(self, kept: Any) -> None:
        super()._bring(kept)
        self._note("in", kept)

    def _note(self, what: str, kept: Any) -> None:
        number = next(i for i, ref in enumerate(self._all) if ref() is kept)
        self.order.append((what, number))
        self.most = max(self.most, self.num_on_device)

    @property
    def num_on_device(self) -> int:
        return sum(kept.on_device is not None for kept in (ref() for ref in self._all) if kept is not None)

    @property
    def num_alive(self) -> int:
        return sum(ref() is not None for ref in self._all)


def blocks(depth: int, offload: Offload) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(depth)))
    for block in net:
        recompute(block, offload)
    return net


def test_inputs_come_back_last_first_each_one_ahead_of_its_use():
    watched = Watched()
    net = blocks(6, watched)
    x = torch.randn(3, 4, requires_grad=True)
    net(x).sum().backward()
    assert watched.order[:6] == [("out", i) for i in range(6)]
    assert watched.order[6:8] == [("use", 5), ("use", 4)], "these have not left yet"
    assert watched.order[8:] == [(what, i) for i in (3, 2, 1, 0) for what in ("in", "use")]
    assert watched.most == offload_module.NUM_LEAVING
    assert (watched.num_on_device, watched.num_alive) == (0, 0)


def test_between_forward_and_backward_only_host_copies_are_left():
    watched = Watched()
    net = blocks(6, watched)
    alive: list[weakref.ref[torch.Tensor]] = []
    for block in net:
        block.register_forward_pre_hook(lambda _, args: alive.append(weakref.ref(args[0])))
    output = net(torch.randn(3, 4, requires_grad=True))
    assert [ref() is not None for ref in alive[1:]] == [False] * 5, "tensors of the forward pass itself are gone"
    assert watched.num_on_device == offload_module.NUM_LEAVING
    assert watched.num_alive == 6
    del output
    assert watched.num_alive == 0, "a graph that is dropped takes its copies with it"


def test_a_pass_without_backward_disturbs_no_other():
    watched = Watched()
    net = blocks(6, watched)
    x = torch.randn(3, 4, requires_grad=True)
    net(x)
    first, second = net(x), net(2 * x)
    first.sum().backward()
    second.sum().backward()
    expected = torch.autograd.grad(blocks(6, Offload(CPU))(x).sum() + blocks(6, Offload(CPU))(2 * x).sum(), x)[0]
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert watched.most <= 2 * offload_module.NUM_LEAVING


def test_a_retained_graph_is_run_twice():
    x = torch.randn(3, 4, requires_grad=True)
    output = blocks(5, Offload(CPU))(x).sum()
    first = torch.autograd.grad(output, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(output, x)[0], first)


class Two(nn.Module):
    """Two inputs that need gradients, and a mask that needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = pair
        return torch.tanh(self.linear(left) * mask + right), left + right


def test_all_inputs_of_a_block_come_together_and_masks_stay():
    watched = Watched()
    torch.manual_seed(1)
    layers = [Two() for _ in range(4)]
    twins = copy.deepcopy(layers)
    for layer in layers:
        recompute(layer, watched)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    results = []
    for stack in (layers, twins):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        pair = (x, 2 * x)
        for layer in stack:
            pair = layer(pair, mask=mask)
        (pair[0] + pair[1]).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)
    assert [i for what, i in watched.order if what == "out"] == list(range(8)), "the mask is not copied"
    assert [i for what, i in watched.order if what == "in"] == [2, 3, 0, 1]


def test_an_input_changed_in_place_is_an_error():
    class Careless(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu_(x)

    net = nn.Sequential(nn.Linear(4, 4), Careless(), nn.Linear(4, 4))
    recompute(net[1], Offload(CPU))
    with pytest.raises(ModelError, match=r"in.place"):
        net(torch.randn(3, 4)).sum().backward()


class Late(Offload):
    """As on a GPU at its slowest: a copy is made when the compute stream waits for it, and not before."""

    def _copy(self, targets: Any, sources: Any) -> Any:
        return SimpleNamespace(copies=list(zip(targets, sources, strict=True)))


def test_nothing_is_used_before_its_copy_was_waited_for(monkeypatch: pytest.MonkeyPatch):
    """Memory that is not waited for has arbitrary contents here, and gradients would differ."""

    def wait_event(event: Any) -> None:
        for target, source in event.copies:
            target.copy_(source)
        event.copies = []

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=wait_event))
    monkeypatch.setattr(offload_module, "PIECE_BYTES", 16)  # several pieces
    gradients = []
    for kind in (Offload, Late):
        x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
        torch.manual_seed(1)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 6), nn.Tanh()) for _ in range(7)))
        offload = kind(CPU)
        for block in net:
            recompute(block, offload)
        for _ in range(2):
            y: torch.Tensor = x
            for block in net:
                y = block(y[:, 1:4])  # a slice of a tensor, with gaps
            y.square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in net.parameters())])
    assert all(torch.equal(gradient, other) for gradient, other in zip(*gradients, strict=True))


def test_a_transposed_input_keeps_its_layout():
    seen: list[tuple[int, ...]] = []

    class Seeing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.stride())
            return x.sin()

    module = Seeing()
    recompute(module, Offload(CPU))
    x = torch.randn(3, 4, 5, requires_grad=True)
    for _ in range(2):
        module((2 * x).transpose(0, 2)).sum().backward()
    assert seen == [(1, 5, 20)] * 4


@pytest.mark.gpu
def test_on_a_gpu_results_are_equal_and_memory_falls():
    """Peaks are counted above what was there before the pass: parameters, what the test keeps, and what is not yet
    collected of the net before. Of 16 kept inputs the first is `x` itself, which stays; of the other 15 at most two are
    on the GPU at a time. 13 are not, and one may go for the allocator's rounding."""
    device, results, grown = torch.device("cuda", 0), [], []
    for offload in (None, Offload(device)):
        torch.manual_seed(1)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16))).to(device)
        for block in net:
            recompute(block, offload)
        for _ in range(4):
            x = torch.randn(16384, 1024, device=device, generator=torch.Generator(device).manual_seed(2))
            net.zero_grad()
            gc.collect()  # none in the middle of the pass, where it would change what is counted
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            net(x).square().mean().backward()
        grown.append(torch.cuda.max_memory_allocated() - before)
        results.append([parameter.grad.clone() for parameter in net.parameters()])
    assert all(torch.equal(gradient, other) for gradient, other in zip(*results, strict=True))
    assert grown[0] - grown[1] > 12 * x.nbytes


# Together with torch's own ways to distribute a model


@contextlib.contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def under_ddp_and_fsdp() -> dict[str, Any]:
    found = {}
    with group():
        for kind in ("ddp", "fsdp"):
            for how in ("plain", "recompute", "offload"):
                net = made(None if how == "plain" else ["encoder.layer.*"], how == "offload")
                called: nn.Module = net
                if kind == "ddp":
                    called = DistributedDataParallel(net)
                else:
                    for layer in net.encoder.layer:
                        fully_shard(layer)
                    fully_shard(net)
                for name, value in trained(net, called).items():
                    found[f"{kind} {how} {name}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def test_replicated_and_sharded_training_is_bit_equal(ranks: Ranks):
    for found in ranks.run(under_ddp_and_fsdp, 2):
        for kind in ("ddp", "fsdp"):
            plain, *others = (
                {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}
                for start in (f"{kind} plain ", f"{kind} recompute ", f"{kind} offload ")
            )
            assert len(plain) == len(Net().state_dict())
            for result in others:
                assert_equal(result, plain)


def in_a_pipeline(offload: bool) -> dict[str, Any]:
    """Forward and backward passes of micro-batches in turns: inputs are not asked for in the reverse order."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # it brings torch.compile, which takes seconds

    with group():
        rank, gradients = dist.get_rank(), []
        for with_it in (False, True):
            watched = Watched()
            torch.manual_seed(1 + rank)
            net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
            for block in net if with_it else ():
                recompute(block, watched if offload else None)
            stage = PipelineStage(net, rank, 2, CPU)
            schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
            schedule.step(x) if rank == 0 else schedule.step(target=torch.ones(8, 4))
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
        return {"plain": gradients[0], "again": gradients[1], "left": watched.num_alive}


@pytest.mark.parametrize("offload", [False, True])
def test_stages_of_a_pipeline_are_bit_equal(ranks: Ranks, offload: bool):
    for found in ranks.run(in_a_pipeline, 2, offload=offload):
        assert torch.equal(found["plain"], found["again"])
        assert found["plain"].abs().sum() > 0
        assert found["left"] == 0
