"""Pictures of profiled steps over time: one step, and several beside each other."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, StepPatch
from numpy.typing import NDArray

from ....analysis.kernels.classes import KernelClass
from ....analysis.kernels.step_profile import PicturedStep, Piece, StepProfile, Window, Work
from ... import draw
from ...charts import CLASS_COLOURS, fitting
from ...words import significant
from .bars import devices_of

Times = NDArray[np.float64]
CELLS = 260
"""Number of bars over the step; one is about as narrow as print can show."""
MAX_STREAMS = 4
"""Only the busiest streams are drawn."""
CHARACTER = 0.0122
"""Width of one character of a phase's name, as a share of the step's time."""
LONGEST_KIND = 24
"""Characters of the name of a kind of steps."""
EDGE = 0.01
"""Share of the step's time; a phase that ends this close to either end of the step needs no
line.
"""
LEGEND_COLUMNS = 4
PHASE_SHADES = ("#D4D4D4", "#EAEAEA")


def draw_timeline(profile: StepProfile, name: str = "") -> Figure:
    """The step of median wall time: its phases above, its streams below; white is idle.

    Raise ValueError where the profile pictures no step.
    """
    step = profile.pictured
    if step is None:
        raise ValueError(
            f"{profile.source}: a timeline needs a pictured step, but this profile has none"
        )
    is_gpu = profile.work is Work.KERNELS
    pieces = step.pieces
    streams = _busiest(pieces)
    kinds = _kinds_in(pieces)
    lane_height = 1.5 if len(streams) == 1 else 0.85
    heights = [0.8 if is_gpu else 0.35, *[lane_height] * len(streams)]
    source = draw.in_settings(profile.source)
    words = [name, source, *devices_of([profile]), *_step_words(profile, step)]
    settings = ", ".join(filter(None, words))
    legend_rows = math.ceil(len(kinds) / LEGEND_COLUMNS)
    height = 1.75 + sum(heights) + 0.19 * legend_rows
    figure = draw.new_figure(6.5, height, _title(profile, step), settings)
    phases, *lanes = figure.subplots(len(heights), 1, height_ratios=heights).tolist()
    _draw_phases(phases, step, is_gpu)
    for lane, (stream, of_stream) in zip(lanes, streams.items(), strict=True):
        _draw_stream(lane, of_stream, step)
        which = f"stream {stream}\n" if len(streams) > 1 else ""
        lane.set_ylabel(f"{which}busy (%)", fontsize=9)
    for panel in (phases, *lanes):
        panel.set_xlim(0, step.wall_s * 1e3)
        panel.tick_params(labelbottom=panel is lanes[-1])
    lanes[-1].set_xlabel("time from the start of the step (ms)", fontsize=9)
    _legend(figure, kinds)
    return figure


def _kinds_in(pieces: Sequence[Piece]) -> list[KernelClass]:
    """The classes of the pieces, in the order of draw."""
    kinds = {piece.kind for piece in pieces}
    return [kind for kind in CLASS_COLOURS if kind in kinds]


def _legend(figure: Figure, kinds: Sequence[KernelClass]) -> None:
    """A legend of these classes below the picture."""
    handles = [Patch(color=CLASS_COLOURS[kind], label=kind) for kind in kinds]
    draw.legend_below(figure, handles, LEGEND_COLUMNS)


def _busiest(pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
    """Pieces by stream, in the order of the streams' numbers; one empty lane where nothing ran."""
    streams: dict[int, list[Piece]] = {}
    for piece in pieces:
        streams.setdefault(piece.stream, []).append(piece)
    by_time = sorted(streams, key=lambda stream: -sum(piece.busy_s for piece in streams[stream]))
    return {stream: streams[stream] for stream in sorted(by_time[:MAX_STREAMS])} or {0: []}


def _title(profile: StepProfile, step: PicturedStep) -> str:
    """What is pictured, how long it lasts and how busy a GPU was in it."""
    is_gpu = profile.work is Work.KERNELS
    what = "The whole trace" if profile.is_whole_trace else "One profiled step"
    where = "GPU" if is_gpu else "CPU"
    title = f"{what} on the {where}: {significant(step.wall_s * 1e3, 3)} ms"
    if is_gpu and step.wall_s:
        busy_s = sum(times.busy_s[step.step] for times in profile.phases)
        title += f", {100 * busy_s / step.wall_s:.0f} % busy"
    return title


def _step_words(profile: StepProfile, step: PicturedStep) -> Iterator[str]:
    """Which of the steps is pictured, and how many of its streams are not."""
    if not profile.is_whole_trace:
        kind = "warm-up step" if profile.is_warmup else "step"
        yield f"{kind} {step.step + 1} of {profile.num_steps} (median time)"
    left_out = len({piece.stream for piece in step.pieces}) - MAX_STREAMS
    if left_out > 0:
        yield f"{left_out} less busy streams left out"


def _draw_phases(panel: Axes, step: PicturedStep, is_gpu: bool) -> None:
    """Draw the phases on the host and below on the device; the slant between them is how far the
    host runs ahead.
    """
    for index, window in enumerate(step.windows):
        shade = PHASE_SHADES[index % len(PHASE_SHADES)]
        host = (window.host_start_s * 1e3, window.host_end_s * 1e3)
        device = (window.device_start_s * 1e3, window.device_end_s * 1e3)
        _draw_window(panel, window, host, 1.0, shade, step)
        if is_gpu:
            _draw_window(panel, window, device, 0.0, shade, step)
            corners = [(host[0], 0.68), (host[1], 0.68), (device[1], 0.32), (device[0], 0.32)]
            panel.add_patch(Polygon(corners, facecolor=shade, alpha=0.45, linewidth=0))
    if is_gpu:
        panel.set_yticks([1.0, 0.0], ["CPU", "GPU"])
        panel.set_ylim(-0.36, 1.36)
    else:
        panel.set_yticks([1.0], ["phase"])
        panel.set_ylim(0.64, 1.36)
    panel.tick_params(length=0, labelsize=9)
    panel.spines[:].set_visible(False)


