"""Steps for which memory does not suffice, at places that are drawn, on a CPU: what held it, where
the step was, and which batch would fit.
"""

import contextlib
import gc
import random
import traceback
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

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
from cs336.watched import fitting, observer, out_of_memory
from cs336.watched.calls import call_of
from cs336.watched.holders import part_of
from cs336.watched.kept_state import kept_state

DRAWS = 16
PLACES = ("forward", "loss", "backward", "optimizer")
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1.00 GiB"
OPTIMIZERS = {
    "SGD": (partial(torch.optim.SGD, lr=0.1), 0),
    "momentum": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
    "AdamW": (partial(torch.optim.AdamW, lr=0.1), 2),
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


def failing(kind, fault):
    """An optimizer of this kind that may fail."""

    class Failing(kind):
        def step(self, closure=None):
            if fault.armed:
                raise torch.OutOfMemoryError(MESSAGE)
            return super().step(closure)

    return Failing


class Loop:
    """A drawn loop, whose last step fails."""

    def __init__(self, draw):
        torch.manual_seed(0)
        self.draw, self.model = draw, Model(draw)
        self.optimizer = OPTIMIZERS[draw.optimizer][0](self.model.parameters())
        self.losses = []
        if draw.place == "optimizer":
            self.optimizer.__class__ = failing(type(self.optimizer), self.model.fault)

    def step(self):
        tokens = torch.arange(self.draw.batch * 7).reshape(self.draw.batch, 7) % 11
        if self.draw.names_logits:
            logits = self.model(tokens)
            loss = self.loss(logits, tokens)
        else:
            loss = self.loss(self.model(tokens), tokens)
        self.losses.append(loss.item())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, logits, tokens):
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        if self.model.fault.armed and self.draw.place == "loss":
            raise torch.OutOfMemoryError(MESSAGE)
        return loss

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

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with pytest.raises(torch.OutOfMemoryError) as caught, hooks:
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
    assert missed == 0


def kept_after(draw, make_step):
    """Whether what a loop has made is gone with the exception, without the garbage collector."""
    loop = Loop(draw)
    step = make_step(loop)
    gc.collect()
    gc.disable()
    try:
        with AllStorages() as storages, contextlib.suppress(torch.OutOfMemoryError):
            loop.run(step)
    finally:
        gc.enable()
    loop.optimizer.state.clear()
    loop.model.zero_grad()
    for parameter in loop.model.parameters():
        storages.seen.pop(parameter.untyped_storage().data_ptr(), None)
    return storages.alive_bytes()


@pytest.mark.parametrize("place", PLACES)
def test_nothing_of_the_step_is_kept(place, tmp_path):
    draw = replace(drawn(1), place=place)
    loops = []

    def watching(loop):
        loops.append(watch(loop.model, loop.optimizer, warmup_steps=0, output=tmp_path))
        return loops[-1].step

    assert kept_after(draw, watching) == kept_after(draw, lambda _: contextlib.nullcontext) == 0
    loops[0].remove()


def functions_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_the_exception_goes_on_as_it_is(tmp_path, monkeypatch):
    draw = replace(drawn(1), place="forward")
    errors = []

    def fail(*_):
        errors.append(torch.OutOfMemoryError(MESSAGE))
        raise errors[-1]

    monkeypatch.setattr(Block, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError) as plain:
        Loop(draw).run()
    _, caught, _ = explained(Loop(draw), tmp_path)
    assert caught.value is errors[1]
    ours = [name for name in functions_of(caught.value) if name != "explained"]
    theirs = functions_of(plain.value)[1:]
    assert [name for name in ours if name in theirs][-len(theirs) :] == theirs


