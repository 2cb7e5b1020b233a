"""Times of phases on the device and causes of idle time: counted by nanosecond, and with causes
made on purpose.
"""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from cs336.analysis.kernels.calls import ApiCallKind, call_name
from cs336.analysis.kernels.idle import HOST_PAUSE_S, LAUNCH_LATENCY_S, NUM_GAPS
from cs336.analysis.kernels.step_profile import IdleCause, PhaseTimes, StepProfile
from cs336.analysis.kernels.trace import Union
from tests.analysis.kernels.tracing import (
    AUTOGRAD,
    MAIN,
    Call,
    Kernel,
    Recording,
    Span,
    each_ns,
    ints,
    profile,
)

US = 1_000
LAUNCH_NS = 4 * US
"""How long a launch takes the host."""


def phase(explained: StepProfile, name: str) -> PhaseTimes:
    return next(times for times in explained.phases if times.phase == name)


def open_times(start: list[int], end: list[int], low: int, high: int) -> set[int]:
    return {
        time for a, b in zip(start, end, strict=True) for time in range(max(a, low), min(b, high))
    }


@pytest.mark.parametrize("seed", range(20))
def test_union_is_that_of_sets_of_nanoseconds(seed: int) -> None:
    generator = random.Random(seed)
    start = [generator.randint(0, 200) for _ in range(generator.randint(0, 20))]
    end = [a + generator.randint(0, 30) for a in start]
    union = Union(ints(start), ints(end))
    times = list(range(-5, 260))
    is_open = open_times(start, end, -5, 260)
    assert union.until(ints(times)).tolist() == [
        sum(other < time for other in is_open) for time in times
    ]

    low = [generator.randint(-5, 240) for _ in range(6)]
    high = [a + generator.randint(0, 20) for a in low]
    holes = union.holes(ints(low), ints(high))
    explained = [
        {
            t
            for w, a, b in zip(holes.window, holes.start_ns, holes.end_ns, strict=True)
            if w == i
            for t in range(a, b)
        }
        for i in range(len(low))
    ]
    assert explained == [set(range(a, b)) - is_open for a, b in zip(low, high, strict=True)]
    assert (holes.end_ns > holes.start_ns).all()
    for window, a, b, before, after in zip(
        holes.window, holes.start_ns, holes.end_ns, holes.before, holes.after, strict=True
    ):
        assert (before >= 0) == (a > low[window])
        assert before < 0 or end[before] == a
        assert (after >= 0) == (b < high[window])
        assert after < 0 or start[after] == b


def random_training(generator: random.Random) -> Recording:
    """Steps of phases of any length; kernels and copies of several streams that run whenever,
    after their launch.
    """
    made, now = Recording(), 10
    has_steps = generator.random() < 0.5
    for _ in range(generator.randint(1, 4)):
        begun = now
        now += generator.randint(0, 20)
        for name in ("forward", "backward", "optimizer"):
            start = now
            now += generator.randint(1, 120)
            made.spans.append(Span(name, start, now))
            for _ in range(generator.randint(0, 5)):
                _add(made, generator, generator.randint(start, now + 3))
            now += generator.randint(0, 15)
        if generator.random() < 0.5:  # a synchronisation, as our own steps end with one
            now = max([now, *(k.start_ns + k.duration_ns for k in made.kernels + made.copies)])
        if has_steps:
            made.spans.append(Span("step", begun, now))
        now += generator.randint(0, 30)
    made.kernels.append(
        Kernel("unlaunched", None, start_ns=generator.randint(0, now), duration_ns=9)
    )
    return made


def _add(made: Recording, generator: random.Random, launch: int) -> None:
    work = Kernel(
        generator.choice("abc"),
        launch,
        generator.choice([MAIN, AUTOGRAD]),
        launch + generator.randint(1, 60),
        generator.randint(0, 40),
        generator.randint(1, 3),
    )
    (made.copies if generator.random() < 0.3 else made.kernels).append(work)