def _draw_window(
    panel: Axes,
    window: Window,
    span_ms: tuple[float, float],
    y: float,
    shade: str,
    step: PicturedStep,
) -> None:
    """Draw one phase in one lane, with its name if that fits."""
    start, end = span_ms
    panel.barh(y, end - start, 0.64, start, color=shade, edgecolor="white", linewidth=0.8)
    if name := fitting(window.phase, (end - start) / 1e3 / (CHARACTER * step.wall_s)):
        panel.text((start + end) / 2, y, name, ha="center", va="center", fontsize=8.5)


def _draw_stream(panel: Axes, pieces: Sequence[Piece], step: PicturedStep) -> None:
    """Draw how busy the stream was, stacked by class; white is idle."""
    edges = np.linspace(0.0, step.wall_s, CELLS + 1)
    bottom: Any = np.zeros(CELLS)
    for kind, share in utilisation(pieces, edges).items():
        top = bottom + 100 * share
        area = StepPatch(
            top, edges * 1e3, baseline=bottom, color=CLASS_COLOURS[kind], linewidth=0, label=kind
        )
        # add_artist does not measure the outline, as add_patch does: the limits are set anyway
        panel.add_artist(area)
        bottom = top
    for window in step.windows:
        end_s = window.device_end_s
        if EDGE * step.wall_s < end_s < (1 - EDGE) * step.wall_s:
            panel.axvline(end_s * 1e3, color="#666666", linewidth=0.7, linestyle=(0, (4, 3)))
    draw.style(panel)
    # streams of one number on several devices share a lane
    panel.set_ylim(0, max(100.0, float(bottom.max())))
    panel.set_yticks([0, 50, 100])


def utilisation(pieces: Sequence[Piece], edges: Times) -> dict[KernelClass, Times]:
    """The part of each cell between `edges` (seconds) in which kernels of a class ran, in the order
    of draw.

    Within a piece, the time in which its kernels ran counts as spread evenly.
    """
    shares = {}
    for kind in CLASS_COLOURS:
        of_kind = [piece for piece in pieces if piece.kind is kind]
        if of_kind:
            shares[kind] = _covered(of_kind, edges) / np.diff(edges)
    return shares


def _covered(pieces: Sequence[Piece], edges: Times) -> Times:
    """Seconds of each cell in which the pieces ran."""
    start = np.array([piece.start_s for piece in pieces])
    length = np.array([piece.end_s for piece in pieces]) - start
    busy = np.array([piece.busy_s for piece in pieces])
    # a piece of no length would divide by zero, and has nothing to cover
    start, length, busy = start[length > 0], length[length > 0], busy[length > 0]
    until = np.clip((edges[:, None] - start) / length, 0.0, 1.0) @ busy
    return np.diff(until)


LANE_INCHES = 0.5
"""Height of a step that stands beside others."""


def draw_steps(profile: StepProfile) -> Figure:
    """Several steps below each other on one scale of time, those of one kind together: how busy
    the streams are, with the names of the phases above; white is idle.
    """
    names = [_lane_name(profile, step) for step in profile.beside]
    # a kind stands where its first step does
    kinds = [name.rpartition("\n")[0] for name in names]
    order = sorted(range(len(names)), key=lambda place: kinds.index(kinds[place]))
    pieces = [piece for step in profile.beside for piece in step.pieces]
    shown = _kinds_in(pieces)
    title = f"{len(order)} of {profile.num_steps:,} steps"
    settings = ", ".join([draw.in_settings(profile.source), *devices_of([profile])])
    legend_rows = math.ceil(len(shown) / LEGEND_COLUMNS)
    height = 1.3 + LANE_INCHES * len(order) + 0.19 * legend_rows
    figure = draw.new_figure(6.5, height, title, settings)
    lanes = figure.subplots(len(order), 1, sharex=True).tolist()
    longest_s = max(step.wall_s for step in profile.beside)
    for lane, place in zip(lanes, order, strict=True):
        _draw_beside(lane, profile.beside[place], names[place], longest_s)
    lanes[-1].set_xlim(0, longest_s * 1e3)
    lanes[-1].set_xlabel("time from the start of each step (ms)", fontsize=9)
    _legend(figure, shown)
    return figure


def _lane_name(profile: StepProfile, step: PicturedStep) -> str:
    """Kind, number and time of a step."""
    name = f"step {step.step + 1}: {significant(step.wall_s * 1e3, 3)} ms"
    if not profile.step_labels:
        return name
    return f"{draw.inert(profile.step_labels[step.step].kind, LONGEST_KIND)}\n{name}"


def _draw_beside(lane: Axes, step: PicturedStep, name: str, longest_s: float) -> None:
    """Draw one of several steps, with the names of its phases that have room."""
    _draw_stream(lane, step.pieces, step)
    lane.grid(visible=False)
    lane.set_yticks([50], [name])
    lane.tick_params(axis="y", length=0, labelsize=8.5)
    for window in step.windows:
        start_s, end_s = window.device_start_s, window.device_end_s
        if word := fitting(window.phase, (end_s - start_s) / (CHARACTER * longest_s)):
            lane.text((start_s + end_s) * 500, 110, word, ha="center", fontsize=7)
