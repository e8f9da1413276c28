"""What loops do between the steps: gradients, writes into parameters, freezing, modes of the model, hooks."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from support.habits.habit import Group, Port
from support.habits.optimizers import Tower
from support.habits.scripts import DIM, Model, batches, loss_of, sgd, train, trained, values

LOOPS = Group("Loops and gradients")
WRITES = Group("Writes into parameters", "What a loop writes between two steps stays, and training goes on from it.")
HOOKS = Group("Hooks")


NETWORK_ALONE = {
    "hybrid": "gradients of rows go to the servers by themselves and are in no .grad: this acts on the network's alone"
}
SUBCLASS = "the class of a converted layer is a subclass of torch's, with a name of its own"


def made(port: Port, **options: Any) -> tuple[Any, Any]:
    model: Any = Model()
    return port(model, sgd(model, **options))


# Loops and gradients


@LOOPS.habit("the loop of torch's tutorial", is_needed=True)
def tutorial(port: Port) -> Any:
    model, optimizer = made(port)
    return train(model, optimizer), values(model)


@LOOPS.habit("zero_grad before forward", is_needed=True)
def zero_first(port: Port) -> Any:
    model, optimizer = made(port)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, values(model)


@LOOPS.habit("zero_grad(set_to_none=False)")
def zeros_stay(port: Port) -> Any:
    model, optimizer = made(port)
    losses = []
    for batch in batches():
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, values(model)


@LOOPS.habit("model.zero_grad()", is_needed=True)
def zero_of_model(port: Port) -> Any:
    model, optimizer = made(port)
    losses = []
    for batch in batches():
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, values(model)


@LOOPS.habit("no zero_grad at all: gradients add up over steps")
def no_zero_grad(port: Port) -> Any:
    model, optimizer = made(port, lr=0.1)
    losses = []
    for batch in batches():
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, values(model)


@LOOPS.habit("gradients of two batches add up to one step", is_needed=True)
def accumulation(port: Port) -> Any:
    model, optimizer = made(port)
    losses = []
    for number, batch in enumerate(batches(6)):
        loss = loss_of(model, batch) / 2
        loss.backward()
        losses.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, values(model)


@LOOPS.habit("a step with a closure")
def closures(port: Port) -> Any:
    model, optimizer = made(port)
    losses = []
    for batch in batches():

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return losses, values(model)


@LOOPS.habit("backward twice through one graph")
def backward_twice(port: Port) -> Any:
    model, optimizer = made(port)
    for batch in batches():
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@LOOPS.habit("two calls of the model before one backward")
def two_calls(port: Port) -> Any:
    model, optimizer = made(port)
    data = batches(6)
    for one, other in zip(data[::2], data[1::2], strict=True):
        (loss_of(model, one) + 2 * loss_of(model, other)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@LOOPS.habit("a step without a backward")
def empty_step(port: Port) -> Any:
    model, optimizer = made(port)
    optimizer.step()
    return train(model, optimizer), values(model)


@LOOPS.habit("a batch is left out: zero_grad without a step")
def left_out(port: Port) -> Any:
    model, optimizer = made(port)
    for number, batch in enumerate(batches(5)):
        loss_of(model, batch).backward()
        if number != 2:
            optimizer.step()
        optimizer.zero_grad()
    return values(model)


@LOOPS.habit("clip_grad_norm_", NETWORK_ALONE, is_needed=True)
def clipped_norm(port: Port) -> Any:
    model, optimizer = made(port)
    norms: list[float] = []

    def clip() -> None:
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))

    losses = train(model, optimizer, after_backward=clip)
    return losses, norms, values(model)


@LOOPS.habit("clip_grad_value_", NETWORK_ALONE)
def clipped_value(port: Port) -> Any:
    model, optimizer = made(port)
    losses = train(model, optimizer, after_backward=lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01))
    return losses, values(model)


@LOOPS.habit("p.grad is scaled by hand", NETWORK_ALONE)
def scaled_gradients(port: Port) -> Any:
    model, optimizer = made(port)

    def scale() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    return train(model, optimizer, after_backward=scale), values(model)


@LOOPS.habit("p.grad of the network is replaced by hand")
def replaced_gradients(port: Port) -> Any:
    model, optimizer = made(port)

    def replace() -> None:
        model.out.weight.grad = model.out.weight.grad.clone() * 2

    return train(model, optimizer, after_backward=replace), values(model)


@LOOPS.habit("p.grad = None leaves a parameter out of a step")
def gradient_taken_away(port: Port) -> Any:
    model, optimizer = made(port)

    def take_away() -> None:
        model.out.weight.grad = None

    return train(model, optimizer, after_backward=take_away), values(model)


@LOOPS.habit("gradients of the network can be read after backward")
def readable_gradients(port: Port) -> Any:
    model, optimizer = made(port)
    found: list[torch.Tensor] = []
    train(model, optimizer, after_backward=lambda: found.append(model.hidden.weight.grad.clone()))
    return found


@LOOPS.habit("torch.autograd.grad, and a gradient of a gradient")
def double_backward(port: Port) -> Any:
    model, optimizer = made(port, lr=0.05)
    for batch in batches():
        loss = loss_of(model, batch)
        (gradient,) = torch.autograd.grad(loss, model.out.weight, create_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@LOOPS.habit("an L2 term of the network in the loss")
def l2_of_network(port: Port) -> Any:
    model, optimizer = made(port)
    for batch in batches():
        (loss_of(model, batch) + 0.1 * model.hidden.weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@LOOPS.habit("an L2 term of a whole table in the loss")
def l2_of_table(port: Port) -> Any:
    model, optimizer = made(port)
    for batch in batches():
        (loss_of(model, batch) + 0.1 * model.items.weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@LOOPS.habit("a layer is frozen midway, and thawed")
def frozen_layer(port: Port) -> Any:
    model, optimizer = made(port)
    losses = train(model, optimizer, batches(2))
    model.hidden.requires_grad_(False)
    losses += train(model, optimizer, batches(2))
    model.hidden.requires_grad_(True)
    return losses + train(model, optimizer, batches(2)), values(model)


@LOOPS.habit("an embedding is frozen midway")
def frozen_table(port: Port) -> Any:
    model, optimizer = made(port)
    losses = train(model, optimizer, batches(2))
    model.items.requires_grad_(False)
    return losses + train(model, optimizer, batches(2)), values(model)


@LOOPS.habit("a layer is frozen before the port")
def frozen_before(port: Port) -> Any:
    model: Any = Model()
    model.hidden.requires_grad_(False)
    return trained(port, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5))


@LOOPS.habit("eval() and no_grad() between two steps", is_needed=True)
def evaluated(port: Port) -> Any:
    model, optimizer = made(port)
    found = []
    for batch in batches():
        train(model, optimizer, [batch])
        model.eval()
        with torch.no_grad():
            found.append(model(batch[0]))
        model.train()
    return found


@LOOPS.habit("inference_mode()")
def inferred(port: Port) -> Any:
    model, optimizer = made(port)
    train(model, optimizer)
    model.eval()
    with torch.inference_mode():
        return model(batches()[0][0]).clone()


@LOOPS.habit("ids that the training has not looked up, in evaluation")
def unseen(port: Port) -> Any:
    model, optimizer = made(port)
    train(model, optimizer)
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([[18, 19, 17], [19, 19, 0]]))


@LOOPS.habit("batch norm and its running values", is_needed=True)
def batch_norm(port: Port) -> Any:
    model: Any = Model()
    model.out = torch.nn.Sequential(torch.nn.BatchNorm1d(5), model.out)
    return trained(port, model, sgd(model))


@LOOPS.habit("dropout draws what plain torch draws", is_needed=True)
def dropout(port: Port) -> Any:
    model: Any = Model()
    model.hidden = torch.nn.Sequential(model.hidden, torch.nn.Dropout(0.5))
    model, optimizer = port(model, sgd(model))
    torch.manual_seed(11)
    return train(model, optimizer), values(model)


@LOOPS.habit("random numbers that the script draws after the port")
def random_numbers(port: Port) -> Any:
    model: Any = Model()
    torch.manual_seed(5)
    model, optimizer = port(model, sgd(model))
    first = torch.rand(2)
    train(model, optimizer)
    return first, torch.rand(2)


@LOOPS.habit("parts of the model are called by themselves", is_needed=True)
def parts_called(port: Port) -> Any:
    model, optimizer = made(port)
    losses = []
    for ids, target in batches():
        found = torch.cat([model.items(ids[:, 0]), model.words(ids)], dim=1)
        loss = (model.out(model.hidden(found)).squeeze(1) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(model)


@LOOPS.habit("another method than forward computes the loss", is_needed=True)
def other_method(port: Port) -> Any:
    class Scored(Model):
        def calculate_loss(self, batch: Any) -> torch.Tensor:
            return loss_of(self, batch) if self.training else torch.zeros(())

    model: Any = Scored()
    model, optimizer = port(model, sgd(model))
    losses = []
    for batch in batches():
        loss = model.calculate_loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(model)


@LOOPS.habit("the model is in another module")
def wrapped(port: Port) -> Any:
    class Around(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(ids)

    model, optimizer = made(port)
    around = Around(model)
    return train(around, optimizer), values(model)


@LOOPS.habit("one embedding for two inputs", is_needed=True)
def shared_embedding(port: Port) -> Any:
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items, self.out = torch.nn.Embedding(20, DIM), torch.nn.Linear(DIM, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.items(ids[:, 0]) * self.items(ids[:, 1])).squeeze(1)

    model: Any = Pair()
    return trained(port, model, sgd(model))


@LOOPS.habit("the whole weight is used in training, as users @ items.weight.T")
def whole_weight(port: Port) -> Any:
    class Ranks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = torch.nn.Embedding(20, DIM), torch.nn.Embedding(12, DIM)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.users(ids[:, 0]) @ self.items.weight.T).logsumexp(1)

    model: Any = Ranks()
    return trained(port, model, sgd(model))


@LOOPS.habit("the whole weight is used in eval()", is_needed=True)
def whole_weight_in_eval(port: Port) -> Any:
    model, optimizer = made(port)
    train(model, optimizer)
    model.eval()
    with torch.no_grad():
        return model.items(torch.tensor([1, 2])) @ model.items.weight.T


@LOOPS.habit("weights tied before the port")
def tied(port: Port) -> Any:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items, self.out = torch.nn.Embedding(20, DIM), torch.nn.Linear(DIM, 20, bias=False)
            self.out.weight = self.items.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.items(ids[:, 0])).tanh().mean(1)

    model: Any = Tied()
    return trained(port, model, sgd(model, 0.01))


@LOOPS.habit("autocast to bfloat16")
def autocast(port: Port) -> Any:
    model, optimizer = made(port)
    losses = []
    for batch in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(model)


@LOOPS.habit("GradScaler")
def grad_scaler(port: Port) -> Any:
    model, optimizer = made(port)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    for batch in batches():
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(model), float(scaler.get_scale())


@LOOPS.habit("torch.utils.checkpoint(use_reentrant=False)")
def recomputed(port: Port) -> Any:
    model, optimizer = made(port)
    losses = []
    for ids, target in batches():
        found = torch.utils.checkpoint.checkpoint(model, ids, use_reentrant=False)
        loss = (found - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(model)


@LOOPS.habit("inspect.signature(model.forward)", is_needed=True)
def signature(port: Port) -> Any:
    model, optimizer = made(port)
    before = list(inspect.signature(model.forward).parameters)
    train(model, optimizer)
    return before, list(inspect.signature(model.forward).parameters), model.forward.__name__


@LOOPS.habit("type, names and attributes of the model", is_needed=True)
def names(port: Port) -> Any:
    model, _ = made(port)
    of_layer = (model.items.num_embeddings, model.items.embedding_dim, model.words.mode, model.items.padding_idx)
    modules, parameters = (list(dict(named)) for named in (model.named_modules(), model.named_parameters()))
    return type(model).__name__, modules, parameters, of_layer


@LOOPS.habit("type(layer) is torch.nn.Embedding", SUBCLASS)
def type_of_layer(port: Port) -> Any:
    model, _ = made(port)
    return type(model.items) is torch.nn.Embedding


@LOOPS.habit("isinstance(layer, torch.nn.Embedding)", is_needed=True)
def kind_of_layer(port: Port) -> Any:
    model, _ = made(port)
    return isinstance(model.items, torch.nn.Embedding), isinstance(model.words, torch.nn.EmbeddingBag)


@LOOPS.habit("weight.shape and numel() of a table", "a worker has no rows: the weight stands for them, and is empty")
def shapes(port: Port) -> Any:
    model, _ = made(port)
    return [tuple(p.shape) for p in model.parameters()], sum(p.numel() for p in model.parameters())


# Writes into parameters


def _after_steps(port: Port, write: Any) -> Any:
    model, optimizer = made(port)
    losses = train(model, optimizer, after_step=lambda: write(model))
    return losses, values(model)


@WRITES.habit("p.clamp_() of the network after each step")
def clamped(port: Port) -> Any:
    def write(model: Any) -> None:
        with torch.no_grad():
            for parameter in [*model.hidden.parameters(), *model.out.parameters()]:
                parameter.clamp_(-0.2, 0.2)

    return _after_steps(port, write)


@WRITES.habit("p.data.mul_() of the network after each step")
def decayed(port: Port) -> Any:
    return _after_steps(port, lambda model: model.out.weight.data.mul_(0.9))


@WRITES.habit("p.data = values of the network after each step")
def data_replaced(port: Port) -> Any:
    def write(model: Any) -> None:
        model.out.weight.data = model.out.weight.data.clamp(-0.1, 0.1)

    return _after_steps(port, write)


@WRITES.habit("p.copy_() of the network once, midway")
def copied(port: Port) -> Any:
    model, optimizer = made(port)
    losses = train(model, optimizer)
    with torch.no_grad():
        model.out.weight.copy_(torch.full((1, 5), 0.3))
    return losses, train(model, optimizer), values(model)


@WRITES.habit("torch.nn.init of the network after the port")
def initialised(port: Port) -> Any:
    model, optimizer = made(port)
    torch.nn.init.constant_(model.out.weight, 0.3)
    return train(model, optimizer), values(model)


@WRITES.habit("vector_to_parameters for the network")
def from_vector(port: Port) -> Any:
    model: Any = Tower()
    model, optimizer = port(model, sgd(model))
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(0.5 * vector, model.parameters())
    return train(model, optimizer), values(model)


@WRITES.habit("a buffer is written after each step")
def buffer_written(port: Port) -> Any:
    model: Any = Model()
    model.register_buffer("seen", torch.zeros(1))
    model, optimizer = port(model, sgd(model))
    return train(model, optimizer, after_step=lambda: model.seen.add_(1)), values(model)


@WRITES.habit("embedding.weight[ids] = values after the port")
def rows_written(port: Port) -> Any:
    model, optimizer = made(port)
    with torch.no_grad():
        model.items.weight[torch.tensor([1, 2])] = 0.25
    return train(model, optimizer), values(model)


@WRITES.habit("torch.nn.init of embedding.weight after the port")
def rows_initialised(port: Port) -> Any:
    model, optimizer = made(port)
    torch.nn.init.constant_(model.items.weight, 0.25)
    return train(model, optimizer), values(model)


@WRITES.habit("embedding.weight.data.clamp_() after each step")
def rows_clamped(port: Port) -> Any:
    return _after_steps(port, lambda model: model.items.weight.data.clamp_(-0.2, 0.2))


@WRITES.habit("pruning of the network (torch.nn.utils.prune)")
def pruned(port: Port) -> Any:
    from torch.nn.utils import prune

    model: Any = Model()
    prune.l1_unstructured(model.hidden, "weight", 0.4)
    return trained(port, model, sgd(model))


@WRITES.habit("weight_norm of the network")
def weight_norm(port: Port) -> Any:
    model: Any = Model()
    torch.nn.utils.parametrizations.weight_norm(model.hidden)
    return trained(port, model, sgd(model))


# Hooks


@HOOKS.habit("forward hook of the model, and of an embedding")
def forward_hooks(port: Port) -> Any:
    model: Any = Model()
    found: list[Any] = []
    model.register_forward_hook(lambda module, inputs, output: found.append(output.detach().clone()))
    model.items.register_forward_hook(lambda module, inputs, output: found.append(output.detach().clone()))
    return trained(port, model, sgd(model)), found


@HOOKS.habit("forward hook that changes an embedding's output")
def changing_hook(port: Port) -> Any:
    model: Any = Model()
    model.items.register_forward_hook(lambda module, inputs, output: 2 * output)
    return trained(port, model, sgd(model))


@HOOKS.habit("forward pre-hook that changes the ids")
def changing_ids(port: Port) -> Any:
    model: Any = Model()
    model.items.register_forward_pre_hook(lambda module, inputs: (inputs[0] // 2,))
    return trained(port, model, sgd(model))


@HOOKS.habit("forward hook registered after the port")
def late_forward_hook(port: Port) -> Any:
    model, optimizer = made(port)
    found: list[Any] = []
    handle = model.words.register_forward_hook(lambda module, inputs, output: found.append(output.detach().clone()))
    losses = train(model, optimizer)
    handle.remove()
    return losses, train(model, optimizer), found


@HOOKS.habit("full backward hook of a layer")
def backward_hook(port: Port) -> Any:
    model: Any = Model()
    found: list[Any] = []
    model.hidden.register_full_backward_hook(lambda module, given, taken: found.append(taken[0].clone()))
    return trained(port, model, sgd(model)), found


@HOOKS.habit("full backward hook of an embedding")
def backward_hook_of_table(port: Port) -> Any:
    model: Any = Model()
    found: list[Any] = []
    model.items.register_full_backward_hook(lambda module, given, taken: found.append(taken[0].clone()))
    return trained(port, model, sgd(model)), found


@HOOKS.habit("output.register_hook on what an embedding gives")
def tensor_hook(port: Port) -> Any:
    model: Any = Model()

    def halve(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / 2)

    model.items.register_forward_hook(halve)
    return trained(port, model, sgd(model))


@HOOKS.habit("parameter.register_hook of the network before the port")
def parameter_hook(port: Port) -> Any:
    model: Any = Model()
    model.out.weight.register_hook(lambda gradient: gradient / 2)
    return trained(port, model, sgd(model))


@HOOKS.habit("parameter.register_hook of the network after the port")
def late_parameter_hook(port: Port) -> Any:
    model, optimizer = made(port)
    model.out.weight.register_hook(lambda gradient: gradient / 2)
    return train(model, optimizer), values(model)


@HOOKS.habit("register_post_accumulate_grad_hook of the network")
def accumulate_hook(port: Port) -> Any:
    model, optimizer = made(port)
    model.out.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    return train(model, optimizer), values(model)


@HOOKS.habit("embedding.weight.register_hook before the port")
def row_hook(port: Port) -> Any:
    model: Any = Model()
    model.items.weight.register_hook(lambda gradient: gradient / 2)
    return trained(port, model, sgd(model))


@HOOKS.habit("embedding.weight.register_hook after the port")
def late_row_hook(port: Port) -> Any:
    model, optimizer = made(port)
    model.items.weight.register_hook(lambda gradient: gradient / 2)
    return train(model, optimizer), values(model)


@HOOKS.habit("register_post_accumulate_grad_hook of embedding.weight before the port")
def row_accumulate_hook(port: Port) -> Any:
    model: Any = Model()
    model.items.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    return trained(port, model, sgd(model))


@HOOKS.habit("register_post_accumulate_grad_hook of embedding.weight after the port")
def late_row_accumulate_hook(port: Port) -> Any:
    model, optimizer = made(port)
    model.items.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    return train(model, optimizer), values(model)


@HOOKS.habit("step hooks of the optimizer before the port")
def step_hooks(port: Port) -> Any:
    model: Any = Model()
    optimizer: Any = sgd(model)
    found: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: found.append("pre"))
    optimizer.register_step_post_hook(lambda *_: found.append("post"))
    return trained(port, model, optimizer), found


@HOOKS.habit("step hooks of the optimizer after the port")
def late_step_hooks(port: Port) -> Any:
    model, optimizer = made(port)
    found: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: found.append("pre"))
    optimizer.register_step_post_hook(lambda *_: found.append("post"))
    return train(model, optimizer), values(model), found


@HOOKS.habit("state_dict hooks of the model")
def state_hooks(port: Port) -> Any:
    model: Any = Model()
    found: list[str] = []
    model.register_state_dict_post_hook(lambda *_: found.append("saved"))
    model, _ = port(model, sgd(model))
    found.clear()
    return sorted(model.state_dict()), found


@HOOKS.habit(
    "hooks on all modules (register_module_forward_hook)",
    {"hybrid": "they also see the modules of torch and torchfleet through which the whole model is called"},
)
def global_hooks(port: Port) -> Any:
    model, optimizer = made(port)
    found: list[Any] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: found.append([name for name, one in model.named_modules() if one is module])
    )
    try:
        train(model, optimizer)
    finally:
        handle.remove()
    return found


@HOOKS.habit("deepcopy of the model is evaluated")
def copied_model(port: Port) -> Any:
    model, optimizer = made(port)
    train(model, optimizer)
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        return twin(batches()[0][0])
