"""The pictured step of a page: what a profile keeps of it, in numbers that a script can unfold."""

import gzip
import json
from dataclasses import replace
from itertools import accumulate

import pytest

from cs336_systems.analysis.kernels.attribution import attribute
from cs336_systems.analysis.kernels.explain import summarise
from cs336_systems.analysis.kernels.step_profile import IdleSpans, Work
from cs336_systems.report.page.pictured import IDLE, Lane, step_picture, step_title
from tests.analysis.kernels.tracing import Call, Kernel, Recording, Span, make_trace
from tests.report.page.pages import large_step
from tests.report.sections.kernels.profiles import make_profile


def a_step() -> Recording:
    """Three kernels on two streams, the second of which waits 300 us for its launch."""
    made = Recording(spans=[Span("step", 1_000, 900_000), Span("forward", 1_000, 300_000), Span("block", 2_000, 9_000)])
    made.spans.append(Span("backward", 300_000, 600_000))
    rows = [
        ("sgemm_of_mine", 3_000, 5_000, 7),
        ("void softmax<int>(int)", 305_000, 307_000, 7),
        ("other", 3_500, 6_000, 9),
    ]
    for name, launch, start, stream in rows:
        made.kernels.append(Kernel(name, launch, start_ns=start, duration_ns=2_500, stream=stream))
        made.calls.append(Call("cudaLaunchKernel", launch, launch + 400))
    return made


def places_of(spec):
    """Stream, times, name, class and place of all that is not idle."""
    return [
        (lane["label"], *times, spec["names"][name], spec["classes"][spec["kind"][name]], spec["places"][place])
        for lane in spec["lanes"]
        for times, name, place in zip(unfolded(lane), lane["name"], lane["place"], strict=True)
        if lane["label"] != IDLE
    ]


def unfolded(lane):
    """Start, end and launch of each kernel, as the page's script works them out."""
    end, found, launches = 0, [], list(accumulate(lane["launch_us"]))
    for i, (gap, length) in enumerate(zip(lane["gap"], lane["length"], strict=True)):
        start, end = end + gap, end + gap + length
        found.append((start, end, None if i in lane["unknown"] or not launches else launches[i]))
    return found


def test_each_kernel_is_in_the_page_with_its_name_class_phase_and_module() -> None:
    spec = step_picture(summarise(attribute(make_trace(a_step())), source="p"))
    assert places_of(spec) == [
        ("stream 7", 4_000, 6_500, 2, "sgemm_of_mine", "matrix product", "forward, block"),
        ("stream 7", 306_000, 308_500, 304, "softmax", "softmax", "backward"),
        ("stream 9", 5_000, 7_500, 2, "other", "other", "forward, block"),
    ]
    assert spec["whole"][spec["names"].index("softmax")] == "void softmax<int>(int)"
    assert set(spec["classes"]) == {"matrix product", "softmax", "other", IDLE}
    (idle,) = [lane for lane in spec["lanes"] if lane["label"] == IDLE]
    times, names = unfolded(idle), [spec["names"][name] for name in idle["name"]]
    assert times[1] == (7_500, 306_000, None)
    assert names[1] == "late launch"
    assert spec["places"][idle["place"][1]].startswith("0.298 ms, late launch, before softmax")
    alone = replace(summarise(attribute(make_trace(a_step())), source="p"), gaps=())
    spec = step_picture(alone)
    (idle,) = [lane for lane in spec["lanes"] if lane["label"] == IDLE]
    assert [spec["places"][place] for place in idle["place"]] == ["before sgemm_of_mine", "before softmax", ""]
    assert sum(end - start for start, end, _ in times) == 899_000 - 3_500 - 2_500  # two kernels overlap for 1.5 us


def test_copies_by_the_driver_are_on_their_stream_between_the_kernels() -> None:
    made = a_step()
    made.copies = [
        Kernel("Memcpy HtoD", 304_000, start_ns=200_000, duration_ns=50_000, stream=7),
        Kernel("Memset", 4_000, start_ns=9_000, duration_ns=1_000, stream=4),
        Kernel("Memset", 901_000, start_ns=902_000, duration_ns=1_000, stream=4),  # after the step
    ]
    profile = summarise(attribute(make_trace(made)), source="p")
    seen = places_of(step_picture(profile))
    assert [own for own in seen if own[4].startswith("Mem")] == [
        ("stream 4", 8_000, 9_000, None, "Memset", "copy and fill", "forward"),
        ("stream 7", 199_000, 249_000, None, "Memcpy HtoD", "copy and fill", "backward"),
    ]
    assert [own[4] for own in seen if own[0] == "stream 7"] == ["sgemm_of_mine", "Memcpy HtoD", "softmax"]


def test_a_profile_with_merged_kernels_is_still_shown() -> None:
    profile = make_profile()
    spec = step_picture(profile)
    lanes = {lane["label"]: unfolded(lane) for lane in spec["lanes"]}
    assert set(lanes) == {IDLE, "stream 7", "stream 20"}
    pieces = [p for p in profile.pictured.pieces if p.stream == 7]
    assert [start for start, *_ in lanes["stream 7"]] == [round(p.start_s * 1e9) for p in pieces]
    first = [gap for gap in profile.gaps if gap.step == 0]
    assert [start for start, *_ in lanes[IDLE]] == sorted(round(gap.start_s * 1e9) for gap in first)
    assert "kernel by kernel" not in step_title(profile)
    assert step_picture(replace(profile, pictured=None)) is None


def test_devices_have_lanes_of_their_own_and_operators_have_threads() -> None:
    profile = summarise(attribute(make_trace(a_step())), source="p")
    step, (first, second) = profile.pictured, profile.pictured.streams
    idle = tuple(IdleSpans(device=d, cause="late launch", start_ns=(d,), duration_ns=(5,)) for d in (0, 1))
    two = replace(profile, pictured=replace(step, streams=(first, replace(second, device=1)), idle=idle))
    labels = [lane["label"] for lane in step_picture(two)["lanes"]]
    assert labels == ["GPU 0 idle", "GPU 1 idle", "GPU 0, stream 7", "GPU 1, stream 9"]
    of_host = step_picture(replace(profile, work=Work.OPERATORS))
    assert [(lane["label"], lane["launch_us"]) for lane in of_host["lanes"]] == [("thread 7", []), ("thread 9", [])]


def test_columns_of_a_lane_need_one_length() -> None:
    with pytest.raises(ValueError, match="stream 7: all columns need as many entries"):
        Lane(label="stream 7", start_ns=[1, 2], end_ns=[2, 3], name=[0, 0], place=[1])


def test_a_step_of_15_000_kernels_takes_little_of_a_page() -> None:
    packed = gzip.compress(json.dumps(large_step(15_000).spec).encode(), 9)
    assert len(packed) < 60_000
