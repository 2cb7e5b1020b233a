"""Pictures of profiled steps: one step over time, classes of kernels, and communication."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon
from numpy.typing import NDArray

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import Gap, PicturedStep, Piece, StepProfile, Window, Work
from cs336_systems.report.columns import Row
from cs336_systems.report.plots import charts, draw
from cs336_systems.report.plots.charts import (
    CLASS_COLOURS,
    FAILURE_COLOUR,
    REST_COLOUR,
    Axis,
    Bar,
    Chart,
    Panel,
    Style,
    distinct,
)
from cs336_systems.report.plots.draw import LONGEST_SOURCE
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import collectives_s, exposed_s
from cs336_systems.report.sections.kernels.tables import CLASS_KEYS, class_rows, is_shown, phase_rows
from cs336_systems.report.words import significant
from cs336_systems.text import shorten

Times = NDArray[np.float64]
CELLS = 260
"""Number of bars over the step; one is about as narrow as print can show."""
MAX_STREAMS = 4
"""Only the busiest streams are drawn."""
MAX_GAPS = 3
SHORTEST_GAP = 1 / 400
"""Share of the step's time; shorter gaps cannot be seen."""
CHARACTER = 0.0122
"""Width of one character of a phase's name, as a share of the step's time."""
SHORT_NAMES = {LaunchPhase.FORWARD: "fwd", LaunchPhase.BACKWARD: "bwd", LaunchPhase.COMMUNICATION: "comm.",
               LaunchPhase.OPTIMIZER: "opt."}  # fmt: skip
"""Names of phases that are too short for the whole name."""
EDGE = 0.01
"""Share of the step's time; a phase that ends this close to either end of the step needs no line."""
NUMBER = 0.018
"""Width of the number of a gap, as a share of the step's time."""
PHASE_SHADES = ("#D4D4D4", "#EAEAEA")
LONGEST_LINE = 92
LONGEST_NAME = 40
"""Characters of the name of a kernel, of the modules around it, or of a call."""


