"""Summarise attributed kernels in a `StepProfile`."""

from collections.abc import Iterator

import numpy as np

from cs336_systems.analysis.columns import Ints
from cs336_systems.analysis.kernels.attribution import Attribution, AttributionError
from cs336_systems.analysis.kernels.device_time import (
    DeviceWindows,
    Floats,
    Jobs,
    busy_devices,
    busy_ns,
    join_jobs,
    on_device,
)
from cs336_systems.analysis.kernels.host_calls import Host, host_calls
from cs336_systems.analysis.kernels.idle import find_gaps, idle_notes, idle_times, longest_gaps
from cs336_systems.analysis.kernels.kernel_times import class_times, kernel_classes, kernel_times
from cs336_systems.analysis.kernels.parts import AttentionNames, module_times, range_parts
from cs336_systems.analysis.kernels.phases import PHASES, Codes, PhaseNames
from cs336_systems.analysis.kernels.picture import picture
from cs336_systems.analysis.kernels.products import attention_times, product_counts, roles
from cs336_systems.analysis.kernels.step_profile import Left, PhaseTimes, StepProfile, Work
from cs336_systems.analysis.kernels.windows import Selection, select
from cs336_systems.config import ModelConfig

__all__ = ["AttentionNames", "summarise"]


def summarise(
    attribution: Attribution,
    *,
    source: str,
    model: ModelConfig | None = None,
    batch_size: int | None = None,
    names: AttentionNames | None = None,
    phase_names: PhaseNames | None = None,
) -> StepProfile:
    """The profile of the steps in a trace of the file `source`; with `model` and `batch_size`, attention has FLOPs.

    `phase_names` must be those that `attribute` was given; raises ValueError for others. Raises AttributionError if the
    parts do not add up to the whole.
    """
    trace, placed = attribution.trace, attribution.kernels
    selection = select(attribution, phase_names)
    jobs = join_jobs(attribution, selection)
    spans, windows = on_device(jobs, selection, is_of_host=trace.is_of_host)
    devices = [] if trace.is_of_host else list(busy_devices(jobs))
    busy, num_devices = busy_ns(devices, selection.steps, spans, windows)
    host = Host(trace, selection)
    gaps = find_gaps(jobs, devices, spans, selection, host)

    step = jobs.step[: len(placed)]
    left = _left(attribution, step)
    used = np.flatnonzero(step >= 0)
    phase, duration = placed.phase[used], trace.kernels.duration_ns[used]
    kind = kernel_classes(trace.kernels.name, trace.strings)
    parts = range_parts(attribution, AttentionNames() if names is None else names)
    found_roles, role_notes = roles(attribution, parts, step, kind)
    attention, attention_notes = attention_times(found_roles, attribution, parts, model, batch_size)
    return StepProfile(
        source=source,
        work=Work.OPERATORS if trace.is_of_host else Work.KERNELS,
        device_names=trace.device_names,
        phases_from=tuple(attribution.sources.values()),
        num_steps=len(selection.steps),
        is_whole_trace=selection.is_whole_trace,
        is_warmup=selection.is_warmup,
        num_kernels=len(placed),
        kernel_s=int(trace.kernels.duration_ns.sum()) / 1e9,
        left=left,
        step_s=_seconds(selection.steps.end_ns - selection.steps.start_ns),
        phases=tuple(_phases(attribution, selection, jobs, windows, busy)),
        kernels=kernel_times(trace.kernels.name[used], phase, duration, trace.strings),
        classes=class_times(kind[used], phase, duration),
        products=product_counts(found_roles),
        attention=attention,
        modules=module_times(parts, placed.module[used], phase, duration),
        idle=idle_times(gaps, num_devices),
        gaps=longest_gaps(gaps, jobs, attribution, selection, host),
        host_calls=host_calls(host, selection),
        pictured=picture(selection.steps, spans, windows, jobs, kind),
        notes=(
            *attribution.notes,
            *_process_notes(attribution, selection),
            *role_notes,
            *attention_notes,
            *idle_notes(gaps),
        ),
    )


