"""The right reader for each file, sums of its kernels against brute force, and the kernels of
the pictured step.
"""

import gzip
import lzma
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from cs336.analysis.columns import ProfileError
from cs336.analysis.kernels import explain as explaining
from cs336.analysis.kernels import pictured as picturing
from cs336.analysis.kernels.attribution import attribute
from cs336.analysis.kernels.phases import PHASES, PhaseSource
from cs336.analysis.kernels.readers import read_trace
from cs336.analysis.kernels.step_profile import StepProfile, Work, decode_profile, encode_profile
from tests.analysis.kernels.kineto_files import events_of, write_trace
from tests.analysis.kernels.tracing import (
    STEP,
    Call,
    Kernel,
    Recording,
    Span,
    make_trace,
    module_path,
    ns,
    profile,
    random_recording,
    totals,
    training,
    write_export,
)


def test_the_same_steps_from_either_profiler(tmp_path: Path) -> None:
    made = training(3)
    expected = totals(attribute(make_trace(made)), 1)
    (tmp_path / "zipped").write_bytes(
        gzip.compress(write_trace(tmp_path / "kineto", events_of(made)).read_bytes())
    )
    (tmp_path / "indented").write_bytes(b" \n\t" + (tmp_path / "kineto").read_bytes())
    write_export(tmp_path / "nsys", made)
    for name in ("nsys", "kineto", "zipped", "indented"):
        assert totals(attribute(read_trace(tmp_path / name)), 1) == expected, name


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t", b"", "but it is empty"),
        ("t", b"\x80\x04}.", "but it is a pickle"),
        ("t", lzma.compress(b"{}"), "xz -dk"),
        ("t", b"\x28\xb5\x2f\xfd", "zstd -dk"),
        ("t", b"{}", "traceEvents"),
    ],
)
def test_any_other_file_is_said_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProfileError) as caught:
        read_trace(tmp_path / name)
    assert said in str(caught.value)
    if "but it" in said:
        assert "a trace of torch.profiler" in str(caught.value)
        assert "the SQLite export of an nsys report" in str(caught.value)


def launches(explained: StepProfile) -> dict[str, tuple[int, ...]]:
    return {times.phase.value: times.launches for times in explained.phases}


def whole(explained: StepProfile) -> tuple[int, int]:
    """Kernels and nanoseconds of all parts together."""
    left = explained.left
    count = (
        sum(sum(times.launches) for times in explained.phases)
        + left.warmup
        + left.outside
        + left.no_launch
    )
    time_ns = sum(ns(value) for times in explained.phases for value in times.kernel_s)
    return count, time_ns + ns(left.warmup_s) + ns(left.outside_s) + ns(left.no_launch_s)


@pytest.mark.parametrize("seed", range(30))
def test_every_kernel_is_in_one_place_and_in_the_module_of_its_path(seed: int) -> None:
    made = random_recording(random.Random(seed))
    attribution = attribute(make_trace(made))
    explained = explaining.summarise(attribution, source="test")
    total = len(made.kernels), sum(k.duration_ns for k in made.kernels)
    assert whole(explained) == total == (explained.num_kernels, ns(explained.kernel_s))
    in_steps = sum(sum(times.launches) for times in explained.phases)
    for rows in (
        explained.classes,
        explained.modules,
        [row for row in explained.kernels if row.phase is None],
    ):
        assert sum(row.count for row in rows) == in_steps
    assert decode_profile(encode_profile(explained)) == explained
    durations: dict[tuple[tuple[str, ...], str], list[int]] = defaultdict(list)
    used = (attribution.jobs.step >= 0) | explained.is_whole_trace
    for i in used.nonzero()[0].tolist():
        key = (
            module_path(attribution, int(attribution.jobs.module[i])),
            PHASES[attribution.jobs.phase[i]],
        )
        durations[key].append(int(attribution.trace.kernels.duration_ns[i]))
    counted = {key: (len(own), sum(own)) for key, own in durations.items()}
    assert {
        (row.path, row.phase): (row.count, ns(row.total_s)) for row in explained.modules
    } == counted
    assert [row.total_s for row in explained.modules] == sorted(
        (row.total_s for row in explained.modules), reverse=True
    )


