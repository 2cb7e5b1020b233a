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
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..analysis.warnings import launch_bound_phases, timing_warnings
from ..config import Device, Mode, Phase, Precision, Profiler
from ..measure.run import Progress
from ..record import RunRecord, Telemetry, read_record, write_record
from ..subject import WatchedLoop
from ..sweep.store import PROFILE_DIRECTORIES
from .gpu import LoopGpu
from .marks import LoopStep, Mark, WatchedStep, resolved
from .observer import Observer
from .precision import precision_of
from .profiled import PROFILED_STEPS, Profiled

MAX_KEPT_STEPS = 10_000
"""Most measured steps whose times are kept; of a longer loop, the last ones."""


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
        self._step: LoopStep | None = None
        self._pending: deque[LoopStep] = deque()
        self._events: list[torch.cuda.Event] = []
        self._last_end: Mark | None = None
        self._depth = 0
        self._is_accumulating = False
        """Whether the last step had several forward passes."""
        self._context_length: int | None = None
        self._precision: Precision | None = None
        self._written: Path | None = None
        self._gpu = LoopGpu() if self.device is Device.CUDA else None
        if profiler is Profiler.MEMORY and self.device is Device.CPU:
            raise ValueError(
                "watch: memory=True needs the model on a GPU, whose allocator it records; got the "
                "CPU"
            )
        self._loop = WatchedLoop(
            name=name, device=self.device, profiler=profiler, warmup_steps=warmup_steps
        )
        self._progress = Progress(subject=self._loop, gpu=self._gpu.gpu if self._gpu else None)
        self._profiled = Profiled(model, several, self._loop, self.directory)
        self._observers: list[Observer] = [self._profiled]
        if self._gpu is not None:
            self._observers.insert(0, self._gpu)
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
        number = self._begun - self.warmup_steps
        for observer in self._observers:
            observer.step_begins(number)
        self._step = LoopStep()
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
            for observer in self._observers:
                observer.phase_begins(None)
            torch.autograd.backward = backward
            self._step = None
        for observer in self._observers:
            observer.step_ended(number)
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
        step.marks.append(Mark(phase, perf_counter_ns(), event))
        if phase is not None:
            for observer in self._observers:
                observer.phase_begins(phase)

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
        self._precision = precision_of(self.model, self.device)

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
                (self.measured if is_warm else self.warmup).append(resolved(step, self._last_end))
            if self._last_end is not None and self._last_end.event is not None:
                self._events.append(self._last_end.event)
            self._last_end = step.marks.pop()
            self._events += [mark.event for mark in step.marks if mark.event is not None]

    def record(self) -> RunRecord:
        """The record of the steps so far, as of a run of benchmark.py; waits until the device has
        done them.

        Raise RuntimeError before the first step that counts.
        """
        for observer in self._observers:
            observer.finish()
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
        from ..report.terminal import print_run

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print_run(self.record())
        return printed.getvalue().rstrip()

    def report(self) -> Path | None:
        """Write the record of the steps so far, print its table, and return the path.

        Of several ranks the first one does; the others return None.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return None
        from ..report.terminal import print_measured
        from ..sweep.keep import explain_run
        from ..sweep.store import raw_profile_path

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
