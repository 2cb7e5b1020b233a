"""The runs of a page: of each, failed ones too, all that is kept of it in words and as its record."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from cs336_systems.analysis.warnings import launched_phases
from cs336_systems.config import Phase, Profiler
from cs336_systems.record import Environment, GpuState, Measurement, Memory, RunRecord, Status, encode_record
from cs336_systems.report.frame import order
from cs336_systems.report.numbers import mean_and_std, significant
from cs336_systems.report.page.commands import command_of
from cs336_systems.report.page.figures import Spec
from cs336_systems.report.page.provenance import PlaceOf, provenance
from cs336_systems.report.page.write import Chapter, Figure, Run
from cs336_systems.report.plots import palette
from cs336_systems.report.sections.memory.words import size
from cs336_systems.report.words import status_text
from cs336_systems.sweep.store import VIEWERS, raw_profile_path
from cs336_systems.text import counted, inert_json, inert_line, shortened

LONGEST_TEXT = 20_000
"""Characters of a traceback or of the end of a log."""
STEP, OTHER = "#333333", "#888888"
"""Colours of the whole step, and of what is beside the measured steps."""
HOST = "host, to launch a step"
MOST_ABOVE, ROOM_ABOVE = 2, 1.3
"""A first step longer than MOST_ABOVE times the longest other step is cut off: the axis ends at ROOM_ABOVE times that
other step."""


def runs_chapter(records: Iterable[RunRecord], place_of: PlaceOf, prefix: str = "") -> Chapter:
    """Every run, failed ones too; `prefix` begins all identifiers."""
    found = sorted(records, key=lambda record: (*order(record.config), record.config.profiler, record.config.repeat))
    blocks = [_run(record, place_of, f"{prefix}run-{number}") for number, record in enumerate(found)]
    return Chapter(id=f"{prefix}runs", title="Runs", blocks=blocks, source=provenance(found, place_of))


def _run(record: RunRecord, place_of: PlaceOf, identifier: str) -> Run:
    """All that is kept of one run: facts, its times in order, and its texts."""
    step = record.measurement(Phase.STEP)
    profiler = "" if record.config.profiler is Profiler.NONE else f", under {record.config.profiler}"
    mean = "" if step is None else f", {step.mean_s * 1e3:.2f} ms"
    spec = times_picture(record)
    source = provenance([record], place_of)
    title = f"Every step of the run in order: {record.config.label}{profiler}"
    figure = Figure(id=f"{identifier}-times", title=inert_line(title), spec=spec or {}, source=source, height=300)
    return Run(
        id=identifier,
        title=inert_line(f"{record.config.label}{profiler}: {status_text(record.status)}{mean}"),
        facts=_facts(record, place_of(record)),
        blocks=[figure] if spec else [],
        texts=[(heading, text) for heading, text in _texts(record) if text],
        failed=record.status is not Status.OK,
    )


def _texts(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Headings and texts; an empty text is not known."""
    failure = record.failure
    yield "Repeat it with", inert_line(command_of(record.config))
    if failure is not None:
        yield "Traceback", _long(failure.traceback)
        yield "End of the log", _long(failure.log_tail)
    yield "Times in order (ms)", _lines(f"{name}: {_in_order(times_s)}" for name, times_s in _series(record) if times_s)
    yield "Record", inert_json(encode_record(record)).decode()


def _series(record: RunRecord) -> list[tuple[str, Sequence[float]]]:
    """The times of all steps in order: of warm-up, of the measured ones and of their phases, and of launching."""
    measured = sorted(record.measurements, key=lambda own: own.phase is not Phase.STEP)
    return [
        ("warm-up", record.warmup_times_s),
        *((str(own.phase), own.times_s) for own in measured),
        (HOST, record.launch_times_s),
    ]


def _measured_s(record: RunRecord) -> Sequence[float]:
    step = record.measurement(Phase.STEP)
    return step.times_s if step else ()


