"""Explains a profiler's file: trace, then the phase, step and module of each kernel, then sums as a
`StepProfile`.

A run on several ranks has one report of nsys, or a trace of torch.profiler for each rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...config import RunConfig
from ...costs.time import operations
from ...costs.traces import has_tape, is_at_hand, is_compiled
from ...ranges import PhaseNames
from ...text import inert_line
from ...torch_needed import lacking_torch
from ..columns import Ints, Mask, groups
from . import communication, idle, modules, operators, pictured, process_groups, step_profile
from .attribution import Attribution, Jobs, Selection, attribute, by_step, frame_of, select_steps
from .classes import KernelRules, is_generated, use_rules
from .copies import copy_times
from .counters import counter_means, module_means
from .device_memory import reserved_peaks
from .device_time import (
    UNSEEN_NS,
    Busy,
    DeviceSteps,
    DeviceWindows,
    busy_ns,
    times_on_device,
    unseen_ns,
)
from .doubts import doubts, is_rounded
from .host_calls import Host, host_calls
from .ledger import ledger_times
from .phase_ranges import check_names
from .phases import LaunchPhase
from .places import place_times
from .readers import read_trace
from .run_files import files_of_run
from .trace import Trace


class AttributionError(AssertionError):
    """The parts do not add up to the whole, which is a bug of this program, not a fault of the
    file.
    """


@dataclass(frozen=True, kw_only=True)
class _ProfiledSteps:
    """The steps of a trace that are profiled, and what host and device did in them."""

    attribution: Attribution
    selection: Selection
    host: Host
    jobs: Jobs
    """What the device ran, with the number of the profiled step, -1 for none."""
    devices: Sequence[Busy]
    """Empty for a trace of a CPU."""
    num_devices: Ints
    """For each step, the number of devices that it used."""
    spans: DeviceSteps
    windows: DeviceWindows
    times: pd.DataFrame
    """The windows, with the time in which the device was busy."""
    work: pd.DataFrame
    """The jobs as rows of a frame."""
    kernels: pd.DataFrame
    """The jobs that are no copies, with the class of each, outside of steps too."""

    @property
    def trace(self) -> Trace:
        """The trace that has the steps."""
        return self.attribution.trace

    @property
    def in_step(self) -> pd.DataFrame:
        """The kernels of the profiled steps."""
        return self.kernels[self.kernels["step"] >= 0]


def _profiled_steps(attribution: Attribution) -> _ProfiledSteps:
    """The steps that are profiled, placed on the device."""
    trace = attribution.trace
    selection = select_steps(attribution)
    jobs = replace(attribution.jobs, step=selection.step_of(attribution.jobs.step))
    host = Host(trace)
    spans, windows = times_on_device(jobs, selection, host, is_of_host=trace.is_of_host)
    devices = []
    if not trace.is_of_host:
        for _, rows in groups(jobs.device):
            devices.append(Busy(rows=rows, union=jobs.union(rows)))
    busy, num_devices = busy_ns(devices, spans, windows)
    work = frame_of(jobs)
    kernels = work[~work["is_copy"]]
    return _ProfiledSteps(
        attribution=attribution,
        selection=selection,
        host=host,
        jobs=jobs,
        devices=devices,
        num_devices=num_devices,
        spans=spans,
        windows=windows,
        times=frame_of(windows).assign(busy_ns=busy),
        work=work,
        kernels=kernels.assign(kind=modules.kernel_classes(trace.kernels.name, trace.strings)),
    )


def summarise(
    attribution: Attribution, *, source: str, config: RunConfig | None = None
) -> step_profile.StepProfile:
    """The profile of the steps in a trace of the file `source`; attention has FLOPs if `config` is
    that of the traced run.

    Raises AttributionError if the parts do not add up to the whole.
    """
    steps = _profiled_steps(attribution)
    profile = _with_extras(_summary(steps, source, config), steps, config)
    for wrong in step_profile.contradictions(profile):
        raise AttributionError(wrong)
    return profile


def _summary(
    steps: _ProfiledSteps, source: str, config: RunConfig | None
) -> step_profile.StepProfile:
    """What every profile has: phases, kernels, modules, idle times, and what the file lacks."""
    attribution, selection, trace = steps.attribution, steps.selection, steps.trace
    kernels, in_step, num_steps = steps.kernels, steps.in_step, len(selection.steps)
    parts = modules.range_parts(attribution)
    gaps = idle.find_gaps(steps.jobs, steps.devices, steps.spans, selection, steps.host)
    drawn = pictured.with_copies(in_step, steps.work)
    lost_times = not is_rounded(trace.kernels)
    grave, slight = doubts(trace, selection.contains(trace.api_calls.start_ns))
    notes = [*attribution.notes, *idle.idle_notes(gaps), *selection.notes, *_unseen(steps)]
    notes += [f"{doubt}." for doubt in (*grave, *slight)]
    return step_profile.StepProfile(
        source=source,
        work=step_profile.Work.OPERATORS if trace.is_of_host else step_profile.Work.KERNELS,
        device_names=trace.device_names,
        phases_from=(attribution.plan.source,),
        num_steps=num_steps,
        is_whole_trace=selection.is_whole_trace,
        is_warmup=selection.is_warmup,
        num_kernels=len(kernels),
        kernel_s=int(kernels["duration_ns"].sum()) / 1e9,
        left=_left(kernels, attribution.jobs.step[kernels.index], selection.is_cut),
        step_s=tuple((selection.steps.duration_ns / 1e9).tolist()),
        phases=tuple(_phases(steps.work, steps.times, num_steps, trace.is_of_host)),
        kernels=modules.kernel_times(in_step, trace.strings, lost_times=lost_times),
        classes=modules.class_times(in_step),
        attention=modules.attention_times(in_step, parts, trace.strings, config),
        modules=modules.module_times(in_step, parts),
        idle=idle.idle_times(gaps, steps.num_devices),
        gaps=tuple(idle.longest_gaps(gaps, steps.jobs, parts, trace, steps.spans, steps.host)),
        host_calls=host_calls(steps.host, selection),
        pictured=pictured.median_step(steps.spans, steps.windows, drawn, trace.strings),
        beside=pictured.steps_beside(selection.labels, steps.spans, steps.windows, drawn),
        notes=tuple(notes),
        doubts=grave,
        module_counters=tuple(module_means(trace, in_step, parts)),
    )


def _unseen(steps: _ProfiledSteps) -> Iterator[str]:
    """A note on the first step, if the device began it late, with work that the file lacks."""
    if steps.trace.is_of_host:
        return
    time_ns = unseen_ns(steps.jobs, steps.selection, steps.host)
    if time_ns > UNSEEN_NS:
        yield (
            f"The device began the first step {time_ns / 1e6:,.4g} ms after the host: before, it "
            "ran work that is not in the file."
        )


def _with_extras(
    profile: step_profile.StepProfile, steps: _ProfiledSteps, config: RunConfig | None
) -> step_profile.StepProfile:
    """The profile with what only some files have: collectives, copies, ranks, graphs, operators,
    counters, lines of the program, the ledger.
    """
    attribution, selection, trace = steps.attribution, steps.selection, steps.trace
    jobs, devices, num_devices = steps.jobs, steps.devices, steps.num_devices
    windows, in_step = steps.windows, steps.in_step
    return replace(
        profile,
        communication=communication.communication_times(jobs, devices, num_devices, windows),
        copies=copy_times(jobs, devices, num_devices, steps.spans, trace.strings),
        lacks_device=trace.lacks_device,
        rank=trace.rank,
        between=_between_steps(steps.spans, selection, attribution),
        graph_share=float(in_step["is_in_graph"].mean()) if len(in_step) else 0.0,
        is_compiled=bool(trace.named(trace.kernels, is_generated).any()),
        steps_from="" if selection.is_whole_trace else attribution.plan.steps_from,
        step_labels=selection.labels,
        passes_per_step=attribution.plan.passes_per_step,
        operators=operators.operator_times(attribution, in_step),
        counters=tuple(counter_means(trace, windows, jobs.device)),
        reserved=tuple(reserved_peaks(trace, windows)),
        places=tuple(place_times(in_step, trace)),
        ledger=_ledger(in_step, trace, config),
    )


def _ledger(
    kernels: pd.DataFrame, trace: Trace, config: RunConfig | None
) -> tuple[step_profile.LedgerTimes, ...]:
    """The kernels beside the operations of the step's tape; empty for a trace of a CPU, for a step
    whose tape would take a run of torch.compile, and for one without a tape, which only an
    installed PyTorch can make.
    """
    if config is None or trace.is_of_host or not config.needs_fast_model or is_compiled(config):
        return ()
    if not is_at_hand(config) and (lacking_torch() or not has_tape(config)):
        return ()
    by_phase = {phase.value: launched for phase, launched in operations(config).items()}
    return ledger_times(kernels, trace.strings, by_phase)


def _between_steps(
    spans: DeviceSteps, selection: Selection, attribution: Attribution
) -> step_profile.BetweenSteps | None:
    """The time between steps that follow each other in the file."""
    if selection.is_whole_trace:
        return None
    number, begins = selection.number[:-1], attribution.plan.steps.start_ns.copy()
    is_profiled = number >= 0
    begins[is_profiled] = spans.start_ns
    # what follows a profiled step may be left out, and begins all the same
    followed = np.flatnonzero(is_profiled[:-1])
    start, end = spans.end_ns[number[followed]], begins[followed + 1]
    start, end = start[end > start], end[end > start]
    if not len(start):
        return None
    holes = attribution.jobs.union().holes(start, end)
    windows = attribution.plan.windows
    data = windows.union(windows.among(LaunchPhase.DATA))
    data_ns = data.within(holes.start_ns, holes.end_ns)
    return step_profile.BetweenSteps(
        total_s=int((end - start).sum()) / 1e9,
        idle_s=int(holes.duration_ns.sum()) / 1e9,
        data_s=int(data_ns.sum()) / 1e9,
    )


def _left(kernels: pd.DataFrame, step: Ints, is_cut: Mask) -> step_profile.Left:
    """The kernels in no profiled step, from their steps in the trace (-1 for none)."""
    is_launched = kernels["is_launched"].to_numpy(dtype=np.bool_)
    place = np.select(
        [kernels["step"] >= 0, is_cut[step], step >= 0, is_launched],
        ["profiled", "cut", "warmup", "outside"],
        "no_launch",
    )
    times_s = kernels["duration_ns"].groupby(place).sum() / 1e9
    counts = kernels.groupby(place).size()
    values: dict[str, Any] = {}
    for name in ("warmup", "outside", "no_launch", "cut"):
        values[name] = int(counts.get(name, 0))
        values[f"{name}_s"] = float(times_s.get(name, 0))
    return step_profile.Left(**values)


def _phases(
    work: pd.DataFrame, windows: pd.DataFrame, num_steps: int, is_of_host: bool
) -> Iterator[step_profile.PhaseTimes]:
    """The phases in which some step has a window, kernels or copies."""
    time, is_copy = work["duration_ns"], work["is_copy"]
    work = work[["phase", "step"]].assign(
        launches=(~is_copy).astype(int),
        kernel_s=time.where(~is_copy, 0),
        recomputed_s=time.where(~is_copy & work["is_recomputed"], 0),
        copies=is_copy.astype(int),
        copy_s=time.where(is_copy, 0),
    )
    windows = windows[["phase", "step"]].assign(
        windows=1,
        busy_s=windows["busy_ns"],
        wall_s=windows["duration_ns"],
        host_s=windows["host_end_ns"] - windows["host_start_ns"],
    )
    rows = pd.concat([work, windows]).fillna(0)
    for phase, values in by_step(rows[rows["step"] >= 0], num_steps):
        del values["windows"]
        if is_of_host:
            values["busy_s"] = values["kernel_s"]
        yield step_profile.PhaseTimes(phase=phase, **values)


def explain(
    path: Path,
    config: RunConfig | None = None,
    phases: PhaseNames | None = None,
    rules: KernelRules | None = None,
) -> step_profile.StepProfile:
    """Explain the profile at `path`, or all ranks of the run in a directory; with the run's
    `config`, attention has its FLOPs too.

    `rules` decide on the classes of kernels before those of plug-ins and of this program. Of a run
    on several ranks, the profile is of the first, with the times of all. Raises ProfileError for a
    file that is no profile, RangeNameError for a range name in `phases` that the file does not
    have, NsysError if nsys is needed and missing.
    """
    use_rules(*([] if rules is None else [rules]))
    # an own model's shape is not that of the configuration
    is_of_config = config is not None and config.model_factory is None
    profiles, collectives = [], []
    world_size = 1 if config is None else config.ranks
    for rank, trace in _traces(path):
        check_names(trace, phases or PhaseNames())
        attribution = attribute(trace, phases)
        source = inert_line(path.resolve().name)  # a name may hold what no UTF-8 has
        profile = summarise(attribution, source=source, config=config if is_of_config else None)
        profiles.append((rank, profile))
        collectives.append(process_groups.collectives_of(attribution))
        sizes = [message.size or 1 for message in trace.messages]
        world_size = max(world_size, trace.world_size or 1, *sizes)
    return _of_all_ranks(profiles, collectives, world_size)


def _of_all_ranks(
    profiles: Sequence[tuple[int, step_profile.StepProfile]],
    collectives: Sequence[pd.DataFrame],
    world_size: int,
) -> step_profile.StepProfile:
    """The profile of the first of these ranks, with the times of all; `collectives` are those of
    each, and `world_size` is the number of ranks of the run, of which some may not be here.
    """
    rank, first = profiles[0]
    if len(profiles) < world_size:
        note = communication.missing_ranks(len(profiles), world_size)
        first = replace(first, notes=(*first.notes, note))
    together = process_groups.met(collectives, profiles, world_size)
    if len(profiles) > 1 or together["size"].notna().any():
        first = replace(first, groups=tuple(process_groups.group_times(together)))
    if len(profiles) == 1:
        return first
    return replace(
        first,
        rank=rank,
        ranks=process_groups.rank_times(profiles, together),
        skew=process_groups.step_skews(together, first.num_steps),
    )


def _traces(path: Path) -> Iterator[tuple[int, Trace]]:
    """Each rank and its trace, one after the other; the first alone if there are no others."""
    if path.is_dir():
        files = files_of_run(path)
        if len(files) > 1:
            for rank, file in files.items():
                yield rank or 0, read_trace(file)
            return
        (path,) = files.values()
    traces = communication.by_rank(read_trace(path))
    is_alone = len(traces) == 1
    yield from traces.items()
    del traces  # the traces of others need the memory
    if is_alone:
        for rank, beside in communication.files_of_others(path).items():
            other = read_trace(beside)
            yield rank if other.rank is None else other.rank, other
