"""What pauses a watched loop, seen where it happens: garbage collections, compilations, torch.save,
and calls of the model that train nothing.
"""

import gc
import sys
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns, time
from typing import Any

from ..loop_record import Cause


@dataclass(slots=True)
class Seen:
    """What was seen of one cause since the last step ended."""

    ns: int | None = 0
    """None where only a counter tells that it happened."""
    count: int = 0
    details: list[str] = field(default_factory=list)


class Pauses:
    """Times the pauses of a loop; `take` returns those since the last step."""

    def __init__(self) -> None:
        self.seen: dict[Cause, Seen] = {}
        """What was seen since the last `take`."""
        self._begun_ns: dict[Cause, int] = {}
        self.has_evaluated = False
        """Whether the model was ever called without training."""
        self._evaluated: tuple[int, int] | None = None
        """When the first call of an evaluation began, and when the last one ended."""
        self._compiled_at = time()
        self._of_compiler = (
            partial(self.begins, Cause.COMPILATION),
            partial(self.ends, Cause.COMPILATION),
        )

    def attach(self) -> None:
        """See garbage collections; compilations are seen from the next step on."""
        if self.collects not in gc.callbacks:
            gc.callbacks.append(self.collects)

    def detach(self) -> None:
        """Take the callbacks away."""
        if self.collects in gc.callbacks:
            gc.callbacks.remove(self.collects)
        compiler = sys.modules.get("torch._dynamo.callback")
        if compiler is None:
            return
        begins, ends = self._of_compiler
        handler = compiler.callback_handler
        if begins in handler.start_callbacks:
            handler.remove_start_callback(begins)
        if ends in handler.end_callbacks:
            handler.remove_end_callback(ends)

    def collects(self, phase: str, _: dict[str, int]) -> None:
        """Time a collection of Python's garbage, as a callback of `gc`."""
        if phase == "start":
            self.begins(Cause.COLLECTION)
        else:
            self.ends(Cause.COLLECTION)

    def begins(self, cause: Cause, *_: object) -> None:
        """Time a pause from here."""
        self._begun_ns[cause] = perf_counter_ns()

    def ends(self, cause: Cause, *_: object) -> None:
        """Count the pause; nothing happens if it has not begun."""
        begun_ns = self._begun_ns.pop(cause, None)
        if begun_ns is not None:
            self._add(cause, perf_counter_ns() - begun_ns)

    def evaluates(self, begun_ns: int, *, in_step: bool) -> None:
        """Count a call of the model that trains nothing, which began then and ends now.

        Between steps, the evaluation lasts from the first call to the end of the last one: on a GPU
        a call only launches kernels, and a later line waits for them.
        """
        now_ns = perf_counter_ns()
        self.has_evaluated = True
        if in_step:
            self._add(Cause.EVALUATION, now_ns - begun_ns)
        elif self._evaluated is None:
            self._evaluated = begun_ns, now_ns
        else:
            self._evaluated = self._evaluated[0], now_ns

    def step_begins(self) -> None:
        """End an evaluation, and hook the compiler once there is one."""
        if self._evaluated is not None:
            begun_ns, ended_ns = self._evaluated
            self._evaluated = None
            self._add(Cause.EVALUATION, ended_ns - begun_ns)
        compiler = sys.modules.get("torch._dynamo.callback")
        if compiler is not None:
            begins, ends = self._of_compiler
            handler = compiler.callback_handler
            # torch._dynamo.reset() forgets all callbacks
            if begins not in handler.start_callbacks:
                handler.register_start_callback(begins)
                handler.register_end_callback(ends)

    def forget_open(self) -> None:
        """Forget what an exception has left open."""
        self._begun_ns.clear()

    def take(self) -> dict[Cause, Seen]:
        """What was seen since the last call."""
        seen = self.seen
        if seen:
            self.seen = {}
            if Cause.COMPILATION in seen:
                seen[Cause.COMPILATION].details += _reasons(self._compiled_at)
                self._compiled_at = time()
        return seen

    def _add(self, cause: Cause, ns: int) -> None:
        seen = self.seen.setdefault(cause, Seen())
        seen.ns = (seen.ns or 0) + ns
        seen.count += 1


def _reasons(since: float) -> list[str]:
    """Why torch.compile compiled again since then (seconds since the epoch), in its words."""
    utilities: Any = sys.modules.get("torch._dynamo.utils")
    if utilities is None:
        return []
    reasons = []
    for metrics in utilities.get_compilation_metrics():
        reason = getattr(metrics, "recompile_reason", None)
        if reason and (metrics.start_time or 0.0) >= since:
            reasons.append(reason.strip().splitlines()[0])
    return reasons
