"""Loaders; checkpoints and copies; what takes a model apart: compilers, tracers, functional calls."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from support.habits.habit import Group, Port
from support.habits.optimizers import Tower
from support.habits.scripts import Model, adagrad, batches, loss_of, sgd, train, trained, values
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

LOADERS = Group("Loaders", "Prepared together with the model; the loop is over what comes back.")
CHECKPOINTS = Group("Checkpoints and copies")
TRANSFORMS = Group("Compilers, tracers and functional calls")


def samples(num: int = 26) -> TensorDataset:
    ids, targets = (torch.cat(parts) for parts in zip(*batches(5), strict=True))
    return TensorDataset(ids[:num], targets[:num])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = samples()
        return (data[i] for i in range(len(data)))


class OwnLoader(DataLoader[Any]):
    """A subclass, as RecBole and PyG have: it makes its batches from numbers."""

    def __init__(self, batch_size: int, shuffle: bool) -> None:
        self.data = samples()
        super().__init__(range(len(self.data)), batch_size=batch_size, shuffle=shuffle, collate_fn=self.collate)  # type: ignore[arg-type]

    def collate(self, numbers: list[int]) -> Any:
        return self.data[torch.tensor(numbers)]


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(samples(), **{"batch_size": 6, **options})


def with_loader(port: Port, data: Any, epochs: int = 2) -> Any:
    model: Any = Model()
    model, optimizer, data = port(model, sgd(model), data)
    torch.manual_seed(21)
    return [train(model, optimizer, data) for _ in range(epochs)], values(model)


AHEAD = dict.fromkeys(
    ("async", "hybrid"),
    "a prepared loader looks one batch ahead: rows of the next batch are fetched before this batch's gradients are "
    "applied",
)


def add_loader(name: str, make: Any, **more: Any) -> None:
    LOADERS.add(name, lambda port: with_loader(port, make()), AHEAD, **more)


add_loader("batch_size", loader, is_needed=True)
add_loader("shuffle=True", lambda: loader(shuffle=True), is_needed=True)
add_loader("shuffle=True, generator", lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(4)))
add_loader("drop_last=True", lambda: loader(drop_last=True), is_needed=True)
add_loader(
    "sampler=WeightedRandomSampler",
    lambda: loader(sampler=WeightedRandomSampler(torch.linspace(0.1, 1, 26).tolist(), 20)),
)
add_loader("batch_sampler", lambda: DataLoader(samples(), batch_sampler=BatchSampler(range(20), 7, False)))
add_loader("batch_size=None", lambda: DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
add_loader("collate_fn", lambda: loader(collate_fn=lambda parts: tuple(map(torch.stack, zip(*parts, strict=True)))))
add_loader("an IterableDataset", lambda: DataLoader(Stream(), batch_size=6))
add_loader("num_workers=1", lambda: loader(num_workers=1))
add_loader("a Subset", lambda: DataLoader(Subset(samples(), range(3, 21)), batch_size=6))
add_loader("a subclass of DataLoader", lambda: OwnLoader(6, shuffle=False), is_needed=True)
add_loader("a subclass of DataLoader, shuffle=True", lambda: OwnLoader(6, shuffle=True), is_needed=True)
LOADERS.add("a list of batches", lambda port: with_loader(port, batches()))


@LOADERS.habit("a loader that is not prepared", is_needed=True)
def unprepared(port: Port) -> Any:
    model: Any = Model()
    model, optimizer = port(model, sgd(model))
    torch.manual_seed(21)
    return train(model, optimizer, loader(shuffle=True)), values(model)


@LOADERS.habit("a loader for validation beside the one for training", AHEAD, is_needed=True)
def validated(port: Port) -> Any:
    model: Any = Model()
    model, optimizer, data, other = port(model, sgd(model), loader(), loader(batch_size=13))
    train(model, optimizer, data)
    model.eval()
    with torch.no_grad():
        return [loss_of(model, batch) for batch in other]


@LOADERS.habit("break after some batches, and a new pass", AHEAD)
def broken_off(port: Port) -> Any:
    model: Any = Model()
    model, optimizer, data = port(model, sgd(model), loader())
    losses = []
    for _ in range(2):
        for number, batch in enumerate(data):
            losses += train(model, optimizer, [batch])
            if number == 1:
                break
    return losses, values(model)


@LOADERS.habit("len(loader), loader.dataset, loader.batch_size", is_needed=True)
def facts_of_loader(port: Port) -> Any:
    model: Any = Model()
    _, _, data = port(model, sgd(model), loader())
    return len(data), len(data.dataset), data.batch_size


@LOADERS.habit("loader.sampler, loader.drop_last, loader.num_workers, loader.collate_fn")
def more_of_loader(port: Port) -> Any:
    model: Any = Model()
    _, _, data = port(model, sgd(model), loader(shuffle=True, drop_last=True))
    return type(data.sampler).__name__, data.drop_last, data.num_workers, data.collate_fn.__name__


@LOADERS.habit("isinstance(loader, DataLoader)")
def kind_of_loader(port: Port) -> Any:
    model: Any = Model()
    _, _, data = port(model, sgd(model), loader())
    return isinstance(data, DataLoader)


# Checkpoints and copies


def prepared(port: Port) -> tuple[Any, Any]:
    model: Any = Model()
    model, optimizer = port(model, sgd(model))
    train(model, optimizer)
    return model, optimizer


def through_file(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@CHECKPOINTS.habit("model.state_dict()", is_needed=True)
def state(port: Port) -> Any:
    return values(prepared(port)[0])


@CHECKPOINTS.habit("torch.save(model.state_dict()), loaded by plain torch", is_needed=True)
def saved_for_torch(port: Port) -> Any:
    model, _ = prepared(port)
    other = Model()
    other.load_state_dict(through_file(model.state_dict()))
    return other(batches()[0][0])


@CHECKPOINTS.habit("load_state_dict of plain torch, before the port", is_needed=True)
def loaded_before(port: Port) -> Any:
    source: Any = Model()
    train(source, sgd(source))
    model: Any = Model()
    model.load_state_dict(source.state_dict())
    return trained(port, model, sgd(model))


@CHECKPOINTS.habit("load_state_dict of plain torch, after the port", is_needed=True)
def loaded_after(port: Port) -> Any:
    source: Any = Model()
    train(source, sgd(source))
    model: Any = Model()
    model, optimizer = port(model, sgd(model))
    model.load_state_dict(source.state_dict())
    return train(model, optimizer), values(model)


@CHECKPOINTS.habit("load_state_dict(strict=False) of a part")
def loaded_part(port: Port) -> Any:
    model, optimizer = prepared(port)
    found = model.load_state_dict({"out.bias": torch.tensor([0.7]), "more": torch.zeros(1)}, strict=False)
    return sorted(found.missing_keys), found.unexpected_keys, train(model, optimizer), values(model)


@CHECKPOINTS.habit("load_state_dict(assign=True)")
def assigned(port: Port) -> Any:
    source = Model()
    model, optimizer = prepared(port)
    model.load_state_dict(source.state_dict(), assign=True)
    if port.is_plain:  # torch's own optimizer keeps stepping the parameters that it was given
        optimizer = sgd(model)
    return train(model, optimizer), values(model)


@CHECKPOINTS.habit("the state of a part: model.items.state_dict()", is_needed=True)
def state_of_part(port: Port) -> Any:
    model, _ = prepared(port)
    return [dict(part.state_dict()) for part in (model.items, model.hidden)]


@CHECKPOINTS.habit("saved midway, loaded, and trained on: model and optimizer")
def resumed(port: Port) -> Any:
    model: Any = Model()
    model, optimizer = port(model, adagrad(model))
    train(model, optimizer)
    kept = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    return train(model, optimizer), values(model)


@CHECKPOINTS.habit("copy.deepcopy(model.state_dict()) keeps the best model")
def best_kept(port: Port) -> Any:
    model, optimizer = prepared(port)
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer)
    model.load_state_dict(best)
    return values(model)


@CHECKPOINTS.habit("copy.deepcopy(model), trained on by an optimizer of its own")
def copy_trained(port: Port) -> Any:
    model, _ = prepared(port)
    twin = copy.deepcopy(model)
    return train(twin, sgd(twin))


@CHECKPOINTS.habit("AveragedModel of the network alone")
def averaged(port: Port) -> Any:
    model: Any = Tower()
    model, optimizer = port(model, sgd(model))
    average = torch.optim.swa_utils.AveragedModel(model)
    losses = train(model, optimizer, after_step=lambda: average.update_parameters(model))
    return losses, values(average.module)


@CHECKPOINTS.habit("AveragedModel of rows and network", "rows are read from the servers, live: they are not averaged")
def averaged_rows(port: Port) -> Any:
    model: Any = Model()
    model, optimizer = port(model, sgd(model))
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, optimizer, after_step=lambda: average.update_parameters(model))
    average.eval()
    with torch.no_grad():
        return average(batches()[0][0])


def _pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@CHECKPOINTS.habit("torch.save(model), pickle of the whole model")
def pickled(port: Port) -> Any:
    return _pickled(prepared(port)[0])(batches()[0][0])


@CHECKPOINTS.habit("pickle of a layer of the network", is_needed=True)
def pickled_layer(port: Port) -> Any:
    return dict(_pickled(prepared(port)[0].hidden).state_dict())


@CHECKPOINTS.habit("pickle of a loss that the model has as a part", is_needed=True)
def pickled_loss(port: Port) -> Any:
    model: Any = Model()
    model.criterion = torch.nn.MSELoss()
    model, optimizer = port(model, sgd(model))
    train(model, optimizer)
    return _pickled(model.criterion)(torch.ones(2), torch.zeros(2))


@CHECKPOINTS.habit("deepcopy of a layer of the network", is_needed=True)
def copied_layer(port: Port) -> Any:
    return dict(copy.deepcopy(prepared(port)[0].hidden).state_dict())


@CHECKPOINTS.habit("pickle of an embedding")
def pickled_table(port: Port) -> Any:
    return dict(_pickled(prepared(port)[0].items).state_dict())


@CHECKPOINTS.habit("model.to(dtype) after the port")
def other_type(port: Port) -> Any:
    model, _ = prepared(port)
    return model.to(torch.float64)(batches()[0][0]).dtype


@CHECKPOINTS.habit("model.to('cpu'), model.cpu(), model.float() after the port", is_needed=True)
def moved(port: Port) -> Any:
    model, optimizer = prepared(port)
    model = model.to("cpu").cpu().float()
    return train(model, optimizer), values(model)


@CHECKPOINTS.habit("model.share_memory()")
def shared(port: Port) -> Any:
    model, _ = prepared(port)
    return model.share_memory()(batches()[0][0])


# Compilers, tracers and functional calls


@TRANSFORMS.habit("torch.compile(model, backend='eager')")
def compiled(port: Port) -> Any:
    model: Any = Model()
    model, optimizer = port(model, sgd(model))
    try:
        return train(torch.compile(model, backend="eager"), optimizer), values(model)
    finally:
        torch._dynamo.reset()


@TRANSFORMS.habit("torch.func.functional_call with the model's own parameters")
def functional(port: Port) -> Any:
    model, _ = prepared(port)
    parameters = dict(model.named_parameters())
    return torch.func.functional_call(model, parameters, (batches()[0][0],))


@TRANSFORMS.habit("torch.func.functional_call with other values of the network")
def functional_values(port: Port) -> Any:
    model, _ = prepared(port)
    return torch.func.functional_call(model, {"out.bias": torch.tensor([2.0])}, (batches()[0][0],))


@TRANSFORMS.habit("vmap over a model with tables")
def vmapped(port: Port) -> Any:
    model, _ = prepared(port)
    model.eval()
    ids = batches()[0][0]
    return torch.vmap(lambda one: model(one.unsqueeze(0)))(ids)


@TRANSFORMS.habit("vmap over a network without tables")
def vmapped_network(port: Port) -> Any:
    model: Any = Tower()
    model, optimizer = port(model, sgd(model))
    train(model, optimizer)
    return torch.vmap(model.layers)(torch.ones(4, 3))


@TRANSFORMS.habit("torch.fx.symbolic_trace")
def symbolic(port: Port) -> Any:
    return torch.fx.symbolic_trace(prepared(port)[0])(batches()[0][0])


@TRANSFORMS.habit("torch.jit.trace")
def traced(port: Port) -> Any:
    return torch.jit.trace(prepared(port)[0].eval(), (batches()[0][0],))(batches()[1][0])


@TRANSFORMS.habit("torch.jit.script")
def scripted(port: Port) -> Any:
    return torch.jit.script(prepared(port)[0].eval())(batches()[1][0])


@TRANSFORMS.habit("torch.export.export")
def exported(port: Port) -> Any:
    return torch.export.export(prepared(port)[0].eval(), (batches()[0][0],)).module()(batches()[1][0])


@TRANSFORMS.habit("torch.jit.trace of fleet.to_plain(model)")
def traced_plain(port: Port) -> Any:
    import torchfleet as fleet

    model, _ = prepared(port)
    plain = model if port.is_plain else fleet.to_plain(model)
    return torch.jit.trace(plain.eval(), (batches()[0][0],))(batches()[1][0])


@TRANSFORMS.habit("parametrize.register_parametrization of the network after the port")
def parametrized(port: Port) -> Any:
    model, _ = prepared(port)
    torch.nn.utils.parametrizations.weight_norm(model.hidden)
    return model(batches()[0][0])


@TRANSFORMS.habit("a quantised copy (torch.ao.quantization.quantize_dynamic)")
def quantised(port: Port) -> Any:
    model, _ = prepared(port)
    return torch.ao.quantization.quantize_dynamic(model.eval(), {torch.nn.Linear})(batches()[0][0])


@TRANSFORMS.habit("model.apply(fn) and model.children()", is_needed=True)
def applied(port: Port) -> Any:
    model, _ = prepared(port)
    found: list[str] = []
    model.apply(lambda part: found.append(part.__class__.__bases__[0].__name__))
    return len(found), [name for name, _ in model.named_children()]


@TRANSFORMS.habit("repr(model)", "a converted layer shows its own name")
def shown(port: Port) -> Any:
    return repr(prepared(port)[0])
