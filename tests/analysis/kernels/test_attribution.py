"""Each kernel in its place: known answers, a search through everything, and sums."""

import random
from dataclasses import replace

import pytest

from cs336.analysis.kernels.attribution import Attribution, attribute
from cs336.analysis.kernels.phases import PHASES, PhaseSource
from tests.analysis.kernels.tracing import (
    AUTOGRAD,
    MAIN,
    STEP,
    Kernel,
    Recording,
    Span,
    counts,
    make_trace,
    module_path,
    random_recording,
    training,
)

WITHOUT_LOSS = {
    "forward": STEP["forward"] + STEP["loss"],
    **{name: STEP[name] for name in ("backward", "optimizer")},
}
"""A step whose ranges do not tell the loss from forward."""


def phases(attribution: Attribution) -> list[str]:
    return [PHASES[code].value for code in attribution.jobs.phase]


def module_names(attribution: Attribution) -> list[str]:
    return ["/".join(module_path(attribution, int(index))) for index in attribution.jobs.module]


def innermost(spans: list[Span], now: int) -> int | None:
    """Index of the last begun of the spans around a time, the shortest of those."""
    around = [i for i, s in enumerate(spans) if s.start_ns <= now < s.end_ns]
    return max(around, key=lambda i: (spans[i].start_ns, -spans[i].end_ns)) if around else None


def is_inside(inner: Span, outer: Span) -> bool:
    return inner is not outer and (
        outer.start_ns < inner.start_ns < outer.end_ns
        or (outer.start_ns == inner.start_ns and inner.end_ns < outer.end_ns)
    )


def outermost_phases(windows: list[Span]) -> list[Span]:
    """A phase within another is a part of it; but forward and backward within the optimizer's range
    are a closure that it calls.
    """
    kept = []
    for span in windows:
        around = [other for other in windows if is_inside(span, other)]
        alike = [o for o in around if (o.name == "optimizer") == (span.name == "optimizer")]
        if not alike:
            kept.append(span)
    return [s for s in kept if (i := parent(kept, s)) is None or kept[i].name == "optimizer"]


def parent(spans: list[Span], span: Span) -> int | None:
    others = [i for i, other in enumerate(spans) if is_inside(span, other)]
    return max(others, key=lambda i: (spans[i].start_ns, -spans[i].end_ns), default=None)


def without_closures(windows: list[Span]) -> list[Span]:
    """The optimizer begins when the last backward that begins within its range has ended."""
    begun = []
    for span in windows:
        ends = [
            other.end_ns
            for other in windows
            if other.name == "backward" and other.start_ns < span.end_ns
        ]
        start = max([span.start_ns, *ends]) if span.name == "optimizer" else span.start_ns
        begun.append(replace(span, start_ns=min(start, span.end_ns)))
    return begun


@pytest.mark.parametrize("seed", range(30))
def test_every_kernel_is_placed_as_by_brute_force(seed: int) -> None:
    """Every kernel is compared with every range, by the documented rule."""
    recording = random_recording(random.Random(seed))
    # equal times would make the outermost ambiguous, so every start and end is its own
    recording.spans = [
        replace(s, start_ns=s.start_ns * 1_000 + i, end_ns=s.end_ns * 1_000 + 999 - i)
        for i, s in enumerate(recording.spans)
        if s.end_ns > s.start_ns
    ]
    recording.kernels = [
        k if k.launch_ns is None else replace(k, launch_ns=k.launch_ns * 1_000 + 500)
        for k in recording.kernels
    ]
    attributed = attribute(make_trace(recording))
    structure = {"forward", "backward", "optimizer", "step"}
    for k, phase, module in zip(
        recording.kernels, phases(attributed), attributed.jobs.module, strict=True
    ):
        mine = recording.spans
        named = [s for s in mine if s.name in structure - {"step"}]
        if k.launch_ns is None:
            assert (phase, module) == ("unattributed", -1)
            continue
        main = min(named, key=lambda s: s.start_ns, default=Span("", 0, 0)).thread
        on_main = [s for s in mine if s.thread == main or not s.is_nested]
        windows = [s for s in on_main if s.name in {*structure, "loss"} - {"step"}]
        outer = without_closures(outermost_phases(windows))
        # without forward or backward, other evidence than ranges tells phases
        if {"forward", "backward"} <= {s.name for s in outer}:
            index = innermost(outer, k.launch_ns)
            assert phase == ("unattributed" if index is None else outer[index].name)
            spanning = [
                s for s in on_main if any(s.start_ns < o.start_ns < s.end_ns for o in outer)
            ]
            inside = [(s, innermost(outer, s.start_ns)) for s in mine if s.name == "forward"]
            again = [
                s for s, around in inside if around is not None and outer[around].name == "backward"
            ]
            modules = [
                s
                for s in mine
                if s.thread == k.thread
                and s.is_nested
                and (s.name not in structure or s in again)
                and s not in spanning
            ]
            best = innermost(modules, k.launch_ns)
            assert (-1 if best is None else recording.spans.index(modules[best])) == module


