"""What is said of drawn forward passes, beside what PyTorch computes in them: FLOPs of the backward
that ran, the type of matmuls, lengths of sequences and tokens.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry

from cs336 import watch
from cs336.analysis.loop_times import loop_sentences
from cs336.config import Precision
from cs336.watched.graph import HIGHER, PARTIAL, REFROZEN, TRANSFORMED, TWICE

SEEDS = 24
WIDTH, VOCABULARY, BATCH = 8, 19, 6
MATMULS = ("mm", "addmm", "bmm", "baddbmm")


class Dispatched(TorchDispatchMode):
    """What PyTorch dispatches: FLOPs by its own formulas, and the types of matmuls."""

    def __init__(self):
        super().__init__()
        self.flops, self.dtypes = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        packet = function._overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        if packet._qualified_op_name.removeprefix("aten::") in MATMULS:
            self.dtypes.add(out.dtype)
        return out


def seen_of(models, parameters, step, folder, steps=3):
    """The record of a loop of these steps, which are each given their number."""
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    watched = watch(models, optimizer, warmup_steps=0, output=folder, every=0)
    for number in range(steps):
        with watched.step():
            step(number)
            optimizer.step()
            optimizer.zero_grad()
    record = watched.record()
    watched.remove()
    return record


# FLOPs


@dataclass
class Output:
    """Results in a data class, as many models return them."""

    results: list[Tensor]
    name: str = "heads"


class Result:
    """Results in an object of a class of one's own."""

    def __init__(self, results):
        self.results = results


WAYS = {
    "tuple": (tuple, tuple),
    "dictionary": (lambda results: dict(enumerate(results)), lambda made: [*made.values()]),
    "data class": (Output, lambda made: made.results),
    "object": (Result, lambda made: made.results),
    "namespace": (lambda results: SimpleNamespace(logits=results), lambda made: made.logits),
}


class Heads(nn.Module):
    """A body and heads of unequal widths, whose results are returned in some way."""

    def __init__(self, widths, way):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)
        self.way = way

    def forward(self, x):
        hidden = self.body(x).tanh()
        return WAYS[self.way][0]([head(hidden) for head in self.heads])


BACKWARDS = ("once", "twice", "higher", "partial", "refrozen", "transformed")
REASONS = {
    "twice": (TWICE,),
    "higher": (HIGHER, TWICE),
    "partial": (PARTIAL,),
    "refrozen": (REFROZEN,),
    "transformed": (TRANSFORMED,),
}


class Passes:
    """A drawn step: what its passes are for, which results are trained on, and what is frozen."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        widths = [draw.randint(2, 9) for _ in range(draw.randint(1, 3))]
        self.model = Heads(widths, draw.choice([*WAYS]))
        self.trained = draw.sample(range(len(widths)), draw.randint(1, len(widths)))
        self.passes = [draw.choice(("train", "detach", "drop")) for _ in range(2)]
        self.backward = BACKWARDS[seed % len(BACKWARDS)] if seed % 2 else "once"
        if draw.random() < 0.4:
            self.model.body.requires_grad_(False)
        # more rows than any matrix has sides, and several shapes of calls
        self.rows = [draw.randint(20, 30) for _ in range(3)]

    def results(self, rows):
        made = WAYS[self.model.way][1](self.model(torch.randn(rows, WIDTH)))
        return [made[place] for place in self.trained]

    def loss(self, rows):
        return torch.stack([result.square().mean() for result in self.results(rows)]).sum()

    def step(self, number):
        """Passes beside the trained one, and this one with its backward."""
        targets = torch.zeros(())
        for kind, rows in zip(self.passes, self.rows, strict=False):
            if kind == "train":
                self.loss(rows).backward()
                continue
            loss = self.loss(rows)
            if kind == "detach":
                targets = targets + loss.detach()
        getattr(self, self.backward)(number, targets)

    def once(self, _number, targets):
        (self.loss(self.rows[-1]) - targets).square().backward()

    def twice(self, _number, _targets):
        loss = self.loss(self.rows[-1])
        loss.backward(retain_graph=True)
        loss.square().backward()

    def higher(self, _number, _targets):
        loss, weight = self.loss(self.rows[-1]), self.model.heads[self.trained[0]].weight
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        gradient.square().sum().backward()

    def partial(self, _number, _targets):
        weight = self.model.heads[self.trained[0]].weight
        (weight.grad,) = torch.autograd.grad(self.loss(self.rows[-1]), weight)

    def refrozen(self, number, targets):
        self.model.heads[self.trained[0]].requires_grad_(number == 0)
        (self.loss(self.rows[-1]) - targets).square().backward()

    def transformed(self, _number, _targets):
        def loss(row):
            made = WAYS[self.model.way][1](self.model(row.unsqueeze(0)))
            return made[self.trained[0]].square().mean()

        torch.func.vmap(torch.func.grad(loss))(torch.randn(self.rows[-1], WIDTH))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_flops_are_those_of_the_backward_that_ran_or_the_reason_is_said(seed, tmp_path):
    passes = Passes(seed)
    record = seen_of(passes.model, [*passes.model.parameters()], passes.step, tmp_path)
    if passes.backward != "once":
        assert record.seen.flops is None
        assert record.seen.not_traced in REASONS[passes.backward]
        return
    with Dispatched() as dispatched:
        passes.step(0)
    assert record.seen.not_traced == ""
    assert record.seen.flops.per_step == dispatched.flops


# precision


class Within(nn.Linear):
    """A linear layer that casts what it is given, as those of BitNet and of fast GPT-2s."""

    dtype = torch.bfloat16

    def forward(self, x):
        return functional.linear(x.to(self.dtype), self.weight.to(self.dtype)).to(x.dtype)


class Einsum(nn.Module):
    """A linear layer as the course asks for it."""

    def __init__(self, inner, outer):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner) / inner)

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Apart(Einsum):
    """One that computes without autocast, whatever is around it."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.to(self.weight.dtype))


