"""The first screen of the page of one file: its answer, bars, numbers and doubts, from the profile
alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...analysis.kernels.phases import LaunchPhase
from ...analysis.kernels.step_profile import StepProfile, Work
from ..charts import PHASE_COLOURS, Bar, Style
from ..results import Results
from ..section import Finding, finding_rows
from ..sections.kernels.entry import Explained
from ..sections.kernels.findings import answer as answer_of_trace
from ..sections.kernels.kinds import StepKind, step_kinds, wall_by_step_s
from ..sections.kernels.plots import STYLES, parts_ms
from ..sections.kernels.sums import mean_std_ms, num_launches, terms
from ..sections.memory.entry import MemoryEntry
from ..sections.memory.findings import answer as answer_of_memory
from ..sections.memory.plots import CATEGORIES, peak_bar
from ..sections.memory.words import check_words, size
from ..sections.steps import BY_PHASE
from ..words import count, mean_and_std, percent_of, significant
from .blocks import Bars, Glance, Tile

LAUNCH_PHASES: Mapping[str, Style] = {
    **{str(phase): Style(colour=colour) for phase, colour in PHASE_COLOURS.items()},
    LaunchPhase.LOSS: Style(colour="#F0E442"),
    LaunchPhase.WEIGHT_GRADIENTS: Style(colour="#D55E00"),
    LaunchPhase.UNATTRIBUTED: Style(colour="#FFFFFF", pattern="/", ink="#6A6A6A"),
}
"""Style of each phase of launches; those that a clock has too look as they do there."""


def glance_of_file(results: Results) -> Glance:
    """The first screen of the page of one file."""
    for entry in results.memory:
        return _of_snapshot(entry)
    return _of_trace(results.kernels[0])


def _in_words(findings: Iterable[Finding | str]) -> tuple[str, str]:
    """The first sentence of all, and the others."""
    texts = [str(row["finding"]) for row in finding_rows(findings)]
    if not texts:
        return "Nothing stands out.", ""
    head, dot, rest = texts[0].partition(". ")
    return f"{head}{dot.strip()}", " ".join(filter(None, [rest, *texts[1:]]))


def _of_trace(entry: Explained) -> Glance:
    """What limits the steps of a trace, their phases by kind of step, and the kinds of work."""
    profile = entry.profile
    answer, more = _in_words(answer_of_trace(entry))
    item, _ = terms(profile)
    work = Bars(
        title="Kinds of work, and how long the device is idle, in a step",
        bars=[Bar(name="work", parts=parts_ms(profile))],
        styles=STYLES,
        unit="ms",
    )
    return Glance(
        answer=answer,
        more=more,
        bars=[bars for bars in (_by_phase(profile), work) if any(bar.length for bar in bars.bars)],
        tiles=list(_tiles_of_trace(entry)),
        doubts=[f"{doubt}." for doubt in profile.doubts],
        trust=(
            f"The {item}s of the steps, and those that are in none, add up to all "
            f"{profile.num_kernels:,} of the file."
        ),
    )


def _kinds(profile: StepProfile) -> list[StepKind]:
    """The kinds of steps; where all are alike, one kind of them all."""
    every = StepKind(name="step", steps=tuple(range(profile.num_steps)), labels=())
    return step_kinds(profile) or [every]


def _by_phase(profile: StepProfile) -> Bars:
    """A bar of the phases for each kind of steps."""
    bars = []
    for kind in _kinds(profile):
        parts: dict[str, float] = {}
        for times in profile.phases:
            time_s = sum(kind.of(times.wall_s)) / len(kind.steps)
            if time_s:
                parts[times.phase] = time_s * 1e3
        words = f"{significant(sum(parts.values()), 3)} ms"
        bars.append(Bar(name=kind.name, parts=parts, words=words))
    return Bars(title=BY_PHASE, bars=bars, styles=LAUNCH_PHASES, unit="ms")


def _tiles_of_trace(entry: Explained) -> Iterator[Tile]:
    """Time of a step, how busy the device is, and how many kernels a step has."""
    profile, span = entry.profile, entry.span()
    item, time = terms(profile)
    steps = profile.num_steps
    yield Tile("step", _step_words(profile), _about_steps(profile))
    if profile.work is Work.KERNELS:
        idle_ms = span.idle_s / steps * 1e3
        idle = f"idle {significant(idle_ms, 3)} ms of a step"
        yield Tile("GPU busy", percent_of(span.busy_s, span.whole_s), idle)
    kernel_ms, _ = mean_std_ms([times.kernel_s for times in profile.phases])
    yield Tile(time, f"{significant(kernel_ms)} ms", f"of all {item}s of a step, added up")
    yield Tile(f"{item}s", count(num_launches(*profile.phases) / steps), "in a step")


def _step_words(profile: StepProfile) -> str:
    """The mean time of a step with its deviation; of several kinds the least and the largest
    mean.
    """
    walls_s = wall_by_step_s(profile)
    means = [mean_std_ms([kind.of(walls_s)]) for kind in _kinds(profile)]
    (least, std), (most, _) = min(means), max(means)
    if least == most:
        return f"{mean_and_std(least, std)} ms"
    return f"{significant(least, 3)} to {significant(most, 3)} ms"


def _about_steps(profile: StepProfile) -> str:
    """How many steps there are, and of which kinds."""
    if profile.is_whole_trace:
        return "no steps seen: the whole file"
    kinds = step_kinds(profile)
    if kinds:
        return ", ".join(f"{len(kind.steps)} {kind.name}" for kind in kinds)
    return f"on the device, {profile.num_steps} in the file"


def _of_snapshot(entry: MemoryEntry) -> Glance:
    """How much memory there was and of what, and what was asked for in vain."""
    profile = entry.profile
    answer, more = _in_words(answer_of_memory(profile))
    wrong = check_words(profile.boundaries)
    bars = Bars(
        title="What the peak consists of",
        bars=[peak_bar("peak", entry)],
        styles=CATEGORIES,
        unit="GiB",
    )
    return Glance(
        answer=answer,
        more=more,
        bars=[bars] if bars.bars[0].length else [],
        tiles=_tiles_of_snapshot(entry),
        doubts=[wrong] if wrong else [],
        trust="The parts add up to the peak, to the byte.",
    )


def _tiles_of_snapshot(entry: MemoryEntry) -> Sequence[Tile]:
    """The peak, what was reserved and what of it in private pools, and the first request that
    failed.
    """
    profile, failure = entry.profile, entry.profile.work.first_failure
    tiles = [
        Tile("peak", size(profile.peak.allocated_bytes), "allocated at most"),
        Tile("reserved", size(profile.peak_reserved_bytes), "by PyTorch at most"),
    ]
    if profile.private_bytes:
        tiles.append(Tile("private pools", size(profile.private_bytes), "reserved at the peak"))
    if failure is not None:
        free = f"asked for in vain, {size(failure.free_bytes)} were free"
        tiles.append(Tile("out of memory", size(failure.requested_bytes), free))
    tiles.append(Tile("events", f"{profile.work.events:,}", "of the allocator"))
    return tiles[:4]
