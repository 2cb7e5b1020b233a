"""Times the steps of a training loop that exists already: three lines in the loop, hooks on model
and optimizer.

    watched = watch(model, optimizer)
    for batch in loader:
        with watched.step():
            loss = model(batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(watched)

A step is what the `with` block does on the device. Its phases are data (before the first forward
pass), forward (from where the model is called to where backward begins, so the loss is in it),
backward, and optimizer (from the end of the last backward to the end of the block, so clipping and
dropping of gradients are in it). Several forward and backward passes in one step are summed. On a
GPU the marks are CUDA events, which are read once they have passed: nothing waits.
"""

import contextlib
import functools
import io
import os
import statistics
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import pynvml
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .analysis.memory.notes import notes_path
from .analysis.warnings import launch_bound_phases, timing_warnings
from .config import MODULE_DEPTH, Device, Mode, Phase, Precision, Profiler
from .measure.clock import StepTimes
from .measure.nvml import Gpu, GpuMonitor, visible_gpus
from .measure.run import Progress
from .measure.step import memory_since, reset_memory
from .model.annotate import (
    Annotator,
    annotate,
    backward_ranges,
    forward_ranges,
    kineto_trace,
    module_names,
    set_annotator,
)
from .ranges import Range
from .record import GpuState, Memory, RunRecord, Telemetry, read_record, write_record
from .subject import WatchedLoop
from .sweep.store import PROFILE_DIRECTORIES

if TYPE_CHECKING:
    from .measure.memory import MemoryRecorder

MAX_KEPT_STEPS = 10_000
"""Most measured steps whose times are kept; of a longer loop, the last ones."""
PROFILED_STEPS = 3
"""Steps that torch.profiler records, after one more that warms it up."""


@dataclass(slots=True)
class _Mark:
    """A moment at which the phase changes; `event` is None on a CPU."""

    phase: Phase | None
    """The phase that begins here; None at the end of the step."""
    host_ns: int
    event: torch.cuda.Event | None


@dataclass(slots=True)
class _Step:
    """One step of the loop: its marks, and what went through the model."""

    marks: list[_Mark] = field(default_factory=list)
    forwards: int = 0
    tokens: int = 0

    def is_over(self) -> bool:
        """Whether the device has passed the last mark."""
        event = self.marks[-1].event
        return event is None or event.query()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStep:
    """A finished step."""

    times: StepTimes
    between_s: float | None
    """From the end of the step before to the beginning of this one, on the device; None for the
    first.
    """
    tokens: int
    """Elements of the first integer tensor that the model was given, summed over the step's
    forward passes.
    """