def times_picture(record: RunRecord) -> Spec | None:
    """A line for each series over the steps of the run, of which those of warm-up are grey; None without times."""
    num_warmup = len(record.warmup_times_s)
    colours = {str(phase): colour for phase, colour in palette.PHASE_COLOURS.items()} | {str(Phase.STEP): STEP}
    data: list[Spec] = []
    for name, times_s in _series(record):
        first = 1 if name == "warm-up" else num_warmup + 1
        if times_s:
            colour = colours.get(name, OTHER)
            data.append(
                {
                    "type": "scatter", "mode": "lines" if name == HOST else "lines+markers", "name": name,
                    "x": list(range(first, first + len(times_s))), "y": [time_s * 1e3 for time_s in times_s],
                    "line": {"color": colour, "width": 1.5, "dash": "dot" if colour == OTHER else "solid"},
                    "marker": {"color": colour, "size": 6, "symbol": "circle-open" if name == "warm-up" else "circle"},
                    "hovertemplate": Markup("{}: %{{y:.5~g}} ms").format(name),
                }
            )  # fmt: skip
    shade = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": 0.5, "x1": num_warmup + 0.5, "layer": "below",
             "line": {"width": 0}, "fillcolor": OTHER, "opacity": 0.15}  # fmt: skip
    layout: Spec = {
        "hovermode": "x unified", "shapes": [shade] if num_warmup else [],
        "xaxis": {"title": {"text": "step of the run, with warm-up"}},
        "yaxis": {"title": {"text": "time (ms)"}, "rangemode": "tozero"},
    }  # fmt: skip
    first_s, others_s = record.warmup_times_s[:1], [*record.warmup_times_s[1:], *_measured_s(record)]
    if first_s and others_s and first_s[0] > MOST_ABOVE * max(others_s):
        top_ms = 1e3 * ROOM_ABOVE * max(others_s)
        layout["yaxis"] |= {"range": [0, top_ms]}
        layout["annotations"] = [{"x": 1, "y": top_ms, "showarrow": False, "xanchor": "left", "yanchor": "top",
                                  "text": f"step 1: {significant(first_s[0] * 1e3)} ms"}]  # fmt: skip
    return {"data": data, "layout": layout} if data else None


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(map(inert_line, texts))


def _long(text: str | None) -> str:
    """A text of several lines, of which a long one loses its middle."""
    return "" if text is None else _lines(shortened(text, LONGEST_TEXT).splitlines())


def _in_order(times_s: Sequence[float]) -> str:
    return ", ".join(f"{time_s * 1e3:.4f}" for time_s in times_s)


def _facts(record: RunRecord, directory: Path) -> list[tuple[str, str]]:
    """Names and values, without those that are not known; several lines where there are several of one kind."""
    found = [
        ("Status", _status(record)),
        *_times(record),
        ("Peak of memory", "" if record.memory is None else _memory(record.memory)),
        ("Parameters", "" if record.num_parameters is None else f"{record.num_parameters:,}"),
        ("Loss", _losses(record)),
        ("Compilation", _compilation(record)),
        ("Warnings", "\n".join(inert_line(f"{each.code}: {each.message}") for each in record.warnings)),
        *_gpu(record),
        *(_environment(record.environment) if record.environment is not None else ()),
        ("Measured", f"{record.started_at[:19]} UTC{_took(record)}"),
        ("Record", str(directory / "runs" / f"{record.key}.json")),
        ("Raw profile", _raw_profile(record, directory)),
    ]
    return [(name, "\n".join(map(inert_line, value.split("\n")))) for name, value in found if value]


def _status(record: RunRecord) -> str:
    failure = record.failure
    if failure is None:
        return status_text(record.status)
    where = f" (in {failure.where})" if failure.where else ""
    return f"{status_text(record.status)}: {failure.message}{where}"


def _mean(measured: Measurement) -> str:
    return f"{mean_and_std(measured.mean_s * 1e3, None if measured.stdev_s is None else measured.stdev_s * 1e3)} ms"