class Raw(nn.Module):
    """A model whose own parameters are its matrices, under autocast of its own or without."""

    def __init__(self, inner):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, VOCABULARY))
        self.inner = inner

    def forward(self, tokens):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inner):
            return self.embedding(tokens) @ self.weight


LAYERS = {"PyTorch's": nn.Linear, "casts": Within, "einsum": Einsum, "apart": Apart}
PRECISIONS = {torch.float32: Precision.FP32, torch.bfloat16: Precision.BF16}


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("kind", [*LAYERS, "raw", "raw within"])
def test_the_precision_is_that_of_the_matmuls_that_ran(kind, low, outer, tmp_path):
    if kind.startswith("raw"):
        model = Raw(kind == "raw within")
    else:
        make = LAYERS[kind]
        model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), make(WIDTH, WIDTH), make(WIDTH, 3))
    if low:
        model.bfloat16()
    tokens = torch.zeros(2, 5, dtype=torch.int64)

    def step(_number):
        with torch.autocast("cpu", torch.bfloat16) if outer else nullcontext():
            logits = model(tokens)
        logits.float().sum().backward()

    with Dispatched() as dispatched:
        step(0)
    record = seen_of(model, [*model.parameters()], step, tmp_path)
    (dtype,) = dispatched.dtypes
    assert record.loop.precision is PRECISIONS[dtype]


# lengths and tokens


class Sequences(nn.Module):
    """Mixes tokens by a layer of PyTorch, which may want the sequence first, and a few things that
    have lengths of their own.
    """

    def __init__(self, mixer, *, batch_first, has_matrix, has_samples):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.samples = nn.Embedding(BATCH, WIDTH) if has_samples else None
        self.batch_first, self.is_attention = batch_first, mixer == "attention"
        if has_matrix:  # a buffer of the batch's size is no mask
            self.register_buffer("matrix", torch.randn(BATCH, BATCH))
        self.mixer = None
        if mixer == "attention":
            self.mixer = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
        elif mixer == "recurrent":
            self.mixer = nn.GRU(WIDTH, WIDTH, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, samples):
        hidden = self.embedding(tokens)
        if self.samples is not None:
            hidden = hidden + self.samples(samples)[:, None]
        if self.mixer is not None:
            hidden = hidden if self.batch_first else hidden.transpose(0, 1)
            given = (hidden, hidden, hidden) if self.is_attention else (hidden,)
            hidden = self.mixer(*given)[0]
        return self.head(hidden)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_length_is_that_of_the_sequences_or_is_not_said(seed, tmp_path):
    draw = random.Random(seed)
    mixer = draw.choice(("attention", "recurrent", "none"))
    model = Sequences(
        mixer,
        batch_first=draw.random() < 0.5,
        has_matrix=draw.random() < 0.5,
        has_samples=draw.random() < 0.5,
    )
    length = draw.choice([5, 9, BATCH])
    chunks = draw.choice([1, 2, 3])
    data = [torch.randint(VOCABULARY, (length + 1,)) for _ in range(24)]
    batches = iter(DataLoader(data, batch_size=BATCH))

    def step(_number):
        batch = next(batches)
        for chunk in batch.chunk(chunks):
            model(chunk[:, :-1], torch.arange(len(chunk))).sum().backward()

    record = seen_of(model, [*model.parameters()], step, tmp_path)
    told = record.seen.context_lengths
    assert told in (None, (length, length))
    if length != BATCH // chunks and mixer != "none":
        assert told is not None
    assert record.seen.tokens == (BATCH * length,) * 3


