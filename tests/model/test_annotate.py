"""Ranges as torch.profiler sees them: which, in what order, nested how, and around which
operators.
"""

import contextlib
import gc
import warnings
from collections import Counter
from dataclasses import dataclass, field

import nvtx
import pytest
import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from cs336.config import Arch, ModelConfig, OptimizerKind, Precision, RunConfig
from cs336.model import annotate as profiling
from cs336.model.annotate import (
    Annotator,
    annotate,
    backward_ranges,
    forward_ranges,
    module_names,
    own_names,
    set_annotator,
)
from cs336.model.fast.model import FastLM
from cs336.model.transformer import TransformerLM
from cs336.ranges import Range

LAYERS = 2
NAMES = {str(name) for name in Range} | {f"block.{i}" for i in range(LAYERS)}


@dataclass
class Span:
    """One range of the trace, and what it directly holds."""

    event: FunctionEvent
    children: list["Span"] = field(default_factory=list)

    def names(self):
        names = []
        for child in self.children:
            names.append(child.event.name)
            if child.children:
                names.append(child.names())
        return names


def spans(events):
    """Tree of the ranges among `events`; two that overlap without one holding the other are an
    error.
    """
    root = Span(event=None)
    stack = [root]
    for event in sorted(
        (e for e in events if e.name in NAMES),
        key=lambda e: (e.time_range.start, -e.time_range.end),
    ):
        while len(stack) > 1 and stack[-1].event.time_range.end <= event.time_range.start:
            stack.pop()
        assert len(stack) == 1 or event.time_range.end <= stack[-1].event.time_range.end, (
            "ranges overlap"
        )
        stack[-1].children.append(span := Span(event))
        stack.append(span)
    return root


def innermost(events, operator):
    """Of each call of `operator`, the name of the shortest range around it."""

    def around(call):
        holding = [
            e
            for e in events
            if e.name in NAMES
            and e.thread == call.thread
            and e.time_range.start <= call.time_range.start
            and call.time_range.end <= e.time_range.end
        ]
        return (
            min(holding, key=lambda e: e.time_range.end - e.time_range.start).name
            if holding
            else ""
        )

    return Counter(around(event) for event in events if event.name == operator)


def make(arch, device="cpu"):
    torch.manual_seed(0)
    config = ModelConfig(
        arch=arch,
        vocab_size=11,
        context_length=8,
        d_model=16,
        d_ff=20,
        num_layers=LAYERS,
        num_heads=2,
    )
    with torch.device(device):
        return TransformerLM(config), torch.randint(config.vocab_size, (3, 7))