def test_warm_up_is_left_out_unless_there_is_nothing_else() -> None:
    made = training(4, step_range=True)
    steps = sorted(s.start_ns for s in made.spans if s.name == "step")
    made.spans.append(Span("warmup", steps[0] - 1, steps[3] - 1))
    explained = profile(made)
    assert launches(explained) == {
        "unattributed": (1,),
        **{name: (count,) for name, count in STEP.items()},
    }
    per_step = 1 + sum(STEP.values())
    assert (explained.left.warmup, explained.is_warmup, explained.num_steps) == (
        3 * per_step,
        False,
        1,
    )
    assert explained.left.warmup_s == pytest.approx(
        3 * sum(times.kernel_s[0] for times in explained.phases)
    )
    made.spans[-1] = Span("warmup", steps[0] - 1, steps[3] + 1)
    explained = profile(made)
    assert (explained.left.warmup, explained.is_warmup, explained.num_steps) == (0, True, 4)


def test_without_steps_the_whole_file_is_one() -> None:
    made = Recording(
        kernels=[Kernel("a", 5, start_ns=10, duration_ns=30), Kernel("b", None, start_ns=50)]
    )
    made.calls = [Call("cudaDeviceSynchronize", 0, 100)]
    explained = profile(made)
    assert (explained.is_whole_trace, explained.num_steps, explained.phases_from) == (
        True,
        1,
        (PhaseSource.NOTHING,),
    )
    # from the first event of the device to the last
    assert [ns(t) for t in explained.step_s] == [50]
    (times,) = explained.phases
    assert (times.phase, times.launches) == ("unattributed", (2,))
    assert [ns(v[0]) for v in (times.kernel_s, times.busy_s, times.wall_s, times.host_s)] == [
        40,
        40,
        50,
        50,
    ]
    assert whole(explained) == (2, 40)


def test_a_graph_of_a_whole_step_has_steps_without_phases() -> None:
    """Four steps, of which one settles the profiler; each launches one graph of three kernels."""
    made = Recording(spans=[Span("warmup", 0, 100)])
    for step in range(4):
        at = step * 100
        made.spans.append(Span("step", at + 5, at + 95))
        made.kernels += [
            Kernel(name, at + 10, start_ns=at + 20 + 10 * i, graph=9)
            for i, name in enumerate("abc")
        ]
    explained = profile(made)
    assert (explained.is_whole_trace, explained.num_steps, explained.phases_from) == (
        False,
        3,
        (PhaseSource.NOTHING,),
    )
    assert launches(explained) == {"unattributed": (3, 3, 3)}
    assert explained.left.warmup == 3


def test_phases_without_steps() -> None:
    """No forward, so no step; what backward launched is known all the same."""
    made = Recording(
        spans=[Span("backward", 10, 100)], kernels=[Kernel("a", 20, start_ns=30, duration_ns=200)]
    )
    explained = profile(made)
    assert explained.is_whole_trace
    assert {t.phase.value: (t.launches, ns(t.wall_s[0])) for t in explained.phases} == {
        "backward": ((1,), 200)
    }


def test_an_empty_trace() -> None:
    explained = profile(Recording())
    assert (
        explained.num_steps,
        explained.is_whole_trace,
        explained.num_kernels,
        explained.gaps,
    ) == (1, True, 0, ())
    assert decode_profile(encode_profile(explained)) == explained


