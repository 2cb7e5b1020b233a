"""Explains a profiler's file: trace, then the phase, step and module of each kernel, then sums as a `StepProfile`.

A run on several ranks has one report of nsys, or a trace of torch.profiler for each rank.
"""

from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

from cs336_systems.analysis.columns import GZIP_MAGIC, SQLITE_MAGIC, Mask, ProfileError, read_head, what_it_is
from cs336_systems.analysis.kernels.attribution import (
    Attribution,
    AttributionError,
    Selection,
    attribute,
    frame_of,
    select,
)
from cs336_systems.analysis.kernels.communication import (
    by_rank,
    collectives_of,
    communication_times,
    files_of_others,
    gather_times,
    rank_times,
    without_rank,
)
from cs336_systems.analysis.kernels.device_time import (
    busy_devices,
    busy_ns,
    find_gaps,
    idle_notes,
    idle_times,
    join_jobs,
    longest_gaps,
    on_device,
)
from cs336_systems.analysis.kernels.host_calls import Host, host_calls
from cs336_systems.analysis.kernels.kineto import NEEDED as KINETO_FILE
from cs336_systems.analysis.kernels.kineto import read_kineto
from cs336_systems.analysis.kernels.modules import (
    AttentionNames,
    attention_times,
    class_times,
    kernel_classes,
    kernel_times,
    matmul_counts,
    module_times,
    range_parts,
    with_roles,
)
from cs336_systems.analysis.kernels.nsys import NEEDED as NSYS_FILE
from cs336_systems.analysis.kernels.nsys import export, read_nsys
from cs336_systems.analysis.kernels.phases import PHASES, PhaseNames, check_names
from cs336_systems.analysis.kernels.picture import median_step, picture, with_rows
from cs336_systems.analysis.kernels.step_profile import Left, PhaseTimes, StepProfile, Work, contradictions
from cs336_systems.analysis.kernels.trace import Trace
from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.text import inert_line

HEAD_BYTES = 100


def read_trace(path: Path) -> Trace:
    """Read a file of nsys or torch.profiler, recognised by its first bytes; raise ProfileError for other files."""
    needed = f"{NSYS_FILE}, or {KINETO_FILE}"
    head = read_head(path, HEAD_BYTES, needed)
    if head.startswith(SQLITE_MAGIC):
        return read_nsys(path)
    if head.startswith(GZIP_MAGIC) or head.lstrip()[:1] in (b"{", b"["):
        return read_kineto(path)
    raise ProfileError(path, f"needed {needed}, but {what_it_is(path, head)}")


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


REPORT_ENDING = ".nsys-rep"


def explain(
    path: Path,
    config: RunConfig | None = None,
    phases: PhaseNames | None = None,
    attention: AttentionNames | None = None,
) -> StepProfile:
    """Explain the profile at `path`; with the run's `config`, attention has its FLOPs too.

    Of a run on several ranks, the profile is of the first, with the times of all. A report of nsys is first exported by
    nsys. Raises ProfileError for a file that is no profile, UnknownRangeError for a range name in `phases` that the
    file does not have, NsysError if nsys is needed and missing.
    """
    own_model = config is not None and config.model_factory is not None
    profiles, collectives = [], []
    for rank, trace in _traces(path):
        check_names(trace, phases or PhaseNames())
        attribution = attribute(trace, phases)
        profile = summarise(
            attribution,
            source=inert_line(path.name),
            model=config.model if config and not own_model else None,
            batch_size=config.batch_size if config and not own_model else None,
            names=attention,
        )
        profiles.append((rank, profile))
        collectives.append(collectives_of(attribution))
    first = profiles[0][1]
    is_of_one = without_rank(path.name) != path.name  # chosen by its user
    if config is not None and len(profiles) < config.ranks and not is_of_one:
        missing = [str(rank) for rank in range(config.ranks) if rank not in dict(profiles)]
        note = f"There is no trace of rank {', '.join(missing)} of {config.ranks}."
        first = replace(first, notes=(*first.notes, note))
    return replace(first, ranks=rank_times(profiles, collectives)) if len(profiles) > 1 else first


def _traces(path: Path) -> Iterator[tuple[int, Trace]]:
    """Each rank and its trace, one after the other; the first alone if there are no others."""
    with TemporaryDirectory(prefix="cs336-", dir=get_temp_dir()) as scratch:  # a sweep that is killed removes it too
        file = export(path, Path(scratch)) if path.suffix == REPORT_ENDING and path.is_file() else path
        trace = read_trace(file)
    if several := by_rank(trace):
        yield from several.items()
        return
    yield 0, trace
    del trace
    for rank, beside in files_of_others(path).items():
        yield rank, read_trace(beside)
