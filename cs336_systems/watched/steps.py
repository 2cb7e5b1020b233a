"""The steps of a watched loop: those whose times are not computed yet, and the times of others."""

from collections import deque

import torch

from .marks import LoopStep, Timeline, WatchedStep, resolved
from .observer import Observers, note_trouble, say
from .profiled import PROFILED_STEPS
from .tokens import NO_TOKENS, Pass, PassReader, Tokens

MAX_KEPT_STEPS = 10_000
"""Most measured steps whose times are kept; of a longer loop, the last ones."""
MOST_PENDING, READ_EVERY_NS = 64, 250_000_000
"""Most steps that are marked before their times are computed, and the time from one computation to
the next: in a row, it costs less than after each step.
"""


class Steps:
    """Keeps the steps that have ended, and computes their times once the device has done them.

    The first `warmup_steps` are not measured. Of a loop with a profiler, neither is the next one,
    which warms it up, and it records the PROFILED_STEPS after that.
    """

    def __init__(
        self, timeline: Timeline, reader: PassReader, warmup_steps: int, *, has_profiler: bool
    ) -> None:
        self._timeline, self._reader = timeline, reader
        self.warmup_steps, self._has_profiler = warmup_steps, has_profiler
        self.observers = Observers(())
        self.warmup: list[WatchedStep] = []
        self.measured: deque[WatchedStep] = deque(maxlen=MAX_KEPT_STEPS)
        self._recorded: list[WatchedStep] = []
        self._num_ended = self._num_read = 0
        """Steps that have ended, and of these, steps that were read."""
        self._pending: deque[LoopStep] = deque()
        self._due_ns = 0
        """When the times of the pending steps are to be computed."""

    @property
    def num_ended(self) -> int:
        """Number of steps that have ended, warm-up included."""
        return self._num_ended

    @property
    def next_number(self) -> int:
        """The number of the next step: 0 is the first one after the warm-up."""
        return self._num_ended - self.warmup_steps

    @property
    def first_kept(self) -> int:
        """The number of the first step in `measured`."""
        return self._num_read - self.warmup_steps - len(self.measured)

    @property
    def reported(self) -> list[WatchedStep]:
        """The steps that a report is of."""
        return self._recorded if self._has_profiler else list(self.measured)

    def ended(self, step: LoopStep) -> bool:
        """Keep a step that has ended; compute times, and return True, if it is time to."""
        self._pending.append(step)
        self._num_ended += 1
        now_ns = step.host_ns[-1]
        if len(self._pending) < MOST_PENDING and now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + READ_EVERY_NS
        self.read()
        return True

    def read(self) -> None:
        """Compute the times of the steps that the device has done, in order."""
        first, steps = self._num_read - self.warmup_steps, []
        while self._pending and self._pending[0].is_passed():
            pending = self._pending.popleft()
            steps.append(resolved(pending, self.tokens))
            self._timeline.recycle(pending)
        num_warm = self.warmup_steps + self._has_profiler - len(self.warmup)
        self.warmup += steps[:num_warm]
        measured = steps[num_warm:]
        self.measured += measured
        if self._has_profiler:
            self._recorded += measured[: PROFILED_STEPS - len(self._recorded)]
        self._num_read += len(steps)
        if steps:
            say(self.observers.steps_read, first, steps)

    def settle(self) -> None:
        """Wait until the device has done the steps so far, and read them."""
        if self._pending and self._pending[-1].events:
            torch.cuda.synchronize()
        self.read()

    def tokens(self, passes: list[Pass]) -> Tokens:
        """What went through the model in these passes; nothing where reading it fails."""
        try:
            return self._reader.tokens(passes)
        except Exception as error:
            note_trouble(self._reader.tokens, error)
            return NO_TOKENS
