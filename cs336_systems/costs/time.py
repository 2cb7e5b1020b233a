"""Time of a step, predicted from its configuration and from the measured ceilings of a device, without torch.

`forecast/` lists the operations of the step, with what each computes and moves. A kernel takes as long as the ceilings
say of one like it. The host launches them in order into a queue, from which the device takes them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from cs336_systems.config import Phase, Precision, RunConfig, SdpaBackend
from cs336_systems.costs.curves import Curves
from cs336_systems.costs.forecast.step import StepTape
from cs336_systems.costs.forecast.tape import Kind, Operation
from cs336_systems.costs.memory import is_predictable

QUEUE_DEPTH = 1024
"""Launches that CUDA's driver takes before it lets the host wait for the device."""
MAX_LAUNCH_SHARE = 0.95
"""Launching limits the step if it takes more than this share of it, and the backlog is at most MAX_BACKLOG_S."""
MAX_BACKLOG_S = 1e-3
"""Longest time from the last launch to the end of the step if launching limits it. Launching also takes long if the
device lags behind, since the host waits while the queue is full, but then about a thousand kernels are left to run."""


class Limit(StrEnum):
    """What decides how long a step takes."""

    DEVICE = "device"
    LAUNCHES = "launches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Kernels that the host launches one after the other, in one call."""

    host_s: float
    """Time that the host needs for each, with the views that lead to it."""
    kernel_s: float
    """Time that the device needs for each."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePrediction:
    """Times of a step that is timed from an idle device to an idle device."""

    phases_s: Mapping[Phase, float]
    """Time of each phase on the device's clock, with the time in which the device waits for the host."""
    kernels_s: Mapping[Phase, float]
    """Time of the kernels of each phase."""
    step_s: float
    host_s: float
    """When the host has launched everything."""
    launch_s: float
    """Time that the host needs to launch everything, if it never waits for room in the queue."""

    @property
    def busy_share(self) -> float:
        """Part of the step in which a kernel runs."""
        return sum(self.kernels_s.values()) / self.step_s

    @property
    def limit(self) -> Limit:
        """Launches, where a measured step gets the warning `launch-bound`."""
        return Limit.LAUNCHES if launching_limits(self.host_s, self.step_s - self.host_s, self.step_s) else Limit.DEVICE


def launching_limits(host_s: float, backlog_s: float, step_s: float) -> bool:
    """Whether launching, which ends `backlog_s` before the step does, is what the step waits for."""
    return host_s / step_s > MAX_LAUNCH_SHARE and backlog_s <= MAX_BACKLOG_S


def step_time(config: RunConfig, curves: Curves) -> TimePrediction | None:
    """Predict the time of a step of a CUDA run on the device that has these curves.

    None for what is not predicted: what `predict_memory` does not predict, steps of several ranks, loaded tokens, fp16,
    whose gradient scaler waits for the device, PyTorch's attention with matmuls and softmax (math), and precisions that
    were not measured. What the host does for an operation takes as long as one launch, and for each view too.
    """
    is_math = config.model.sdpa_backend is SdpaBackend.MATH
    refused = config.is_shared or config.tokens is not None or config.precision is Precision.FP16 or is_math
    if refused or not is_predictable(config) or not curves.matmuls.get(config.precision):
        return None
    found = operations(config)
    kernel_s = cache(lambda operation: _kernel_s(operation, config.precision, curves))
    return replay({phase: _launches(each, kernel_s, curves.launch_s) for phase, each in found.items()}, curves.gap_s)


def operations(config: RunConfig) -> dict[Phase, list[Operation]]:
    """Operations of each phase of a step in the steady state."""
    step = StepTape(config)
    step.set_up()
    for _ in range(2):  # the second has the optimizer's state
        step.tape.operations.clear()
        step.run()
    found: dict[Phase, list[Operation]] = {}
    phase = Phase.STEP
    for each in step.tape.operations:
        if isinstance(each, Phase):
            phase = each
        else:
            found.setdefault(phase, []).append(each)
    return found


def _launches(found: Iterable[Operation], kernel_s: Callable[[Operation], float], launch_s: float) -> list[Launch]:
    """The launches of operations; views wait for the next of them."""
    launches, views = [], 0
    for each in found:
        if each.kind is Kind.VIEWS:
            views += each.calls
            continue
        host_s = (views + each.calls) * launch_s
        launches.append(Launch(host_s=host_s, kernel_s=kernel_s(each), count=each.launches))
        views = 0
    return launches


def _kernel_s(operation: Operation, precision: Precision, curves: Curves) -> float:
    """Time of one kernel of an operation."""
    if operation.kind is Kind.ADAMW:
        return curves.adamw_s(operation.moved_bytes)
    if operation.kind is Kind.PASS:
        return curves.pass_s(operation.moved_bytes, operation.how)
    matmul_s = curves.matmul_s(
        precision,
        *operation.sides,
        batch=operation.batch,
        form=operation.form,
        moved_bytes=operation.moved_bytes,
    )
    assert matmul_s is not None
    return matmul_s


def replay(phases: Mapping[Phase, Sequence[Launch]], gap_s: float = 0.0, depth: int = QUEUE_DEPTH) -> TimePrediction:
    """Let a host launch the kernels of a step in order, and a device run them.

    A kernel starts when it is launched and the one before it has ended for `gap_s`. While `depth` kernels are launched
    and have not ended, the host waits.
    """
    host_s = launch_s = 0.0
    device_s = -gap_s  # it has been idle
    ends: deque[float] = deque(maxlen=depth)
    """When the last kernels end, the earliest first."""
    phases_s, kernels_s = {}, {}
    begun_s = 0.0
    for phase, launches in phases.items():
        for launch in launches:
            for _ in range(launch.count):
                host_s += launch.host_s
                launch_s += launch.host_s
                if len(ends) == depth:
                    host_s = max(host_s, ends[0])
                device_s = max(device_s + gap_s, host_s) + launch.kernel_s
                ends.append(device_s)
        ended_s = max(device_s, host_s)
        phases_s[phase] = ended_s - begun_s
        kernels_s[phase] = sum(launch.count * launch.kernel_s for launch in launches)
        begun_s = ended_s
    return TimePrediction(
        phases_s=phases_s, kernels_s=kernels_s, step_s=begun_s, host_s=host_s, launch_s=launch_s
    )  # fmt: skip