class Watched:
    """Watches the steps of a loop: put `with watched.step():` around each, and print the result.

    `model` is what the loop calls (the wrapper, if there is one: DistributedDataParallel,
    torch.compile), `optimizers` one or several. The first `warmup_steps` are not counted. The
    record goes to `output`/e2e_benchmark/`name`/runs/.

    With `profile`, torch.profiler records PROFILED_STEPS steps after the warm-up, with the model's
    modules as ranges, and the report says where their time went; later steps are not recorded. The
    record goes to kineto_profiles then. With `memory`, on a GPU, the allocator's history is
    recorded instead, and the report says what the memory holds, by which tensor it is; the record
    goes to memory_profiles.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        *,
        name: str = "mine",
        warmup_steps: int = 5,
        profile: bool = False,
        memory: bool = False,
        output: Path | str = "data",
    ) -> None:
        if not name.isidentifier():
            raise ValueError(
                f"watch: name must be letters, digits and underscores, as in my_model, got {name!r}"
            )
        if warmup_steps < 0:
            raise ValueError(f"watch: warmup_steps must be at least 0, got {warmup_steps}")
        if profile and memory:
            raise ValueError("watch: profile and memory record different steps: give one of them")
        if isinstance(optimizers, torch.optim.Optimizer):
            optimizers = (optimizers,)
        # Accelerate and Lightning wrap optimizers
        several = tuple(getattr(wrapper, "optimizer", wrapper) for wrapper in optimizers)
        profiler = Profiler.KINETO if profile else Profiler.NONE
        if memory:
            profiler = Profiler.MEMORY
        self.model, self.warmup_steps = model, warmup_steps
        self.directory = Path(output) / PROFILE_DIRECTORIES[profiler] / name
        types = [parameter.device.type for parameter in model.parameters()]
        # parameters that are not loaded yet are on "meta", whatever the device
        loaded = [name for name in types if name != "meta"]
        self.device = Device.CUDA if loaded[:1] == ["cuda"] else Device.CPU
        self.warmup: list[WatchedStep] = []
        self.measured: deque[WatchedStep] = deque(maxlen=MAX_KEPT_STEPS)
        self._begun = 0
        self._step: _Step | None = None
        self._pending: deque[_Step] = deque()
        self._events: list[torch.cuda.Event] = []
        self._last_end: _Mark | None = None
        self._depth = 0
        self._is_accumulating = False
        """Whether the last step had several forward passes."""
        self._context_length: int | None = None
        self._precision: Precision | None = None
        self._written: Path | None = None
        self._gpu = _Gpu() if self.device is Device.CUDA else None
        if profiler is Profiler.MEMORY and self.device is Device.CPU:
            raise ValueError(
                "watch: memory=True needs the model on a GPU, whose allocator it records; got the "
                "CPU"
            )
        self._loop = WatchedLoop(
            name=name, device=self.device, profiler=profiler, warmup_steps=warmup_steps
        )
        self._progress = Progress(subject=self._loop, gpu=self._gpu.gpu if self._gpu else None)
        self._profiled = _Profiled(model, several, self._loop, self.directory)
        self._handles = [model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)]
        for optimizer in several:
            handle = optimizer.register_step_pre_hook(lambda *_: self._begin(Phase.OPTIMIZER))
            self._handles.append(handle)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one step of the loop. A step that ends by an exception is not counted."""
        if self._step is not None:
            raise RuntimeError(
                "watched.step() is open already: one `with` block is one step, and steps do not "
                "nest"
            )
        if self._gpu is not None:
            self._gpu.look(self._begun - self.warmup_steps)
        self._profiled.before(self._begun - self.warmup_steps)
        self._step = _Step()
        self._begin(Phase.DATA)
        backward = torch.autograd.backward
        torch.autograd.backward = self._timed(backward)
        try:
            yield
            self._begin(None)
            self._pending.append(self._step)
            self._begun += 1
            self._is_accumulating = self._step.forwards > 1
        finally:
            self._profiled.begin(None)
            torch.autograd.backward = backward
            self._step = None
        self._read()

    def remove(self) -> None:
        """Take the hooks away again; the times stay."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, phase: Phase | None) -> None:
        """Put a mark into the running step; outside of steps, as in a validation, do nothing."""
        step = self._step
        if step is None or torch.compiler.is_compiling():
            return
        event = None
        if self.device is Device.CUDA:
            event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
            event.record()
        step.marks.append(_Mark(phase, perf_counter_ns(), event))
        if phase is not None:
            self._profiled.begin(phase)

    def _forward_begins(
        self, _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if self._step is None or self._depth or torch.compiler.is_compiling():
            return  # within backward, a checkpoint calls the model again
        self._begin(Phase.FORWARD)
        self._step.forwards += 1
        for given in (*inputs, *named.values()):
            if isinstance(given, Tensor) and given.ndim and not given.is_floating_point():
                self._step.tokens += given.numel()
                self._context_length = given.shape[-1]
                break
        self._precision = _precision(self.model, self.device)

    def _timed(self, backward: Callable[..., None]) -> Callable[..., None]:
        """`torch.autograd.backward` with a mark at its beginning and at its end, unless one runs
        within another.
        """

        @functools.wraps(backward)
        def timed(*arguments: Any, **named: Any) -> None:  # noqa: ANN401
            if not self._depth:
                self._begin(Phase.BACKWARD)
            self._depth += 1
            try:
                backward(*arguments, **named)
            finally:
                self._depth -= 1
            if not self._depth:
                self._begin(Phase.DATA if self._is_accumulating else Phase.OPTIMIZER)

        return timed

    def _read(self) -> None:
        """Move the steps that the device has done, in order, from the pending ones to the
        others.
        """
        while self._pending and self._pending[0].is_over():
            step = self._pending.popleft()
            is_warm = len(self.warmup) >= self.warmup_steps + self._profiled.has_profiler
            if not self._profiled.has_profiler or len(self.measured) < PROFILED_STEPS:
                (self.measured if is_warm else self.warmup).append(_resolved(step, self._last_end))
            if self._last_end is not None and self._last_end.event is not None:
                self._events.append(self._last_end.event)
            self._last_end = step.marks.pop()
            self._events += [mark.event for mark in step.marks if mark.event is not None]

    def record(self) -> RunRecord:
        """The record of the steps so far, as of a run of benchmark.py; waits until the device has
        done them.

        Raise RuntimeError before the first step that counts.
        """
        self._profiled.finish()
        if self._pending and self.device is Device.CUDA:
            torch.cuda.synchronize()
        self._read()
        steps = list(self.measured)
        if not steps:
            raise RuntimeError(
                f"watch: no step to report: {len(self.warmup)} of {self.warmup_steps} warm-up "
                "steps are done; watch more steps, or give watch(..., warmup_steps=0)"
            )
        progress = replace(
            self._progress,
            num_parameters=sum(map(Tensor.numel, self.model.parameters())),
            warmup=[step.times for step in self.warmup],
            measured=[step.times for step in steps],
            warnings=[],
        )
        telemetry = self._gpu.telemetry() if self._gpu else None
        self._judge(progress, telemetry)
        progress.subject = replace(
            self._loop,
            measured_steps=len(steps),
            mode=_mode({measurement.phase for measurement in progress.measurements()}),
            precision=self._precision,
            context_length=self._context_length,
            tokens_per_step=statistics.median_low([step.tokens for step in steps]) or None,
        )
        return replace(
            progress.finished(),
            between_s=tuple(step.between_s for step in steps if step.between_s is not None),
            memory=self._gpu.memory() if self._gpu else None,
            telemetry=telemetry,
        )

    def _judge(self, progress: Progress, telemetry: Telemetry | None) -> None:
        """Add the warnings that follow from the times and the telemetry."""
        measured = progress.measurements()
        progress.warnings += timing_warnings(
            measured[-1].times_s, launch_bound_phases(measured, progress.host_phases())
        )
        if any(measurement.phase is Phase.OPTIMIZER for measurement in measured):
            progress.warn_of_short_warmup(len(self.warmup))
        if telemetry is not None:
            progress.warn_if_throttled(telemetry)

    def __str__(self) -> str:
        """The table of the steps so far, with its warnings, as benchmark.py prints it."""
        from .report.terminal import print_run

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print_run(self.record())
        return printed.getvalue().rstrip()

    def report(self) -> Path | None:
        """Write the record of the steps so far, print its table, and return the path.

        Of several ranks the first one does; the others return None.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return None
        from .report.terminal import print_measured
        from .sweep.keep import explain_run
        from .sweep.store import raw_profile_path

        runs = self.directory / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        earlier, record = self._written, self.record()
        # the profiled steps are those of the first report
        if earlier is not None and self._profiled.has_profiler:
            print_measured(read_record(earlier), runs)
            return earlier
        # where an earlier process has left such a record, this is a repetition of it
        while (path := runs / f"{record.key}.json") != earlier:
            with contextlib.suppress(FileExistsError):
                path.touch(exist_ok=False)  # so that no other process takes this name
                break
            assert record.loop is not None
            record = replace(record, loop=replace(record.loop, repeat=record.loop.repeat + 1))
        self._written = write_record(record, runs)
        if earlier is not None and earlier != path:
            earlier.unlink(missing_ok=True)  # this loop's own, with fewer steps
        if self._profiled.has_profiler:
            self._profiled.move(raw_profile_path(record.subject, runs))
            explain_run(record.subject, runs)
        print_measured(record, runs)
        return self._written