@pytest.mark.parametrize("seed", range(50))
def test_phases_are_those_of_every_nanosecond(seed: int) -> None:
    """Wall times follow the documented rule, busy times are counted nanosecond by nanosecond,
    idle time is the rest.
    """
    made = random_training(random.Random(seed))
    steps, windows = host_times(made)
    explained = profile(made)
    jobs = made.kernels + made.copies
    launched = [job for job in jobs if job.launch_ns is not None]
    is_busy = open_times(
        [k.start_ns for k in jobs], [k.start_ns + k.duration_ns for k in jobs], 0, 5_000
    )

    def through(now: int) -> int:
        return max([0, *(k.start_ns + k.duration_ns for k in launched if k.launch_ns < now)])

    assert explained.num_steps == len(steps)
    idle_total = 0
    for step, (_, ended) in enumerate(steps):
        last = first = max(windows[step][0][1], through(windows[step][0][1]))
        expected: defaultdict[str, set[int]] = defaultdict(set)
        for name, _, leaves in windows[step]:
            boundary = max(leaves, through(leaves), last)
            expected[name] |= set(range(last, boundary))
            last = boundary
        tail = max(last, through(ended), ended)
        expected["unattributed"] |= set(range(last, tail))
        for name, nanoseconds in expected.items():
            if nanoseconds:
                times = phase(explained, name)
                assert each_ns(times.wall_s)[step] == len(nanoseconds)
                assert each_ns(times.busy_s)[step] == len(is_busy & nanoseconds)
        idle = set(range(first, max(tail, ended))) - is_busy
        # a step in which nothing at all ran has no device that was idle
        idle_total += len(idle) if is_busy & set(range(first, max(tail, ended))) else 0
        for name in ("forward", "backward", "optimizer"):
            own = [window for window in windows[step] if window[0] == name]
            inside = [
                k for k in made.kernels if k.launch_ns is not None and is_in(own, k.launch_ns)
            ]
            copied = [k for k in made.copies if is_in(own, k.launch_ns)]
            times = phase(explained, name)
            assert times.launches[step] == len(inside)
            assert each_ns(times.kernel_s)[step] == sum(k.duration_ns for k in inside)
            assert times.copies[step] == len(copied)
            assert each_ns(times.copy_s)[step] == sum(k.duration_ns for k in copied)
            assert each_ns(times.host_s)[step] == sum(end - start for _, start, end in own)
    missing = [note for note in explained.notes if "left out" in note]
    listed = sum(each_ns(row.total_s for row in explained.idle))
    assert listed <= idle_total if missing else listed == idle_total


def host_times(made: Recording) -> tuple[list[tuple[int, int]], list[list[tuple[str, int, int]]]]:
    """Each step's start and end, and its phases: as random_training makes them."""
    spans = sorted((s for s in made.spans if s.name != "step"), key=lambda s: s.start_ns)
    windows = [
        [(s.name, s.start_ns, s.end_ns) for s in spans[i : i + 3]] for i in range(0, len(spans), 3)
    ]
    steps = sorted((s.start_ns, s.end_ns) for s in made.spans if s.name == "step")
    if not steps:
        steps = [(three[0][1], three[-1][2]) for three in windows]
    filled = []
    for (now, _), three in zip(steps, windows, strict=True):
        of_step = []
        for name, start, end in three:
            if start > now:
                of_step.append(("unattributed", now, start))
            of_step.append((name, start, end))
            now = end
        filled.append(of_step)
    return steps, filled


def is_in(windows: list[tuple[str, int, int]], now: int) -> bool:
    return any(start <= now < end for _, start, end in windows)


def test_several_devices_count_as_their_mean() -> None:
    made = Recording(spans=[Span("step", 0, 100), Span("forward", 0, 100)])
    made.kernels = [
        Kernel("a", 0, start_ns=0, duration_ns=100),
        Kernel("a", 1, start_ns=0, duration_ns=40, device=1),
    ]
    # not used by the step
    made.kernels.append(Kernel("a", 200, start_ns=200, duration_ns=5, device=2))
    explained = profile(made)
    assert each_ns(phase(explained, "forward").busy_s) == [70]
    assert [each_ns([row.total_s]) for row in explained.idle] == [[30]]
    assert each_ns(g.duration_s for g in explained.gaps) == [60]


def launching(
    launch: int, start: int, duration: int, name: str = "k", call: str = "cudaLaunchKernel"
) -> Recording:
    kernel = Kernel(name, launch, start_ns=start, duration_ns=duration)
    return Recording(kernels=[kernel], calls=[Call(f"{call}_v7000", launch, launch + LAUNCH_NS)])