def _times(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Mean and deviation of the step and of its phases."""
    step, host, warmup = record.measurement(Phase.STEP), record.launch_times_s, record.warmup_times_s
    if step is not None:
        extremes = f"median {significant(step.median_s * 1e3)} ms, fastest {significant(step.min_s * 1e3)} ms"
        yield "Step", f"{_mean(step)} over {counted(len(step.times_s), 'step')}; {extremes}"
    phases = [f"{own.phase} {_mean(own)}" for own in record.measurements if own.phase is not Phase.STEP]
    yield "Phases", ", ".join(phases)
    if host:
        launched = launched_phases(record.measurements, record.host_phases).items()
        waiting = ", ".join(f"{phase} ({significant(time_s * 1e3)} ms)" for phase, time_s in launched)
        waits = f"; the GPU waits for it in {waiting}" if waiting else ""
        yield "Launching a step", f"{_mean(Measurement(Phase.STEP, host))} of the host{waits}"
    if warmup:
        first = f"{counted(len(warmup), 'step')}, the first {significant(warmup[0] * 1e3)} ms"
        yield "Warm-up", f"{first}{f', the last {significant(warmup[-1] * 1e3)} ms' if len(warmup) > 1 else ''}"


def _memory(memory: Memory) -> str:
    first = memory.first_step_peak_allocated_bytes
    parts = [
        f"{size(memory.peak_allocated_bytes)} allocated",
        f"{size(memory.peak_reserved_bytes)} reserved",
        *([] if first is None else [f"{size(first)} allocated in the first step"]),
        *([f"the cache flushed {counted(memory.alloc_retries, 'time')}"] if memory.alloc_retries else []),
    ]
    return ", ".join(parts)


def _losses(record: RunRecord) -> str:
    words = ["not finite" if loss is None else f"{loss:.4f}" for loss in record.losses]
    skipped = f"; {counted(record.skipped_steps, 'step')} skipped" if record.skipped_steps else ""
    return f"{' to '.join(dict.fromkeys((*words[:1], *words[-1:])))}{skipped}"


def _compilation(record: RunRecord) -> str:
    own = record.compilation
    if own is None:
        return ""
    parts = [f"{own.seconds:.1f} s", *(counted(n, noun) for n, noun in (
        (own.graphs, "graph"), (own.graph_breaks, "graph break"), (own.recompiles, "recompilation")))]  # fmt: skip
    return ", ".join(parts)


def _gpu(record: RunRecord) -> Iterator[tuple[str, str]]:
    telemetry = record.telemetry
    if telemetry is not None:
        before, after = _state(telemetry.before), _state(telemetry.after)
        yield "GPU", f"{before} before the last warm-up step\n{after} after all steps"
        if telemetry.energy_per_step_j is not None:
            yield "Energy", f"{significant(telemetry.energy_per_step_j, 3)} J per step, of the whole card"


def _state(state: GpuState) -> str:
    clocks = f"SM clock {state.sm_clock_hz / 1e6:,.0f} of {state.max_sm_clock_hz / 1e6:,.0f} MHz"
    memory = f"memory {state.memory_clock_hz / 1e6:,.0f} MHz"
    held = f"; held down by {', '.join(state.throttle_reasons)}" if state.throttle_reasons else ""
    others = f"; other processes on it: {state.other_processes}" if state.other_processes else ""
    return f"{clocks}, {memory}, {state.temperature_c} °C, {state.power_w:.0f} W{held}{others}"


def _environment(environment: Environment) -> Iterator[tuple[str, str]]:
    """Hardware and software."""
    identity, memory = environment.identity, environment.device_memory_bytes
    yield "Device", f"{identity.device_name}{'' if memory is None else f', {size(memory)}'}"
    software = {
        "driver": identity.driver, "PyTorch": identity.torch, "CUDA": environment.cuda, "cuDNN": environment.cudnn,
        "QuACK": environment.quack, "FlashAttention 4": environment.flash_attention_4, "Python": environment.python,
    }  # fmt: skip
    yield "Software", ", ".join(f"{name} {value}" for name, value in software.items() if value)
    load = "" if environment.load_1min is None else f", load {environment.load_1min:.2f}"
    cores = f"{counted(environment.cpu_count, 'core')}, {counted(environment.torch_threads, 'thread')} of PyTorch"
    yield "Host", f"{environment.cpu}, {cores}{load}; {environment.platform}"
    changes = " with changes" if environment.git_dirty else ""
    commit = f"commit {environment.git_commit}{changes}, " if environment.git_commit else ""
    yield "Code", f"{commit}measuring code {identity.code}, version {environment.package_version}"


def _took(record: RunRecord) -> str:
    return "" if record.durations is None else f", in {record.durations.total_s:.1f} s"


def _raw_profile(record: RunRecord, directory: Path) -> str:
    profiler = record.config.profiler
    if profiler is Profiler.NONE:
        return ""
    path = raw_profile_path(record.config, directory / "runs")
    missing = "" if path.is_file() else " (it is not there: the command below makes it again)"
    return f"{path}{missing}: open it with {VIEWERS[profiler]}"
