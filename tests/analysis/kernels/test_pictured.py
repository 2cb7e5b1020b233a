"""Several steps beside each other: which they are, and that they hold all that ran in them."""

import random
from collections import Counter

import numpy as np
import pytest

from cs336.analysis.kernels.attribution import frame_of
from cs336.analysis.kernels.device_time import DeviceSteps, DeviceWindows
from cs336.analysis.kernels.pictured import LEAST_OF_KIND, MOST_BESIDE, MOST_KINDS, steps_beside
from cs336.analysis.kernels.step_profile import StepLabel
from tests.analysis.kernels.tracing import Kernel, Recording, Span, profile


def recording_of(walls_ns: list[int], rng: random.Random) -> Recording:
    """A step of each wall time, with kernels on two streams, and a copy in every second one."""
    made = Recording()
    for step, wall_ns in enumerate(walls_ns):
        start = 1_000_000 * step
        made.spans += [
            Span("step", start, start + wall_ns),
            Span("forward", start, start + wall_ns),
        ]
        for number in range(rng.randint(1, 9)):
            begin = start + number * wall_ns // 10
            made.kernels.append(
                Kernel("k", begin, start_ns=begin, duration_ns=wall_ns // 20, stream=number % 2)
            )
        if step % 2:
            begin = start + wall_ns // 2
            made.copies.append(
                Kernel("Memcpy HtoD", begin, start_ns=begin, duration_ns=wall_ns // 9, stream=9)
            )
    return made


@pytest.mark.parametrize("seed", range(10))
def test_a_step_holds_all_kernels_and_copies_that_ran_in_it(seed: int) -> None:
    rng = random.Random(seed)
    walls_ns = [rng.randint(1_000, 500_000) for _ in range(rng.randint(2, 30))]
    made = recording_of(walls_ns, rng)
    steps = profile(made).beside
    assert len(steps) == min(len(walls_ns), MOST_BESIDE)
    chosen = [step.step for step in steps]
    assert chosen == sorted(set(chosen))
    assert {walls_ns[step] for step in chosen} >= {min(walls_ns), max(walls_ns)}
    for step in steps:
        assert step.wall_s == pytest.approx(walls_ns[step.step] / 1e9)
        mine = [
            job for job in (*made.kernels, *made.copies) if job.launch_ns // 1_000_000 == step.step
        ]
        assert sum(piece.busy_s for piece in step.pieces) == pytest.approx(
            sum(job.duration_ns for job in mine) / 1e9
        )
        assert {piece.stream for piece in step.pieces} == {job.stream for job in mine}


def test_a_single_step_stands_beside_none() -> None:
    assert profile(recording_of([500], random.Random(0))).beside == ()


@pytest.mark.parametrize("num_kinds", [1, 2, 3, MOST_KINDS, MOST_KINDS + 3])
def test_each_kind_has_its_shortest_and_its_longest_step(num_kinds: int) -> None:
    """Kind k has 2 + k steps, of times that no other step has."""
    kinds = [f"kind {kind}" for kind in range(num_kinds) for _ in range(2 + kind)]
    random.Random(num_kinds).shuffle(kinds)
    wall_ns = np.array(random.Random(7).sample(range(1, 10_000), len(kinds)), np.int64)
    start_ns = np.arange(len(kinds), dtype=np.int64) * 10_000
    spans = DeviceSteps(start_ns=start_ns, end_ns=start_ns + wall_ns, origin_ns=start_ns)
    none = np.zeros(0, np.int64)
    windows = DeviceWindows(
        step=none,
        phase=none.astype(np.int8),
        host_start_ns=none,
        host_end_ns=none,
        start_ns=none,
        end_ns=none,
    )
    jobs = frame_of(windows).assign(stream=none, kind=none, duration_ns=none)
    labels = [StepLabel(kind=kind) for kind in kinds]
    chosen = [step.step for step in steps_beside(labels, spans, windows, jobs)]
    counts = Counter(kinds[step] for step in chosen)
    most_common = {kind for kind, _ in Counter(kinds).most_common(MOST_KINDS)}
    assert counts.keys() == most_common
    assert sum(counts.values()) <= max(MOST_BESIDE, LEAST_OF_KIND * MOST_KINDS)
    for kind in most_common:
        of_kind = [step for step, name in enumerate(kinds) if name == kind]
        assert {min(of_kind, key=wall_ns.__getitem__), max(of_kind, key=wall_ns.__getitem__)} <= {
            *chosen
        }