def with_causes(*others: Recording, calls: tuple[Call, ...] = ()) -> StepProfile:
    """One step of forward: a kernel runs from 10 to 50 us, and then the others."""
    parts = [launching(1 * US, 10 * US, 40 * US, "first"), *others]
    end = 10_000 * US
    return profile(
        Recording(
            kernels=[k for part in parts for k in part.kernels],
            spans=[Span("step", 0, end), Span("forward", 0, end)],
            copies=[k for part in parts for k in part.copies],
            calls=[*(c for part in parts for c in part.calls), *calls],
        )
    )


def cause_after(explained: StepProfile, name: str = "first") -> tuple[IdleCause, int, str]:
    gap = next(gap for gap in explained.gaps if gap.before == name)
    return gap.cause, round(gap.duration_s * 1e9), gap.host_call


def test_launched_in_time_is_between_kernels() -> None:
    explained = with_causes(launching(20 * US, 53 * US, 10))
    assert cause_after(explained) == (IdleCause.BETWEEN_KERNELS, 3 * US, "")


def test_launched_after_the_device_ran_dry_is_late() -> None:
    explained = with_causes(launching(80 * US, 86 * US, 10))
    assert cause_after(explained) == (IdleCause.LATE_LAUNCH, 36 * US, "cudaLaunchKernel")
    # a launch that began before the device ran dry and took long, as one that loads code does
    slow = launching(40 * US, 95 * US, 10)
    slow.calls = [replace(slow.calls[0], end_ns=92 * US)]
    assert cause_after(with_causes(slow)) == (IdleCause.LATE_LAUNCH, 45 * US, "cudaLaunchKernel")


def test_a_device_that_takes_longer_than_the_host_was_late_is_the_cause() -> None:
    late = LAUNCH_NS + round(LAUNCH_LATENCY_S * 1e9)
    assert (
        cause_after(with_causes(launching(50 * US, 50 * US + 2 * late, 10)))[0]
        is IdleCause.LATE_LAUNCH
    )
    assert (
        cause_after(with_causes(launching(50 * US, 51 * US + 2 * late, 10)))[0]
        is IdleCause.BETWEEN_KERNELS
    )


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize_v3020", "cudaDeviceSynchronize", "cuEventSynchronize"]
)
def test_a_host_that_waited_is_named(name: str) -> None:
    waited = Call(name, 8 * US, 55 * US)
    explained = with_causes(launching(80 * US, 90 * US, 10), calls=(waited,))
    assert cause_after(explained) == (IdleCause.HOST_WAITED, 40 * US, call_name(name))
    # over long before the device ran dry, or only begun then
    for other in (replace(waited, end_ns=30 * US), Call(name, 60 * US, 65 * US)):
        explained = with_causes(launching(80 * US, 90 * US, 10), calls=(other,))
        assert cause_after(explained)[0] is IdleCause.LATE_LAUNCH


def test_item_waits_in_the_copy_to_the_host() -> None:
    """As PyTorch does it: the copy is launched while the device is at work, returns when it is
    done, and is awaited.
    """
    copied = Kernel("memcpy Device-to-Host", 8 * US, start_ns=52 * US, duration_ns=2 * US)
    calls = (
        Call("cudaMemcpyAsync_v3020", 8 * US, 57 * US),
        Call("cudaStreamSynchronize_v3020", 58 * US, 59 * US),
    )
    explained = with_causes(
        Recording(copies=[copied]), launching(80 * US, 90 * US, 10), calls=calls
    )
    assert cause_after(explained) == (IdleCause.BETWEEN_KERNELS, 2 * US, "cudaMemcpyAsync")
    assert cause_after(explained, "memcpy Device-to-Host")[:2] == (IdleCause.HOST_WAITED, 36 * US)
    assert [(row.name, row.is_wait) for row in explained.host_calls if row.is_wait] == [
        ("cudaMemcpyAsync", True),
        ("cudaStreamSynchronize", True),
    ]


def test_a_copy_to_the_host_that_nobody_awaits_is_no_wait() -> None:
    copied = Kernel("memcpy Device-to-Host", 8 * US, start_ns=52 * US, duration_ns=2 * US)
    calls = (
        Call("cudaMemcpyAsync", 8 * US, 10 * US),
        Call("cudaStreamSynchronize", 200 * US, 201 * US),
    )
    explained = with_causes(
        Recording(copies=[copied]), launching(80 * US, 90 * US, 10), calls=calls
    )
    assert [row.name for row in explained.host_calls if row.is_wait] == ["cudaStreamSynchronize"]
    assert cause_after(explained, "memcpy Device-to-Host")[0] is IdleCause.LATE_LAUNCH


