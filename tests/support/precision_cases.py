"""Half precision on ranks, beside plain torch: torch.amp.GradScaler, and autocast by hand."""

from __future__ import annotations

import gc
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import torchfleet as fleet
from torchfleet.base.errors import ModelError

SCALE = 32768.0


def take_device(device: str) -> torch.device:
    """All ranks share the first GPU, over gloo; one alone has NCCL."""
    if device == "cuda":
        os.environ.pop("FLEET_DEVICE", None)
        os.environ["LOCAL_RANK"] = "0"
        torch.backends.cuda.matmul.allow_tf32 = False
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    return torch.device(device)


def gradients(model: torch.nn.Module) -> torch.Tensor:
    every = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([gradient.float().flatten() for gradient in every]).clone()


# A loss outside of the model


def classifier(classes: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, classes))


def errors_of_losses(device: str, rows: int, classes: int) -> dict[str, Any]:
    """Relative errors of the gradients of cross entropy / 1, / 8, / 64 against float32: ours, and GradScaler's.

    Gradients are as small as those of 8192 rows and 2000 classes.
    """
    smaller = 8192 * 2000 / (rows * classes)
    place = take_device(device)
    torch.manual_seed(1)
    x, y = torch.randn(rows, 32, device=place), torch.randint(classes, (rows,), device=place)
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(amp=True))
    ours = fleet.distributed_model(classifier(classes))
    fleet.distributed_optimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
    true, scaled = classifier(classes).to(place), classifier(classes).to(place)
    scaler = torch.amp.GradScaler(device, init_scale=SCALE)
    found: dict[str, Any] = {}
    for divisor in (1, 8, 64):
        for model in (ours, true, scaled):
            model.zero_grad()
        (F.cross_entropy(true(x), y) / divisor / smaller).backward()
        (F.cross_entropy(ours(x).float(), y) / divisor / smaller).backward()
        with torch.autocast(device, torch.float16):
            loss = F.cross_entropy(scaled(x), y) / divisor / smaller
        scaler.scale(loss).backward()
        right = gradients(true)
        for name, error in (("ours", gradients(ours) - right), ("scaler", gradients(scaled) / SCALE - right)):
            found[f"{name} {divisor}"] = float(error.norm() / right.norm())
    return found


# Everything that may stand beside the model's outputs in a loss


class Twins(torch.nn.Module):
    """Returns what a user's own kind of object holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(3, 3), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return types.SimpleNamespace(logits=self.second(hidden), both=[hidden, {"hidden": hidden}])


Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def of_logits(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).logits.float().square().mean()


def with_penalty(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    used = [parameter for name, parameter in model.named_parameters() if "unused" not in name]
    return of_logits(model, x) + 0.1 * sum((parameter.square().sum() for parameter in used), x.new_zeros(()))


def penalty_first(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Made before the model is called, and of this rank's batch."""
    penalty = 0.1 * (x @ next(p for name, p in model.named_parameters() if "first.weight" in name).float().T).square()
    return penalty.mean() + of_logits(model, x)


def two_calls(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second = model(x), model(2 * x)
    return (first.logits.float() - second.logits.float()).square().mean() + second.both[1]["hidden"].float().mean()


LOSSES: Mapping[str, Loss] = {"plain": of_logits, "penalty": with_penalty, "first": penalty_first, "two": two_calls}


def made_twins() -> Twins:
    torch.manual_seed(3)
    return Twins()


def gradients_of_losses(device: str, num_passes: int) -> dict[str, Any]:
    """Ours and by hand, of every loss; the batches of `num_passes` backward passes are accumulated."""
    place = take_device(device)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    configs = {"init_loss_scaling": SCALE, "use_dynamic_loss_scaling": False}
    fields = {"amp": True, "amp_configs": configs, "find_unused_parameters": size > 1}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    ours = fleet.distributed_model(made_twins())
    fleet.distributed_optimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
    hand = made_twins().to(place)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(16, 6, generator=generator).to(place) for _ in range(num_passes)]
    found: dict[str, Any] = {}
    for name, loss in LOSSES.items():
        ours.zero_grad()
        hand.zero_grad()
        for x in batches:
            loss(ours, x).backward()
            with torch.autocast(device, torch.float16):
                value = loss(hand, x)
            (value.float() * SCALE).backward()
        found[name], found[f"{name} by hand"] = gradients(ours), averaged(gradients(hand)) / SCALE
    return found