def test_a_failing_explanation_is_only_noted(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    draw = replace(drawn(2), place="loss", steps_before=0)
    for name in ("place_of", "all_tensors", "describe"):
        with monkeypatch.context() as patched:
            patched.setattr(out_of_memory, name, broken)
            told, caught, watched = explained(Loop(draw), tmp_path)
            assert caught.value.args == (MESSAGE,)
            assert told.requested_bytes == 20 * 2**20
            assert watched.record().status is Status.OOM
    observer.TROUBLES.clear()


def test_the_record_of_a_loop_without_a_measured_step_says_why(tmp_path, capsys):
    draw = replace(drawn(3), place="backward", steps_before=0)
    told, _, watched = explained(Loop(draw), tmp_path)
    watched.report(page=False)
    (record,), problems = load_records(watched.directory / "runs")
    assert not problems
    assert record.status is Status.OOM
    assert record.seen.out_of_memory == told
    printed = capsys.readouterr().out
    assert "20.00 MiB" in printed
    assert "self.step()" in printed
    for holder in told.holders:
        assert holder.category in printed


def test_the_end_of_the_loop_reports_it(tmp_path, capsys):
    loop = Loop(replace(drawn(3), place="forward", steps_before=0))
    watched = watch(loop.model, loop.optimizer, output=tmp_path)
    with pytest.raises(torch.OutOfMemoryError) as caught, watched:
        loop.run(watched.step)
    assert caught.value.args == (MESSAGE,)
    (record,), _ = load_records(watched.directory / "runs")
    assert record.seen.out_of_memory.doing == Phase.FORWARD
    assert record.seen.out_of_memory.module in capsys.readouterr().out


class Chain(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Identity()) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("seed", range(6))
def test_the_batch_that_is_advised_follows_from_arithmetic(seed, tmp_path, monkeypatch):
    chance = random.Random(seed)
    width, layers = 128 * chance.randint(2, 5), chance.randint(3, 8)
    rows, asked = 128 * chance.randint(8, 16), chance.randint(2, 40)
    model = Chain(width, layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample, weights = 4 * rows * width, 4 * layers * width**2
    constant = torch.empty(chance.randint(0, 2**24))
    room = 3 * weights + 200 * sample + 4 * constant.numel() + 2**28
    monkeypatch.setattr(out_of_memory, "device_memory", lambda *_: memory_of(room))
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path)

    def fail(*_):
        raise torch.OutOfMemoryError(MESSAGE)

    model.layers[-1].register_forward_hook(fail)
    x = torch.empty(asked, rows, width)
    with pytest.raises(torch.OutOfMemoryError), watched.step():
        F.mse_loss(model(x), x)
    watched.remove()
    told = watched.record().seen.out_of_memory
    assert not told.not_foretold
    assert told.batch_size == asked
    plain, checkpointed = told.fits
    # beside the input, which is the target too: what each layer returns, and in backward two
    # gradients; the weights and their gradients; two workspaces of cuBLAS, of at most 32 MiB each
    free = room - 4 * constant.numel() - 2 * weights
    most, least = free / sample / (layers + 1), (free - 2**27) / sample / (layers + 5)
    assert int(least) <= plain.batch_size <= most
    # of checkpoints only what each block is given is kept, which is here what it returns
    assert abs(checkpointed.batch_size - plain.batch_size) <= 0.3 * plain.batch_size
    del constant


def memory_of(room):
    """A GPU on which PyTorch's allocator may have so much."""
    return out_of_memory.DeviceMemory(
        total=2**40,
        free=2**40,
        reserved=0,
        allocated=0,
        allowed=room,
        block_bytes={},
        is_expandable=False,
        pool_bytes=0,
    )


def traced(model, optimizer, batch, **known):
    """The first steps of a loop, traced, whose loss is the mean square of the results."""
    loop = fitting.Loop(
        call=call_of(weakref.ref(model), (batch,), {}),
        batch_axis=0,
        optimizers=[optimizer],
        loss="mse_loss",
        kept=fitting.Kept.LOSS,
        **known,
    )
    with kept_state([model]):
        return fitting._traced(loop, len(batch), 60.0, is_checkpointed=False)[0]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_is_there_before_the_trace_is_counted(autocast):
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    tape = traced(model, optimizer, torch.randn(8, 64), autocast=autocast)
    parameters = [parameter.nbytes for parameter in model.parameters()]
    assert tape.bytes_of(Category.PARAMETERS) == sum(parameters)
    first = [tape.spec(handle) for handle in range(len(tape.tensors))][: len(parameters) + 4]
    sizes = Counter(spec.size_bytes for spec in first)
    assert not Counter(parameters) - sizes, "before everything else"
    assert tape.spec(0).category is Category.BUFFERS


def test_a_checkpoint_that_failed_runs_nothing_in_the_trace():
    """Before 2.13, PyTorch leaves the hooks of such a checkpoint, as these are left."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters())
    batch = torch.randn(8, 64)
    expected = traced(model, optimizer, batch)

    def run_again(_: object) -> torch.Tensor:
        raise AssertionError("the trace runs the user's model")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, run_again):
        tape = traced(model, optimizer, batch)
    assert (tape.tensors, tape.events) == (expected.tensors, expected.events)


def test_dropout_keeps_a_byte_for_each_element():
    """CUDA's kernel keeps a mask of bool; made of other operators, it would be one of numbers."""
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Dropout(0.1))
    tape = traced(model, torch.optim.SGD(model.parameters()), torch.randn(8, 64))
    (first, *_) = tape.steps
    (_, begin, _), (_, end, _), *_ = first
    made = [tape.spec(event) for event in tape.events[begin:end] if event >= 0]
    sizes = [spec.size_bytes for spec in made if "dropout" in spec.label]
    assert sorted(sizes) == [8 * 96, 4 * 8 * 96], "the mask and the result"
