"""Tables of any number of explained traces: phases of a step, copies, classes, attention.

Times and counts are per step: the sum over the profiled steps, over their number. Tables of one
trace are in files.py.
"""

from collections.abc import Callable, Iterator, Sequence

from ....analysis.kernels.classes import KernelClass
from ....analysis.kernels.phases import LaunchPhase
from ....analysis.kernels.step_profile import (
    AttentionPart,
    AttentionTimes,
    PhaseTimes,
    StepProfile,
    Work,
)
from ....config import Phase
from ...columns import Column, Row, column, columns_of
from ...section import Section, over_configurations, rows_of
from ...words import in_percent, mean_and_std, ratio, rounded
from .communication import communication, groups, ranks, skew
from .entry import Explained
from .recorded import activity, lines, reserved
from .sums import (
    ALL_KINDS,
    WHOLE_STEP,
    added,
    grouped,
    kernel_s,
    mean_std_ms,
    num_launches,
    phases_by_name,
    terms,
    total,
    wall_s,
)

NOTICEABLE = 0.005
"""Share of the step's wall time: a phase that launched nothing and is shorter is not shown, such as
taking a batch that is ready.
"""
_PHASE_CSV = (
    "phase",
    "kernels_per_step",
    "kernel_mean_ms",
    "kernel_std_ms",
    "share",
    "wall_mean_ms",
    "wall_std_ms",
    "busy_mean_ms",
    "busy_share",
    "host_mean_ms",
    "host_std_ms",
    "launch_calls_per_step",
    "host_per_launch_ms",
    "copies_per_step",
    "copy_mean_ms",
    "recomputed_mean_ms",
    "clock_mean_ms",
    "wall_over_clock",
    "profiled_mean_ms",
    "slowdown",
)
_OF_A_DEVICE = ("busy_mean_ms", "busy_std_ms", "busy_share", "host_mean_ms", "host_std_ms")
"""Values of what a device does beside its host; a trace of a CPU has none of them."""
_OF_A_HOST = ("host_mean_ms", "host_std_ms", "host_per_launch_ms", "host_per_launch_s")
CLASS_KEYS = {kind: kind.lower().replace(" ", "_").replace("-", "_") for kind in KernelClass}
_RARE_CLASSES = (KernelClass.CONVOLUTION, KernelClass.RECURRENCE, KernelClass.SORT)
"""Classes that have columns only where a kernel is of them."""
_CLASS_VALUES = ("share", "ms_per_step", "per_step")
_PART_VALUES = ("per_step", "ms_per_step", "products_ms_per_step", "flops_per_step", "flops_per_s")


def phases(entries: Sequence[Explained]) -> Section:
    """Kernels and times of each phase, beside the clock of the run without a profiler."""
    first = entries[0].profile
    is_single = len(entries) == 1
    item, time = terms(first)
    shown = [
        column("phase"),
        column("kernels_per_step", name=f"{item}s", drop_order=6),
        column("kernel_mean_ms", name=time, std="kernel_std_ms"),
    ]
    if is_single:
        shown.append(column("share", drop_order=7))
    shown += [column("wall_mean_ms", std="wall_std_ms"), column("busy_share")]
    if is_single:
        shown += [
            column("host_mean_ms", std="host_std_ms", drop_order=8),
            column("host_per_launch_s", drop_order=9),
            column("copies_per_step", drop_order=10),
        ]
    shown.append(column("recomputed_mean_ms", std="recomputed_std_ms"))
    shown += columns_of("clock_mean_ms", "wall_over_clock", "slowdown")
    notes = [*_of_one_trace(first)] if is_single else []
    if any(entry.plain for entry in entries):
        others = "all other times" if item == "operator" else "all other times, and GPU busy,"
        notes.append(f"The clock ran without a profiler; {others} are those under it.")
    rows = rows_of(entries, phase_rows)
    return over_configurations(
        "phases", "Phases of a step", rows, shown, notes, _PHASE_CSV, shown=is_shown
    )