def test_a_host_that_slept_is_named() -> None:
    pause = round(HOST_PAUSE_S * 1e9)
    start = 1 * US + LAUNCH_NS
    assert (
        cause_after(with_causes(launching(start + pause, start + pause + 5 * US, 10)))[0]
        is IdleCause.LATE_LAUNCH
    )
    slept = launching(start + pause + 1, start + pause + 5 * US, 10)
    assert cause_after(with_causes(slept))[0] is IdleCause.HOST_PAUSE
    # a call in between, of any thread, and the host did something
    other = Call("cudaMalloc", 500 * US, 501 * US, AUTOGRAD)
    assert cause_after(with_causes(slept, calls=(other,)))[0] is IdleCause.LATE_LAUNCH
    # waited first, slept then: what took longer
    waited = Call("cudaDeviceSynchronize", 8 * US, 55 * US)
    asleep = launching(5_000 * US, 5_005 * US, 10)
    assert cause_after(with_causes(asleep, calls=(waited,)))[0] is IdleCause.HOST_PAUSE


def test_nodes_of_a_graph_follow_each_other_however_long_its_launch_takes() -> None:
    graph = Recording(
        kernels=[
            Kernel(f"node{i}", 60 * US, start_ns=(70 + 20 * i) * US, duration_ns=10 * US)
            for i in range(3)
        ],
        calls=[Call("cudaGraphLaunch_v10000", 60 * US, 500 * US)],
    )
    explained = with_causes(graph)
    assert cause_after(explained) == (IdleCause.LATE_LAUNCH, 20 * US, "cudaGraphLaunch")
    assert cause_after(explained, "node0")[:2] == (IdleCause.BETWEEN_KERNELS, 10 * US)
    assert cause_after(explained, "node1")[:2] == (IdleCause.BETWEEN_KERNELS, 10 * US)
    assert cause_after(explained, "node2")[0] is IdleCause.END_OF_STEP


def test_an_idle_time_before_something_without_a_launch_has_no_cause() -> None:
    made = Recording(spans=[Span("step", 0, 100), Span("forward", 0, 100)])
    made.kernels = [
        Kernel("a", 0, start_ns=0, duration_ns=10),
        Kernel("b", None, start_ns=30, duration_ns=70),
    ]
    explained = profile(made)
    assert (explained.idle, explained.gaps) == ((), ())
    assert "1 idle times of the device, 2e-08 s together" in explained.notes[-1]


def test_the_longest_gaps_are_kept_with_their_modules() -> None:
    made = Recording(
        spans=[
            Span("step", 0, 100_000),
            Span("forward", 0, 100_000),
            Span("attention", 3_000, 100_000),
        ]
    )
    starts = np.cumsum([0, *range(10, 1_010, 10)]).tolist()
    made.kernels = [Kernel("k", start, start_ns=start, duration_ns=1) for start in starts]
    explained = profile(made)
    assert len(explained.gaps) == NUM_GAPS
    durations = each_ns(gap.duration_s for gap in explained.gaps)
    assert durations == [
        100_000 - starts[-1] - 1,
        *(10 * n - 1 for n in range(100, 100 - NUM_GAPS + 1, -1)),
    ]
    assert {gap.module for gap in explained.gaps} == {(), ("attention",)}


@pytest.mark.parametrize(
    ("names", "launches", "waits"),
    [
        (
            "cudaLaunchKernel_v7000 cudaLaunchKernel_ptsz_v7000 cudaLaunchKernelExC_v11060 "
            "cuLaunchKernelEx cudaMemset2D cudaLaunchCooperativeKernel cudaGraphLaunch_v10000 "
            "cudaMemcpyAsync_v3020 cuMemcpyDtoHAsync_v2 hipLaunchKernel hipExtModuleLaunchKernel "
            "hipModuleLaunchKernel hipGraphLaunch cuGraphLaunch urEnqueueKernelLaunch",
            True,
            False,
        ),
        ("cudaMemcpy_v3020 cudaMemcpy2D cudaMemcpyToSymbol_v3020 hipMemcpyWithStream", True, True),
        (
            "cuCtxSynchronize cudaEventSynchronize_v3020 hipDeviceSynchronize hipStreamSynchronize",
            False,
            True,
        ),
        (
            "cudaEventQuery_v3020 cudaStreamIsCapturing_v10000 cuKernelGetFunction cudaMalloc",
            False,
            False,
        ),
    ],
)
def test_calls_by_name(names: str, launches: bool, waits: bool) -> None:
    for name in names.split():
        assert (ApiCallKind.LAUNCH.is_done_by(name), ApiCallKind.WAIT.is_done_by(name)) == (
            launches,
            waits,
        ), name