watch = Watched


def _mode(phases: set[Phase]) -> Mode | None:
    """How much of a training step the loop runs; None if no forward pass was seen."""
    if Phase.FORWARD not in phases:
        return None
    if Phase.OPTIMIZER in phases:
        return Mode.TRAIN
    return Mode.FORWARD_BACKWARD if Phase.BACKWARD in phases else Mode.FORWARD


def _precision(model: nn.Module, device: Device) -> Precision:
    """The precision of the model's matmuls, from autocast, else from its parameters, else from
    the mode of fp32.
    """
    if torch.is_autocast_enabled(device.value):
        dtype = torch.get_autocast_dtype(device.value)
    else:
        dtype = next(model.parameters()).dtype
    if dtype in (torch.bfloat16, torch.float16):
        return Precision.BF16 if dtype is torch.bfloat16 else Precision.FP16
    is_tf32 = device is Device.CUDA and torch.get_float32_matmul_precision() != "highest"
    return Precision.TF32 if is_tf32 else Precision.FP32


class _Profiled:
    """The profiler of a watched loop; it does nothing if the loop has none.

    It records PROFILED_STEPS measured steps, with ranges around the phases and the model's modules.
    To the recorder of memory it stands for the step.
    """

    way = None
    optimizer = None
    phase: Phase | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        loop: WatchedLoop,
        directory: Path,
    ) -> None:
        self.model = model
        self._optimizers, self._loop = optimizers, loop
        self.has_profiler = loop.profiler is not Profiler.NONE
        self.trace = directory / "traces" / f".{os.getpid()}.json.gz"
        """The raw profile, in a hidden file until the record's name is known (see `move`)."""
        self._recorder: "MemoryRecorder | None" = None
        self._session: contextlib.ExitStack | None = None
        """What is open while steps are recorded: the profiler, the hooks of the modules."""
        self._ranges: list[contextlib.AbstractContextManager[None]] = []
        """The open ranges: around the steps, the step, its phase."""

    def optimizer_state(self) -> Mapping[Tensor, dict[str, Any]]:
        """What the optimizers keep of each parameter, by name."""
        return ChainMap(*(optimizer.state for optimizer in self._optimizers))

    def before(self, number: int) -> None:
        """Call this before measured step `number`, which is negative in the warm-up.

        Step 0 warms the profiler up, the PROFILED_STEPS after it are recorded, and before the next
        one the trace is written.
        """
        if number == 0 and self.has_profiler:
            self._start()
            self._enter(Range.WARMUP)
        elif number == 1 and self._session:
            self._leave(0)
            self._enter(Range.MEASURE)
        elif number == 1 + PROFILED_STEPS:
            self.finish()

    def begin(self, phase: Phase | None) -> None:
        """Begin the range of a phase, in that of its step, and end the one before; None ends the
        step.
        """
        if self._session is None:
            return
        ended, self.phase = self.phase, phase
        if self._recorder is not None and ended not in (Phase.DATA, phase):
            self._recorder.mark(ended)
        self._leave(1 if phase is None else 2)
        if phase is not None and len(self._ranges) == 1:
            self._enter(Range.STEP)
        if phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            self._enter(phase)

    def finish(self) -> None:
        """Write the trace, if steps are being recorded."""
        if self._session is not None:
            if self._loop.device is Device.CUDA:
                torch.cuda.synchronize()
            self._leave(0)
            if self._recorder is not None:
                self._recorder.dump(self.trace)
            self._session.close()
            self._session = None

    def move(self, target: Path) -> None:
        """Move what was recorded to where the analysis looks for it."""
        self.trace.replace(target)
        if self._loop.profiler is Profiler.MEMORY:
            notes_path(self.trace).replace(notes_path(target))

    def _start(self) -> None:
        """Open the profiler and the hooks of the modules."""
        self.trace.parent.mkdir(parents=True, exist_ok=True)
        self._session = session = contextlib.ExitStack()
        session.callback(set_annotator, Annotator.NONE)
        names = module_names(self.model, MODULE_DEPTH)
        # modules within torch.compile's wrapper run no hooks, so they have no ranges
        if hasattr(self.model, "_orig_mod"):
            names = {}
        session.enter_context(forward_ranges(names))
        if self._loop.profiler is Profiler.MEMORY:
            from .measure.memory import MemoryRecorder

            set_annotator(Annotator.PATH)
            self._recorder = MemoryRecorder(self, self._loop.device)
            session.enter_context(self._recorder.watching())
        else:
            set_annotator(Annotator.RECORD_FUNCTION)
            session.enter_context(backward_ranges(names))
            session.enter_context(kineto_trace(self.trace, self._loop.device is Device.CUDA))

    def _enter(self, name: str) -> None:
        self._ranges.append(opened := annotate(name))
        opened.__enter__()

    def _leave(self, depth: int) -> None:
        """Close the innermost ranges until `depth` are open."""
        while len(self._ranges) > depth:
            self._ranges.pop().__exit__(None, None, None)


