"""What is said of real programs, against what they counted and what the host's clock showed."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cs336.analysis.kernels.explain import explain  # noqa: E402
from cs336.analysis.kernels.phases import LaunchPhase  # noqa: E402
from cs336.analysis.kernels.step_profile import StepProfile  # noqa: E402
from cs336.report.sections.kernels.entry import Explained  # noqa: E402
from cs336.report.sections.kernels.findings import findings  # noqa: E402
from tests.analysis.kernels.drawn_plans import STYLES, Part  # noqa: E402
from tests.analysis.kernels.real_programs import RealPlan, RealTruth, draw_real, run_real  # noqa: E402
from tests.analysis.kernels.tracing import ns  # noqa: E402

PROGRAMS = 60
CLOCK_NS = 50_000
"""How far the profiler's clock and Python's may differ over a step: PyTorch measures the rate of
the processor's counter anew in each session.
"""
CLOCK_SHARE = 0.001


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Other threads would only wait for each other in matrices as small as these."""
    torch.set_num_threads(1)


ACTIVATION = re.compile(r"^aten::gelu(_backward)?$|Gelu(Backward)?CUDAKernelImpl")


def activations(profile: StepProfile) -> Counter[str]:
    """Calls of GELU and of its backward by phase, over the steps of the profile."""
    counts: Counter[str] = Counter()
    for row in profile.kernels:
        if row.phase is not None and ACTIVATION.search(row.name):
            counts[row.phase.value] += row.count
    return counts


def check(profile: StepProfile, plan: RealPlan, truth: RealTruth) -> None:
    """Nothing that is said of the program is false."""
    if profile.is_whole_trace:
        assert Part.STEP not in STYLES[plan.style] or plan.style == "iteration"
        assert not plan.counts_steps
    else:
        assert profile.num_steps == plan.steps
    said = activations(profile)
    unseen = said.pop("unattributed", 0)
    for phase, count in truth.activations.items():
        assert said[phase] <= count
    # what a loop evaluates between two steps may be in neither
    lacking = sum(truth.activations.values()) - sum(said.values()) - unseen
    assert 0 <= lacking <= truth.activations[Part.EVALUATION]
    assert set(said) <= set(truth.activations)
    assert profile.passes_per_step in (None, plan.micro_batches)
    check_times(profile, plan, truth)


def check_times(profile: StepProfile, plan: RealPlan, truth: RealTruth) -> None:
    """Steps last as long as the clock around their ranges; the loader as long as it slept."""
    clock = truth.clocks.get("range") if "step" in profile.steps_from else None
    if "ProfilerStep" in profile.steps_from:
        clock = truth.clocks["ProfilerStep"]
    # the first of the profiler's own steps begins with the start of the recording
    said = [ns(time) for time in profile.step_s][-len(clock or []) :] if clock else []
    for time_ns, (inner, outer) in zip(said, clock or [], strict=True):
        slack = CLOCK_NS + CLOCK_SHARE * outer
        assert inner - slack <= time_ns <= outer + slack
    if plan.loads and plan.slept_s and not profile.is_whole_trace:
        waited = [phase.host_s for phase in profile.phases if phase.phase.value == "data"]
        assert sum(sum(times) for times in waited) * 1e9 >= truth.slept_ns * 0.99


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_nothing_false_is_said_of_a_real_program(seed: int, tmp_path: Path) -> None:
    plan = draw_real(seed)
    truth = run_real(plan, tmp_path / "trace.json")
    check(explain(tmp_path / "trace.json"), plan, truth)


@pytest.mark.parametrize("seed", range(6))
def test_backward_is_seen_without_any_range(seed: int, tmp_path: Path) -> None:
    """Autograd's nodes show it; the update that is written out is no forward."""
    settings = {"style": "none", "optimizer": "plain", "trains": True, "loads": False}
    apart = {"counts_steps": False, "clips": False, "zero_grad": "", "without_gradients": ""}
    plan = replace(draw_real(seed), **settings, **apart, micro_batches=1, steps=4)
    truth = run_real(plan, tmp_path / "trace.json")
    profile = explain(tmp_path / "trace.json")
    backward = truth.activations[Part.BACKWARD] // plan.steps
    assert not any("whether autograd recorded" in note for note in profile.notes)
    assert profile.num_steps == plan.steps - 1  # the kernels repeat, and the last have no next
    assert activations(profile)["backward"] == profile.num_steps * backward
    updates = [row for row in profile.kernels if row.name == "aten::sub_"]
    assert {row.phase for row in updates if row.phase is not None} == {LaunchPhase.UNATTRIBUTED}


MAKERS = (
    lambda: torch.randn(8, 16),
    lambda: torch.rand(8, 16).sqrt(),
    lambda: torch.normal(0.0, 1.0, (8, 16)),
    lambda: torch.empty(8, 16).uniform_(),
    lambda: torch.randint(0, 9, (8, 16)).float(),
    lambda: torch.empty(8, 16).exponential_().log(),
    lambda: torch.full((8, 16), 0.5).bernoulli_(),
    lambda: torch.linspace(0.0, 1.0, 128).view(8, 16),
    lambda: torch.eye(16)[torch.randperm(16)[:8]],
)
"""Ways to draw a batch in the loop itself."""


@pytest.mark.parametrize("seed", range(len(MAKERS) * 2))
def test_a_batch_that_is_made_is_no_work_without_gradients(seed: int, tmp_path: Path) -> None:
    """Only a teacher computes while autograd does not record, once in each step if there is one."""
    make, has_teacher = MAKERS[seed // 2], seed % 2 == 1
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 3
    with torch.profiler.profile() as profiler:
        for _ in range(steps):
            batch = make()
            if has_teacher:
                with torch.no_grad():
                    batch = model(batch)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    path = tmp_path / "t.json"
    profiler.export_chrome_trace(str(path))
    said = re.findall(r"(\d+) times?, the program launched work", " ".join(explain(path).notes))
    assert said == ([str(steps)] if has_teacher else [])


@pytest.mark.parametrize("inner", [1, 2, 4])
def test_an_inner_loop_has_passes_of_backward_and_no_forward_of_each(
    inner: int, tmp_path: Path
) -> None:
    """One forward, gradients of its loss several times, then the backward that trains."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            loss = model(torch.randn(8, 16)).pow(2).mean()
            weights = list(model.parameters())
            for _ in range(inner):
                torch.autograd.grad(loss, weights, retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    path = tmp_path / "t.json"
    profiler.export_chrome_trace(str(path))
    profile = explain(path)
    assert profile.passes_per_step == inner + 1
    said = [finding.text for finding in findings(Explained(profile=profile))]
    assert f"Each step of the optimizer takes {inner + 1} passes of backward." in said
