"""Records some steps of a watched loop with torch.profiler or the allocator's history."""

import contextlib
import os
import weakref
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..analysis.memory.notes import notes_path
from ..config import MODULE_DEPTH, Device, Phase, Profiler
from ..model.annotate import (
    Annotator,
    annotate,
    backward_ranges,
    forward_ranges,
    kineto_trace,
    module_names,
    set_annotator,
)
from ..ranges import Range
from ..subject import WatchedLoop
from .observer import Observer

if TYPE_CHECKING:
    from ..measure.memory import MemoryRecorder

PROFILED_STEPS = 3
"""Steps that torch.profiler records, after one more that warms it up."""


class Profiled(Observer):
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
        optimizers: Iterable[torch.optim.Optimizer],
        loop: WatchedLoop,
        directory: Path,
    ) -> None:
        self._model, self._loop = weakref.ref(model), loop
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.has_profiler = loop.profiler is not Profiler.NONE
        self.trace = directory / "traces" / f".{os.getpid()}.json.gz"
        """The raw profile, in a hidden file until the record's name is known (see `move`)."""
        self._recorder: "MemoryRecorder | None" = None
        self._session: contextlib.ExitStack | None = None
        """What is open while steps are recorded: the profiler, the hooks of the modules."""
        self._ranges: list[contextlib.AbstractContextManager[None]] = []
        """The open ranges: around the steps, the step, its phase."""

    @property
    def model(self) -> nn.Module:
        """The model that is watched."""
        model = self._model()
        assert model is not None, "a profile is of steps, which have the model"
        return model

    def optimizer_state(self) -> Mapping[Tensor, dict[str, Any]]:
        """What the optimizers keep of each parameter, by name."""
        optimizers = [reference() for reference in self._optimizers]
        return ChainMap(*(optimizer.state for optimizer in optimizers if optimizer is not None))

    def step_begins(self, number: int) -> None:
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

    def phase_begins(self, phase: Phase | None) -> None:
        """Begin the range of a phase, in that of its step, and end the one before; None ends the
        step.
        """
        if self._session is None:
            return
        ended, self.phase = self.phase, phase
        if self._recorder is not None and ended not in (Phase.DATA, Phase.OTHER, phase):
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
            from ..measure.memory import MemoryRecorder

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