def loss_of(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.fixture
def recording():
    set_annotator(Annotator.RECORD_FUNCTION)
    yield
    set_annotator(Annotator.NONE)
    assert not profiling._thread.records, "a range was left open"


def test_ranges_nest_and_close_on_error(recording):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with (
            pytest.raises(RuntimeError, match="boom"),
            annotate("step"),
            annotate("forward"),
            annotate("norm"),
        ):
            raise RuntimeError("boom")
        with annotate("forward"), annotate("ffn"), annotate("forward"):
            pass
    assert spans(prof.events()).names() == [
        "step",
        ["forward", ["norm"]],
        "forward",
        ["ffn", ["forward"]],
    ]


def test_nvtx_ranges_are_registered_strings_of_the_default_domain(monkeypatch):
    """The only names that `nsys profile --nvtx-capture=measure` looks at; a range ends where an
    exception passes.
    """
    calls = []

    class Domain:
        def get_event_attributes(self, message):
            calls.append(f"registered {message}")
            return f"attributes of {message}"

        push_range = calls.append

        def pop_range(self):
            calls.append("pop")

    monkeypatch.setattr(nvtx, "get_domain", Domain)  # which is given no name
    set_annotator(Annotator.NVTX)
    try:
        for _ in range(2):
            with (
                contextlib.suppress(RuntimeError),
                annotate(Range.ATTENTION),
                annotate(Range.SCORES),
            ):
                raise RuntimeError
    finally:
        set_annotator(Annotator.NONE)
    ranges = ["attributes of attention", "attributes of attention.scores", "pop", "pop"]
    assert [call for call in calls if not call.startswith("registered")] == ranges * 2
    assert len(calls) == 2 * len(ranges) + 2


@pytest.mark.parametrize("annotator", [Annotator.NONE, Annotator.RECORD_FUNCTION])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_vanishes_while_compiling(backend, annotator):
    @torch.compile(fullgraph=True, backend=backend)
    def double(x):
        with annotate(Range.FFN), annotate(Range.NORM):
            return x + x

    set_annotator(annotator)
    try:
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            assert double(torch.ones(2)).tolist() == [2, 2]
    finally:
        set_annotator(Annotator.NONE)
    assert not spans(prof.events()).children


@pytest.mark.parametrize("arch", list(Arch))
def test_forward_ranges(arch, recording):
    model, tokens = make(arch)
    with profile(activities=[ProfilerActivity.CPU]) as prof, torch.no_grad():
        model(tokens)
    block = [
        "norm",
        "attention",
        ["attention.scores", "attention.softmax", "attention.values"],
        "norm",
        "ffn",
    ]
    expected = ["embedding", "block.0", block, "block.1", block, "norm", "lm_head"]
    assert spans(prof.events()).names() == expected


FUSED = {
    "precision": Precision.BF16,
    "optimizer": OptimizerKind.FUSED,
    "cast_once": True,
    "fused_blocks": True,
}


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("arch", list(Arch))
def test_backward_ranges(arch, is_fused, recording):
    """Those of fused blocks too, though a block's branch is added by the norm of the next block."""
    model, tokens = make(arch)
    computed = (
        FastLM(model, RunConfig(size="custom", model=model.config, **FUSED)) if is_fused else model
    )
    with (
        backward_ranges(own_names(computed)),
        torch.autocast("cpu", torch.bfloat16, enabled=is_fused),
    ):
        loss = loss_of(computed, tokens)
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            loss.backward()
    block = ["ffn", "norm", "attention", "norm"]
    expected = ["lm_head", "norm", "block.1", block, "block.0", block, "embedding"]
    assert spans(prof.events()).names() == expected
    if is_fused:
        assert innermost(prof.events(), "cs336::add_norm_backward") == {"norm": 2 * LAYERS + 1}
        assert innermost(prof.events(), "cs336::lookup_backward") == {"embedding": 1}


def test_backward_operators_are_in_their_ranges(recording):
    """Backward of a linear layer is two matmuls, of attention's scores and values two batched
    ones each.
    """
    model, tokens = make(Arch.CS336)
    with backward_ranges(own_names(model)):
        loss = loss_of(model, tokens)
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            loss.backward()
    events = prof.events()
    assert innermost(events, "aten::mm") == {
        "lm_head": 2,
        "ffn": 6 * LAYERS,
        "attention": 8 * LAYERS,
    }
    assert innermost(events, "aten::bmm") == {"attention": 4 * LAYERS}
    assert innermost(events, "aten::_softmax_backward_data") == {"attention": LAYERS}
    assert innermost(events, "aten::silu_backward") == {"ffn": LAYERS}
    assert innermost(events, "aten::embedding_dense_backward") == {"embedding": 1}
    assert set(innermost(events, "torch::autograd::AccumulateGrad")) == {
        "lm_head",
        "norm",
        "ffn",
        "attention",
        "embedding",
    }


@pytest.mark.parametrize("arch", list(Arch))
def test_gradients_are_the_same_to_the_bit(arch, recording):
    gradients = []
    for hooked in (False, True):
        model, tokens = make(arch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if hooked:
                with backward_ranges(own_names(model)):
                    loss_of(model, tokens).backward()
            else:
                loss_of(model, tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_backward_ranges_stay_balanced_over_overlapping_graphs(recording):
    model, tokens = make(Arch.GPT2)
    with backward_ranges(own_names(model)):
        # its graph shares the nodes that accumulate into the parameters
        unused = loss_of(model, tokens)
        for _ in range(3):
            loss = loss_of(model, tokens)
            with profile(activities=[ProfilerActivity.CPU]) as prof:
                loss.backward(retain_graph=True)
                loss.backward()
            assert [name for name in spans(prof.events()).names() if isinstance(name, str)] == [
                "lm_head",
                "norm",
                "block.1",
                "block.0",
                "embedding",
            ] * 2
    del unused


def test_backward_ranges_leave_no_cycle(recording):
    model, tokens = make(Arch.CS336)
    gc.collect()
    gc.disable()
    try:
        with backward_ranges(own_names(model)):
            loss = loss_of(model, tokens)
            loss.backward()
            del loss
        assert not [o for o in gc.get_objects() if type(o) is profiling._CloseAfter], (
            "a graph outlived its loss"
        )
    finally:
        gc.enable()


def test_modules_of_another_model_have_ranges_by_their_places_in_both_directions():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.step = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, *, hidden):
            return self.step(self.attention(hidden)), None

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, tokens):
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden, _ = layer(hidden=hidden)
            return {"logits": hidden}

    model = Other()
    names = module_names(model, 2)
    assert list(names.values()) == [
        "Other",
        "embedding",
        "layers.0",
        "attention",
        "step module",
        "layers.1",
        "attention",
        "step module",
    ]
    assert [*module_names(model, 0).values()] == ["Other"]
    set_annotator(Annotator.RECORD_FUNCTION)
    with (
        profile(activities=[ProfilerActivity.CPU]) as prof,
        forward_ranges(names),
        backward_ranges(names),
    ):
        model(torch.zeros(1, 4, dtype=torch.long))["logits"].sum().backward()
    products = {"aten::addmm": [], "aten::mm": []}
    for event in prof.events():
        if event.name in products:
            path = []
            parent = event.cpu_parent
            while parent is not None:
                if parent.name in names.values():
                    path.insert(0, parent.name)
                parent = parent.cpu_parent
            products[event.name].append(" ".join(path))
    forward = [
        f"Other layers.{i} {part}" for i in range(2) for part in ("attention", "step module")
    ]
    assert products["aten::addmm"] == forward
    assert products["aten::mm"] == [place for place in reversed(forward) for _ in range(2)]