def averaged(tensor: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return tensor


def gradients_of_inputs(device: str) -> dict[str, Any]:
    """Of inputs, of what made them, by backward and by torch.autograd.grad; and what is refused."""
    place = take_device(device)
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(amp=True))
    ours = fleet.distributed_model(made_twins())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
    hand = made_twins().to(place)
    found: dict[str, Any] = {}
    for name, model in (("ours", ours), ("hand", hand)):
        torch.manual_seed(5)
        encoder = torch.nn.Linear(5, 6).to(place)
        x = torch.randn(4, 5, device=place, requires_grad=True)
        with torch.autocast(device, torch.float16, enabled=name == "hand"):
            loss = of_logits(model, encoder(x)).float()
        (found[f"{name} asked"],) = torch.autograd.grad(loss, x, retain_graph=True)
        found[f"{name} untouched"] = all(parameter.grad is None for parameter in model.parameters())
        loss.backward(retain_graph=True)
        loss.backward()
        found[f"{name} x"], found[f"{name} encoder"] = x.grad, encoder.weight.grad
        found[f"{name} own"] = gradients(model)
    found["twice"] = refused(spent(ours, place).backward)
    inputs = torch.randn(4, 6, device=place, requires_grad=True)
    found["graph"] = refused(lambda: torch.autograd.grad(of_logits(ours, inputs), inputs, create_graph=True))
    optimizer.step()
    optimizer.zero_grad()
    of_logits(ours, inputs.detach()).backward(inputs=list(ours.parameters()))
    found["inputs"] = refused(optimizer.step)
    fleet.stop_worker()
    configs = {"use_pure_fp16": True}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(amp=True, amp_configs=configs))
    pure = fleet.distributed_model(made_twins())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(pure.parameters(), lr=0.1))
    penalty_first(pure, inputs.detach()).backward()
    found["pure"] = refused(optimizer.step)
    return found


def spent(model: torch.nn.Module, place: torch.device) -> torch.Tensor:
    """A loss without saved tensors outside of the model, after its backward pass."""
    loss = model(torch.randn(4, 6, device=place)).logits.sum()
    loss.backward()
    return loss


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ModelError as error:
        return str(error)
    return ""


# Memory


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def blocks(width: int, num: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, width), *(Block(width) for _ in range(num)))


class Kept:
    """The storages of what autograd keeps for backward, each once, while they have memory."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __enter__(self) -> Kept:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = own.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def num_bytes(self, but: torch.nn.Module) -> int:
        """Without those of the parameters of the model."""
        own = {local_storage(parameter)._cdata for parameter in but.parameters()}
        return sum(storage.nbytes() for key, storage in self._storages.items() if key not in own)


def local_storage(parameter: torch.Tensor) -> torch.UntypedStorage:
    parameter = parameter.detach()
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).untyped_storage()


def kept_bytes(cases: Mapping[str, Mapping[str, Any]], width: int, num: int, rows: int) -> dict[str, Any]:
    """Of every case, what a forward pass keeps, and parameters after two steps."""
    take_device("cpu")
    found: dict[str, Any] = {}
    for name, fields in cases.items():
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
        model = fleet.distributed_model(blocks(width, num))
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
        for step in range(2):
            x = torch.randn(rows, width, generator=torch.Generator().manual_seed(step)).to(fleet_device(model))
            with Kept() as kept:
                loss = model(x).float().square().mean()
            found[f"{name} bytes"] = kept.num_bytes(but=model.module)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[f"{name} parameters"] = torch.cat([whole(parameter).flatten() for parameter in model.parameters()])
        fleet.stop_worker()
    return found


def fleet_device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def whole(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).float()


def peak_bytes(cases: Mapping[str, Mapping[str, Any]], width: int, num: int, rows: int) -> dict[str, Any]:
    """On a GPU: the most that was allocated in the third step, in bytes per parameter."""
    place = take_device("cuda")
    num_parameters = sum(parameter.numel() for parameter in blocks(width, num).parameters())
    found: dict[str, Any] = {"num": num_parameters}
    for name, fields in cases.items():
        gc.collect()
        before = torch.cuda.memory_allocated()
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
        model = fleet.distributed_model(blocks(width, num))
        optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        x = torch.randn(rows, width, device=place)
        marks: dict[str, int] = {}
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            loss = model(x).float().square().mean()
            marks["forward"] = torch.cuda.memory_allocated()
            loss.backward()
            marks["backward"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            marks["step"] = torch.cuda.max_memory_allocated()
            optimizer.zero_grad()
            marks["rest"] = torch.cuda.memory_allocated()
        found.update({f"{name} {mark}": (value - before) / num_parameters for mark, value in marks.items()})
        del model, optimizer, loss
        fleet.stop_worker()
        fleet.reset()  # nothing of this job is held
    return found


# Lists


class Seen(TorchDispatchMode):
    """The types of the first inputs of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next((value for value in args if isinstance(value, torch.Tensor)), None)
        if first is not None:
            self.types.setdefault(func.overloadpacket.__name__, set()).add(str(first.dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


class Attention(torch.nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.inner, self._need_weights = torch.nn.MultiheadAttention(8, 2, batch_first=True), need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.inner(x, x, x, need_weights=self._need_weights)
        return torch.nn.functional.interpolate(attended, scale_factor=2.0, mode="nearest")


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.inner(x)
        return outputs  # type: ignore[no-any-return]


def made_composite(kind: str) -> torch.nn.Module:
    if kind == "encoder":
        return torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Recurrent() if kind == "lstm" else Attention(kind == "weights")


def types_in_composites(cases: Mapping[str, Any]) -> dict[str, Any]:
    """(kind of model, lists, whether it predicts) → the types that operations see, or the error."""
    found: dict[str, Any] = {}
    for name, (kind, lists, predicts) in cases.items():
        configs = {"dtype": "bfloat16", **lists}
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(amp=True, amp_configs=configs))
        model = fleet.distributed_model(made_composite(kind)).train(not predicts)
        x = torch.randn(2, 3, 8)
        with Seen() as seen, torch.set_grad_enabled(not predicts):
            error = refused(lambda model=model, x=x: model(x))
        found[name] = error or {operation: sorted(types) for operation, types in seen.types.items()}
        fleet.stop_worker()
    return found


# Copies in float32


def pure_training(cases: Mapping[str, Mapping[str, Any]], folder: str) -> dict[str, Any]:
    """Pure trainings with clipped gradients: parameters, norms, bytes at rest, and how each goes on from its save."""
    take_device("cpu")
    found: dict[str, Any] = {}
    for name, fields in cases.items():
        gc.freeze()  # what is there is not counted
        model, optimizer = pure_job(fields)
        norms = [pure_step(model, optimizer, step) for step in range(2)]
        fleet.save(f"{folder}/{name}")
        found[f"{name} bytes"], found[f"{name} norms"] = alive_bytes(), norms
        pure_step(model, optimizer, 2)
        found[f"{name} parameters"] = torch.cat([whole(parameter).flatten() for parameter in model.parameters()])
        del model, optimizer
        fleet.stop_worker()
    for name, fields in cases.items():  # each goes on from the save of the other
        other = next(key for key in cases if key != name)
        model, optimizer = pure_job(fields)
        fleet.load(f"{folder}/{other}")
        pure_step(model, optimizer, 2)
        found[f"{name} continued"] = torch.cat([whole(parameter).flatten() for parameter in model.parameters()])
        del model, optimizer
        fleet.stop_worker()
    return found


def pure_job(fields: Mapping[str, Any]) -> tuple[Any, Any]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    model = fleet.distributed_model(blocks(32, 2))
    return model, fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))


