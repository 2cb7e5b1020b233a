"""Oracles: compiled steps measured on an H200, a closed form, and eager steps of full depth."""

from collections import Counter
from dataclasses import astuple, replace
from random import Random
from statistics import median

import pytest
import torch
from torch import Tensor, nn

from cs336.cli import main
from cs336.config import (
    SIZES,
    UNSIZED,
    Attention,
    CompileMode,
    Device,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    Profiler,
    RunConfig,
)
from cs336.costs import traces
from cs336.costs.compiled import (
    STRIDE,
    compiled_tape,
    predict_step_memory,
    steps_to_compile,
    why_not_foretold,
    why_refused,
)
from cs336.costs.curves import FASTER_LAUNCHES, SLOWER_LAUNCHES
from cs336.costs.deepened import deepened
from cs336.costs.depth import of_depth
from cs336.costs.fit import CUDA_CONTEXT_BYTES, fits
from cs336.costs.internals import COMPILER_INTERNALS, compiler_internals
from cs336.costs.memory import memory_of, predict_memory
from cs336.costs.tape import Tape, phases_of
from cs336.costs.time import QUEUE_DEPTH, operations
from cs336.costs.traces import compiled_as, compiled_name, is_compiled, tape_of
from cs336.record import RunRecord, load_records
from tests.committed import DATA, committed_runs

V, D, BATCH, LENGTH = 4096, 8, 16, 64
WORKSPACES = 2 * 32 * 2**20
"""cuBLAS's, of the threads of forward and backward."""


class Bigrams(nn.Module):
    """An embedding and a head, so that logits are nearly all of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class InTwoGraphs(Bigrams):
    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        torch._dynamo.graph_break()
        return self.head(embedded)


def compiled_step(**settings: object) -> RunConfig:
    defaults = {"size": "", "model": SIZES["small"], "compile": CompileMode.DEFAULT}
    return RunConfig(device=Device.CUDA, **defaults | settings)


def own(name: str) -> RunConfig:
    return RunConfig(
        size=UNSIZED,
        model=replace(SIZES["tiny"], vocab_size=V, context_length=LENGTH),
        batch_size=BATCH,
        device=Device.CUDA,
        compile=CompileMode.DEFAULT,
        model_factory=f"{__name__}:{name}",
    )


MORE_AT_FIRST = "gpt2-xl ctx 1024 train bf16 sdpa flash foreach compile default padded to 128"
"""Its first step had 17 % more memory than is foretold, in both processes; why was not seen."""


def measured() -> list[RunRecord]:
    """All published steps whose whole model is compiled, and which have no further shortcut."""
    records = []
    for runs in committed_runs():
        for record in load_records(runs)[0]:
            if is_compiled(record.config) and not why_refused(record.config):
                records.append(record)
    return records


def test_peaks_of_compiled_steps_are_those_measured() -> None:
    """The same configuration, compiled twice, differed by up to 1.4 % itself: inductor times some
    kernels, and keeps what it found.
    """
    records = measured()
    assert len(records) == 56
    for record in records:
        prediction, memory = predict_step_memory(record.config), record.memory
        peaks = (
            (prediction.peak.allocated_bytes, memory.peak_allocated_bytes),
            (prediction.first_step_peak.allocated_bytes, memory.first_step_peak_allocated_bytes),
            (prediction.reserved_bytes, memory.peak_reserved_bytes),
        )
        for foretold, seen in peaks:
            most = 0.18 if record.config.label.startswith(MORE_AT_FIRST) else 0.03
            assert abs(foretold - seen) <= most * seen, (record.config.label, foretold, seen)
        assert peaks[0][0] == pytest.approx(peaks[0][1], rel=0.012)
        parts = prediction.peak.parts
        assert sum(part.size_bytes for part in parts) == prediction.peak.allocated_bytes
        assert all(part.count > 0 for part in parts), record.config.label


def test_logits_are_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels read the logits, and write their gradient where these were. An eager step has
    them with their logarithms of probabilities.
    """
    monkeypatch.setattr(traces, "_traced", {})
    config, before = own("Bigrams"), torch.compile
    logits, parameters = 4 * BATCH * LENGTH * V, 4 * 2 * V * D
    state = 3 * parameters + WORKSPACES
    prediction = predict_step_memory(config)
    assert prediction is not None, why_not_foretold(config)
    peak = prediction.peak.allocated_bytes
    assert state + logits <= peak < state + 1.5 * logits
    eager = config.with_defaults("compile")
    traces.prepare([eager])
    assert predict_memory(eager).peak.allocated_bytes >= state + 2 * logits
    assert torch.compile is before
    # forward reads the logits, and backward reads them again and writes their gradient
    tape = compiled_tape(config)
    moved = 0
    for phase, _, (first, stop) in phases_of(tape, -1):
        for number in tape.launches[first:stop]:
            operation = tape.operations[number]
            if phase in (Phase.FORWARD, Phase.BACKWARD) and not operation.is_matmul:
                moved += operation.moved_bytes
    assert 3 * logits <= moved < 4 * logits


def test_a_step_of_several_graphs_is_not_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_traced", {})
    assert predict_step_memory(own("InTwoGraphs")) is None
    assert "graph" in why_not_foretold(own("InTwoGraphs"))


