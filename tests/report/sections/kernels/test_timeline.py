from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle, StepPatch

from cs336_systems.analysis.kernels.attribution import attribute
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.explain import summarise
from cs336_systems.analysis.kernels.step_profile import IdleCause
from cs336_systems.report.sections.kernels.plots import (
    LONGEST_LINE,
    MAX_STREAMS,
    describe_devices,
    describe_source,
    draw_timeline,
    gap_lines,
    gap_words,
    longest_gaps,
    pieces_of,
    spread,
    utilisation,
)
from tests.analysis.kernels.tracing import Kernel, Recording, Span, make_trace
from tests.report.drawn import texts
from tests.report.making import H200
from tests.report.sections.kernels.profiles import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    make_cpu_profile,
    make_gap,
    make_piece,
    make_profile,
)

PRODUCT, SOFTMAX, ELEMENT_WISE, COPY, OTHER = (
    KernelClass.MATMUL, KernelClass.SOFTMAX, KernelClass.ELEMENT_WISE, KernelClass.COPY_AND_FILL,
    KernelClass.OTHER,
)  # fmt: skip


def test_utilisation_is_that_of_a_brute_force() -> None:
    pieces = [
        make_piece(FORWARD, PRODUCT, 0.25, 1.75),
        replace(make_piece(FORWARD, PRODUCT, 2.0, 4.0), busy_s=0.5e-3),
        make_piece(FORWARD, SOFTMAX, 3.0, 3.0),
        make_piece(FORWARD, SOFTMAX, 7.5, 9.0),
    ]
    edges = np.linspace(0, 8e-3, 9)
    found = utilisation(pieces, edges)
    ticks = (np.arange(8000) + 0.5) * 1e-6  # microsecond by microsecond
    for kind in (PRODUCT, SOFTMAX):
        density = np.zeros(8000)
        for piece in pieces:
            if piece.kind is kind and piece.end_s > piece.start_s:
                within = (ticks > piece.start_s) & (ticks < piece.end_s)
                density += within * piece.busy_s / (piece.end_s - piece.start_s)
        np.testing.assert_allclose(found[kind], density.reshape(8, 1000).mean(axis=1), atol=1e-9)
    assert list(found) == [PRODUCT, SOFTMAX]
    assert utilisation([], edges) == {}


def test_a_stream_is_drawn_as_busy_as_it_was() -> None:
    figure = draw_timeline(make_profile())
    phases, first, second, _ = figure.axes
    assert [panel.get_ylabel() for panel in (first, second)] == ["stream 7\nbusy (%)", "stream 20\nbusy (%)"]
    area: dict[str, float] = {}
    top = np.zeros(0)
    for patch in (patch for patch in first.patches if isinstance(patch, StepPatch)):
        values, edges, baseline = patch.get_data()
        if len(top):
            np.testing.assert_allclose(baseline, top)  # stacked
        top = values
        area[str(patch.get_label())] = float(((values - baseline) * np.diff(edges)).sum() / 100)
        assert to_hex(patch.get_facecolor()) == charts.CLASS_COLOURS[KernelClass(patch.get_label())].lower()
    assert area == pytest.approx({PRODUCT: 10.9, SOFTMAX: 1.5, ELEMENT_WISE: 5.5, COPY: 1})
    assert top.max() <= 100 + 1e-9
    for panel in (phases, first, second):
        assert panel.get_xlim() == (0, pytest.approx(25))


def test_kernels_that_are_kept_one_by_one_are_drawn_as_busy_as_they_were() -> None:
    """Two kernels of 20 us in a step of 100 us, on two streams, and one in half of that time."""
    made = Recording(spans=[Span("step", 0, 100_000), Span("forward", 0, 100_000)])
    for name, start, stream in (("sgemm", 10_000, 7), ("softmax", 60_000, 7), ("sgemm", 15_000, 9)):
        made.kernels.append(
            Kernel(name, 1, start_ns=start, duration_ns=20_000 if stream == 7 else 10_000, stream=stream)
        )
    profile = summarise(attribute(make_trace(made)), source="p")
    assert (profile.pictured.pieces, len(pieces_of(profile))) == ((), 3)
    area = {}
    for panel in draw_timeline(profile).axes[1:3]:
        for patch in (patch for patch in panel.patches if isinstance(patch, StepPatch)):
            values, edges, baseline = patch.get_data()
            key = panel.get_ylabel().partition("\n")[0], str(patch.get_label())
            area[key] = float(((values - baseline) * np.diff(edges)).sum() / 100)
    assert area == pytest.approx(
        {("stream 7", PRODUCT): 0.02, ("stream 7", SOFTMAX): 0.02, ("stream 9", PRODUCT): 0.01}
    )