def name_of(launch: int) -> str:
    """Names that show what the second thread launches, and what the main one does after it."""
    if launch < 100:
        return "k"
    return "softmax_backward" if launch < 200 else "FusedAdam"


def waits_by_phase(num_optimizer: int, *ends: tuple[str, int]) -> Counter[tuple[str, str]]:
    """In two steps of somebody's training without ranges of phases, each with these calls at its
    end.
    """
    made = Recording()
    for begin in (0, 1_000):
        made.spans.append(Span("linear", begin + 10, begin + 50))
        launches = [
            (20, MAIN),
            (100, AUTOGRAD),
            (110, AUTOGRAD),
            *((200 + i, MAIN) for i in range(num_optimizer)),
        ]
        made.kernels += [
            Kernel(name_of(launch), begin + launch, thread, begin + launch + 5)
            for launch, thread in launches
        ]
        made.calls += [
            Call("cudaLaunchKernel_v7000", begin + at, begin + at + 2, thread)
            for at, thread in launches
        ]
        made.calls.append(Call("cudaStreamSynchronize", begin + 105, begin + 106, AUTOGRAD))
        made.calls += [Call(name, begin + at, begin + at + 3) for name, at in ends]
        made.copies += [
            Kernel("memcpy Device-to-Host", begin + at)
            for name, at in ends
            if name == "cudaMemcpyAsync"
        ]
    return Counter(
        {(row.name, row.phase.value): row.count for row in profile(made).host_calls if row.is_wait}
    )


@pytest.mark.parametrize("num_optimizer", [0, 3])
def test_the_clock_of_a_benchmark_waits_in_no_phase(num_optimizer: int) -> None:
    """Nor does what it waits for before the next step; within a step, a wait is of its phase.

    Where optimizers end the steps, what follows the last of them is of no step.
    """
    count = 1 if num_optimizer else 2
    within = {("cudaStreamSynchronize", "backward"): 2}
    for name in ("cudaDeviceSynchronize", "cudaEventSynchronize"):
        assert waits_by_phase(num_optimizer, (name, 300)) == {
            **within,
            (name, "unattributed"): count,
        }
    # an .item(), of which nothing shows the phase
    names = ("cudaMemcpyAsync", "cudaStreamSynchronize")
    of_item = {(name, "unattributed"): count for name in names}
    explained = waits_by_phase(
        num_optimizer, ("cudaMemcpyAsync", 300), ("cudaStreamSynchronize", 310)
    )
    assert explained == {**within, **of_item}


def test_host_calls_by_function_and_phase_of_any_thread() -> None:
    made = Recording(
        spans=[Span("step", 0, 1_000), Span("forward", 10, 400), Span("backward", 400, 900)],
        kernels=[Kernel("k", 20, start_ns=30)],
        calls=[
            Call("cudaLaunchKernel_v7000", 20, 25),
            Call("cudaLaunchKernel_v7000", 399, 410),
            Call("cudaLaunchKernel_v7000", 500, 507, AUTOGRAD),
            Call("cuLaunchKernel", 510, 513, AUTOGRAD),
            Call("cudaDeviceSynchronize_v3020", 950, 990),
            Call("cudaDeviceSynchronize_v3020", 1_000, 2_000),  # after the step
        ],
    )
    rows = profile(made).host_calls
    assert [
        (r.name, r.phase, r.count, *each_ns([r.total_s]), r.is_launch, r.is_wait) for r in rows
    ] == [
        ("cudaDeviceSynchronize", "unattributed", 1, 40, False, True),
        ("cudaLaunchKernel", "forward", 2, 16, True, False),
        ("cudaLaunchKernel", "backward", 1, 7, True, False),
        ("cuLaunchKernel", "backward", 1, 3, True, False),
    ]