@pytest.mark.parametrize("optimizer", [OptimizerKind.ADAMW, OptimizerKind.FUSED])
def test_memory_grows_evenly_with_the_depth(optimizer: OptimizerKind) -> None:
    """Shown by eager steps, which can be traced whole: of 12 blocks from those of 2 and of 4."""
    model = replace(SIZES["small"], attention=Attention.SDPA)
    config = RunConfig(
        size="small", model=model, device=Device.CUDA, precision=Precision.BF16, optimizer=optimizer
    )
    shallow, deeper = (tape_of(of_depth(config, blocks)) for blocks in (2, 4))
    deep = deepened(shallow, deeper, (12 - 2) // STRIDE)
    whole, foretold = memory_of(tape_of(config)), memory_of(deep)
    assert _launched(deep) == _launched(tape_of(config))
    pairs = [
        (foretold.reserved_bytes, whole.reserved_bytes),
        (foretold.peak.allocated_bytes, whole.peak.allocated_bytes),
        (foretold.first_step_peak.allocated_bytes, whole.first_step_peak.allocated_bytes),
        (foretold.start_bytes, whole.start_bytes),
    ]
    for of_few, of_all in pairs:
        # what the allocator does not split off differs
        assert abs(of_few - of_all) <= 0.005 * of_all
    assert foretold.peak.phase is whole.peak.phase


def _launched(tape: Tape) -> list[tuple[Phase, Counter[object]]]:
    """How often each phase of the last step launches each operation."""
    phases = []
    for phase, _, (first, stop) in phases_of(tape, -1):
        operations = (tape.operations[number] for number in tape.launches[first:stop])
        phases.append((phase, Counter(astuple(operation) for operation in operations)))
    return phases


def test_a_compiled_step_fits_what_it_reserves() -> None:
    config = compiled_step()
    reserved = predict_step_memory(config).reserved_bytes + CUDA_CONTEXT_BYTES
    assert fits(config, reserved)
    assert not fits(config, predict_step_memory(config).peak.allocated_bytes)


@pytest.mark.parametrize("blocks", [3, 5, 6, 7, 12, 35])
def test_few_blocks_stand_for_all(blocks: int) -> None:
    config = compiled_step(model=replace(SIZES["tiny"], num_layers=blocks))
    steps, times = steps_to_compile(config)
    depths = [step.model.num_layers for step in steps]
    assert max(depths) <= 5
    assert depths[0] + times * (depths[-1] - depths[0]) == blocks


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compile": CompileMode.REDUCE_OVERHEAD}, "reduce-overhead"),
        ({"compile": CompileMode.MAX_AUTOTUNE_NO_CUDAGRAPHS}, "max-autotune"),
        ({"expandable_segments": True}, "shortcut"),
        ({"checkpoint_blocks": 1}, "checkpoint"),
        ({"parallel": Parallel.DDP, "ranks": 2}, "2 ranks"),
    ],
    ids=str,
)
def test_what_is_not_foretold_has_a_reason(settings: dict[str, object], said: str) -> None:
    config = compiled_step(**settings)
    assert predict_step_memory(config) is None
    assert said in why_not_foretold(config)


def test_tapes_are_those_of_a_compiler() -> None:
    key, other = compiled_as(compiled_step()), compiled_as(compiled_step(model=SIZES["medium"]))
    names = {
        compiled_name(key, "2.11.0"),
        compiled_name(key, "2.13.0"),
        compiled_name(other, "2.11.0"),
        traces._name(compiled_as(replace(compiled_step(), compile=CompileMode.NONE))),
    }
    assert len(names) == 4


def test_an_account_says_the_compiled_peak(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", "--size", "small", "--compile", "default"]) == 0
    out = capsys.readouterr().out
    assert "3.59" in out  # GiB: 3,857,262,592 to 3,858,835,456 bytes were measured
    assert f"PyTorch {traces.COMPILER}" in out


def test_pytorch_has_what_compiled_steps_are_traced_with() -> None:
    assert vars(compiler_internals()).keys() == COMPILER_INTERNALS.keys()


def _calls(config: RunConfig, phase: Phase) -> int:
    """Calls by which the host launches a phase."""
    return sum(one.launches * one.host_calls for one in operations(config)[phase])


def _eager_call_s(records: list[RunRecord]) -> float:
    """Seconds of a call of the eager steps in bf16 of a sweep: the median over its records."""
    times_s = []
    for record in records:
        config = record.config
        is_plain = config == config.without_shortcuts and config.profiler is Profiler.NONE
        if is_plain and config.precision is Precision.BF16:
            times_s.append(_host_s(record, Phase.FORWARD) / _calls(config, Phase.FORWARD))
    return median(times_s)


def _host_s(record: RunRecord, phase: Phase) -> float:
    (measured,) = (one for one in record.host_phases if one.phase is phase)
    return median(measured.times_s)


def _shares() -> list[list[float]]:
    """Of each compiled step, the host's time in calls by what is foretold, in phases in which the
    queue is never full.
    """
    shares = []
    for name in ("gpt2", "gpt2-xl"):
        records = load_records(DATA / "ladder" / name / "runs")[0]
        call_s = _eager_call_s(records)
        for record in records:
            config = record.config
            if not is_compiled(config) or config.cuda_graph or why_refused(config):
                continue
            launched, of_step = 0, []
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                launched += sum(one.launches for one in operations(config)[phase])
                if launched < QUEUE_DEPTH or phase is Phase.FORWARD:
                    of_step.append(_host_s(record, phase) / call_s / _calls(config, phase))
            shares.append(of_step)
    return shares


def test_the_host_takes_as_long_as_is_foretold_for_compiled_steps() -> None:
    shares = _shares()
    found = set(Random(0).sample(range(len(shares)), len(shares) // 2))
    scored = [share for place, of in enumerate(shares) if place not in found for share in of]
    assert len(scored) >= 20
    within = [1 / FASTER_LAUNCHES < share < SLOWER_LAUNCHES for share in scored]
    assert sum(within) >= 0.9 * len(within)
    assert 0.85 < median(scored) < 1.2