def pure_step(model: Any, optimizer: Any, step: int) -> float:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + fleet.worker_index()))
    (model(x).float().square().mean() * 10).backward()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(optimizer.grad_norm)


def alive_bytes() -> int:
    """Of all tensors that Python knows, but for what was frozen, each storage once."""
    gc.collect()
    every = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    storages = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in every}
    return sum(storages.values())


# Layers cut over ranks


def column_and_row(cut: bool) -> torch.nn.Module:
    torch.manual_seed(4)
    if cut:
        first: torch.nn.Module = fleet.nn.ColumnParallelLinear(6, 8, gather_output=False)
        return torch.nn.Sequential(first, torch.nn.Tanh(), fleet.nn.RowParallelLinear(8, 4, input_is_parallel=True))
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def own_squares(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).square().sum()


def gradients_of_cut_layers() -> dict[str, Any]:
    """Four ranks: layers cut in two, two replicas; a penalty on weights before the rest of the loss, and behind it."""
    fields = {"tensor_parallel": True, "tensor_parallel_configs": {"tensor_parallel_degree": 2}, "amp": True}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    ours, hand = fleet.distributed_model(column_and_row(cut=True)), column_and_row(cut=False)
    fleet.distributed_optimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
    x = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
    index, number = fleet.data_shard()
    found: dict[str, Any] = {}
    for name in ("behind", "before"):
        ours.zero_grad()
        hand.zero_grad()
        penalty = 0.1 * torch.stack([own_squares(parameter) for parameter in ours.parameters()]).sum()
        loss = ours(x[index]).square().mean()
        if name == "behind":
            penalty = 0.1 * torch.stack([own_squares(parameter) for parameter in ours.parameters()]).sum()
        (penalty + loss).backward()
        every = 0.1 * torch.stack([own_squares(parameter) for parameter in hand.parameters()]).sum()
        (hand(x).square().mean() + every).backward()
        given = [parameter.grad for parameter in ours.parameters() if parameter.grad is not None]
        found[name] = torch.cat([whole(gradient).flatten() for gradient in given])
        found[f"{name} by hand"] = gradients(hand)
    assert number == 2
    return found
