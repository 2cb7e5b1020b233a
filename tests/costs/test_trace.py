"""The trace of models that nobody here wrote, against PyTorch's own counter; what it refuses;
its tapes.
"""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cs336.config import (
    SIZES,
    UNSIZED,
    Arch,
    Attention,
    Device,
    Mode,
    ModelConfig,
    Parallel,
    Phase,
    Precision,
    RunConfig,
)
from cs336.costs import memory, traces
from cs336.costs.accounting import count_parameters
from cs336.costs.memory import MemoryPrediction, predict_memory
from cs336.costs.shards import kept_elements
from cs336.costs.tape import Category, Names, OperationKind, Tape, TraceError, phases_of
from cs336.costs.time import flops_of, operations
from cs336.costs.traces import has_tape
from cs336.costs.tracing import tracing
from cs336.measure.traced import traced
from tests.ship_traces import compiled_names, shipped_names, wanted

ROOT = Path(__file__).parents[2]
BATCH, SEQ, WIDTH, HEADS, HIDDEN = 3, 10, 24, 3, 28
AXES = {"batch": 11, "T": 13}


class Encoder(nn.Module):
    """PyTorch's own layers, with dropout off, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def trace_of(model: nn.Module, x: Tensor) -> Tape:
    """The tape of one forward and backward of a model's sum."""
    with tracing({}) as trace:
        there, x = model.to("cuda"), x.to("cuda")
        trace.begin(Phase.FORWARD)
        loss = there(x).sum()
        trace.begin(Phase.BACKWARD)
        loss.backward()
        trace.begin(Phase.STEP)
        return trace.tape()


