"""The profilers that run inside the measuring process: none, torch.profiler, or the allocator's
history.

nsys runs outside of the process; for it, this module adds the ranges of backward.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from ..config import CompileMode, Device, Profiler, RunConfig
from ..model.annotate import (
    Annotator,
    annotate,
    backward_ranges,
    forward_ranges,
    kineto_trace,
    module_names,
    own_names,
)
from ..ranges import Range
from .clock import Clock, ObservedClock
from .step import TrainingStep


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
    """The profiler of a run; it does nothing without one, or without the file that it would
    write.
    """

    def __init__(self, step: TrainingStep, path: Path | None) -> None:
        """Choose what to record of `step` by the configured profiler; the profile is written to
        `path`, or not at all if that is None.
        """
        config = step.config
        profiler = config.profiler
        self._step, self._path = step, path
        self._is_profiled = profiler is Profiler.NSYS or (
            path is not None and profiler is not Profiler.NONE
        )
        self._trace = path if profiler is Profiler.KINETO else None
        self._recorder = None
        if path is not None and profiler is Profiler.MEMORY:
            from .memory import MemoryRecorder

            # blocks of a compiled model run no hooks, so their checkpoints are not seen
            is_eager = config.compile is CompileMode.NONE
            checkpoint_blocks = config.checkpoint_blocks if is_eager else 0
            self._recorder = MemoryRecorder(step, config.device, checkpoint_blocks)

    def clock(self, clock: Clock) -> Clock:
        """The clock that times the phases; the recorder of memory marks their ends too."""
        return clock if self._recorder is None else ObservedClock(clock, self._recorder.mark)

    def whole_run(self) -> AbstractContextManager[object]:
        """Context around the warm-up and the measured steps.

        It adds ranges of modules: in backward, and of a user's own model in forward too. Their
        hooks take time on the host, so plain runs have none.
        """
        watching = ExitStack()
        config, model = self._step.config, self._step.model
        if self._is_profiled and config.ranges and config.compile is CompileMode.NONE:
            is_own = config.model_factory is not None
            names = module_names(model, config.module_depth) if is_own else own_names(model)
            if is_own:
                watching.enter_context(forward_ranges(names))
            if config.profiler is not Profiler.MEMORY:
                watching.enter_context(backward_ranges(names))
        if self._recorder is not None:
            watching.enter_context(self._recorder.watching())
        return watching

    @contextmanager
    def measured_steps(self, one_step: Callable[[], object]) -> Iterator[None]:
        """Context around the measured steps, which are recorded; a clean exit writes the file.

        torch.profiler needs a step to settle: `one_step`, a warm-up step.
        """
        with ExitStack() as profiling:
            if self._trace is not None:
                profiling.enter_context(
                    kineto_trace(self._trace, self._step.config.device is Device.CUDA)
                )
                with annotate(Range.WARMUP):
                    one_step()
            if self._recorder is not None:
                self._recorder.restart()
            yield
            self.dump_memory()

    def dump_memory(self) -> None:
        """Write the snapshot of memory, if there is a recorder; a failed run's snapshot shows what
        filled the memory.

        Raises RuntimeError or OSError if it cannot be written, as from a broken CUDA context.
        """
        if self._recorder is not None and self._path is not None:
            self._recorder.dump(self._path)
