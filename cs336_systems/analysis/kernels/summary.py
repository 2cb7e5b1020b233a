"""Summarise attributed kernels in a `StepProfile`."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from cs336_systems.analysis.columns import Mask
from cs336_systems.analysis.kernels.attribution import Attribution, AttributionError
from cs336_systems.analysis.kernels.communication import communication_times
from cs336_systems.analysis.kernels.device_time import busy_devices, busy_ns, join_jobs, on_device
from cs336_systems.analysis.kernels.frames import frame_of
from cs336_systems.analysis.kernels.gathers import gather_times
from cs336_systems.analysis.kernels.host_calls import Host, host_calls
from cs336_systems.analysis.kernels.idle import find_gaps, idle_notes, idle_times, longest_gaps
from cs336_systems.analysis.kernels.kernel_times import class_times, kernel_classes, kernel_times
from cs336_systems.analysis.kernels.matmuls import attention_times, matmul_counts, with_roles
from cs336_systems.analysis.kernels.parts import AttentionNames, module_times, range_parts
from cs336_systems.analysis.kernels.phases import PHASES
from cs336_systems.analysis.kernels.picture import median_step, picture, with_rows
from cs336_systems.analysis.kernels.step_profile import Left, PhaseTimes, StepProfile, Work, contradictions
from cs336_systems.analysis.kernels.windows import Selection, select
from cs336_systems.config import ModelConfig


def summarise(
    attribution: Attribution,
    *,
    source: str,
    model: ModelConfig | None = None,
    batch_size: int | None = None,
    names: AttentionNames | None = None,
) -> StepProfile:
    """The profile of the steps in a trace of the file `source`; with `model` and `batch_size`, attention has FLOPs.

    Raises AttributionError if the parts do not add up to the whole.
    """
    trace = attribution.trace
    selection = select(attribution)
    jobs = join_jobs(attribution, selection)
    host = Host(trace, selection)
    spans, windows = on_device(jobs, selection, host, is_of_host=trace.is_of_host)
    devices = [] if trace.is_of_host else list(busy_devices(jobs))
    busy, num_devices = busy_ns(devices, selection.steps, spans, windows)
    gaps = find_gaps(jobs, devices, spans, selection, host)

    work = frame_of(jobs)
    kind = kernel_classes(trace.kernels.name, trace.strings)
    parts = range_parts(attribution, AttentionNames() if names is None else names)
    kernels = with_roles(work[~work["is_copy"]].assign(kind=kind), attribution, parts)
    in_step, step = kernels[kernels["step"] >= 0], median_step(selection.steps)
    copies = work[work["is_copy"] & (work["step"] == step)]
    by_kernel, by_module = kernel_times(in_step, trace.strings), module_times(in_step, parts)
    attention, attention_notes = attention_times(in_step, parts, model, batch_size)
    profile = StepProfile(
        source=source,
        work=Work.OPERATORS if trace.is_of_host else Work.KERNELS,
        device_names=trace.device_names,
        phases_from=tuple(attribution.sources.values()),
        num_steps=len(selection.steps),
        is_whole_trace=selection.is_whole_trace,
        is_warmup=selection.is_warmup,
        num_kernels=len(kernels),
        kernel_s=int(kernels["duration_ns"].sum()) / 1e9,
        left=_left(kernels, is_in_a_step=attribution.kernels.step >= 0),
        step_s=tuple(((selection.steps.end_ns - selection.steps.start_ns) / 1e9).tolist()),
        phases=tuple(_phases(work, frame_of(windows).assign(busy_ns=busy), len(selection.steps), trace.is_of_host)),
        kernels=by_kernel,
        classes=class_times(in_step),
        products=tuple(matmul_counts(in_step)),
        attention=attention,
        modules=by_module,
        idle=idle_times(gaps, num_devices),
        gaps=longest_gaps(gaps, jobs, attribution, selection, host),
        host_calls=host_calls(host, selection),
        pictured=picture(
            step,
            selection.steps,
            spans,
            windows,
            with_rows(in_step[in_step["step"] == step], by_kernel, by_module, trace.strings, parts),
            copies.assign(text=[trace.strings[name] for name in copies["name"]]),
            gaps,
        ),
        notes=(
            *attribution.notes,
            *_process_notes(attribution, selection),
            *attention_notes,
            *idle_notes(gaps),
        ),
        gathers=() if trace.is_of_host else gather_times(jobs, attribution, selection),
        communication=communication_times(jobs, devices, num_devices, selection.steps, windows),
    )
    if wrong := next(contradictions(profile), None):
        raise AttributionError(wrong)
    return profile


def _left(kernels: pd.DataFrame, *, is_in_a_step: Mask) -> Left:
    """The kernels in no profiled step."""
    place = np.select([is_in_a_step, kernels["is_launched"]], ["warmup", "outside"], "no_launch")
    is_left = kernels["step"] < 0
    found = kernels[is_left].groupby(place[is_left])["duration_ns"].agg(["size", "sum"])
    found = found.reindex(["warmup", "outside", "no_launch"], fill_value=0)
    (warmup, warmup_ns), (outside, outside_ns), (no_launch, no_launch_ns) = found.to_numpy().tolist()
    return Left(
        warmup=warmup,
        warmup_s=warmup_ns / 1e9,
        outside=outside,
        outside_s=outside_ns / 1e9,
        no_launch=no_launch,
        no_launch_s=no_launch_ns / 1e9,
    )


def _phases(work: pd.DataFrame, windows: pd.DataFrame, num_steps: int, is_of_host: bool) -> Iterator[PhaseTimes]:
    """The phases in which some step has a window, kernels or copies."""
    time, is_copy = work["duration_ns"], work["is_copy"]
    work = work[["phase", "step"]].assign(
        launches=~is_copy,
        kernel_ns=time.where(~is_copy, 0),
        recomputed_ns=time.where(~is_copy & work["is_recomputed"], 0),
        copies=is_copy,
        copy_ns=time.where(is_copy, 0),
    )
    windows = windows[["phase", "step", "busy_ns"]].assign(
        windows=1,
        wall_ns=windows["duration_ns"],
        host_ns=windows["host_end_ns"] - windows["host_start_ns"],
    )
    every = pd.MultiIndex.from_product([range(len(PHASES)), range(num_steps)])
    sums = [rows.groupby(["phase", "step"]).sum().reindex(every, fill_value=0) for rows in (work, windows)]
    table = pd.concat(sums, axis=1)
    for code, phase in enumerate(PHASES):
        found = table.loc[code]
        if found[["launches", "copies", "windows"]].to_numpy().any():
            yield PhaseTimes(
                phase=phase,
                launches=tuple(found["launches"].tolist()),
                kernel_s=_seconds(found["kernel_ns"]),
                busy_s=_seconds(found["kernel_ns" if is_of_host else "busy_ns"]),
                wall_s=_seconds(found["wall_ns"]),
                host_s=_seconds(found["host_ns"]),
                recomputed_s=_seconds(found["recomputed_ns"]),
                copies=tuple(found["copies"].tolist()),
                copy_s=_seconds(found["copy_ns"]),
            )


def _seconds(time_ns: "pd.Series[int]") -> tuple[float, ...]:
    return tuple((time_ns / 1e9).tolist())


def _process_notes(attribution: Attribution, selection: Selection) -> Iterator[str]:
    if (num_processes := len(attribution.sources)) > 1:
        what = "as one step" if selection.is_whole_trace else "each with its own steps, which count alike"
        yield f"There are {num_processes} processes with kernels in the file: they are taken together, {what}."