def test_phases_are_drawn_on_the_host_and_on_the_device() -> None:
    panel = draw_timeline(make_profile()).axes[0]
    bars = [patch for patch in panel.patches if isinstance(patch, Rectangle)]
    drawn = {(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars}
    assert drawn == {(1, 0, 7), (0, 0, 8), (1, 7, 18), (0, 8, 20), (1, 18, 22), (0, 20, 25)}
    assert [label.get_text() for label in panel.get_yticklabels()] == ["CPU", "GPU"]
    assert [text.get_text() for text in panel.texts].count("backward") == 2


def test_a_phase_too_short_for_its_name_has_a_short_one_or_none() -> None:
    whole = make_profile()
    step = whole.pictured
    narrow = [replace(step.windows[0], host_end_s=end_s, device_end_s=end_s) for end_s in (0.0018, 0.0002)]
    for window, said in zip(narrow, (["fwd", "fwd"], []), strict=True):
        panel = draw_timeline(replace(whole, pictured=replace(step, windows=(window,)))).axes[0]
        assert [text.get_text() for text in panel.texts] == said


def test_only_gaps_of_the_pictured_step_that_can_be_seen_are_numbered() -> None:
    cause = IdleCause.LATE_LAUNCH
    places = ((0, 9, 1), (1, 1, 5), (0, 5, 3), (0, 1, 2), (0, 20, 0.5), (0, 22, 0.05))
    gaps = tuple(make_gap(step, at, ms, FORWARD, cause) for step, at, ms in places)
    profile = make_profile(gaps=gaps)
    assert [gap.start_s * 1e3 for gap in longest_gaps(profile)] == pytest.approx([1, 5, 9])
    figure = draw_timeline(profile)
    numbers = [text for text in figure.axes[1].texts if text.get_text().isdigit()]
    assert [(text.get_text(), text.get_position()[0]) for text in numbers] == [
        ("1", pytest.approx(2)), ("2", pytest.approx(6.5)), ("3", pytest.approx(9.5)),
    ]  # fmt: skip
    shown = texts(figure)
    assert any(text.startswith("2  3.00 ms, late launch, before ampere_sgemm_128x64_tn") for text in shown)
    assert longest_gaps(replace(profile, gaps=gaps[-1:])) == longest_gaps(replace(profile, pictured=None)) == []


def test_words_of_a_gap() -> None:
    gap = make_gap(0, 1, 1.6, BACKWARD, IdleCause.HOST_WAITED, module=("block.0", "ffn"), host_call="cudaMemcpy")
    assert gap_words(gap) == "1.60 ms, host waited, before ampere_sgemm_128x64_tn in block.0 > ffn, host in cudaMemcpy"
    last = make_gap(0, 1, 0.25, OPTIMIZER, IdleCause.END_OF_STEP, after="")
    assert gap_words(last) == "0.250 ms, end of step"
    long = gap_lines([replace(gap, after="x" * 8000), last])
    assert max(map(len, long)) <= LONGEST_LINE
    assert long[0].startswith(f"1  1.60 ms, host waited, before {'x' * 39}… in block.0 > ffn")
    assert len(long) == 3
    assert long[-1] == "2  0.250 ms, end of step"


@pytest.mark.parametrize(
    ("places", "expected"),
    [([], []), ([5.0], [5.0]), ([1.0, 1.1, 1.2], [1.0, 2.0, 3.0]), ([9.0, 9.9, 9.95], [7.5, 8.5, 9.5]), ([0.0], [0.5])],
)
def test_numbers_keep_apart_and_inside(places: list[float], expected: list[float]) -> None:
    assert spread(places, 1.0, 10.0) == pytest.approx(expected)


def test_the_busiest_streams_are_drawn_and_the_rest_is_said() -> None:
    whole = make_profile()
    pieces = tuple(make_piece(FORWARD, PRODUCT, 0, 1 + stream, stream) for stream in range(MAX_STREAMS + 2))
    figure = draw_timeline(replace(whole, pictured=replace(whole.pictured, pieces=pieces)))
    labels = [panel.get_ylabel().partition("\n")[0] for panel in figure.axes[1:-1]]
    assert labels == [f"stream {stream}" for stream in range(2, MAX_STREAMS + 2)]
    assert any("2\xa0less\xa0busy\xa0streams" in text for text in texts(figure))


def test_titles_say_what_is_shown() -> None:
    # (4.9 + 10.1 + 5) of 25 ms
    shown = texts(draw_timeline(make_profile()))
    assert "One step on the GPU: 25.0 ms, 80 % busy" in shown
    assert any("small.nsys-rep" in text and "NVIDIA" in text and "step\xa01\xa0of\xa02" in text for text in shown)
    on_cpu = make_cpu_profile(pictured=make_profile().pictured)
    assert "One step on the CPU: 25.0 ms" in texts(draw_timeline(on_cpu))
    assert [label.get_text() for label in draw_timeline(on_cpu).axes[0].get_yticklabels()] == ["phase"]
    whole = texts(draw_timeline(make_profile(is_whole_trace=True)))
    assert "The whole trace on the GPU: 25.0 ms, 80 % busy" in whole
    assert describe_devices([make_profile(), make_cpu_profile(), make_profile()]) == [H200, "a CPU"]
    assert describe_source(make_profile(source="a, b")) == ["a b", H200]