def test_operators_of_other_libraries_with_a_rule_for_autocast_are_left_alone() -> None:
    """torchvision registers such an operator when it is imported."""
    program = (
        "import torch\n"
        "library = torch.library.Library('theirs', 'DEF')\n"
        "library.define('twice(Tensor x) -> Tensor')\n"
        "library.impl('twice', lambda x: 2 * x, 'AutocastCUDA')\n"
        "import cs336.costs.trace\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_modules_alone_are_told_that_a_graph_is_captured() -> None:
    """There transformers asks for no values of tensors; AdamW of torch 2.11 on a GPU refuses to
    run in a graph.
    """
    seen = []
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(
        lambda *_: seen.append(torch.cuda.is_current_stream_capturing())
    )
    with tracing({}):
        model(torch.zeros(2, 4))
        seen.append(torch.cuda.is_current_stream_capturing())
    assert seen == [True, False]


class Asking(nn.Module):
    """A layer that asks something of the GPU first."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__()
        self.ask, self.layer = ask, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.ask()
        out: Tensor = self.layer(x)
        return out


ANSWERED = (
    "synchronize",
    "empty_cache",
    "get_device_name",
    "get_device_capability",
    "reset_peak_memory_stats",
)
"""What has an answer, or nothing to do, where no GPU is."""


@pytest.mark.parametrize("name", ANSWERED)
def test_what_a_step_asks_of_the_gpu_changes_nothing(name: str) -> None:
    x = torch.zeros(2, 4)
    asking = trace_of(Asking(lambda: getattr(torch.cuda, name)()), x)
    silent = trace_of(Asking(lambda: None), x)
    assert asking.events == silent.events
    assert len(asking.launches) == len(silent.launches)


@pytest.mark.parametrize(
    "name",
    ["mem_get_info", "memory_allocated", "max_memory_allocated", "memory_reserved", "memory_stats"],
)
def test_a_step_that_asks_how_much_memory_there_is_is_not_foretold(name: str) -> None:
    """No trace knows that, and what the step does may depend on it."""
    with pytest.raises(TraceError, match=rf"torch\.cuda\.{name}"):
        trace_of(Asking(lambda: getattr(torch.cuda, name)()), torch.zeros(2, 4))
    with pytest.raises(TraceError, match="total_memory"):
        trace_of(
            Asking(lambda: torch.cuda.get_device_properties(0).total_memory), torch.zeros(2, 4)
        )


def test_no_mask_is_made_where_no_token_is_padded() -> None:
    """As transformers before 5.24 asks; a mask of its own, made where a graph is captured, would
    rule out kernels.
    """
    seen = []

    def is_cuda_stream_capturing() -> bool:
        return torch.cuda.is_current_stream_capturing()

    def is_tracing() -> bool:
        return is_cuda_stream_capturing()

    def makes_mask(padding_mask: Tensor | None) -> bool:
        return is_tracing()

    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda _, inputs: seen.extend(map(makes_mask, (None, *inputs))))
    with tracing({}):
        model(torch.zeros(2, 4))
    assert seen == [False, True]


def test_matmuls_of_a_foreign_model_have_the_flops_that_pytorch_counts() -> None:
    """PyTorch's counter does not know the CPU's fused attention, whose matmuls are counted by
    hand.
    """
    flops = dict.fromkeys(OperationKind, 0)
    tape = trace_of(Encoder(), torch.zeros(BATCH, SEQ, WIDTH))
    for operation in map(tape.operations.__getitem__, tape.launches):
        flops[operation.kind] += flops_of(operation)
    model = Encoder()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(BATCH, SEQ, WIDTH)).sum().backward()
    assert flops[OperationKind.MATMUL] == counter.get_total_flops()
    assert flops[OperationKind.ATTENTION] == 2 * 7 * 2 * BATCH * SEQ**2 * WIDTH, (
        "2 layers; 2 matmuls forward, 5 backward"
    )


@pytest.mark.parametrize("number", [1, 13, 2 * 11 * 13, 11 * 13 * 13, 7])
def test_a_product_of_axes_has_the_size_of_the_number(number: int) -> None:
    names = Names(AXES)
    assert names.size(names.product(number)) == number


def test_sizes_are_rounded_up_and_widths_are_heads_times_their_width() -> None:
    names = Names({"heads": 3, "T": 130, "d_head": 5})
    assert [names.size(shape) for shape in ("T^128", "d_model T", "100^32")] == [256, 15 * 130, 128]


TINY = ModelConfig(vocab_size=80, context_length=16, d_model=48, d_ff=96, num_layers=2, num_heads=4)


LENGTHS = (1, 2, 507, 1009, 1013, 1014)
"""Contexts of which some are alike to the sizes that stand for others in a tape with names."""


def drawn(draw: random.Random) -> RunConfig:
    """A step whose widths its context mostly divides, or that the stand-ins of other sizes
    divide.
    """
    heads, length = draw.choice((1, 3, 4, 17)), draw.choice((*LENGTHS, draw.randint(3, 200)))
    d_head = 2 * draw.choice((length, length + 1, 19, 23, draw.randint(1, 40)))
    model = ModelConfig(
        arch=draw.choice([*Arch]),
        vocab_size=draw.choice((29, 1013, 23 * 17, draw.randint(2, 900))),
        context_length=length,
        d_model=heads * d_head,
        d_ff=draw.choice((184, length, 1014, 39 * d_head)),
        num_layers=draw.randint(1, 2),
        num_heads=heads,
        attention=draw.choice([*Attention]),
    )
    return RunConfig(
        size="custom",
        model=model,
        batch_size=draw.choice((1, 2, 17, 1009)),
        device=Device.CUDA,
        precision=draw.choice((Precision.FP32, Precision.BF16)),
        mode=draw.choice([*Mode]),
    )


WORKSPACES = {
    "buffer of a sum",
    "sums by parts",
    "workspace of fused attention",
    "queries' gradient in fp32",
    "row sums",
}
"""Labels of tensors within kernels whose sizes are no products of axes, or are written apart."""


def made_and_freed(tape):
    """How many tensors of each size are made and freed, workspaces left out."""
    counts = Counter()
    for event in tape.events:
        spec = tape.spec(event if event >= 0 else ~event)
        if spec.label not in WORKSPACES:
            counts[event >= 0, spec.size_bytes] += 1
    return counts


@pytest.mark.parametrize("seed", range(12))
def test_a_tape_with_names_has_the_sizes_of_one_that_was_traced_with_them(seed: int) -> None:
    config = drawn(random.Random(seed))
    named, plain = traces.tape_of(config), traced(traces.as_costed(config), {})
    plain.repeat()
    assert made_and_freed(named) == made_and_freed(plain)
    for what in (flops_of, attrgetter("moved_bytes")):
        assert [what(named.operations[number]) for number in named.launches] == [
            what(plain.operations[number]) for number in plain.launches
        ]


@pytest.mark.parametrize("parallel", [Parallel.DDP, Parallel.DDP_FLAT, Parallel.FSDP])
def test_widths_of_ranks_are_not_taken_for_other_sizes(parallel: Parallel) -> None:
    """1014 stands for T+1 in tapes with names, and 624 x 2496 is a multiple of it."""
    model = ModelConfig(d_model=624, d_ff=2496, num_layers=2, num_heads=12)
    bytes_of = []
    for length in (64, 128):
        config = RunConfig(
            size="custom",
            model=replace(model, context_length=length),
            device=Device.CUDA,
            parallel=parallel,
            ranks=2,
        )
        bytes_of.append(traces.tape_of(config).bytes_of(Category.PARAMETERS))
    assert bytes_of == [4 * sum(kept_elements(config))] * 2


def test_a_kept_tape_is_the_same_tape() -> None:
    tape = traced(*traces.traced_as(RunConfig(size="custom", model=TINY)))
    again = Tape.from_json(tape.to_json())
    assert (again.events, again.tensors, again.launches, again.steps) == (
        tape.events,
        tape.tensors,
        tape.launches,
        tape.steps,
    )
    assert [spec.formula for spec in again.specs] == [spec.formula for spec in tape.specs]


def test_every_published_step_has_its_tape_shipped() -> None:
    """Otherwise every user, and every run of these tests, traces it anew."""
    assert wanted().keys() | compiled_names().keys() == shipped_names()


def damaged(data: bytes, draw: random.Random) -> Iterator[bytes]:
    """A file of the cache as it may be after a crash."""
    yield b""
    yield data[: draw.randrange(len(data))]
    place = draw.randrange(len(data))
    yield data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
    yield draw.randbytes(500)


def test_a_damaged_tape_of_the_cache_is_traced_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(size="custom", model=TINY, device=Device.CUDA)
    monkeypatch.setattr(traces, "_shipped", lambda _: {})

    monkeypatch.setattr(traces, "_cache", lambda: tmp_path / "version")

    def prediction() -> MemoryPrediction | None:
        memory._predict.cache_clear()
        monkeypatch.setattr(traces, "_traced", {})
        return predict_memory(config)

    right = prediction()
    (path,) = (tmp_path / "version").iterdir()
    data, draw = path.read_bytes(), random.Random(0)
    for _ in range(4):
        for content in damaged(data, draw):
            path.write_bytes(content)
            assert prediction() == right
            assert path.read_bytes() == data


PRINTING = """
import os, subprocess, sys, warnings
from torch import nn

def say(how, place):
    text = f"{place} {how}"
    match how:
        case "print": print(text)
        case "original": sys.__stdout__.write(text)
        case "descriptor": os.write(1, text.encode())
        case "child": subprocess.run(["echo", text], check=True)
        case "replaced": sys.stdout = open(1, "w", closefd=False); print(text, flush=True)
        case "closed": os.write(1, text.encode()); sys.stdout = None
        case "warning": warnings.simplefilter("error"); print(text, flush=True)
        case "exit": sys.exit(3)
        case "ends": os._exit(0)

class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        if PLACE == "factory": say(HOW, PLACE)
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens):
        if PLACE == "forward": say(HOW, PLACE)
        return self.table(tokens)