class Lookups(nn.Module):
    """Looks integers up in tables."""

    def __init__(self, look_up: Callable[..., Tensor]):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.look_up = look_up

    def forward(self, *given):
        return self.head(self.look_up(self.tables, *given))


def codes(tables, floats):
    """Codes of floats, as those of a VQ-VAE."""
    return floats + tables[0](floats.argmax(-1))


def steps(tables, tokens):
    """Tokens one by one."""
    return sum(tables[0](tokens[:, place]) for place in range(tokens.shape[1]))


def relative(tables, tokens):
    """Positions of each two tokens have a table, as T5's."""
    places = torch.arange(tokens.shape[1])
    distances = (places[:, None] - places).abs()
    return tables[0](tokens) + tables[1](distances).mean(0)


LONG, SHORT = (4, 9), (4, 7)
LOOKUPS = {
    "codes": (codes, [torch.randn(4, 9, WIDTH)], None),
    "steps": (steps, [LONG], 36),
    "relative positions": (relative, [LONG], 36),
    "kinds of tokens": (lambda t, a, b: t[0](a) + t[1](b), [LONG, LONG], 36),
    "a table for two": (lambda t, a, b: t[0](a).sum(1) + t[0](b).sum(1), [LONG, SHORT], 64),
    "two tables": (lambda t, a, b: t[0](a).sum(1) + t[1](b).sum(1), [LONG, SHORT], None),
    "negatives": (
        lambda t, a, b, c: t[0](a) * (t[1](b) + t[1](c).sum(1)),
        [(16,), (16,), (16, 5)],
        None,
    ),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_tokens_are_integers_that_the_model_is_given(name, tmp_path):
    look_up, given, tokens = LOOKUPS[name]
    model = Lookups(look_up)
    inputs = [
        torch.randint(VOCABULARY, shape) if isinstance(shape, tuple) else shape for shape in given
    ]
    record = seen_of(
        model, [*model.parameters()], lambda _number: model(*inputs).sum().backward(), tmp_path
    )
    assert record.seen.tokens == (() if tokens is None else (tokens,) * 3)


@pytest.mark.parametrize("kind", ["integers", "booleans", "floats"])
def test_padding_is_said_where_zeros_are_what_is_left_out(kind, tmp_path):
    """In masks of booleans either may be left out, and floats are added to scores."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)

        def forward(self, input_ids, attention_mask):
            return self.embedding(input_ids)

    model = Masked()
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[0, -2:] = 0
    if kind == "booleans":
        mask = mask == 0
    if kind == "floats":
        mask = mask.float().log()
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    record = seen_of(
        model,
        [*model.parameters()],
        lambda _: model(input_ids=tokens, attention_mask=mask).sum().backward(),
        tmp_path,
    )
    assert record.seen.padding_tokens == (6 if kind == "integers" else None)


def test_an_error_of_one_loop_is_not_said_of_the_next(tmp_path, monkeypatch):
    from cs336.watched.tokens import PassReader

    def fails(*_):
        raise LookupError("in a hook")

    said = []
    for has_failed in (True, False):
        model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3))
        with monkeypatch.context() as patched:
            if has_failed:
                patched.setattr(PassReader, "embeds", fails)
            tokens = torch.zeros(2, 5, dtype=torch.int64)
            record = seen_of(
                model,
                [*model.parameters()],
                lambda _, model=model, tokens=tokens: model(tokens).sum().backward(),
                tmp_path,
            )
        said.append(any("in a hook" in warning.message for warning in record.warnings))
    assert said == [True, False]


def test_hooks_of_others_are_left_out_of_a_trace_whatever_module_has_them(tmp_path):
    """They would act on the loop's own tensors; a watched module was once copied with them."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH))
    calls = []
    for module in (model, *model):
        module.register_forward_hook(lambda *_: calls.append(1))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    record = seen_of(
        model, [*model.parameters()], lambda _: model(tokens).sum().backward(), tmp_path
    )
    assert record.seen.flops.modules_with_hooks == 3
    assert len(calls) == 9
    (told,) = [said for said in loop_sentences(record) if said.startswith("model: ")]
    assert told.endswith("without what forward hooks of 3 modules compute")