def draw_timeline(profile: StepProfile, name: str = "") -> Figure:
    """The step of median wall time: its phases above, its streams below, and its longest gaps by number.

    Raise ValueError where the profile pictures no step.
    """
    step = profile.pictured
    if step is None:
        raise ValueError(f"{profile.source}: a timeline needs a pictured step, but this profile has none")
    is_gpu = profile.work is Work.KERNELS
    pieces = pieces_of(profile)
    streams = _busiest(pieces)
    gaps = longest_gaps(profile) if is_gpu else []
    kinds = [kind for kind in charts.CLASS_COLOURS if any(piece.kind is kind for piece in pieces)]
    lines = gap_lines(gaps)
    heights = [0.8 if is_gpu else 0.35, *[1.5 if len(streams) == 1 else 0.85] * len(streams), 0.17 * len(lines) + 0.01]
    figure = draw.new_figure(
        6.5,
        1.75 + sum(heights) + 0.19 * -(-len(kinds) // 4),
        _title(profile, step),
        ", ".join([*([name] if name else []), *describe_source(profile), *_step_words(profile, step, pieces)]),
    )
    phases, *lanes, words = figure.subplots(len(heights), 1, height_ratios=heights).tolist()
    _draw_phases(phases, step, is_gpu)
    for lane, (stream, pieces) in zip(lanes, streams.items(), strict=True):
        _draw_stream(lane, pieces, step, gaps)
        lane.set_ylabel("busy (%)" if len(streams) == 1 else f"stream {stream}\nbusy (%)", fontsize=9)
    for panel in (phases, *lanes):
        panel.set_xlim(0, step.wall_s * 1e3)
        panel.tick_params(labelbottom=panel is lanes[-1])
    lanes[-1].set_xlabel("time from the start of the step (ms)", fontsize=9)
    _number_gaps(lanes[0], gaps, step)
    _write_lines(words, lines)
    handles = [Patch(color=charts.CLASS_COLOURS[kind], label=kind) for kind in kinds]
    draw.legend_below(figure, handles, 4)
    return figure


def pieces_of(profile: StepProfile) -> Sequence[Piece]:
    """The pictured step's merged kernels; if its kernels are kept, a piece for each of them."""
    step = profile.pictured
    if step is None or not step.streams:
        return step.pieces if step is not None else ()
    return [
        Piece(
            stream=stream.stream,
            phase=profile.modules[module].phase,
            kind=profile.kernels[kernel].kind,
            start_s=start_ns / 1e9,
            end_s=(start_ns + duration_ns) / 1e9,
            busy_s=duration_ns / 1e9,
        )
        for stream in step.streams
        for start_ns, duration_ns, kernel, module in zip(
            stream.start_ns, stream.duration_ns, stream.kernel, stream.module, strict=True
        )
    ]


def longest_gaps(profile: StepProfile) -> list[Gap]:
    """The longest gaps of the pictured step that can be seen, in the order of time."""
    step = profile.pictured
    if step is None:
        return []
    seen = [gap for gap in profile.gaps if gap.step == step.step and gap.duration_s >= SHORTEST_GAP * step.wall_s]
    return sorted(sorted(seen, key=lambda gap: -gap.duration_s)[:MAX_GAPS], key=lambda gap: gap.start_s)


def spread(places: Sequence[float], apart: float, end: float) -> list[float]:
    """The rising places, moved to the right until they are `apart`, then back to stay left of `end`."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + apart) if moved else max(place, apart / 2))
    limit = end - apart / 2
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - apart
    return moved


def _busiest(pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
    """Pieces by stream, in the order of the streams' numbers; one empty lane where nothing ran."""
    streams: dict[int, list[Piece]] = {}
    for piece in pieces:
        streams.setdefault(piece.stream, []).append(piece)
    kept = sorted(streams, key=lambda stream: -sum(piece.busy_s for piece in streams[stream]))[:MAX_STREAMS]
    return {stream: streams[stream] for stream in sorted(kept)} or {0: []}


def _title(profile: StepProfile, step: PicturedStep) -> str:
    device = "GPU" if profile.work is Work.KERNELS else "CPU"
    what = "The whole trace" if profile.is_whole_trace else "One step"
    busy_s = sum(phase.busy_s[step.step] for phase in profile.phases)
    busy = f", {100 * busy_s / step.wall_s:.0f} % busy" if device == "GPU" and step.wall_s else ""
    return f"{what} on the {device}: {significant(step.wall_s * 1e3, 3)} ms{busy}"


def _step_words(profile: StepProfile, step: PicturedStep, pieces: Sequence[Piece]) -> list[str]:
    kind = "warm-up step" if profile.is_warmup else "step"
    words = [] if profile.is_whole_trace else [f"{kind} {step.step + 1} of {profile.num_steps} (median time)"]
    left_out = len({piece.stream for piece in pieces}) - MAX_STREAMS
    return [*words, f"{left_out} less busy streams left out"] if left_out > 0 else words


def _draw_phases(panel: Axes, step: PicturedStep, is_gpu: bool) -> None:
    """Draw the phases on the host and below on the device; the slant between them is how far the host runs ahead."""
    for index, window in enumerate(step.windows):
        shade = PHASE_SHADES[index % len(PHASE_SHADES)]
        host = (window.host_start_s * 1e3, window.host_end_s * 1e3)
        device = (window.device_start_s * 1e3, window.device_end_s * 1e3)
        _draw_window(panel, window, host, 1.0, shade, step)
        if is_gpu:
            _draw_window(panel, window, device, 0.0, shade, step)
            corners = [(host[0], 0.68), (host[1], 0.68), (device[1], 0.32), (device[0], 0.32)]
            panel.add_patch(Polygon(corners, facecolor=shade, alpha=0.45, linewidth=0))
    panel.set_yticks([1.0, 0.0] if is_gpu else [1.0], ["CPU", "GPU"] if is_gpu else ["phase"])
    panel.set_ylim(-0.36 if is_gpu else 0.64, 1.36)
    panel.tick_params(length=0, labelsize=9)
    panel.spines[:].set_visible(False)


def _draw_window(
    panel: Axes, window: Window, span_ms: tuple[float, float], y: float, shade: str, step: PicturedStep
) -> None:
    """Draw one phase in one lane, with its name if that fits."""
    start, end = span_ms
    panel.barh(y, end - start, 0.64, start, color=shade, edgecolor="white", linewidth=0.8)
    room = (end - start) / 1e3 / (CHARACTER * step.wall_s)
    name = next((name for name in (window.phase, SHORT_NAMES.get(window.phase, "")) if len(name) < room), "")
    if name:
        panel.text((start + end) / 2, y, name, ha="center", va="center", fontsize=8.5)


def _draw_stream(panel: Axes, pieces: Sequence[Piece], step: PicturedStep, gaps: Sequence[Gap]) -> None:
    """Draw how busy the stream was, stacked by class; white is idle."""
    edges = np.linspace(0.0, step.wall_s, CELLS + 1)
    bottom = np.zeros(CELLS)
    for kind, share in utilisation(pieces, edges).items():
        top = bottom + 100 * share
        colour = charts.CLASS_COLOURS[kind]
        panel.stairs(top, edges * 1e3, baseline=bottom, fill=True, color=colour, linewidth=0, label=kind)
        bottom = top
    ends = [window.device_end_s for window in step.windows]
    for end_s in (end_s for end_s in ends if EDGE * step.wall_s < end_s < (1 - EDGE) * step.wall_s):
        panel.axvline(end_s * 1e3, color="#666666", linewidth=0.7, linestyle=(0, (4, 3)))
    for gap in gaps:
        start, end = gap.start_s * 1e3, (gap.start_s + gap.duration_s) * 1e3
        panel.axvspan(start, end, facecolor=charts.FAILURE_COLOUR, alpha=0.25, linewidth=0)
    draw.style(panel)
    # streams of one number on several devices share a lane
    panel.set_ylim(0, max(100.0, float(bottom.max())))
    panel.set_yticks([0, 50, 100])


def _number_gaps(panel: Axes, gaps: Sequence[Gap], step: PicturedStep) -> None:
    wall_ms = step.wall_s * 1e3
    middles = [(gap.start_s + gap.duration_s / 2) * 1e3 for gap in gaps]
    for number, x in enumerate(spread(middles, NUMBER * wall_ms, wall_ms), start=1):
        panel.text(
            x, 1.02, str(number), transform=panel.get_xaxis_transform(), ha="center", va="bottom", fontsize=8.5,
            fontweight="bold", color=charts.FAILURE_COLOUR,
        )  # fmt: skip


def gap_lines(gaps: Sequence[Gap]) -> list[str]:
    """The numbered gaps in words, wrapped to lines that fit."""
    texts = (f"{number}  {gap_words(gap)}" for number, gap in enumerate(gaps, start=1))
    return [line for text in texts for line in textwrap.wrap(text, LONGEST_LINE, subsequent_indent="    ")]


def gap_words(gap: Gap) -> str:
    """How long the device was idle, why, and before which kernel, where, and what the host did."""
    module = shorten(" > ".join(gap.module), LONGEST_NAME)
    where = f" in {module}" if module else ""
    until = f", before {shorten(gap.after, LONGEST_NAME)}{where}" if gap.after else ""
    host = f", host in {shorten(gap.host_call, LONGEST_NAME)}" if gap.host_call else ""
    return f"{significant(gap.duration_s * 1e3, 3)} ms, {gap.cause}{until}{host}"


def _write_lines(panel: Axes, lines: Sequence[str]) -> None:
    panel.set_axis_off()
    panel.set_ylim(len(lines) or 1, 0)
    for y, line in enumerate(lines):
        words = panel.text(
            0.0, y + 0.5, draw.inert(line, LONGEST_LINE), va="center", fontsize=8, color=charts.FAILURE_COLOUR
        )
        words.set_in_layout(False)


def utilisation(pieces: Sequence[Piece], edges: Times) -> dict[KernelClass, Times]:
    """The part of each cell between `edges` (seconds) in which kernels of a class ran, in the order of drawing.

    Within a piece, the time in which its kernels ran counts as spread evenly.
    """
    return {
        kind: _covered([piece for piece in pieces if piece.kind is kind], edges) / np.diff(edges)
        for kind in charts.CLASS_COLOURS
        if any(piece.kind is kind for piece in pieces)
    }


def _covered(pieces: Sequence[Piece], edges: Times) -> Times:
    """Seconds of each cell in which the pieces ran."""
    start = np.array([piece.start_s for piece in pieces])
    length = np.array([piece.end_s for piece in pieces]) - start
    busy = np.array([piece.busy_s for piece in pieces])
    # a piece of no length would divide by zero, and has nothing to cover
    start, length, busy = start[length > 0], length[length > 0], busy[length > 0]
    until = np.clip((edges[:, None] - start) / length, 0.0, 1.0) @ busy
    return np.diff(until)


def describe_source(profile: StepProfile) -> list[str]:
    """File and devices, in words."""
    source = shorten(profile.source.replace(", ", " "), LONGEST_SOURCE)
    return [source, *describe_devices([profile])]


def describe_devices(profiles: Sequence[StepProfile]) -> list[str]:
    """Names of the devices, each once."""
    return list(dict.fromkeys(name for profile in profiles for name in profile.device_names))


COPIES = "copy by the driver"
IDLE = "idle"
STYLES = {
    **{str(kind): Style(colour=colour) for kind, colour in CLASS_COLOURS.items()},
    COPIES: Style(colour="#FFFFFF", pattern="x", ink=CLASS_COLOURS[KernelClass.COPY_AND_FILL]),
    IDLE: Style(colour="#FFFFFF", pattern="/", ink=REST_COLOUR),
}
"""Style of each part that a bar may have, in the order of drawing."""


@dataclass(frozen=True, slots=True)
class TimeBar:
    """One bar: a row of the table of phases, and what it consists of in milliseconds per step, in the order of drawing.

    The bar is longer than the wall time if kernels overlapped.
    """

    row: Row
    parts_ms: Mapping[str, float]
    """Classes of kernels, copies by the driver and the idle rest of the wall time, as far as there are any."""

    @property
    def length_ms(self) -> float:
        """Length of the whole bar."""
        return sum(self.parts_ms.values())


def time_bars(profile: StepProfile) -> list[TimeBar]:
    """A bar for each phase in which something ran, or which took a noticeable part of the step; last the whole step."""
    entry = Explained(profile=profile)
    classes = {row["phase"]: row for row in class_rows(entry)}
    return [_time_bar(row, classes.get(row["phase"], {})) for row in phase_rows(entry) if is_shown(row)]


def _time_bar(row: Row, classes: Row) -> TimeBar:
    parts_ms = {str(kind): classes.get(f"{CLASS_KEYS[kind]}_ms_per_step", 0.0) for kind in CLASS_COLOURS}
    idle_ms = 0.0 if row["busy_mean_ms"] is None else row["wall_mean_ms"] - row["busy_mean_ms"]
    parts_ms |= {COPIES: row["copy_mean_ms"], IDLE: idle_ms}
    return TimeBar(row, {name: time_ms for name, time_ms in parts_ms.items() if time_ms > 0})


def configuration_chart(profiles: Sequence[tuple[str, StepProfile]]) -> Chart | None:
    """A bar for each labelled profile: the part of its step that each class of kernel took, and that was idle.

    The whole is the step's wall time, and longer where kernels ran side by side. None for fewer than two profiles.
    """
    if len(profiles) < 2:
        return None
    bars = []
    labels = distinct(label for label, _ in profiles)
    for label, (_, profile) in zip(labels, profiles, strict=True):
        step = time_bars(profile)[-1]
        parts = {name: 100 * time_ms / (step.length_ms or 1.0) for name, time_ms in step.parts_ms.items()}
        bars.append(Bar(name=label, parts=parts, words=f"{significant(step.row['wall_mean_ms'], 3)} ms"))
    return Chart(
        name="configurations", title="Where the time of a step goes, by configuration",
        settings=", ".join(describe_devices([profile for _, profile in profiles])), size=(6.0, 0.0), legend=4,
        styles=STYLES, is_lying=True,
        panels=[Panel(x=Axis(names=labels),
                      y=Axis(label="share of the step (%); its time is on the right"), bars=bars)],
    )  # fmt: skip


COMPUTING, OVERLAPPED, EXPOSED = "computing", "computing and communicating", "communicating"
COMMUNICATION = {
    COMPUTING: Style(colour="#4C72B0"),
    OVERLAPPED: Style(colour="#FFFFFF", pattern="/", ink="#4C72B0"),
    EXPOSED: Style(colour=FAILURE_COLOUR),
    IDLE: STYLES[IDLE],
}


def communication_chart(profiles: Sequence[tuple[str, StepProfile]]) -> Chart | None:
    """A bar for each labelled profile of a run on several ranks: when its device computed, communicated, or did both.

    None if fewer than two of them have collectives.
    """
    shared = [(name, profile) for name, profile in profiles if profile.communication]
    bars = []
    labels = distinct(label for label, _ in shared)
    for label, (_, profile) in zip(labels, shared, strict=True):
        step = time_bars(profile)[-1].row
        both_ms, exposed_ms = (found(profile) * 1e3 / profile.num_steps for found in (collectives_s, exposed_s))
        parts = {
            COMPUTING: step["busy_mean_ms"] - both_ms,
            OVERLAPPED: both_ms - exposed_ms,
            EXPOSED: exposed_ms,
            IDLE: step["wall_mean_ms"] - step["busy_mean_ms"],
        }
        words = f"{significant(step['wall_mean_ms'], 3)} ms, {significant(exposed_ms, 2)} of it communicating alone"
        bars.append(Bar(name=label, parts=parts, words=words))
    if len(bars) < 2:
        return None
    return Chart(
        name="communication", title="How much of the communication is hidden behind computing",
        settings=", ".join(describe_devices([profile for _, profile in shared])), size=(6.0, 0.0), legend=4,
        styles=COMMUNICATION, is_lying=True,
        panels=[Panel(x=Axis(names=labels), y=Axis(label="time of a step on the device (ms)"), bars=bars)],
    )  # fmt: skip
