"""Steps for which memory does not suffice, at places that are drawn, on a CPU: what held it, where
the step was, and which batch would fit.
"""

import contextlib
import gc
import io
import random
import weakref
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cs336 import watch
from cs336.config import Phase
from cs336.costs.tape import Category
from cs336.record import Status, load_records
from cs336.watched import out_of_memory
from cs336.watched.holders import part_of

DRAWS = 16
PLACES = ("forward", "loss", "backward", "optimizer")
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1.00 GiB"
OPTIMIZERS = {
    "SGD": (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0),
    "momentum": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1),
    "AdamW": (lambda parameters: torch.optim.AdamW(parameters, lr=0.1), 2),
}
"""Optimizers, and how many tensors like a parameter each keeps of it."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A model, and where it fails."""

    width: int
    layers: int
    batch: int
    activation: type
    is_tied: bool
    has_checkpoints: bool
    optimizer: str
    steps_before: int
    place: str
    layer: int
    names_logits: bool


def drawn(seed):
    chance = random.Random(seed)
    layers = chance.randint(2, 4)
    return Draw(
        width=8 * chance.randint(1, 4),
        layers=layers,
        batch=chance.randint(2, 5),
        activation=chance.choice([nn.GELU, nn.ReLU, nn.Tanh]),
        is_tied=chance.random() < 0.3,
        has_checkpoints=chance.random() < 0.3,
        optimizer=chance.choice(list(OPTIMIZERS)),
        steps_before=chance.choice([0, 0, 1, 2]),
        place=chance.choice(PLACES),
        layer=chance.randrange(layers),
        names_logits=chance.random() < 0.5,
    )


class Fails(torch.autograd.Function):
    """Lets backward fail."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fault.armed:
            raise torch.OutOfMemoryError(MESSAGE)
        return gradient, None


class Fault:
    armed = False


class Block(nn.Module):
    def __init__(self, draw, fault):
        super().__init__()
        self.fault, self.norm = fault, nn.LayerNorm(draw.width)
        self.attention = nn.MultiheadAttention(draw.width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(draw.width, 3 * draw.width),
            draw.activation(),
            nn.Linear(3 * draw.width, draw.width),
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y)[0]
        y = self.mlp(x)
        if self.fault == "forward" and self.armed.armed:
            raise torch.OutOfMemoryError(MESSAGE)
        if self.fault == "backward":
            y = Fails.apply(y, self.armed)
        return x + y


class Model(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw, self.fault = draw, Fault()
        self.embedding, self.head = nn.Embedding(11, draw.width), nn.Linear(draw.width, 11)
        if draw.is_tied:
            self.head.weight = self.embedding.weight
        blocks = []
        for number in range(draw.layers):
            blocks.append(Block(draw, draw.place if number == draw.layer else ""))
            blocks[-1].armed = self.fault
        self.layers = nn.ModuleList(blocks)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.layers:
            if self.draw.has_checkpoints:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return self.head(x)


class Loop:
    """A drawn loop, whose last step fails."""

    def __init__(self, draw):
        torch.manual_seed(0)
        self.draw, self.model = draw, Model(draw)
        self.optimizer = OPTIMIZERS[draw.optimizer][0](self.model.parameters())
        self.losses = []

    def step(self):
        tokens = torch.arange(self.draw.batch * 7).reshape(self.draw.batch, 7) % 11
        if self.draw.names_logits:
            logits = self.model(tokens)
            loss = self.loss(logits, tokens)
        else:
            loss = self.loss(self.model(tokens), tokens)
        self.losses.append(loss.item())
        loss.backward()
        if self.model.fault.armed and self.draw.place == "optimizer":
            self.optimizer.step(self.fails)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, logits, tokens):
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        if self.model.fault.armed and self.draw.place == "loss":
            raise torch.OutOfMemoryError(MESSAGE)
        return loss

    def fails(self):
        raise torch.OutOfMemoryError(MESSAGE)

    def run(self, step=contextlib.nullcontext):
        """Run the steps; the last one raises."""
        for number in range(self.draw.steps_before + 1):
            self.model.fault.armed = number == self.draw.steps_before
            with step():
                self.step()


class AllStorages(TorchDispatchMode):
    """Sees the storage of each result of each operator."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, list | tuple) else [out]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.seen[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive_bytes(self):
        alive = [size for reference, size in self.seen.values() if not reference.expired()]
        return sum(alive)