def phase_rows(entry: Explained) -> Iterator[Row]:
    """A row for each phase in order, then their sum, named WHOLE_STEP."""
    for name, chosen in phases_by_name(entry.profile).items():
        parts = [times for times in entry.profile.phases if times.phase in chosen]
        yield _phase_row(entry, name, parts)


def is_shown(row: Row) -> bool:
    """Whether anything ran in the phase, or it took a noticeable part of the step."""
    ran = row["kernels_per_step"] or row["copies_per_step"]
    return bool(ran or row["wall_mean_ms"] >= NOTICEABLE * row["step_ms"])


def _phase_row(entry: Explained, name: str, parts: Sequence[PhaseTimes]) -> Row:
    """The row of these phases together."""
    profile = entry.profile
    steps = profile.num_steps
    row: Row = {
        "phase": name,
        "kernels_per_step": num_launches(*parts) / steps,
        "share": ratio(total(times.kernel_s for times in parts), kernel_s(profile)),
        "copies_per_step": total(times.copies for times in parts) / steps,
        "step_ms": wall_s(profile) / steps * 1e3,
    }
    # of the time in no phase, in which the host launches nothing, it is not known what it does
    at_work = [
        times
        for times in parts
        if times.phase is not LaunchPhase.UNATTRIBUTED or any(times.launches)
    ]
    for field in ("kernel", "wall", "busy", "host", "copy", "recomputed"):
        counted = at_work if field == "host" else parts
        times_s = [getattr(times, f"{field}_s") for times in counted]
        row[f"{field}_mean_ms"], row[f"{field}_std_ms"] = mean_std_ms(times_s)
    row["busy_share"] = ratio(row["busy_mean_ms"], row["wall_mean_ms"])
    launched_in = [times.phase for times in parts]
    launch_calls = [
        call for call in profile.host_calls if call.is_launch and call.phase in launched_in
    ]
    calls = added(launch_calls).count
    host_ms = row["host_mean_ms"] * steps
    row["launch_calls_per_step"] = calls / steps if profile.host_calls else None
    row["host_per_launch_ms"] = ratio(host_ms, calls)
    row["host_per_launch_s"] = ratio(host_ms / 1e3, calls)
    if profile.work is Work.OPERATORS:
        row |= dict.fromkeys(_OF_A_DEVICE)
    if profile.is_whole_trace and LaunchPhase.UNATTRIBUTED in launched_in:
        # from the first work of the device to the last, whatever the host did
        row |= dict.fromkeys(_OF_A_HOST)
    return row | _by_clock(entry, name, row["wall_mean_ms"])


def _by_clock(entry: Explained, name: str, wall_ms: float) -> Row:
    """Times of a phase by the clocks of the runs with and without a profiler, and the slowdown."""
    clock_ms = profiled_ms = None
    if name in set(Phase):  # no clock for loss and unattributed; WHOLE_STEP is named as Phase.STEP
        clock_s = entry.clock_s(Phase(name), entry.plain)
        profiled_s = entry.clock_s(Phase(name), entry.profiled)
        clock_ms = None if clock_s is None else clock_s * 1e3
        profiled_ms = None if profiled_s is None else profiled_s * 1e3
    return {
        "clock_mean_ms": clock_ms,
        "wall_over_clock": ratio(wall_ms, clock_ms),
        "profiled_mean_ms": profiled_ms,
        "slowdown": ratio(profiled_ms or None, clock_ms),  # none of a phase of 0 ms
    }


def _of_one_trace(profile: StepProfile) -> Iterator[str]:
    """The step by the host's clock, or how long a file without steps is, and what it lacks."""
    mean_ms, std_ms = mean_std_ms([profile.step_s])
    time_ms = mean_and_std(mean_ms, std_ms) if mean_ms else "0"
    if profile.is_whole_trace:
        what = "event" if profile.work is Work.OPERATORS else "kernel or copy"
        yield f"From the first {what} to the last: {time_ms} ms."
    else:
        yield f"The step by the host's clock: {time_ms} ms."
    yield from profile.notes