if PLACE == "import": say(HOW, PLACE)
"""


def test_what_a_user_s_code_prints_is_no_answer_and_goes_to_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All in one process that traces, which only the last one ends."""
    monkeypatch.chdir(tmp_path)
    hows = [
        "print",
        "original",
        "descriptor",
        "child",
        "replaced",
        "warning",
        "closed",
        "exit",
        "ends",
    ]
    cases = [(how, random.Random(how).choice(("import", "factory", "forward"))) for how in hows]
    tracer = traces._Tracer()
    model = replace(TINY, vocab_size=8)
    for number, (how, place) in enumerate(cases):
        Path(f"printing{number}.py").write_text(f"HOW, PLACE = {how!r}, {place!r}{PRINTING}")
        config = RunConfig(
            size=UNSIZED, model=model, device=Device.CUDA, model_factory=f"printing{number}:Model"
        )
        tape = traces._decoded(tracer.trace({how: traces.traced_as(config)})[how])
        assert bool(tape.steps) == (how not in ("exit", "ends")), tape.failure
        assert bool(tape.failure) != bool(tape.steps)
    tracer.end()
    out, err = capfd.readouterr()
    assert not out
    for how, place in cases[:-2]:
        assert f"{place} {how}" in err


@pytest.mark.parametrize("attention", Attention)
def test_shipped_tapes_are_those_of_this_code(attention: Attention) -> None:
    """Run `python -m tests.ship_traces` after a change of the step."""
    config = RunConfig(
        size="tiny", model=replace(SIZES["tiny"], attention=attention), device=Device.CUDA
    )
    shipped, fresh = traces.tape_of(config), traced(*traces.traced_as(config))
    fresh.repeat()
    assert (shipped.events, shipped.kinds) == (fresh.events, fresh.kinds)
    assert shipped.parameters == fresh.parameters
    assert shipped.gradient_order == fresh.gradient_order
    assert [phase for phase, _, _ in phases_of(shipped, -1)] == [*config.phases, Phase.STEP]


