"""Signals that stop a sweep: the first ends it in order, with its tables written; the second at once."""

import math
import os
import signal
import time
from time import monotonic
from types import FrameType

from cs336_systems.interrupt import end_at_once
from cs336_systems.sweep.isolation import Worker
from cs336_systems.sweep.process import STOP_SIGNALS

_ONE_REQUEST_S = 0.3
"""Signals this close together count as one request: `timeout` and a closing terminal send theirs twice."""


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP and wakes the sweep's loop; the second signal ends the process at once.

    A signal that was ignored when the process started, as under nohup, stays ignored.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.count = 0
        self.at_once = at_once
        """Whether the first signal ends the process at once too, because no worker has started yet."""
        self._last = -math.inf
        self.workers: list[Worker] = []
        self.wakeup, self._write = os.pipe()

    def __enter__(self) -> "Interrupts":
        os.set_blocking(self._write, False)
        handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._handle) for number in handled}
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(max(0.0, self._last + _ONE_REQUEST_S - monotonic()))
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self.wakeup)
        os.close(self._write)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if monotonic() - self._last < _ONE_REQUEST_S:
            return
        if self.at_once:
            end_at_once()
        self._last = monotonic()
        self.count += 1
        if self.count > 1:
            for worker in self.workers:
                worker.kill()
            end_at_once()