def test_forward_inside_backward_is_recomputed() -> None:
    """Where backward's own range of the module that needs it is open, on either thread."""
    for thread in (MAIN, AUTOGRAD):
        made = Recording(
            spans=[Span("forward", 0, 5), Span("norm", 1, 4), Span("backward", 10, 90)]
        )
        made.spans += [
            Span(*each, thread) for each in (("ffn", 12, 40), ("forward", 20, 30), ("norm", 24, 26))
        ]
        for launch in (2, 15, 22, 25, 35):
            made.launch("k", launch, thread if launch > 10 else MAIN)
        attributed = attribute(make_trace(made))
        assert phases(attributed) == ["forward", *["backward"] * 4]
        assert attributed.jobs.is_recomputed.tolist() == [False, False, True, True, False]
        assert module_names(attributed) == ["norm", "ffn", "forward", "forward/norm", "ffn"]


def test_without_phase_ranges_threads_give_the_phases() -> None:
    """The same loop without its phase ranges: the same phases, but the loss is of forward."""
    attributed = attribute(make_trace(training(5, phases=False)))
    assert attributed.plan.source is PhaseSource.THREADS
    assert [counts(attributed, step) for step in range(5)] == [WITHOUT_LOSS] * 5
    ranged = phases(attribute(make_trace(training(5))))
    assert phases(attributed) == ["forward" if name == "loss" else name for name in ranged]
    assert "no ranges of forward" in attributed.notes[0]


def test_a_range_of_its_own_around_the_optimizer_is_not_forward() -> None:
    made = training(3)
    kept = [s for s in made.spans if s.name not in ("forward", "loss", "backward")]
    made.spans = [replace(s, name="adamw") if s.name == "optimizer" else s for s in kept]
    attributed = attribute(make_trace(made))
    assert [counts(attributed, step) for step in range(3)] == [WITHOUT_LOSS] * 3


def test_the_range_of_the_warmup_is_no_model_however_short() -> None:
    made = training(2, phases=False)
    made.spans.append(Span("warmup", 0, 20))
    made.launch("random", 10)
    attributed = attribute(make_trace(made))
    assert phases(attributed)[-1] == "unattributed"
    assert counts(attributed, 0) == WITHOUT_LOSS


def test_unknown_phases_are_noted() -> None:
    made = training(2)
    # names that show neither backward nor an optimizer
    bare = Recording(kernels=[replace(kernel, name="k") for kernel in made.kernels])
    attributed = attribute(make_trace(bare))
    assert attributed.plan.source is PhaseSource.NOTHING
    assert counts(attributed) == {"unattributed": len(made.kernels)}
    assert "are not seen" in attributed.notes[0]
    alone = [k for k in made.kernels if k.thread == MAIN]
    spans = [s for s in made.spans if s.name in ("block", "head")]
    assert counts(attribute(make_trace(Recording(alone, spans)))) == {"unattributed": len(alone)}


def test_steps_from_step_ranges_and_warmup() -> None:
    made = training(4, step_range=True)
    steps = sorted(s.start_ns for s in made.spans if s.name == "step")
    made.spans.append(Span("warmup", steps[0] - 1, steps[2] - 1))
    attributed = attribute(make_trace(made))
    assert [counts(attributed, step) for step in range(4)] == [{"unattributed": 1, **STEP}] * 4
    assert attributed.plan.steps.is_warmup.tolist() == [True, True, False, False]
    made.spans[-1] = Span("measure", steps[1] - 1, 10**7)
    assert attribute(make_trace(made)).plan.steps.is_warmup.tolist() == [True, False, False, False]


def test_gradient_accumulation_is_one_step_and_no_optimizer_is_a_step_each() -> None:
    made = Recording(
        spans=[Span(n, 10 * i, 10 * i + 9) for i, n in enumerate(["forward", "backward"] * 2)]
    )
    assert len(attribute(make_trace(with_kernel(made))).plan.steps) == 2
    made.spans += [Span("optimizer", 50, 60), Span("forward", 70, 75)]
    assert attribute(make_trace(with_kernel(made))).plan.steps.start_ns.tolist() == [0, 70]


def with_kernel(recording: Recording) -> Recording:
    return Recording([Kernel("k", 1)], recording.spans)


def test_kernels_without_a_launch_and_of_graphs_are_said() -> None:
    made = Recording([Kernel("k", None), Kernel("k", 5, graph=3)], [Span("forward", 0, 10)])
    attributed = attribute(make_trace(made))
    assert phases(attributed) == ["unattributed", "forward"]
    assert "1 of 2 kernels have no launch" in attributed.notes[0]
    assert "1 kernels came from CUDA graphs" in attributed.notes[1]


def test_an_open_range_holds_to_the_end() -> None:
    made = Recording(spans=[Span("forward", 0, 10), Span("backward", 20, None)])
    made.launch("k", 50)
    assert phases(attribute(make_trace(made))) == ["backward"]


def test_nothing_at_all() -> None:
    attributed = attribute(make_trace(Recording()))
    assert counts(attributed) == {}
    assert len(attributed.plan.steps) == 0
