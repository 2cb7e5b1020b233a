"""The replay of a step, against traces of a simulated host and device, closed forms, and all committed profiles."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cs336_systems.analysis.kernels.attribution import attribute
from cs336_systems.analysis.kernels.changes import without_exposed_communication, without_launches
from cs336_systems.analysis.kernels.explain import explain
from cs336_systems.analysis.kernels.replay import Job, Queue, queue_of
from cs336_systems.analysis.kernels.step_profile import StepProfile, read_profile
from cs336_systems.analysis.kernels.summary import summarise
from cs336_systems.costs.time import Limit
from tests.analysis.kernels.tracing import Call, Kernel, Recording, Span, make_trace
from tests.committed import committed_directories

REAL = Path(__file__).with_name("two_gpus") / "ddp.json.gz"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
TAIL = 40
"""From the end of the last kernel to that of the step."""


def simulated(host: list[int], kernel: list[int], latency: int, gap: int) -> list[tuple[int, int]]:
    """Launch and start of each kernel, by a host and a device that each do one thing a tick."""
    launches, starts = [], []
    host_left, device_left, idle, tick = host[0], 0, gap, 0
    while len(starts) < len(kernel) or device_left:
        while len(launches) < len(host) and host_left == 0:
            launches.append(tick)
            host_left = host[len(launches)] if len(launches) < len(host) else -1
        waiting = len(starts) < len(launches)
        if device_left == 0 and idle >= gap and waiting and tick >= launches[len(starts)] + latency:
            device_left = kernel[len(starts)]
            starts.append(tick)
        tick += 1
        host_left = max(0, host_left - 1) if len(launches) < len(host) else -1
        idle = 0 if device_left else idle + 1
        device_left = max(0, device_left - 1)
    return list(zip(launches, starts, strict=True))


def end_of(times: list[tuple[int, int]], kernel: list[int]) -> int:
    return times[-1][1] + kernel[-1]


def recorded(times: list[tuple[int, int]], kernel: list[int]) -> StepProfile:
    """The profile of a step with these launches and starts."""
    end = end_of(times, kernel) + TAIL
    made = Recording(spans=[Span("step", 0, end), Span("forward", 0, end)])
    for (launch, start), duration in zip(times, kernel, strict=True):
        made.kernels.append(Kernel("k", launch, start_ns=start, duration_ns=duration))
    return summarise(attribute(make_trace(made)), source="test")


def profile(made: Recording) -> StepProfile:
    return summarise(attribute(make_trace(made)), source="test")


def queue(found: StepProfile) -> Queue:
    made = queue_of(found)
    assert made is not None
    return made


def ns(found: Queue) -> float:
    return found.run().step_s * 1e9


@pytest.mark.parametrize("host_bound", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_replay_is_the_simulation_also_with_changes(seed: int, host_bound: bool) -> None:
    draw = random.Random(seed)
    latency, gap = draw.randint(4, 9), draw.randint(0, 3)
    host = [draw.randint(30, 60) if host_bound else draw.randint(5, 60) for _ in range(80)]
    kernel = [draw.randint(5, 30) if host_bound else draw.randint(5, 90) for _ in range(80)]
    times = simulated(host, kernel, latency, gap)
    found = queue(recorded(times, kernel))
    assert ns(found) == pytest.approx(end_of(times, kernel) + TAIL, rel=1e-6)
    if found.gap_s * 1e9 != gap:  # no kernel was launched in time
        assert host_bound
        return
    free = [0] * 80
    assert ns(without_launches(found)) == pytest.approx(end_of(simulated(free, kernel, latency, gap), kernel) + TAIL)
    short = [max(1, duration // 3) for duration in kernel]
    jobs = [replace(job, kernel_s=duration / 1e9) for job, duration in zip(found.jobs, short, strict=True)]
    assert ns(found.with_jobs(jobs)) == pytest.approx(end_of(simulated(host, short, latency, gap), short) + TAIL)


def test_a_slow_host_is_worth_its_known_time_and_shorter_kernels_nothing() -> None:
    """100 launches of 50, kernels of 10 each that begin 6 after their launch."""
    kernel = [10] * 100
    found = queue(recorded(simulated([50] * 100, kernel, 6, 2), kernel))
    assert ns(found) == pytest.approx(100 * 50 + 6 + 10 + TAIL)
    shorter = found.with_jobs([replace(job, kernel_s=job.kernel_s / 2) for job in found.jobs])
    assert ns(shorter) == pytest.approx(ns(found) - 5)
    assert ns(found.with_host(100 * 30e-9)) == pytest.approx(ns(found) - 100 * 20)
    assert ns(found.with_host(1.0)) == pytest.approx(ns(found)), "a profiler makes no host faster"


def test_a_slow_device_is_worth_its_known_time_and_launches_next_to_nothing() -> None:
    """100 kernels of 50 with gaps of 2, launched every 10."""
    kernel = [50] * 100
    found = queue(recorded(simulated([10] * 100, kernel, 6, 2), kernel))
    assert ns(found) == pytest.approx(10 + 6 + 100 * 50 + 99 * 2 + TAIL)
    assert ns(without_launches(found)) == pytest.approx(ns(found) - 10)
    shorter = found.with_jobs([replace(job, kernel_s=job.kernel_s - 20e-9) for job in found.jobs])
    assert ns(shorter) == pytest.approx(ns(found) - 100 * 20)


def test_a_full_queue_says_nothing_about_the_host() -> None:
    """3,000 launches of 5 µs each, kernels of 20: from the 1,365th launch on the host waits for room, 13 at a time."""
    launches, starts, ends = list[int](), list[int](), list[int]()
    now = 0
    for number in range(3000):
        now += 5_000
        if number >= 1024 and now < ends[number - 1024]:
            now = ends[number - 1024 + 12]
        launches.append(now)
        starts.append(max([now, *ends[-1:]]))
        ends.append(starts[-1] + 20_000)
    found = queue(recorded(list(zip(launches, starts, strict=True)), [20_000] * 3000))
    assert max(after - before for before, after in pairwise(launches)) > 200_000
    assert found.host_s == pytest.approx(3000 * 5e-6, rel=0.01)
    assert ns(found) == pytest.approx(ends[-1] + TAIL, rel=1e-3)


def test_a_long_time_after_the_last_kernel_is_no_reason_of_the_host() -> None:
    """A thousand launches of 100 us, after which the device takes 10 us, or 2 ms more."""
    jobs = [Job(host_s=1e-4, kernel_s=1e-5)] * 1000
    limits = [Queue(jobs=jobs, latency_s=0.0, gap_s=0.0, tail_s=tail_s).run().limit for tail_s in (0.0, 0.002)]
    assert limits == [Limit.LAUNCHES, Limit.DEVICE]


def test_a_copy_is_part_of_the_stream() -> None:
    """Its launch is not kept; it is launched with the kernel before, or just in time."""
    made = Recording(spans=[Span("step", 0, 1000), Span("forward", 0, 1000)])
    made.kernels += [Kernel("k", 10, start_ns=20, duration_ns=100), Kernel("k", 30, start_ns=152, duration_ns=100)]
    made.copies.append(Kernel("memset", 20, start_ns=121, duration_ns=30))
    found = queue(profile(made))
    assert [round(job.kernel_s * 1e9) for job in found.jobs] == [100, 30, 100]
    assert [job.kind is None for job in found.jobs] == [False, True, False]
    assert ns(found) == pytest.approx(1000, abs=1)


def test_a_kernel_that_waits_for_a_collective_waits_for_it_again_unless_nothing_is_exposed() -> None:
    """It is launched at 30 µs, and the kernel before ends at 110; a collective on another stream runs until 300."""
    made = Recording(spans=[Span("step", 0, 450_000), Span("forward", 0, 450_000)])
    made.kernels += [
        Kernel("k", 10_000, start_ns=15_000, duration_ns=95_000),
        Kernel(ALL_REDUCE, 20_000, start_ns=50_000, duration_ns=250_000, stream=16),
        Kernel("k", 30_000, start_ns=301_000, duration_ns=100_000),
    ]
    found = queue(profile(made))
    assert [job.name for job in found.jobs] == ["k", "k"]
    assert ns(found) == pytest.approx(450_000)
    assert found.jobs[1].exposed_s == pytest.approx(190e-6)
    hidden = without_exposed_communication(found)
    assert hidden is not None
    assert ns(hidden) == pytest.approx(450_000 - 190_000)
    shorter = found.with_jobs([replace(found.jobs[0], kernel_s=5e-6), found.jobs[1]])
    assert ns(shorter) == pytest.approx(450_000 - 90_000)


def test_a_collective_on_a_stream_that_computes_is_waited_for_and_no_kernel_of_the_queue() -> None:
    """As in a CUDA graph: it runs from 110 to 300 µs, and a kernel on another stream from 200 to 320."""
    made = Recording(spans=[Span("step", 0, 330_000), Span("forward", 0, 330_000)])
    made.kernels += [
        Kernel("k", 10_000, start_ns=15_000, duration_ns=95_000),
        Kernel(ALL_REDUCE, 11_000, start_ns=110_000, duration_ns=190_000),
        Kernel("k", 12_000, start_ns=200_000, duration_ns=120_000, stream=8),
    ]
    found = queue(profile(made))
    assert [round(job.kernel_s * 1e6) for job in found.jobs] == [95, 120]
    hidden = without_exposed_communication(found)
    assert hidden is not None
    assert [ns(found), ns(hidden)] == pytest.approx([330_000, 330_000 - 90_000])


def test_a_step_that_ends_with_a_collective_ends_without_it() -> None:
    """It runs from 120 to 300 µs, and the last kernel that computes ends at 110."""
    made = Recording(spans=[Span("step", 0, 310_000), Span("forward", 0, 310_000)])
    made.kernels += [
        Kernel("k", 10_000, start_ns=15_000, duration_ns=95_000),
        Kernel(ALL_REDUCE, 20_000, start_ns=120_000, duration_ns=180_000, stream=16),
    ]
    found = queue(profile(made))
    hidden = without_exposed_communication(found)
    assert hidden is not None
    assert [ns(found), ns(hidden)] == pytest.approx([310_000, 130_000])


def test_of_kernels_that_run_beside_others_counts_what_they_add() -> None:
    """The second of two streams begins at 50 and ends 60 µs after the first has ended, at 110."""
    made = Recording(spans=[Span("step", 0, 180_000), Span("forward", 0, 180_000)])
    made.kernels += [
        Kernel("k", 10_000, start_ns=15_000, duration_ns=95_000),
        Kernel("k", 20_000, start_ns=50_000, duration_ns=120_000, stream=8),
    ]
    found = queue(profile(made))
    assert [round(job.kernel_s * 1e6) for job in found.jobs] == [95, 60]
    assert ns(found) == pytest.approx(180_000)


def test_a_host_that_waits_for_the_device_waits_less_if_that_is_faster() -> None:
    """An .item() after the first kernel, which ends at 100 µs; 40 later the host launches the next."""
    made = Recording(spans=[Span("step", 0, 300_000), Span("forward", 0, 300_000)])
    made.kernels += [
        Kernel("k", 10_000, start_ns=14_000, duration_ns=86_000),
        Kernel("k", 140_000, start_ns=144_000, duration_ns=100_000),
    ]
    made.calls += [
        Call("cudaLaunchKernel", 10_000, 13_000),
        Call("cudaStreamSynchronize", 13_000, 101_000),
        Call("cudaLaunchKernel", 140_000, 143_000),
    ]
    found = queue(profile(made))
    assert [job.is_after_wait for job in found.jobs] == [False, True]
    assert ns(found) == pytest.approx(300_000)
    shorter = found.with_jobs([replace(found.jobs[0], kernel_s=46e-6), found.jobs[1]])
    assert ns(shorter) == pytest.approx(300_000 - 40_000)
    assert ns(without_launches(found)) == pytest.approx(300_000 - 10_000 - 40_000)


def test_a_pause_of_the_host_stays_if_launches_are_free() -> None:
    """It sleeps for about 3 ms before the second kernel."""
    made = Recording(spans=[Span("step", 0, 4_000_000), Span("forward", 0, 4_000_000)])
    made.kernels += [
        Kernel("k", 10_000, start_ns=14_000, duration_ns=86_000),
        Kernel("k", 3_100_000, start_ns=3_104_000, duration_ns=100_000),
    ]
    made.calls += [Call("cudaLaunchKernel", 10_000, 13_000), Call("cudaLaunchKernel", 3_100_000, 3_103_000)]
    found = queue(profile(made))
    assert ns(found) == pytest.approx(4_000_000)
    assert found.jobs[1].pause_s == pytest.approx(3.004e-3)
    assert ns(without_launches(found)) > 3_900_000


def test_a_profile_that_keeps_no_single_kernels_has_no_queue() -> None:
    found = recorded([(10, 20)], [30])
    assert found.pictured is not None
    assert queue_of(replace(found, pictured=replace(found.pictured, streams=()))) is None
    assert queue_of(replace(found, pictured=None)) is None
    made = Recording(spans=[Span("step", 0, 100), Span("forward", 0, 100)])
    made.kernels.append(Kernel(ALL_REDUCE, 10, start_ns=20, duration_ns=30))
    assert queue_of(profile(made)) is None


def committed_profiles() -> list[Path]:
    return [path for directory in committed_directories() for path in sorted((directory / "kernels").glob("*.json"))]


def test_every_committed_step_of_which_each_kernel_is_kept_is_replayed_to_two_percent() -> None:
    errors = {}
    for path in committed_profiles():
        found = read_profile(path)
        if found is not None and found.pictured is not None and (made := queue_of(found)) is not None:
            errors[path.name] = abs(made.run().step_s / found.pictured.wall_s - 1)
    assert len(errors) >= 10
    assert max(errors.values()) <= 0.02


def test_the_real_step_of_two_gpus_is_shorter_without_the_last_all_reduce_alone() -> None:
    """Of 27 ms of exposed communication 23 are in times in which the host was late: they are no gain.

    The optimizer's first kernel is launched long after backward's last has ended, and then waits for all-reduces.
    """
    found = explain(REAL)
    made, step = queue(found), found.pictured
    assert step is not None
    assert made.run().step_s == pytest.approx(step.wall_s, rel=0.02)
    stream = max(step.streams, key=lambda own: len(own.start_ns))
    first = next(i for i, row in enumerate(stream.module) if found.modules[row].phase == "optimizer")
    launch_ns, start_ns = stream.launch_ns[first], stream.start_ns[first]
    assert launch_ns is not None
    hidden = without_exposed_communication(made)
    assert hidden is not None
    gain_s = made.run().step_s - hidden.run().step_s
    assert gain_s == pytest.approx((start_ns - launch_ns) / 1e9, rel=0.05)
    exposed_s = sum(row.exposed_s[step.step] for row in found.communication if row.collective is None)
    assert gain_s < exposed_s / 5
