"""The first screen of the page of one file: its answer, bars, numbers and doubts, from the profile
alone.
"""

from collections.abc import Iterable, Iterator

from ...analysis.kernels.step_profile import StepProfile
from ..charts import LAUNCH_PHASES, Bar
from ..columns import column
from ..results import Results
from ..section import Finding, finding_rows
from ..sections.kernels.bars import STYLES, parts_ms
from ..sections.kernels.entry import Explained
from ..sections.kernels.findings import answer as answer_of_trace
from ..sections.kernels.kinds import StepKind, step_kinds
from ..sections.kernels.tables import phase_rows
from ..sections.memory.bars import CATEGORIES, peak_bar
from ..sections.memory.entry import MemoryEntry
from ..sections.memory.findings import answer as answer_of_memory
from ..sections.memory.words import check_words, size
from ..sections.steps import BY_PHASE
from ..words import significant
from .blocks import Bars, Glance, Tile


def glance_of_file(results: Results) -> Glance:
    """The first screen of the page of one file."""
    for entry in results.memory:
        return _of_snapshot(entry)
    return _of_trace(results.kernels[0])


def first_sentence(text: str) -> tuple[str, str]:
    """The first sentence, which is the page's headline, and all the others."""
    head, dot, rest = text.partition(". ")
    return f"{head}{dot.strip()}" or "Nothing stands out.", rest


def _in_words(findings: Iterable[Finding | str]) -> tuple[str, str]:
    """The first sentence of the findings, and all the others."""
    return first_sentence(" ".join(str(row["finding"]) for row in finding_rows(findings)))


def bars_of_work(profile: StepProfile, step: str) -> Bars:
    """A bar of the kinds of work in the profiled step, which the title calls `step`."""
    return Bars(
        title=f"Kinds of work, and how long the device is idle, in {step}",
        bars=[Bar(name="work", parts=parts_ms(profile))],
        styles=STYLES,
        unit="ms",
    )


def _of_trace(entry: Explained) -> Glance:
    """What limits the steps of a trace, their phases by kind of step, and the kinds of work."""
    profile = entry.profile
    answer, more = _in_words(answer_of_trace(entry))
    by_phase = Bars(
        title=BY_PHASE, bars=list(_phase_bars(profile)), styles=LAUNCH_PHASES, unit="ms"
    )
    return Glance(
        answer=answer,
        more=more,
        bars=[by_phase, bars_of_work(profile, "a step")],
        tiles=list(_tiles(entry)),
        doubts=[f"{doubt}." for doubt in profile.doubts],
    )


def _phase_bars(profile: StepProfile) -> Iterator[Bar]:
    """The phases of a step, for each kind of steps."""
    every = StepKind(name="step", steps=tuple(range(profile.num_steps)), labels=())
    for kind in step_kinds(profile) or [every]:
        parts: dict[str, float] = {}
        for times in profile.phases:
            parts[times.phase] = sum(kind.of(times.wall_s)) / len(kind.steps) * 1e3
        time = f"{significant(sum(parts.values()), 3)} ms"
        yield Bar(name=kind.name, parts=parts, figures=(time,))


def _tiles(entry: Explained) -> Iterator[Tile]:
    """Time of a step, how busy the device is, and how many kernels a step has."""
    profile = entry.profile
    kinds = [f"{len(kind.steps)} {kind.name}" for kind in step_kinds(profile)]
    about_steps = ", ".join(kinds) or f"on the device, {profile.num_steps:,} in the file"
    if profile.is_whole_trace:
        about_steps = "no steps seen: the whole file"
    *_, step = phase_rows(entry)
    for name, shown, note in (
        ("step", column("wall_mean_ms", std="wall_std_ms"), about_steps),
        ("GPU busy", column("busy_share"), "of the step"),
        (f"time of {profile.work}", column("kernel_mean_ms"), "in a step, added up"),
        (str(profile.work), column("kernels_per_step"), "in a step"),
    ):
        if text := shown.cell(step):
            yield Tile(name, f"{text} {shown.unit}".strip(), note)
    if profile.ranks and profile.skew:
        largest_ms = max(skew.largest_s for skew in profile.skew) * 1e3
        note = f"begin a collective up to {significant(largest_ms, 3)} ms apart"
        yield Tile("ranks", str(len(profile.ranks)), note)


def bars_of_peak(entry: MemoryEntry) -> Bars:
    """A bar of what the peak of memory consists of, by category."""
    bar = peak_bar("peak", entry)
    return Bars(title="What the peak consists of", bars=[bar], styles=CATEGORIES, unit="GiB")


def _of_snapshot(entry: MemoryEntry) -> Glance:
    """How much memory there was and of what, and what was asked for in vain."""
    profile = entry.profile
    failure = profile.work.first_failure
    answer, more = _in_words(answer_of_memory(profile))
    tiles = [
        Tile("peak", size(profile.peak.allocated_bytes), "allocated at most"),
        Tile("reserved", size(profile.peak_reserved_bytes), "by PyTorch at most"),
    ]
    if profile.private_bytes:
        tiles.append(Tile("private pools", size(profile.private_bytes), "reserved at the peak"))
    if failure is not None:
        free = f"asked for in vain, {size(failure.free_bytes)} were free"
        tiles.append(Tile("out of memory", size(failure.requested_bytes), free))
    wrong = check_words(profile.boundaries)
    return Glance(
        answer=answer,
        more=more,
        bars=[bars_of_peak(entry)],
        tiles=tiles,
        doubts=[wrong] if wrong else [],
    )