def copies(entries: Sequence[Explained]) -> Section:
    """Copies and fills by kind, their time, and what of it passes without a kernel."""
    columns = [
        Column("kind", "", "Direction and memory.", key="kind", numeric=False, write=str),
        column("copies_per_step", name="times"),
        Column(
            "time", "ms", "Durations of these copies, added up.", key="copy_mean_ms", write=rounded
        ),
        Column(
            "alone", "ms", "Time without a kernel beside it.", key="alone_mean_ms", write=rounded
        ),
        Column("of step", "%", "Share of that in the step.", key="alone_share", write=in_percent),
    ]
    notes = ["Alone: no kernel runs meanwhile; % of the step's wall time."]
    rows = rows_of(entries, copy_rows)
    return over_configurations("copies", "Copies and fills", rows, columns, notes)


def copy_rows(entry: Explained) -> Iterator[Row]:
    """A row for each kind; for all together too if there are several."""
    profile = entry.profile
    steps = profile.num_steps
    # the last entry is that of all kinds: of a single kind it says nothing more
    kinds = profile.copies if len(profile.copies) > 2 else profile.copies[:1]
    for times in kinds:
        yield {
            "kind": times.kind or ALL_KINDS,
            "copies_per_step": times.count / steps,
            "copy_mean_ms": times.total_s / steps * 1e3,
            "alone_mean_ms": times.alone_s / steps * 1e3,
            "alone_share": ratio(times.alone_s, wall_s(profile)),
        }


def classes(entries: Sequence[Explained]) -> Section:
    """Share of each class in the time of each phase and of the step."""
    rows = rows_of(entries, class_rows)
    kinds = dict(CLASS_KEYS)
    for kind in _RARE_CLASSES:
        if not any(row[f"{kinds[kind]}_per_step"] for row in rows):
            del kinds[kind]
    columns = [column("phase")]
    for number, (kind, key) in enumerate(kinds.items()):
        about = f"Share of {kind}."
        columns.append(
            Column(kind, "%", about, key=f"{key}_share", drop_order=number, write=_share)
        )
    keys = ["phase"]
    for value in _CLASS_VALUES:
        keys += [f"{key}_{value}" for key in kinds.values()]
    item, time = terms(entries[0].profile)
    notes = [f"Shares of the {time}."]
    return over_configurations("classes", f"Classes of {item}s", rows, columns, notes, keys)


def _share(part: float) -> str:
    return in_percent(part) if part else ""


def class_rows(entry: Explained) -> Iterator[Row]:
    """A row for each phase with kernels, then one for the whole step."""
    profile = entry.profile
    for name, chosen in phases_by_name(profile).items():
        of_phase = [times for times in profile.classes if times.phase in chosen]
        sums = grouped(of_phase, lambda times: times.kind)
        whole_s = sum(part.total_s for part in sums.values())
        if not whole_s:
            continue
        row: Row = {"phase": name}
        for kind, key in CLASS_KEYS.items():
            part = sums.get(kind, added([]))
            row[f"{key}_share"] = part.total_s / whole_s
            row[f"{key}_ms_per_step"] = part.total_s / profile.num_steps * 1e3
            row[f"{key}_per_step"] = part.count / profile.num_steps
        yield row


def attention(entries: Sequence[Explained]) -> Section:
    """Scores, softmax and values, and the softmax against the matrix products; as CSV with
    counts and FLOPs of each.
    """
    rows = rows_of(entries, attention_part_rows)
    sums = ("products_ms_per_step", "whole_ms_per_step", "share_of_phase")
    ratios = ("time_ratio", "flops_ratio", "time_per_flop_ratio")
    times = [f"{part}_ms_per_step" for part in AttentionPart]
    shown = columns_of("phase", *times, *sums, *ratios)
    notes = ["Ratios are softmax over matrix multiplications; scaling and masking are in neither."]
    if not all(row["flops_ratio"] for row in rows):
        notes.append("FLOPs are not known without the record of the run.")
    csv = dict.fromkeys(("phase", "softmax_ms_per_step", *sums, *ratios, *_PART_KEYS))
    return over_configurations("attention", "Inside attention", rows, shown, notes, [*csv])