def test_the_softmax_s_backward_makes_a_tensor_that_decides_a_peak() -> None:
    """Measured on an H100: 40.816 GiB; without that tensor of scores the forecast would be
    39.938.
    """
    model = replace(SIZES["large"], num_layers=18, context_length=1536)
    config = RunConfig(
        size="custom", model=model, batch_size=5, device=Device.CUDA, precision=Precision.BF16
    )
    prediction = predict_memory(config)
    assert prediction is not None
    assert prediction.peak.allocated_bytes / 2**30 == pytest.approx(40.816, rel=0.01)


@pytest.mark.parametrize("attention", Attention)
def test_micro_batches_repeat_forward_and_backward_and_keep_gradients(attention: Attention) -> None:
    """From the second on, tokens alone are more; during it all gradients of the first are there."""
    model = replace(SIZES["tiny"], attention=attention)
    one = RunConfig(size="tiny", model=model, device=Device.CUDA, batch_size=2)
    runs = {count: replace(one, accumulate_steps=count) for count in (1, 2, 3)}
    launched = {}
    for count, run in runs.items():
        assert has_tape(run)
        launched[count] = {phase: len(of_phase) for phase, of_phase in operations(run).items()}
    more = {phase: launched[3][phase] - launched[2][phase] for phase in launched[3]}
    assert more.pop(Phase.OPTIMIZER) == 0
    # besides a step's own forward: the loss is divided, and added to that of those before
    assert more[Phase.FORWARD] == launched[1][Phase.FORWARD] + 2
    # besides its own backward: the loss's gradient is divided, and each gradient is added
    assert more[Phase.BACKWARD] >= launched[1][Phase.BACKWARD] + 1
    peaks = {count: predict_memory(run).peak for count, run in runs.items()}
    tokens_bytes = 2 * 8 * 2 * model.context_length  # and targets, of the third
    assert peaks[3].allocated_bytes == peaks[2].allocated_bytes + tokens_bytes
    assert peaks[2].allocated_bytes > peaks[1].allocated_bytes + tokens_bytes
    gradients = peaks[2].bytes_of(Category.GRADIENTS)
    assert gradients >= 4 * count_parameters(model)
