"""Ranges of every kind of run, for everyone who watches: each that opens closes, on its thread, in
order.

With one closed too many torch.profiler raises; nsys closes another in its place, and books kernels
to the wrong phase.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn

from cs336.config import (
    EAGER_STEPS_BEFORE_GRAPH,
    Arch,
    CompileMode,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Phase,
    Precision,
    Profiler,
    RunConfig,
)
from cs336.measure.clock import StepTimes
from cs336.measure.step import TrainingStep
from cs336.measure.watchers import Watch, annotator_of
from cs336.model import annotate as profiling
from cs336.model.annotate import Annotator, annotate, set_annotator
from cs336.model.fast import model as fast_model
from cs336.model.fast.step_graph import StepGraph
from tests.measure.allocator import make_up_allocator
from tests.own_models import Uneven
from tests.plain import plain_blocks, plain_model

MODEL = ModelConfig(vocab_size=11, context_length=8, d_model=16, d_ff=16, num_layers=3, num_heads=2)
CONFIG = RunConfig(size="custom", model=MODEL, batch_size=2)
FAST = replace(
    CONFIG,
    precision=Precision.BF16,
    optimizer=OptimizerKind.FUSED,
    cast_once=True,
    fused_loss=True,
    fused_blocks=True,
)
BLOCKS = {"compile": CompileMode.DEFAULT, "compile_blocks": True}


@dataclass(frozen=True)
class Kind:
    """A kind of run, and the model of its own where it has one."""

    config: RunConfig
    model: Callable[[], nn.Module] | None = None
    has_graph: bool = False


def plain() -> nn.Module:
    """Ours, as the compiler can trace it."""
    return plain_model().TransformerLM(MODEL)


KINDS: dict[str, Kind] = {
    "eager": Kind(CONFIG),
    "gpt2": Kind(replace(CONFIG, model=replace(MODEL, arch=Arch.GPT2))),
    "checkpoint": Kind(replace(CONFIG, checkpoint_blocks=1)),
    "checkpoints of two": Kind(replace(CONFIG, checkpoint_blocks=2, mode=Mode.FORWARD_BACKWARD)),
    "compiled": Kind(replace(CONFIG, compile=CompileMode.DEFAULT), plain),
    "compiled by block, checkpoint": Kind(replace(CONFIG, **BLOCKS, checkpoint_blocks=1), plain),
    "graph": Kind(replace(CONFIG, optimizer=OptimizerKind.FUSED), has_graph=True),
    "fast, checkpoint": Kind(replace(FAST, checkpoint_blocks=2)),
    "fp16": Kind(replace(CONFIG, precision=Precision.FP16)),
    "tokens": Kind(replace(CONFIG, tokens="tokens.npy")),
    "own model": Kind(CONFIG, lambda: Uneven(MODEL.vocab_size, MODEL.d_model)),
    "inference, checkpoint": Kind(replace(CONFIG, mode=Mode.INFERENCE, checkpoint_blocks=1)),
}


class Stacks:
    """The ranges that are open on each thread, as who is told of them has them."""

    def __init__(self) -> None:
        self.open: defaultdict[int, list[str]] = defaultdict(list)
        self.seen: list[tuple[str, ...]] = []

    def push(self, name: str) -> None:
        self.here.append(name)
        self.seen.append(tuple(self.here))

    def pop(self) -> str:
        assert self.here, "a range was closed, and none is open on this thread"
        return self.here.pop()

    @property
    def here(self) -> list[str]:
        return self.open[threading.get_ident()]


class StackClock:
    """Instead of the time, what is open where a phase ends."""

    def __init__(self, stacks: Stacks) -> None:
        self.stacks = stacks

    def start(self) -> None:
        assert self.stacks.here == ["measure", "step"]

    def lap(self, phase: Phase, end: object = None) -> None:
        assert self.stacks.here == ["measure", "step"], f"at the end of {phase}"

    def stop(self) -> StepTimes:
        return StepTimes(step_s=1.0, host_s=1.0, phases_s={})


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stacks]:
    """What NVTX, torch.profiler and the path are told; no range may close but the one that is
    open.
    """
    stacks = Stacks()
    leave, push_and_pop = profiling._Annotation.__exit__, profiling._push_and_pop

    def checked(annotation: Any, *error: object) -> None:
        assert stacks.here[-1:] == [annotation._name], (
            "another range is open than the one that is closed"
        )
        leave(annotation, *error)

    def told(annotator: Annotator) -> tuple[Any, Any]:
        if annotator is not Annotator.PATH:
            return stacks.push, stacks.pop
        push, pop = push_and_pop(annotator)
        return (lambda name: (push(name), stacks.push(name)), lambda: (pop(), stacks.pop()))

    monkeypatch.setattr(profiling._Annotation, "__exit__", checked)
    monkeypatch.setattr(profiling, "_push_and_pop", told)
    yield stacks
    set_annotator(Annotator.NONE)


@pytest.fixture
def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator, and graphs that run their phases once, when they are captured."""
    make_up_allocator(monkeypatch)
    for name in (
        "Stream",
        "CUDAGraph",
        "current_stream",
        "stream",
        "graph",
        "synchronize",
        "graph_pool_handle",
        "reset_peak_memory_stats",
        "max_memory_allocated",
    ):
        monkeypatch.setattr(torch.cuda, name, MagicMock())


@pytest.mark.usefixtures("made_up_gpu")
@pytest.mark.parametrize("profiler", Profiler)
@pytest.mark.parametrize("kind", KINDS)
def test_each_range_that_opens_closes(
    kind: str, profiler: Profiler, stacks: Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher is that of a GPU, which the step does without."""
    made, config = KINDS[kind], KINDS[kind].config
    if made.has_graph and profiler is Profiler.MEMORY:
        pytest.skip("a replayed graph allocates nothing")
    if config.tokens:
        np.save(tmp_path / "tokens.npy", np.arange(100, dtype=np.uint16) % MODEL.vocab_size)
        config = replace(config, tokens=str(tmp_path / "tokens.npy"))
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile_model(model, backend="eager"))
    if made.model is plain:
        monkeypatch.setattr(fast_model, "PaddedHead", plain_blocks().PaddedHead)
    torch.manual_seed(0)
    step = TrainingStep(config, made.model() if made.model else None)
    if made.has_graph:
        step.graph = StepGraph(step._phases, config.phases, lambda: None, ())
    step.config = replace(config, device=Device.CUDA, profiler=profiler)
    watch = Watch(step, tmp_path / "profile")
    set_annotator(annotator_of(step.config))
    step.config = config
    clock = watch.clock(StackClock(stacks))
    with watch.whole_run(), annotate("measure"):
        for _ in range(EAGER_STEPS_BEFORE_GRAPH + 2 if made.has_graph else 2):
            step(clock)
    assert any(names[-1] == "step" for names in stacks.seen), "somebody is told"
    assert not any(stacks.open.values())
    if (
        made.model is None
        and Phase.BACKWARD in config.phases
        and profiler in (Profiler.KINETO, Profiler.NSYS)
    ):
        assert any(names[-2:] == ("backward", "lm_head") for names in stacks.seen), (
            "modules have ranges in backward"
        )
