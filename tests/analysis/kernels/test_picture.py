"""The pictured step: every kernel with its name, phase and times, against the recording and against the raw file."""

import random

import pytest

from cs336_systems.analysis.kernels import explain as explaining
from cs336_systems.analysis.kernels.explain import CELLS, MAX_IDLE
from cs336_systems.analysis.kernels.step_profile import StepProfile
from tests.analysis.kernels.tracing import Call, Kernel, Recording, Span, ns, profile


def kernels_of(found: StepProfile) -> list[tuple[object, ...]]:
    """Device, stream, start, duration, launch, name, phase and modules of each kernel of the pictured step."""
    return [
        (s.device, s.stream, s.start_ns[i], s.duration_ns[i], s.launch_ns[i], found.kernels[s.kernel[i]].name,
         str(found.modules[s.module[i]].phase), found.modules[s.module[i]].path)
        for s in found.pictured.streams
        for i in range(len(s.start_ns))
    ]  # fmt: skip


def test_the_step_of_median_wall_time_is_pictured() -> None:
    made = Recording()
    for index, wall in enumerate((900, 100, 400, 300)):
        start = 10_000 * index
        made.spans += [Span("step", start, start + wall), Span("forward", start + 10, start + wall)]
        made.kernels.append(Kernel("k", start + 20, start_ns=start + 30, duration_ns=50, stream=index))
    found = profile(made)
    pictured = found.pictured
    assert (pictured.step, ns(pictured.wall_s)) == (3, 300)
    assert kernels_of(found) == [(0, 3, 30, 50, 20, "k", "forward", ())]
    window = pictured.windows[-1]
    assert [ns(v) for v in (window.host_start_s, window.host_end_s)] == [10, 300]
    assert [ns(v) for v in (window.device_start_s, window.device_end_s)] == [10, 300]


@pytest.mark.parametrize("seed", range(10))
def test_every_kernel_of_the_step_is_kept_as_it_was(seed: int) -> None:
    """Kernels of many names on several streams and devices, within nested modules, and others outside of the step."""
    generator = random.Random(seed)
    made = Recording(spans=[Span("step", 100, 5_000), Span("forward", 100, 2_000), Span("backward", 2_000, 4_000)])
    made.spans += [Span("block", 200, 900), Span("attention", 300, 600), Span("block", 900, 1_500)]
    expected = []
    for _ in range(200):
        launch, start, duration = generator.randint(0, 6_000), generator.randint(0, 9_000), generator.randint(0, 40)
        stream, device = generator.randint(1, 3), generator.randint(0, 1)
        name = generator.choice(["gemm", "softmax", "copy_kernel", "mystery"])
        made.kernels.append(Kernel(name, launch, start_ns=start, duration_ns=duration, stream=stream, device=device))
        if not 100 <= launch < 5_000:
            continue
        phase = "forward" if launch < 2_000 else "backward" if launch < 4_000 else "unattributed"
        inner = [s for s in made.spans[3:] if s.start_ns <= launch < s.end_ns]
        path = tuple(s.name for s in sorted(inner, key=lambda span: span.start_ns))
        expected.append((device, stream, start - 100, duration, launch - 100, name, phase, path))
    found = profile(made)
    assert sorted(kernels_of(found)) == sorted(expected)
    for stream in found.pictured.streams:
        assert list(stream.start_ns) == sorted(stream.start_ns)
    assert found.pictured.pieces == ()


def test_copies_of_the_step_are_kept_apart_from_its_kernels() -> None:
    made = Recording(spans=[Span("step", 100, 900), Span("forward", 100, 500), Span("backward", 500, 900)])
    made.kernels = [Kernel("k", 200, start_ns=300)]
    rows = [("Memcpy", 150, 160, 7), ("Memcpy", 450, 700, 7), ("Memcpy", 600, 750, 7), ("Memset", 160, 400, 7),
            ("Memset", 170, 420, 8), ("Memset", 950, 960, 8), ("Memset", None, 500, 8)]  # fmt: skip
    made.copies = [Kernel(name, launch, start_ns=start, duration_ns=5, stream=s) for name, launch, start, s in rows]
    found = profile(made)
    assert len(kernels_of(found)) == 1
    assert [(c.stream, c.name, str(c.phase), c.start_ns, c.duration_ns) for c in found.pictured.copies] == [
        (7, "Memcpy", "forward", (60, 600), (5, 5)), (7, "Memset", "forward", (300,), (5,)),
        (7, "Memcpy", "backward", (650,), (5,)), (8, "Memset", "forward", (320,), (5,)),
    ]  # fmt: skip


def test_kernels_without_a_launch_in_the_file_have_none() -> None:
    made = Recording(kernels=[Kernel("a", 5, start_ns=10, duration_ns=30), Kernel("b", None, start_ns=50)])
    made.calls = [Call("cudaDeviceSynchronize", 0, 100)]
    assert [kernel[4] for kernel in kernels_of(profile(made))] == [5, None]


def test_idle_times_are_the_times_without_a_kernel() -> None:
    """The first two kernels wait for their launches, of which the second comes after a pause; the third does not."""
    made = Recording(spans=[Span("step", 0, 9_000_000), Span("forward", 0, 9_000_000)])
    launches = (1_000_000, 5_000_000, 5_010_000)
    for launch, start in zip(launches, (1_002_000, 5_002_000, 5_900_000), strict=True):
        made.kernels.append(Kernel("k", launch, start_ns=start, duration_ns=500_000))
        made.calls.append(Call("cudaLaunchKernel", launch, launch + 1_000))
    made.calls.insert(0, Call("cudaGetDevice", 0, 1_000_000))
    made.copies.append(Kernel("memcpy", 5_020_000, start_ns=7_000_000, duration_ns=2_000_000))
    found = {
        str(idle.cause): list(zip(idle.start_ns, idle.duration_ns, strict=True)) for idle in profile(made).pictured.idle
    }
    assert found == {
        "late launch": [(0, 1_002_000)],
        "host pause": [(1_502_000, 3_500_000)],
        "between kernels": [(5_502_000, 398_000), (6_400_000, 600_000)],
    }


def test_only_the_longest_idle_times_are_kept() -> None:
    count = MAX_IDLE + 500
    made = Recording(spans=[Span("step", 0, 100 * count), Span("forward", 0, 100 * count)])
    made.kernels = [Kernel("k", 1, start_ns=100 * i, duration_ns=99 if i < 500 else 50) for i in range(count)]
    idle = profile(made).pictured.idle
    lengths = [length for own in idle for length in own.duration_ns]
    assert (len(lengths), set(lengths)) == (MAX_IDLE, {50})


def test_a_picture_of_very_many_kernels_is_bounded_and_loses_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 4 * CELLS
    monkeypatch.setattr(explaining, "MAX_KERNELS", count - 1)
    made = Recording(spans=[Span("step", 0, 20 * count), Span("forward", 0, 20 * count)])
    made.kernels = [
        Kernel("gemm" if i % 2 else "softmax", 20 * i, start_ns=20 * i, duration_ns=9 if i % 2 else 5)
        for i in range(count)
    ]
    found = profile(made).pictured
    assert (len(found.pieces), found.streams) == (CELLS, ())
    assert {piece.kind for piece in found.pieces} == {"matrix product"}
    assert sum(ns(piece.busy_s) for piece in found.pieces) == 7 * count
    monkeypatch.setattr(explaining, "MAX_KERNELS", count)
    assert sum(map(sum, (stream.duration_ns for stream in profile(made).pictured.streams))) == 7 * count