_PART_KEYS = [f"{part}_{value}" for part in AttentionPart for value in _PART_VALUES]


def attention_part_rows(entry: Explained) -> Iterator[Row]:
    """A row for each phase in which the parts of attention are known; ratios are softmax over
    products.
    """
    profile = entry.profile
    steps = profile.num_steps
    for phase in dict.fromkeys(times.phase for times in profile.attention):
        parts = [times for times in profile.attention if times.phase is phase]
        row: Row = dict.fromkeys(_PART_KEYS)
        for times in parts:
            row |= _part_values(times, steps)
        products = [times for times in parts if times.part is not AttentionPart.SOFTMAX]
        products_ms = sum(times.product_s for times in products) / steps * 1e3
        flops = [times.flops for times in products if times.flops is not None]
        products_flops = sum(flops) / steps if len(flops) == len(products) else None
        time_ratio = ratio(row["softmax_ms_per_step"] or None, products_ms)
        flops_ratio = ratio(row["softmax_flops_per_step"] or None, products_flops)
        whole_s = added(parts).total_s
        yield row | {
            "phase": phase,
            "products_ms_per_step": products_ms,
            "whole_ms_per_step": whole_s / steps * 1e3,
            "share_of_phase": ratio(whole_s, kernel_s(profile, [phase])),
            "time_ratio": time_ratio,
            "flops_ratio": flops_ratio,
            "time_per_flop_ratio": ratio(time_ratio, flops_ratio),
        }


def _part_values(times: AttentionTimes, steps: int) -> Row:
    """The values of one part of attention, under the keys of _PART_VALUES behind its name."""
    values = (
        times.count / steps,
        times.total_s / steps * 1e3,
        times.product_s / steps * 1e3,
        ratio(times.flops, steps),
        ratio(times.flops, times.total_s),
    )
    return {f"{times.part}_{key}": value for key, value in zip(_PART_VALUES, values, strict=True)}


def top_kernels(entries: Sequence[Explained]) -> Section:
    """The longest kernel of forward, and of the whole step."""
    item, time = terms(entries[0].profile)
    share, name = column("share", drop_order=0), column("short_name", name=item)
    keys = ("of", "share", "total_ms_per_step", "count_per_step", "class", "name")
    columns = columns_of("of", share, *keys[2:5], name)
    notes = [f"By {time} per step; share of that of forward, or of the step."]
    rows = rows_of(entries, _top_kernels)
    return over_configurations("top_kernels", f"The longest {item}", rows, columns, notes, keys)


def _top_kernels(entry: Explained) -> Iterator[Row]:
    """The row of the longest kernel of forward and of the step, where they have kernels."""
    profile = entry.profile
    for where, phase in ((LaunchPhase.FORWARD, LaunchPhase.FORWARD), (WHOLE_STEP, None)):
        kernels = profile.kernels_of(phase)
        for kernel in kernels[:1]:
            yield {
                "of": where,
                "share": ratio(kernel.total_s, added(kernels).total_s),
                "total_ms_per_step": kernel.total_s / profile.num_steps * 1e3,
                "count_per_step": kernel.count / profile.num_steps,
                "class": kernel.kind,
                "short_name": kernel.short_name,
                "name": kernel.name,
            }


PRINTED: tuple[Callable[[Sequence[Explained]], Section], ...] = (
    phases,
    communication,
    ranks,
    classes,
)
"""The sections that a terminal shows of several traces."""
OF_ONE = (
    phases,
    communication,
    groups,
    ranks,
    skew,
    classes,
    copies,
    attention,
    activity,
    reserved,
    lines,
)
SUBJECTS = (*PRINTED, attention, top_kernels)
"""Sections about any number of traces; `detail_sections` in files.py has more of the kernels of a
single one.
"""
