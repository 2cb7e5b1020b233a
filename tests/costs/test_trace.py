"""The trace of models that nobody here wrote, against PyTorch's own counter; what it refuses; its tapes."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.config import SIZES, Attention, Device, ModelConfig, Phase, Precision, RunConfig
from cs336_systems.costs import traces
from cs336_systems.costs.memory import predict_memory
from cs336_systems.costs.tape import MATMULS_OF, Category, Kind, Names, Tape, phases_of
from cs336_systems.costs.trace import TraceError, tracing
from cs336_systems.measure.traced import traced
from tests.ship_traces import wanted

BATCH, SEQ, WIDTH, HEADS, HIDDEN = 3, 10, 24, 3, 28
AXES = {"batch": 11, "T": 13}


class Encoder(nn.Module):
    """PyTorch's own layers, with dropout off, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True) for _ in range(2)
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
        there = model.to("cuda")
        x = x.to("cuda")
        trace.note(Category.PARAMETERS, there.parameters())
        trace.begin(Phase.FORWARD)
        loss = there(x).sum()
        trace.begin(Phase.BACKWARD)
        loss.backward()
        trace.begin(Phase.STEP)
        return trace.tape()


def test_modules_alone_are_told_that_a_graph_is_captured() -> None:
    """There transformers asks for no values of tensors; AdamW of torch 2.11 on a GPU refuses to run in a graph."""
    seen = []
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda *_: seen.append(torch.cuda.is_current_stream_capturing()))
    with tracing({}):
        model(torch.zeros(2, 4))
        seen.append(torch.cuda.is_current_stream_capturing())
    assert seen == [True, False]


def test_no_mask_is_made_where_no_token_is_padded() -> None:
    """As transformers before 5.24 asks; a mask of its own, made where a graph is captured, would rule out kernels."""
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
    """PyTorch's counter does not know the CPU's fused attention, whose matmuls are counted by hand."""
    flops = dict.fromkeys(Kind, 0)
    tape = trace_of(Encoder(), torch.zeros(BATCH, SEQ, WIDTH))
    for each in map(tape.operations.__getitem__, tape.launches):
        rows, inner, columns = each.sides
        flops[each.kind] += MATMULS_OF.get(each.form, 1) * 2 * each.batch * rows * inner * columns
    model = Encoder()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(BATCH, SEQ, WIDTH)).sum().backward()
    assert flops[Kind.MATMUL] == counter.get_total_flops()
    assert flops[Kind.ATTENTION] == 2 * 7 * 2 * BATCH * SEQ**2 * WIDTH, "2 layers; 2 matmuls forward, 5 backward"


def test_parameters_of_a_foreign_model_are_counted() -> None:
    tape = trace_of(Encoder(), torch.zeros(BATCH, SEQ, WIDTH))
    kept = sum(tape.spec(handle).size_bytes for handle in range(len(tape.tensors))
               if tape.spec(handle).category is Category.PARAMETERS)  # fmt: skip
    assert kept == sum(each.nbytes for each in Encoder().parameters())
    assert {"layers.*.linear1", "head"} <= {spec.label.rpartition(" in ")[2] for spec in tape.specs}


class Choosing(nn.Module):
    """Its result depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def test_a_step_that_depends_on_values_is_refused_in_one_line() -> None:
    with pytest.raises(TraceError, match=r"_local_scalar_dense needs the values of a tensor"):
        trace_of(Choosing(), torch.zeros(2, 3))


@pytest.mark.parametrize("number", [1, 13, 2 * 11 * 13, 11 * 13 * 13, 7])
def test_a_product_of_axes_has_the_size_of_the_number(number: int) -> None:
    names = Names(AXES)
    assert names.size(names.product(number)) == number


def test_sizes_are_rounded_up_and_widths_are_heads_times_their_width() -> None:
    names = Names({"heads": 3, "T": 130, "d_head": 5})
    assert [names.size(each) for each in ("T^128", "d_model T", "100^32")] == [256, 15 * 130, 128]


TINY = ModelConfig(vocab_size=80, context_length=16, d_model=48, d_ff=96, num_layers=2, num_heads=4)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_tape_with_names_has_the_sizes_of_one_that_was_traced_with_them(precision: Precision) -> None:
    config = RunConfig(size="custom", model=TINY, batch_size=2, device=Device.CUDA, precision=precision)
    named, plain = traces.tape_of(config), traced(replace(config, model=TINY), {})
    plain.repeat()
    assert [named.spec(each).size_bytes for each in range(len(named.tensors))] == pytest.approx(
        [plain.spec(each).size_bytes for each in range(len(plain.tensors))], abs=16  # tokens before they are cut
    )  # fmt: skip
    assert sorted(named.events) == sorted(plain.events), "of what one statement frees, the order may differ"
    moved = [[tape.operations[each].moved_bytes for each in tape.launches[20:]] for tape in (named, plain)]
    assert moved[0] == moved[1]


def test_a_kept_tape_is_the_same_tape() -> None:
    tape = traced(*traces.traced_as(RunConfig(size="custom", model=TINY)))
    again = Tape.from_json(json.loads(json.dumps(tape.to_json())))
    assert (again.events, again.tensors, again.launches, again.steps) == (
        tape.events, tape.tensors, tape.launches, tape.steps,
    )  # fmt: skip
    assert [spec.formula for spec in again.specs] == [spec.formula for spec in tape.specs]


def test_every_published_step_has_its_tape_shipped() -> None:
    """Otherwise every user, and every run of these tests, traces it anew."""
    assert wanted().keys() == traces._shipped().keys()


@pytest.mark.parametrize("attention", Attention)
def test_shipped_tapes_are_those_of_this_code(attention: Attention) -> None:
    """Run `python -m tests.ship_traces` after a change of the step."""
    config = RunConfig(size="tiny", model=replace(SIZES["tiny"], attention=attention), device=Device.CUDA)
    shipped, fresh = traces.tape_of(config), traced(*traces.traced_as(config))
    fresh.repeat()
    assert (shipped.events, shipped.kinds) == (fresh.events, [[*each] for each in fresh.kinds])
    assert [phase for phase, _, _ in phases_of(shipped, -1)] == [*config.phases, Phase.STEP]


def test_the_softmax_s_backward_makes_a_tensor_that_decides_a_peak() -> None:
    """Measured on an H100: 40.816 GiB; without that tensor of scores the forecast would be 39.938."""
    model = replace(SIZES["large"], num_layers=18, context_length=1536)
    config = RunConfig(size="custom", model=model, batch_size=5, device=Device.CUDA, precision=Precision.BF16)
    found = predict_memory(config)
    assert found is not None
    assert found.peak.allocated_bytes / 2**30 == pytest.approx(40.816, rel=0.01)
