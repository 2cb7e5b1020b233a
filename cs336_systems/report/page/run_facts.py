"""What is known of one run, in a line for each fact."""

from collections.abc import Iterator
from pathlib import Path

from cs336_systems.config import Phase, Profiler
from cs336_systems.record import Environment, GpuState, Measurement, Memory, RunRecord
from cs336_systems.report.numbers import mean_and_std, significant
from cs336_systems.report.sections.memory.words import size
from cs336_systems.report.words import status_text
from cs336_systems.sweep.store import VIEWERS, raw_profile_path
from cs336_systems.text import counted, inert_line


def facts_of(record: RunRecord, directory: Path) -> list[tuple[str, str]]:
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
        yield "Launching a step", f"{_mean(Measurement(Phase.STEP, host))} of the host"
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
        "Python": environment.python,
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
