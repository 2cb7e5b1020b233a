"""Of two drawn programs, one of which has a known change, the change is what is named first.

Both are simulated with the same seed and differ in nothing else, or with another seed and the same
plan. The truth is the change, and the times of the jobs as they were simulated.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cs336.analysis.kernels.attribution import attribute
from cs336.analysis.kernels.explain import explain, summarise
from cs336.analysis.kernels.readers import read_trace
from cs336.analysis.kernels.step_profile import StepProfile
from cs336.report.difference import Difference
from cs336.report.sections.kernels.compared import Sides, compared_traces, module_amounts
from tests.analysis.kernels.drawn_files import write
from tests.analysis.kernels.drawn_machine import MICROSECOND, MILLISECOND, Job, recorded
from tests.analysis.kernels.drawn_plans import Part, Pause, Plan, draw
from tests.analysis.kernels.drawn_programs import KERNELS, Program, simulate
from tests.analysis.kernels.kineto_files import Event, write_trace

ALL = 1_000
SEEDS = 8
SLOWER, EXTRA = KERNELS["linear"][0], "void cs336_injected_kernel<float>(float*)"


class Slower(Program):
    """One kernel takes 3 ms longer."""

    def costs(self, kind: str, name: str, duration_ns: int) -> tuple[int, float, int]:
        duration_ns += 3 * MILLISECOND * (name == SLOWER)
        return super().costs(kind, name, duration_ns)


class More(Program):
    """A kernel more in each layer."""

    def launch(self, kind: str, name: str, duration_ns: int, stream: int, **what: Any) -> Job:
        job = super().launch(kind, name, duration_ns, stream, **what)
        if name == SLOWER:
            super().launch(kind, EXTRA, 2 * MILLISECOND, stream)
        return job


class LongerBackward(Program):
    """Each kernel of backward takes 500 µs longer."""

    def costs(self, kind: str, name: str, duration_ns: int) -> tuple[int, float, int]:
        duration_ns += 500 * MICROSECOND * (self.at.get("phase") == Part.BACKWARD)
        return super().costs(kind, name, duration_ns)


def _plans() -> Iterator[Plan]:
    """Training loops whose files are whole, on a GPU that is never out of work."""
    seeds = (seed for seed in range(10_000) if draw(seed).kind == "training")
    for _, seed in zip(range(SEEDS), seeds, strict=False):
        plan = draw(seed)
        yield replace(
            plan,
            style="ours",
            limit="gpu",
            cut=(0.0, 1.0),
            dropped="",
            shift_ns=0,
            hides="",
            ranks=1,
            devices=1,
            steps=4,
            micro_batches=1,
            evaluates=False,
            queue=1024,
            optimizer="torch",
            graph="",
            loader="",
            compiled=False,
            reads_in_forward=False,
        )


PLANS = list(_plans())


def profile(plan: Plan, directory: Path, kind: type[Program] = Program) -> StepProfile:
    """The profile of the program as this kind of run runs it."""
    machine = simulate(plan, kind)[0]
    directory.mkdir(exist_ok=True)
    return summarise(attribute(read_trace(write(recorded(machine), directory))), source="drawn")


def compared(a: StepProfile, b: StepProfile) -> Difference:
    return compared_traces(a, b, top=ALL)


def named_parts(difference: Difference) -> dict[str, float]:
    """Kernels, copies and idle times that are said to differ, the largest difference first."""
    return dict(difference.findings[1].numbers)


def kernel_ns(plan: Plan, name: str, kind: type[Program] = Program) -> int:
    """The simulated time of one kernel over all steps."""
    jobs = [job for job in simulate(plan, kind)[0].jobs if job.name == name]
    return sum(job.end_ns - job.start_ns for job in jobs if job.step >= 0)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.seed))
@pytest.mark.parametrize(("kind", "name"), [(Slower, SLOWER), (More, EXTRA)])
def test_a_kernel_that_is_slower_or_new_is_named_first(
    plan: Plan, kind: type[Program], name: str, tmp_path: Path
) -> None:
    a, b = profile(plan, tmp_path / "a"), profile(plan, tmp_path / "b", kind)
    difference = compared(a, b)
    said = named_parts(difference)
    assert difference.findings[0].code == "step longer"
    assert next(iter(said)) == name
    true = Fraction(kernel_ns(plan, name, kind) - kernel_ns(plan, name), plan.steps)
    assert said[name] == pytest.approx(float(true) / 1e9, rel=1e-12)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.seed))
def test_a_wait_of_the_host_is_named_first(plan: Plan, tmp_path: Path) -> None:
    waits = replace(plan, hides=Pause.NOTHING)
    difference = compared(profile(plan, tmp_path / "a"), profile(waits, tmp_path / "b"))
    name, time_s = next(iter(named_parts(difference).items()))
    assert name == "idle, host pause"
    assert 0 < time_s < 1.1 * 4e-3  # the pause, of which the device works through a part


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.seed))
def test_a_phase_that_is_longer_is_named_first(plan: Plan, tmp_path: Path) -> None:
    a, b = profile(plan, tmp_path / "a"), profile(plan, tmp_path / "b", LongerBackward)
    first = compared(a, b).findings[0]
    assert first.code == "step longer"
    phases = [str(times.phase) for times in b.phases]
    assert next(name for name in first.numbers if name in phases) == Part.BACKWARD


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.seed))
def test_two_draws_of_one_program_are_not_said_to_differ(plan: Plan, tmp_path: Path) -> None:
    again = replace(plan, seed=plan.seed + 6)
    difference = compared(profile(plan, tmp_path / "a"), profile(again, tmp_path / "b"))
    assert difference.findings[0].code == "step same"
    # whether a batch is copied from pinned memory is drawn too, so it may really differ
    assert all(name.startswith("copies, host to device") for name in named_parts(difference))


def _whole(profiles: tuple[StepProfile, StepProfile], field: str) -> Fraction:
    """The difference of the wholes, in ns per step."""
    a, b = (
        Fraction(
            sum(round(time_s * 1e9) for times in side.phases for time_s in getattr(times, field)),
            side.num_steps,
        )
        for side in profiles
    )
    return b - a


def test_differences_add_up_to_that_of_the_whole(tmp_path: Path) -> None:
    """Of any two programs, with servers, cuts, lost events and several devices among them."""
    profiles = []
    for seed in range(40):
        made = tmp_path / str(seed)
        made.mkdir()
        file = recorded(simulate(draw(seed))[0])
        if any(job.kind == "kernel" for job in file.jobs):
            profiles.append(summarise(attribute(read_trace(write(file, made))), source="drawn"))
    for pair in pairwise(profiles):
        sides = Sides(*pair)
        for parts, field in (
            (sides.phases, "wall_s"),
            (sides.contents, "wall_s"),
            (sides.parts(module_amounts), "kernel_s"),
            (sides.kernels, "kernel_s"),
        ):
            assert sum(part.difference for part in parts) == _whole(pair, field)


@pytest.mark.parametrize("seed", range(6))
def test_recordings_without_steps_are_not_said_to_have_a_step(seed: int, tmp_path: Path) -> None:
    """Two launches of drawn lengths and numbers, between which nothing repeats."""
    draw = random.Random(seed)
    sides = []
    for name in ("a", "b"):
        events: list[Event] = []
        for number in range(draw.randint(1, 3)):
            args = {"device": 0, "stream": 7, "correlation": number + 1}
            times = {"ts": 1000 * number, "dur": draw.randint(100, 900)}
            kernel = {"ph": "X", "cat": "kernel", "name": f"gemm_{number}", "pid": 0, "tid": 7}
            events.append(kernel | times | {"args": args})
        path = write_trace(tmp_path / f"{name}.json", events)
        sides.append(explain(path))
    answer = compared(*sides).findings[0].text
    assert "B's recording" in answer
    assert "B's step" not in answer