def _seconds(time_ns: Ints | Floats) -> tuple[float, ...]:
    return tuple((time_ns / 1e9).tolist())


def _left(attribution: Attribution, step: Ints) -> Left:
    """The kernels in no profiled step; raise AttributionError unless these and the phases' are all kernels."""
    work, placed = attribution.trace.kernels, attribution.kernels
    in_phases = _Table(int(step.max(initial=-1)) + 1)
    used = int(in_phases(step, placed.phase).sum()), int(in_phases(step, placed.phase, work.duration_ns).sum())
    is_left = step < 0
    is_warmup = is_left & (placed.step >= 0)
    is_outside = is_left & (placed.step < 0) & work.is_launched
    rows = (is_warmup, is_outside, is_left & ~work.is_launched)
    left = [(int(chosen.sum()), int(work.duration_ns[chosen].sum())) for chosen in rows]
    whole = len(work), int(work.duration_ns.sum())
    if tuple(map(sum, zip(used, *left, strict=True))) != whole:
        raise AttributionError(
            f"of all {whole[0]} kernels and {whole[1]} ns, phases hold {used}, warm-up, outside and no launch {left}"
        )
    (warmup, warmup_ns), (outside, outside_ns), (no_launch, no_launch_ns) = left
    return Left(
        warmup=warmup,
        warmup_s=warmup_ns / 1e9,
        outside=outside,
        outside_s=outside_ns / 1e9,
        no_launch=no_launch,
        no_launch_s=no_launch_ns / 1e9,
    )


class _Table:
    """Sums whole numbers by step and phase."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def __call__(self, step: Ints, phase: Codes, values: Ints | int = 1) -> Ints:
        """The sum of `values` over the rows of each step and phase, without rows of step -1 (none)."""
        table = np.zeros((self._num_steps + 1, len(PHASES)), dtype=np.int64)
        np.add.at(table, (step, phase), values)
        return table[:-1]


def _phases(
    attribution: Attribution, selection: Selection, jobs: Jobs, windows: DeviceWindows, busy: Floats
) -> Iterator[PhaseTimes]:
    """The phases in which some step has a window, kernels or copies."""
    sums = _Table(len(selection.steps))
    trace, placed, num_kernels = attribution.trace, attribution.kernels, len(attribution.kernels)
    step, copy_step, copy_phase = jobs.step[:num_kernels], jobs.step[num_kernels:], attribution.copies.phase
    launches = sums(step, placed.phase)
    kernel = sums(step, placed.phase, trace.kernels.duration_ns)
    recomputed = sums(step, placed.phase, trace.kernels.duration_ns * placed.is_recomputed)
    copies = sums(copy_step, copy_phase)
    copy = sums(copy_step, copy_phase, trace.copies.duration_ns)
    wall = sums(windows.step, windows.phase, windows.end_ns - windows.start_ns)
    host = sums(windows.step, windows.phase, windows.host_end_ns - windows.host_start_ns)
    busy_time = np.zeros(wall.shape)
    np.add.at(busy_time, (windows.step, windows.phase), busy)
    if trace.is_of_host:
        busy_time = kernel.astype(np.float64)
    has_window = sums(windows.step, windows.phase)
    for code, which in enumerate(PHASES):
        if (launches + copies + has_window)[:, code].any():
            yield PhaseTimes(
                phase=which,
                launches=tuple(launches[:, code].tolist()),
                kernel_s=_seconds(kernel[:, code]),
                busy_s=_seconds(busy_time[:, code]),
                wall_s=_seconds(wall[:, code]),
                host_s=_seconds(host[:, code]),
                recomputed_s=_seconds(recomputed[:, code]),
                copies=tuple(copies[:, code].tolist()),
                copy_s=_seconds(copy[:, code]),
            )


def _process_notes(attribution: Attribution, selection: Selection) -> Iterator[str]:
    if (num_processes := len(attribution.sources)) > 1:
        what = "as one step" if selection.is_whole_trace else "each with its own steps, which count alike"
        yield f"There are {num_processes} processes with kernels in the file: they are taken together, {what}."
