"""Explains a profiler's file: trace, then the phase, step and module of each kernel, then sums as a
`StepProfile`.

A run on several ranks has one report of nsys, or a trace of torch.profiler for each rank.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...config import RunConfig
from ...ranges import PhaseNames
from ...text import inert_line
from ..columns import Mask, groups
from . import communication, device_time, modules, step_profile
from .attribution import Attribution, attribute, by_step, frame_of, select
from .classes import KernelRules, use_rules
from .device_time import Busy, DeviceSteps, DeviceWindows, Host, host_calls
from .modules import CLASSES
from .phases import PHASES, check_names
from .readers import read_trace
from .trace import Trace, Union


class AttributionError(AssertionError):
    """The parts do not add up to the whole, which is a bug of this program, not a fault of the
    file.
    """


def summarise(
    attribution: Attribution, *, source: str, config: RunConfig | None = None
) -> step_profile.StepProfile:
    """The profile of the steps in a trace of the file `source`; attention has FLOPs if `config` is
    that of the traced run.

    Raises AttributionError if the parts do not add up to the whole.
    """
    trace = attribution.trace
    selection = select(attribution)
    jobs = replace(attribution.jobs, step=selection.step_of(attribution.jobs.step))
    host = Host(trace)
    spans, windows = device_time.on_device(jobs, selection, host, is_of_host=trace.is_of_host)
    by_device = [] if trace.is_of_host else groups(jobs.device)
    devices = [
        Busy(rows=rows, union=Union(jobs.start_ns[rows], jobs.end_ns[rows]))
        for _, rows in by_device
    ]
    busy, num_devices = device_time.busy_ns(devices, spans, windows)
    gaps = device_time.find_gaps(jobs, devices, spans, selection, host)

    work = frame_of(jobs)
    kind = modules.kernel_classes(trace.kernels.name, trace.strings)
    parts = modules.range_parts(attribution)
    kernels = work[~work["is_copy"]].assign(kind=kind)
    in_step = kernels[kernels["step"] >= 0]
    grave, slight = device_time.doubts(trace)
    profile = step_profile.StepProfile(
        source=source,
        work=step_profile.Work.OPERATORS if trace.is_of_host else step_profile.Work.KERNELS,
        device_names=trace.device_names,
        phases_from=(attribution.source,),
        num_steps=len(selection.steps),
        is_whole_trace=selection.is_whole_trace,
        is_warmup=selection.is_warmup,
        num_kernels=len(kernels),
        kernel_s=int(kernels["duration_ns"].sum()) / 1e9,
        left=_left(kernels, is_in_a_step=attribution.jobs.step[kernels.index] >= 0),
        step_s=tuple(((selection.steps.end_ns - selection.steps.start_ns) / 1e9).tolist()),
        phases=tuple(
            _phases(
                work, frame_of(windows).assign(busy_ns=busy), len(selection.steps), trace.is_of_host
            )
        ),
        kernels=modules.kernel_times(in_step, trace.strings),
        classes=modules.class_times(in_step),
        attention=modules.attention_times(in_step, parts, trace.strings, config),
        modules=modules.module_times(in_step, parts),
        idle=device_time.idle_times(gaps, num_devices),
        gaps=tuple(device_time.longest_gaps(gaps, jobs, parts, trace, spans, host)),
        host_calls=host_calls(host, selection),
        pictured=_picture(_median_step(spans), spans, windows, in_step),
        notes=(
            *attribution.notes,
            *device_time.idle_notes(gaps),
            *selection.notes,
            *(f"{text}." for text in (*grave, *slight)),
        ),
        communication=communication.communication_times(jobs, devices, num_devices, windows),
        copies=device_time.copy_times(jobs, devices, num_devices, spans, trace.strings),
        doubts=grave,
        rank=trace.rank,
    )
    if wrong := next(step_profile.contradictions(profile), None):
        raise AttributionError(wrong)
    return profile


def _left(kernels: pd.DataFrame, *, is_in_a_step: Mask) -> step_profile.Left:
    """The kernels in no profiled step."""
    step, is_launched = kernels["step"].to_numpy(), kernels["is_launched"].to_numpy(dtype=np.bool_)
    place = np.select(
        [step >= 0, is_in_a_step, is_launched], ["", "warmup", "outside"], "no_launch"
    )
    values: dict[str, Any] = {}
    for name in ("warmup", "outside", "no_launch"):
        times_ns = kernels["duration_ns"][place == name]
        values |= {name: len(times_ns), f"{name}_s": int(times_ns.sum()) / 1e9}
    return step_profile.Left(**values)


def _phases(
    work: pd.DataFrame, windows: pd.DataFrame, num_steps: int, is_of_host: bool
) -> Iterator[step_profile.PhaseTimes]:
    """The phases in which some step has a window, kernels or copies."""
    time, is_copy = work["duration_ns"], work["is_copy"]
    work = work[["phase", "step"]].assign(
        launches=~is_copy,
        kernel_s=time.where(~is_copy, 0),
        recomputed_s=time.where(~is_copy & work["is_recomputed"], 0),
        copies=is_copy,
        copy_s=time.where(is_copy, 0),
    )
    windows = windows[["phase", "step"]].assign(
        windows=1,
        busy_s=windows["busy_ns"],
        wall_s=windows["duration_ns"],
        host_s=windows["host_end_ns"] - windows["host_start_ns"],
    )
    columns = work.columns.union(windows.columns, sort=False)
    rows = pd.concat(
        [part[part["step"] >= 0].reindex(columns=columns, fill_value=0) for part in (work, windows)]
    )
    for phase, values in by_step(rows, num_steps):
        del values["windows"]
        yield step_profile.PhaseTimes(
            phase=phase, **values | ({"busy_s": values["kernel_s"]} if is_of_host else {})
        )


def explain(
    path: Path,
    config: RunConfig | None = None,
    phases: PhaseNames | None = None,
    rules: KernelRules | None = None,
) -> step_profile.StepProfile:
    """Explain the profile at `path`; with the run's `config`, attention has its FLOPs too.

    `rules` decide on the classes of kernels before those of plug-ins and of this program. Of a run
    on several ranks, the profile is of the first, with the times of all. Raises ProfileError for a
    file that is no profile, RangeNameError for a range name in `phases` that the file does not
    have, NsysError if nsys is needed and missing.
    """
    use_rules(*([] if rules is None else [rules]))
    # an own model's shape is not that of the configuration
    is_of_config = config is not None and config.model_factory is None
    profiles, collectives = [], []
    for rank, trace in _traces(path):
        check_names(trace, phases or PhaseNames())
        attribution = attribute(trace, phases)
        source = inert_line(path.name)  # a name may hold what no UTF-8 has
        profile = summarise(attribution, source=source, config=config if is_of_config else None)
        profiles.append((rank, profile))
        collectives.append(communication.collectives_of(attribution))
    rank, first = profiles[0]
    is_of_one = communication.without_rank(path.name) != path.name  # chosen by its user
    if config is not None and len(profiles) < config.ranks and not is_of_one:
        explained = dict(profiles)
        missing = [str(number) for number in range(config.ranks) if number not in explained]
        note = f"There is no trace of rank {', '.join(missing)} of {config.ranks}."
        first = replace(first, notes=(*first.notes, note))
    if len(profiles) == 1:
        return first
    return replace(first, rank=rank, ranks=communication.rank_times(profiles, collectives))


def _traces(path: Path) -> Iterator[tuple[int, Trace]]:
    """Each rank and its trace, one after the other; the first alone if there are no others."""
    traces = communication.by_rank(read_trace(path))
    is_alone = len(traces) == 1
    yield from traces.items()
    del traces  # the traces of others need the memory
    if is_alone:
        for rank, beside in communication.files_of_others(path).items():
            other = read_trace(beside)
            yield rank if other.rank is None else other.rank, other


NUM_PARTS = 500
"""Parts of the pictured step; kernels of one class and stream that begin in the same part are
one piece.
"""


def _median_step(spans: DeviceSteps) -> int:
    """The step of median wall time; of two, the shorter."""
    order = np.argsort(spans.end_ns - spans.origin_ns, kind="stable")
    return int(order[(len(order) - 1) // 2])


def _picture(
    step: int, spans: DeviceSteps, windows: DeviceWindows, kernels: pd.DataFrame
) -> step_profile.PicturedStep:
    """The picture of one step of these kernels."""
    start = int(spans.origin_ns[step])
    wall = int(spans.end_ns[step]) - start
    own = kernels[kernels["step"] == step]
    own = own.assign(end_ns=own["start_ns"] + own["duration_ns"])
    part = ((own["start_ns"] - start) * NUM_PARTS // max(wall, 1)).rename("part")
    groups = own.groupby(["stream", part, "kind"])
    bounds = {"start": groups["start_ns"].min(), "end": groups["end_ns"].max()}
    pieces = pd.DataFrame({**bounds, "busy": groups["duration_ns"].sum()})
    return step_profile.PicturedStep(
        step=step,
        wall_s=wall / 1e9,
        windows=tuple(
            step_profile.Window(
                phase=PHASES[windows.phase[row]],
                host_start_s=(int(windows.host_start_ns[row]) - start) / 1e9,
                host_end_s=(int(windows.host_end_ns[row]) - start) / 1e9,
                device_start_s=(int(windows.start_ns[row]) - start) / 1e9,
                device_end_s=(int(windows.end_ns[row]) - start) / 1e9,
            )
            for row in np.flatnonzero(windows.step == step).tolist()
        ),
        pieces=tuple(
            step_profile.Piece(
                stream=stream,
                kind=CLASSES[kind],
                start_s=(begin - start) / 1e9,
                end_s=(end - start) / 1e9,
                busy_s=busy / 1e9,
            )
            for (stream, _, kind), begin, end, busy in pieces.itertuples()
        ),
    )
