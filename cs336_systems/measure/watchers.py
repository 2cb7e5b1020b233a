"""The profilers that run inside the measuring process: none, torch.profiler, or the allocator's history.

nsys runs outside of the process; for it, this module adds the ranges of backward.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from cs336_systems.config import CompileMode, Device, Profiler, RunConfig
from cs336_systems.measure.clock import Clock
from cs336_systems.measure.step import TrainingStep
from cs336_systems.model.annotate import (
    Annotator,
    annotate,
    backward_ranges,
    forward_ranges,
    kineto_trace,
    module_names,
    own_names,
)
from cs336_systems.ranges import Range

OneStep = Callable[[], None]


def annotator_of(config: RunConfig) -> Annotator:
    """Where the ranges of this run are recorded."""
    if not config.ranges:
        return Annotator.NONE
    if config.profiler is Profiler.KINETO:
        return Annotator.RECORD_FUNCTION
    if config.profiler is Profiler.MEMORY:
        return Annotator.PATH
    return Annotator.NVTX if config.device is Device.CUDA else Annotator.NONE


class Watch:
    """No-op profiler."""

    def clock(self, clock: Clock) -> Clock:
        """The clock that times the phases; a profiler may add to it."""
        return clock

    def whole_run(self) -> AbstractContextManager[object]:
        """Context around the warm-up and the measured steps."""
        return nullcontext()

    def measured_steps(self, one_step: OneStep) -> AbstractContextManager[object]:
        """Context around the measured steps; a profiler that needs a step to settle runs `one_step`, a warm-up step."""
        del one_step
        return nullcontext()

    def failed(self) -> None:
        """Keep what was recorded of a run that raised an exception. Raises RuntimeError or OSError if that fails."""


class _Ranges(Watch):
    """Adds ranges of modules: in backward, and of a user's own model in forward too.

    Their hooks take time on the host, so plain runs have none.
    """

    def __init__(self, step: TrainingStep, path: Path | None) -> None:
        self._step, self._path = step, path or Path()

    @contextmanager
    def whole_run(self) -> Iterator[None]:
        config, model = self._step.config, self._step.model
        is_own = config.model_factory is not None
        with ExitStack() as ranges:
            if config.ranges and config.compile is CompileMode.NONE:
                names = module_names(model, config.module_depth) if is_own else own_names(model)
                if is_own:
                    ranges.enter_context(forward_ranges(names))
                if config.profiler is not Profiler.MEMORY:
                    ranges.enter_context(backward_ranges(names))
            yield


class _Kineto(_Ranges):
    @contextmanager
    def measured_steps(self, one_step: OneStep) -> Iterator[None]:
        with kineto_trace(self._path, self._step.config.device is Device.CUDA):
            with annotate(Range.WARMUP):
                one_step()
            yield


class _Memory(_Ranges):
    def __init__(self, step: TrainingStep, path: Path) -> None:
        super().__init__(step, path)
        from cs336_systems.measure.memory import MemoryRecorder

        self._recorder = MemoryRecorder(step)

    def clock(self, clock: Clock) -> Clock:
        return self._recorder.clock(clock)

    @contextmanager
    def whole_run(self) -> Iterator[None]:
        with super().whole_run(), self._recorder.watching():
            yield

    @contextmanager
    def measured_steps(self, one_step: OneStep) -> Iterator[None]:
        del one_step
        self._recorder.restart()
        yield
        self._recorder.dump(self._path)

    def failed(self) -> None:
        """Write the snapshot, which shows what filled the memory. It cannot be taken from a broken CUDA context."""
        self._recorder.dump(self._path)


def make_watch(step: TrainingStep, path: Path | None) -> Watch:
    """The profiler of the configuration, which writes to `path`; without a path, the no-op profiler."""
    profiler = step.config.profiler
    if profiler is Profiler.NSYS:
        return _Ranges(step, path)
    if path is None or profiler is Profiler.NONE:
        return Watch()
    return _Kineto(step, path) if profiler is Profiler.KINETO else _Memory(step, path)