def explained(loop, tmp_path):
    """Let the loop fail under `watch`, and return what is said of it, and the error."""
    watched = watch(loop.model, loop.optimizer, warmup_steps=0, output=tmp_path)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loop.run(watched.step)
    watched.remove()
    return watched.record().seen.out_of_memory, caught, watched


def parameters_bytes(loop):
    return 4 * sum(parameter.numel() for parameter in loop.model.parameters())


def bytes_by_category(told):
    held = Counter()
    for holder in told.holders:
        held[holder.category] += holder.held_bytes
    return held


def storages_of(tensors):
    """Bytes of the storages of tensors, each once."""
    storages = {}
    for tensor in tensors:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def made_until_failure(draw):
    """Bytes of what a loop without `watch` has made and not freed when it fails; its losses."""
    loop = Loop(draw)
    with AllStorages() as storages, pytest.raises(torch.OutOfMemoryError) as caught:
        loop.run()
    for parameter in loop.model.parameters():  # operators give views of them
        storages.seen.pop(parameter.untyped_storage().data_ptr(), None)
    made = storages.alive_bytes()
    del caught
    return made, loop.losses


@pytest.mark.parametrize("seed", range(DRAWS))
def test_all_memory_is_told_by_what_it_is_for(seed, tmp_path):
    draw = drawn(seed)
    made, losses = made_until_failure(draw)
    gc.collect()
    things = gc.get_objects()
    elsewhere = storages_of(thing for thing in things if isinstance(thing, torch.Tensor))
    del things
    loop = Loop(draw)
    told, caught, _ = explained(loop, tmp_path)
    held = bytes_by_category(told)
    assert losses == loop.losses
    assert caught.value.args == (MESSAGE,)
    parameters = parameters_bytes(loop)
    assert held[Category.PARAMETERS] == parameters
    gradients = [p.grad for p in loop.model.parameters() if p.grad is not None]
    assert held[Category.GRADIENTS] == sum(4 * gradient.numel() for gradient in gradients)
    copies = OPTIMIZERS[draw.optimizer][1]
    state = copies * parameters if draw.steps_before else 0
    steps = 4 * len(loop.optimizer.state) * (draw.optimizer == "AdamW")
    assert held[Category.OPTIMIZER_STATE] == state + steps
    # a number that a tensor is multiplied by is kept too, and made by no operator
    more = sum(held.values()) - made - parameters - elsewhere
    assert more in range(0, 8 * draw.layers + 1, 8)
    assert told.doing == {"loss": Phase.OTHER}.get(draw.place, draw.place)
    if draw.place in ("forward", "backward"):
        assert told.module.startswith(f"layers.{draw.layer}")


def saved_until_failure(draw):
    """Bytes that autograd keeps of a loop without `watch`, by the module that ran."""
    loop = Loop(draw)
    running, packed = [""], {}

    def leave():
        running.pop()

    for path, module in loop.model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: running.append(path))
        module.register_forward_hook(lambda *_: leave(), always_call=True)

    def pack(tensor):
        storage = tensor.untyped_storage()
        entry = running[-1], StorageWeakRef(storage), storage.nbytes()
        before = packed.get(storage.data_ptr())
        if before is None or before[1].expired():
            packed[storage.data_ptr()] = entry
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            loop.run()
    for tensor in loop.model.parameters():
        packed.pop(tensor.untyped_storage().data_ptr(), None)
    saved = Counter()
    for path, reference, size in packed.values():
        if not reference.expired():
            saved[part_of(path)] += size
    del caught
    return saved


@pytest.mark.parametrize("seed", range(DRAWS))
def test_activations_are_told_by_module(seed, tmp_path):
    draw = replace(drawn(seed), has_checkpoints=False, place="forward")
    saved = saved_until_failure(draw)
    told, _, _ = explained(Loop(draw), tmp_path)
    by_part = Counter()
    for holder in told.holders:
        if holder.category in (Category.ACTIVATIONS, Category.LOSS):
            by_part[holder.module] += holder.held_bytes
    missed = sum((saved - by_part).values())
    print(missed / sum(saved.values()), dict(saved), dict(by_part))
