"""What a report of nsys may have beside kernels: activity of the device's units, memory that was
reserved, and lines of the program. Tables and sentences of a trace that has them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ....analysis.kernels.classes import KernelClass
from ....analysis.kernels.step_profile import CounterMean
from ....costs.accounting import component_flops, mfu, step_flops
from ...columns import Column, Row, column, columns_of
from ...section import Finding, Section, over_configurations, rows_of
from ...words import count, in_percent, label, percent_of, ratio, rounded
from .entry import Explained
from .figures import WHERE, Figures
from .gains import is_full_precision
from .sums import WHOLE_STEP, added, path_text, phases_by_name, total

TENSOR_CORES = "Tensor Active"
MAX_LINES = 20
MIN_DIFFERENCE = 0.02
"""Smallest difference of activity and MFU that is explained."""


def activity(entries: Sequence[Explained]) -> Section:
    """Activity of the device's units by phase, with the number of samples."""
    columns = [
        column("phase"),
        Column("module", key="module", numeric=False, write=str),
        Column("samples", key="samples", write=count),
    ]
    for counter in dict.fromkeys(mean.counter for mean in entries[0].profile.counters):
        columns.append(Column(counter, "%", key=counter, write=in_percent))
    notes = [
        "Means over samples of the device's counters, in % of the highest value. A phase or "
        "module without a row was too short to be seen by them."
    ]
    rows = rows_of(entries, activity_rows)
    return over_configurations("activity", "Activity of the GPU", rows, columns, notes)


def activity_rows(entry: Explained) -> Iterator[Row]:
    """A row for each phase that the counters saw, one for the whole step, then one for each module
    whose kernels they saw.
    """
    for name in phases_by_name(entry.profile):
        means = [mean for mean in entry.profile.counters if (mean.phase or WHOLE_STEP) == name]
        if means:
            shares = {mean.counter: mean.share for mean in means}
            yield {"phase": name, "module": "", "samples": means[0].count, **shares}
    by_module = defaultdict[str, list[CounterMean]](list)
    for mean in entry.profile.module_counters:
        by_module[path_text(mean.module)].append(mean)
    for module, means in by_module.items():
        shares = {mean.counter: mean.share for mean in means}
        yield {"phase": WHOLE_STEP, "module": module, "samples": means[0].count, **shares}


def reserved(entries: Sequence[Explained]) -> Section:
    """The most memory that was reserved in each phase."""
    columns = [
        Column("memory", key="memory", numeric=False, write=str),
        column("phase"),
        Column("peak", "GiB", key="peak_bytes", scale=1 / 2**30, write=rounded),
    ]
    notes = ["What PyTorch and libraries had from the driver, at most at one time."]
    rows = rows_of(entries, _reserved_rows)
    return over_configurations("reserved", "Reserved memory", rows, columns, notes)


def _reserved_rows(entry: Explained) -> Iterator[Row]:
    """A row for each kind of memory and device in the whole file, then in each phase."""
    for peak in entry.profile.reserved:
        memory = f"{peak.kind}, device {peak.device}"
        phase = peak.phase or "whole file"
        yield {"memory": memory, "phase": phase, "peak_bytes": peak.peak_bytes}


def lines(entries: Sequence[Explained]) -> Section:
    """Time of the kernels that each line of the program launched."""
    shown = Column("line", key="line", numeric=False, write=label)
    columns = columns_of("share", "total_ms_per_step", "count_per_step", shown)
    notes = [
        "Per step: kernels by the innermost line outside of libraries that launched them. A trace "
        "of torch.profiler names the line where a function begins; its backward is that of forward."
    ]
    rows = rows_of(entries, _line_rows)
    return over_configurations("lines", "Lines of the program", rows, columns, notes)


def _line_rows(entry: Explained) -> Iterator[Row]:
    """A row for each of the longest lines."""
    profile = entry.profile
    whole_s = added(profile.places).total_s
    for times in profile.places[:MAX_LINES]:
        place = times.place
        line = "not in the file" if place is None else f"{place.file}:{place.line} {place.function}"
        yield {
            "share": ratio(times.total_s, whole_s),
            "total_ms_per_step": times.total_s / profile.num_steps * 1e3,
            "count_per_step": times.count / profile.num_steps,
            "line": line,
        }


def activity_finding(figures: Figures) -> Iterator[Finding]:
    """How active tensor cores were, beside MFU, and what in the file explains the difference."""
    profile = figures.profile
    shares = {mean.phase: mean for mean in profile.counters if mean.counter == TENSOR_CORES}
    whole = shares.pop(None, None)
    if whole is None:
        return
    parts = [f"{WHERE[phase]} {percent_of(mean.share)}" for phase, mean in shares.items() if phase]
    text = (
        f"Tensor cores are active {percent_of(whole.share)} of the step "
        f"({', '.join([*parts, f'{whole.count:,} samples'])})"
    )
    numbers = {"activity": whole.share, "samples": float(whole.count)}
    used = flops_used(figures.entry)
    if used is not None:
        text += f"; MFU is {percent_of(used)}"
        numbers["mfu"] = used
        if abs(whole.share - used) >= MIN_DIFFERENCE:
            reasons = list(_reasons(figures))
            text += f": {'; '.join(reasons)}" if reasons else ", and the file does not show why"
    yield figures.finding("activity", f"{text}.", 0.0, **numbers)


def flops_used(entry: Explained) -> float | None:
    """MFU of the steps under the profiler, in which the counters were read; None if the model, the
    device or its peak is not known.
    """
    config = entry.config
    step_s = entry.span().profiled_s / entry.profile.num_steps
    flops = None if config is None else step_flops(config)
    if not (config and flops and step_s and entry.device_name) or entry.profile.is_whole_trace:
        return None
    return mfu(flops / step_s, entry.device_name, config.precision)


def _reasons(figures: Figures) -> Iterator[str]:
    """What makes activity of tensor cores and MFU differ, as far as it is seen."""
    profile, config = figures.profile, figures.config
    full_s = added(kernel for kernel in figures.kernels if is_full_precision(kernel)).total_s
    if full_s:
        yield f"matrix multiplications in true fp32, {figures.ms(full_s)}, need no tensor cores"
    again_s = total(times.recomputed_s for times in profile.phases)
    if again_s:
        yield f"MFU leaves out recomputation, {figures.ms(again_s)}"
    fused = any(kernel.kind is KernelClass.ATTENTION for kernel in figures.kernels)
    if fused and config is not None:
        needed = sum(part.step for part in component_flops(config, causal=True))
        masked = 1 - needed / sum(part.step for part in component_flops(config))
        yield f"MFU counts masked attention, {percent_of(masked)} of it, and the kernels do not"