class _Gpu:
    """The counters of the GPU that this process uses: its allocator's, and those of the driver's
    library.
    """

    def __init__(self) -> None:
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self.gpu: Gpu | None = next((gpu for gpu in visible_gpus() if gpu.uuid == uuid), None)
        self._monitor = GpuMonitor(uuid) if self.gpu else None
        self._states: list[GpuState] = []
        self._before = torch.cuda.memory_stats()

    def look(self, number: int) -> None:
        """Before measured step `number` (from 0): start to count at the first, and read the
        GPU's state at some.
        """
        if number == 0:
            self._before = reset_memory()
        # a reading takes milliseconds of the CPU, so they become rarer: steps 0, 8, 16, 32, ...
        if self._monitor is not None and (
            number == 0 or (number >= 8 and number & (number - 1) == 0)
        ):
            with contextlib.suppress(pynvml.NVMLError):
                self._states.append(self._monitor.state())

    def telemetry(self) -> Telemetry | None:
        """The first and the last reading."""
        return Telemetry(before=self._states[0], after=self._states[-1]) if self._states else None

    def memory(self) -> Memory:
        """What PyTorch's allocator did since the first measured step."""
        return memory_since(self._before)


def _resolved(step: _Step, before: _Mark | None) -> WatchedStep:
    """The times of a step whose marks have all passed.

    What lies between a backward pass and another forward pass of the same step belongs to data,
    like what comes before the first forward pass.
    """
    first, last = step.marks[0], step.marks[-1]
    phases: dict[Phase, float] = {}
    host_phases: dict[Phase, float] = {}
    for mark, following in zip(step.marks, step.marks[1:], strict=False):
        assert mark.phase is not None
        phase = mark.phase
        if phase in (Phase.DATA, Phase.OPTIMIZER) and mark is not first:
            phase = Phase.DATA if following.phase is Phase.FORWARD else Phase.OPTIMIZER
        phases[phase] = phases.get(phase, 0.0) + _seconds(mark, following)
        host_phases[phase] = host_phases.get(phase, 0.0) + (following.host_ns - mark.host_ns) / 1e9
    host_s = (last.host_ns - first.host_ns) / 1e9
    times = StepTimes(
        step_s=_seconds(first, last),
        host_s=host_s,
        phases_s=phases,
        host_phases_s=host_phases if first.event is not None else {},
    )
    between_s = None if before is None else _seconds(before, first)
    return WatchedStep(times=times, between_s=between_s, tokens=step.tokens)


def _seconds(begin: _Mark, end: _Mark) -> float:
    if begin.event is None or end.event is None:
        return (end.host_ns - begin.host_ns) / 1e9
    return float(begin.event.elapsed_time(end.event)) / 1e3