@pytest.mark.parametrize("seed", range(20))
def test_statistics_of_kernels_are_pythons(seed: int) -> None:
    generator = random.Random(seed)
    made = Recording(
        spans=[Span("step", 0, 1_000), Span("forward", 0, 500), Span("backward", 500, 1_000)]
    )
    for _ in range(generator.randint(1, 60)):
        duration = generator.choice([0, 1, 7, generator.randint(1, 10**9)])
        made.kernels.append(
            Kernel(generator.choice("abcd"), generator.randint(0, 999), duration_ns=duration)
        )
    rows = profile(made).kernels
    for row in rows:
        window = {None: (0, 1_000), "forward": (0, 500), "backward": (500, 1_000)}[row.phase]
        mine = [
            k.duration_ns / 1e9
            for k in made.kernels
            if k.name == row.name and window[0] <= k.launch_ns < window[1]
        ]
        assert row.count == len(mine)
        assert row.total_s == pytest.approx(sum(mine))
        # a time of nothing was lost, and is in no average
        mine = [time for time in mine if time] or [0.0]
        assert (row.min_s, row.max_s) == (min(mine), max(mine))
        assert row.mean_s == pytest.approx(statistics.mean(mine))
        assert row.median_s == pytest.approx(statistics.median(mine))
        stdev = statistics.stdev(mine) if len(mine) > 1 else None
        assert row.stdev_s == (None if stdev is None else pytest.approx(stdev, abs=1e-15))
    phases = [row.phase for row in rows]
    assert phases == sorted(phases, key=lambda p: -1 if p is None else PHASES.index(p))
    for phase in set(phases):
        totals = [row.total_s for row in rows if row.phase == phase]
        assert totals == sorted(totals, reverse=True)


def test_a_host_without_a_device_has_operators() -> None:
    made = Recording(
        spans=[Span("step", 0, 200), Span("forward", 10, 100), Span("backward", 110, 190)]
    )
    made.kernels = [
        Kernel("aten::mm", 20, start_ns=20, duration_ns=50),
        Kernel("aten::mm", 120, start_ns=120, duration_ns=60),
    ]
    explained = profile(replace(make_trace(made), is_of_host=True))
    assert explained.work is Work.OPERATORS
    assert {t.phase.value: (ns(t.wall_s[0]), ns(t.busy_s[0])) for t in explained.phases} == {
        "unattributed": (30, 0),
        "forward": (90, 50),
        "backward": (80, 60),
    }
    assert (explained.idle, explained.gaps) == ((), ())
    assert whole(explained) == (2, 110)


# the pictured step


def test_the_step_of_median_wall_time_is_pictured() -> None:
    made = Recording()
    for index, wall in enumerate((900, 100, 400, 300)):
        start = 10_000 * index
        made.spans += [Span("step", start, start + wall), Span("forward", start + 10, start + wall)]
        made.kernels.append(
            Kernel("k", start + 20, start_ns=start + 30, duration_ns=50, stream=index)
        )
    pictured = profile(made).pictured
    assert (pictured.step, ns(pictured.wall_s)) == (3, 300)
    assert [(p.stream, ns(p.start_s), ns(p.end_s), ns(p.busy_s)) for p in pictured.pieces] == [
        (3, 30, 80, 50)
    ]
    assert pictured.places == {"k": (100,)}, "it begins after a tenth of the step"
    window = pictured.windows[-1]
    assert [ns(v) for v in (window.host_start_s, window.host_end_s)] == [10, 300]
    assert [ns(v) for v in (window.device_start_s, window.device_end_s)] == [10, 300]


def test_pieces_hold_all_kernels_of_the_step_by_stream_and_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten kernels to a part of the step, by turns of two classes and two streams."""
    monkeypatch.setattr(picturing, "PICTURE_PARTS", 4)
    made = Recording(spans=[Span("step", 0, 800), Span("forward", 0, 800)])
    names = ("ampere_sgemm", "softmax_warp_forward")
    made.kernels = [
        Kernel(names[i % 2], 20 * i, start_ns=20 * i, duration_ns=9, stream=1 + i // 2 % 2)
        for i in range(40)
    ]
    pieces = profile(made).pictured.pieces
    assert len(pieces) == 4 * 2 * 2
    for stream in (1, 2):
        for name, kind in zip(names, ("matrix product", "softmax"), strict=True):
            own = [piece for piece in pieces if (piece.stream, piece.kind) == (stream, kind)]
            mine = [
                kernel for kernel in made.kernels if (kernel.stream, kernel.name) == (stream, name)
            ]
            assert sum(ns(piece.busy_s) for piece in own) == 9 * len(mine)
            for kernel in mine:
                end = kernel.start_ns + 9
                assert any(
                    ns(piece.start_s) <= kernel.start_ns and end <= ns(piece.end_s) for piece in own
                )
