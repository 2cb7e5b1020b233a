"""What a report of nsys may have beside kernels: activity of the device's units, memory that was
reserved, and lines of the program. Tables and sentences of a trace that has them.
"""

import re
from collections.abc import Iterator

from ....analysis.kernels.classes import KernelClass
from ....analysis.kernels.step_profile import KernelTimes, StepProfile
from ....costs.accounting import component_flops, mfu, step_flops
from ...columns import Column, Row, column, columns_of
from ...section import Finding, Section, make_table
from ...words import count, in_percent, label, percent_of, ratio, rounded, significant
from .entry import Explained
from .figures import WHERE, Figures
from .sums import WHOLE_STEP, added, phases_by_name, total

TENSOR_CORES = "Tensor Active"
MIN_ACTIVITY = 0.005
"""A unit that is active for less of every phase has no column."""
MIN_DIFFERENCE = 0.02
"""Smallest difference of activity and MFU that is explained."""
_FULL_PRECISION = re.compile(r"sgemm|f32f32_f32f32_f32")
"""Part of the names of fp32 products of cuBLAS and CUTLASS: ampere_sgemm_, simt_sgemm,
xmma_gemm_f32f32_f32f32_f32_.
"""


def is_full_precision(kernel: KernelTimes) -> bool:
    """Whether the kernel is a matmul in true fp32, which no tensor core computes."""
    is_named = _FULL_PRECISION.search(kernel.name) and "tf32" not in kernel.name
    return kernel.kind is KernelClass.MATMUL and bool(is_named)


def recorded(profile: StepProfile, top: int) -> list[Section]:
    """The sections of one trace."""
    return [_activity(profile), _reserved(profile), _places(profile, top)]


def _activity(profile: StepProfile) -> Section:
    """Activity of the device's units by phase, with the number of samples."""
    highest: dict[str, float] = {}
    for mean in profile.counters:
        highest[mean.counter] = max(mean.share, highest.get(mean.counter, 0.0))
    rows, unseen = [], []
    for name in phases_by_name(profile):
        row: Row = {"phase": name, "samples": 0} | dict.fromkeys(highest)
        for mean in profile.counters:
            if (mean.phase or WHOLE_STEP) == name:
                row |= {mean.counter: mean.share, "samples": mean.count}
        if row["samples"]:
            rows.append(row)
        else:
            unseen.append(name)
    if not rows:
        return Section(name="activity")
    columns = [column("phase"), Column("samples", key="samples", write=count)]
    for counter, share in highest.items():
        if share >= MIN_ACTIVITY:
            columns.append(Column(counter, "%", key=counter, write=in_percent))
    notes = ["Means over samples of the device's counters, in % of the highest value."]
    if unseen:
        notes.append(f"Too short to be seen by the counters: {', '.join(unseen)}.")
    table = make_table("Activity of the GPU", columns, rows, notes)
    return Section(name="activity", tables=(table,), rows=rows)


def _reserved(profile: StepProfile) -> Section:
    """The most memory that was reserved in each phase."""
    rows: list[Row] = []
    for peak in profile.reserved:
        place = peak.phase or "whole file"
        rows.append({"memory": f"{peak.kind}, device {peak.device}", "phase": place})
        rows[-1]["peak_bytes"] = peak.peak_bytes
    if not rows:
        return Section(name="reserved")
    columns = [
        Column("memory", key="memory", numeric=False, write=str),
        column("phase"),
        Column("peak", "GiB", key="peak_bytes", scale=1 / 2**30, write=rounded),
    ]
    notes = ["What PyTorch and libraries had from the driver, at most at one time."]
    table = make_table("Reserved memory", columns, rows, notes)
    return Section(name="reserved", tables=(table,), rows=rows)


def _places(profile: StepProfile, top: int) -> Section:
    """Time of the kernels that each line of the program launched."""
    whole_s = added(profile.places).total_s
    rows = []
    for times in profile.places:
        place = times.place
        line = "not known" if place is None else f"{place.file}:{place.line} {place.function}"
        row: Row = {
            "share": ratio(times.total_s, whole_s),
            "total_ms_per_step": times.total_s / profile.num_steps * 1e3,
            "count_per_step": times.count / profile.num_steps,
            "line": line,
        }
        rows.append(row)
    if not rows:
        return Section(name="lines")
    shown = Column("line", key="line", numeric=False, write=label)
    columns = columns_of("share", "total_ms_per_step", "count_per_step", shown)
    notes = ["Per step: kernels by the innermost line outside of libraries that launched them."]
    table = make_table("Lines of the program", columns, rows[:top], notes)
    return Section(name="lines", tables=(table,), rows=rows)


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
    config, profile = entry.config, entry.profile
    device = entry.device_name or next(iter(profile.device_names), None)
    step_s = entry.span().profiled_s / profile.num_steps
    flops = None if config is None else step_flops(config)
    if config is None or flops is None or device is None or not step_s:
        return None
    return mfu(flops / step_s, device, config.precision)


def _reasons(figures: Figures) -> Iterator[str]:
    """What makes activity of tensor cores and MFU differ, as far as it is seen."""
    profile, config = figures.profile, figures.config
    full_s = added(kernel for kernel in figures.kernels if is_full_precision(kernel)).total_s
    if full_s:
        yield f"matrix products in true fp32, {figures.ms(full_s)}, need no tensor cores"
    again_s = total(times.recomputed_s for times in profile.phases)
    if again_s:
        yield f"MFU leaves out recomputation, {figures.ms(again_s)}"
    fused = any(kernel.kind is KernelClass.ATTENTION for kernel in figures.kernels)
    if fused and config is not None:
        needed = sum(part.step for part in component_flops(config, causal=True))
        masked = 1 - needed / sum(part.step for part in component_flops(config))
        yield f"MFU counts masked attention, {percent_of(masked)} of it, and the kernels do not"


def reserved_finding(profile: StepProfile) -> Iterator[Finding]:
    """The most memory that was reserved on one device."""
    for peak in sorted(profile.reserved, key=lambda peak: -peak.peak_bytes)[:1]:
        text = (
            f"At most {significant(peak.peak_bytes / 2**30, 3)} GiB of memory ({peak.kind}, device "
            f"{peak.device}) were reserved at one time, by PyTorch or by libraries."
        )
        yield Finding(code="reserved", text=text, numbers={"peak_bytes": peak.peak_bytes})
