"""Time of a step, predicted from its configuration and from the measured ceilings of a device, without torch.

`forecast/` lists the operations of the step, with what each computes and moves. A kernel takes as long as the ceilings
say of one like it. The host launches them in order into a queue, from which the device takes them.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from itertools import chain, pairwise
from sys import maxsize

from cs336_systems.config import Attention, Phase, Precision, RunConfig, SdpaBackend
from cs336_systems.costs.curves import Curves
from cs336_systems.costs.forecast.fast import fast_tape, is_fast_step
from cs336_systems.costs.forecast.step import as_costed, tape_of
from cs336_systems.costs.forecast.tape import Kind, Operation, Pass
from cs336_systems.costs.memory import is_predictable

QUEUE_DEPTH = 1024
"""Launches that CUDA's driver takes before it lets the host wait for the device."""
MAX_LAUNCH_SHARE = 0.95
"""Launching limits the step if it takes more than this share of it, and the backlog is at most MAX_BACKLOG_S."""
MAX_BACKLOG_S = 1e-3
"""Longest time from the last launch to the end of the step if launching limits it. Launching also takes long if the
device lags behind, since the host waits while the queue is full, but then about a thousand kernels are left to run."""
TRUSTED_SHARE = 0.9
"""A prediction is trusted if kernels run for at least this part of the step, and those whose like was measured take at
least this part of their time. Otherwise the step depends on the host, whose speed varies by a third from one machine to
the next, or on kernels of which no ceiling is known."""


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
    wait_s: float = 0.0
    """Time that each waits, besides the gap, after the kernel before it, as for another stream."""
    is_after_wait: bool = False
    """Before each, the host waits until the device has run everything."""


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
    known_share: float = 1.0
    """Part of the kernels' time that kernels take whose like was measured."""

    @property
    def is_trusted(self) -> bool:
        """Whether a step that differs from it much is more likely to be slow than the prediction to be wrong."""
        return min(self.busy_share, self.known_share) >= TRUSTED_SHARE

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

    None for what is not predicted: eager steps that `predict_memory` does not predict, what else makes a step faster
    than CUDA graphs and all of `--fast` together, steps of several ranks, loaded tokens, fp16, whose gradient scaler
    waits for the device, PyTorch's attention with matmuls and softmax (math), and precisions that were not measured.
    What the host does for an operation takes as long as one launch, and for each view too.
    """
    if config.is_shared or not has_known_kernels(config, curves):
        return None
    return _step_time(as_costed(config), curves)


def has_known_kernels(config: RunConfig, curves: Curves) -> bool:
    """Whether the kernels of a step, on each rank, are known from its configuration, and curves have their times."""
    is_math = config.model.attention is Attention.SDPA and config.model.sdpa_backend is SdpaBackend.MATH
    refused = config.tokens is not None or config.precision is Precision.FP16 or is_math
    is_known = is_predictable(config.without_graph) or (config.model_factory is None and is_fast_step(config))
    return not refused and is_known and bool(curves.matmuls.get(config.precision))


@lru_cache(maxsize=4096)
def _step_time(config: RunConfig, curves: Curves) -> TimePrediction:
    return replay_operations(operations(config), config.precision, curves, in_graphs=config.cuda_graph)


def replay_operations(
    found: Mapping[Phase, Sequence[Operation]], precision: Precision, curves: Curves, *, in_graphs: bool = False
) -> TimePrediction:
    """The time of these operations on the device that has these curves, launched one by one or as a graph a phase."""
    kernel_s = cache(lambda operation: kernel_time_s(operation, precision, curves))
    launches = {phase: _launches(each, kernel_s, curves.launch_s) for phase, each in found.items()}
    if curves.on_host:
        waiting = {phase: [replace(each, is_after_wait=True) for each in own] for phase, own in launches.items()}
        predicted = replay(waiting)
        predicted = replace(predicted, host_s=predicted.launch_s)
    elif in_graphs:
        predicted = replay({phase: _as_graph(each, curves.launch_s) for phase, each in launches.items()}, depth=maxsize)
    else:
        predicted = replay(launches, curves.gap_s)
    counts = Counter(chain.from_iterable(found.values()))
    known_s = sum(
        count * each.launches * kernel_s(each) for each, count in counts.items() if _is_known(each, precision, curves)
    )
    return replace(predicted, known_share=known_s / sum(predicted.kernels_s.values()))


def _as_graph(launches: Sequence[Launch], launch_s: float) -> list[Launch]:
    """The same kernels launched at once. Short ones were timed in a graph, with what is between two of them."""
    return [Launch(host_s=launch_s, kernel_s=0.0), *(replace(each, host_s=0.0) for each in launches)]


def operations(config: RunConfig) -> dict[Phase, list[Operation]]:
    """Operations of each phase of a step in the steady state."""
    tape = fast_tape(config) if config.fused_blocks else tape_of(config.without_graph)
    phases = [(phase, begin) for phase, _, begin in tape.steps[-1]]
    return {
        phase: [tape.operations[number] for number in tape.launches[begin:end]]
        for (phase, begin), (_, end) in pairwise([*phases, (Phase.STEP, len(tape.launches))])
        if begin < end
    }


def _launches(found: Iterable[Operation], kernel_s: Callable[[Operation], float], launch_s: float) -> list[Launch]:
    """The launches of operations."""

    @cache
    def launch_of(operation: Operation) -> Launch:
        host_s = (operation.views + operation.calls) * launch_s
        return Launch(host_s=host_s, kernel_s=kernel_s(operation), count=operation.launches)

    return [*map(launch_of, found)]


def kernel_time_s(operation: Operation, precision: Precision, curves: Curves) -> float:
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


def _is_known(operation: Operation, precision: Precision, curves: Curves) -> bool:
    """Whether kernels like it were measured. Those of linear layers stand for all matmuls that are not batched."""
    if operation.kind is Kind.ADAMW:
        return True
    if operation.kind is Kind.PASS:
        return operation.how is Pass.COPY or operation.how in curves.passes
    is_batched = operation.batch > 1
    is_linear = operation.kind is Kind.MATMUL and not is_batched
    return is_linear or curves.has_form(precision, operation.form, is_batched=is_batched)


def replay(
    phases: Mapping[Phase, Sequence[Launch]], gap_s: float = 0.0, depth: int = QUEUE_DEPTH, latency_s: float = 0.0
) -> TimePrediction:
    """Let a host launch the kernels of a step in order, and a device run them.

    A kernel starts when it is launched for `latency_s` and the one before it has ended for `gap_s`. While `depth`
    kernels are launched and have not ended, the host waits.
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
                if launch.is_after_wait:
                    host_s = max(host_s, device_s)
                host_s += launch.host_s
                launch_s += launch.host_s
                if len(ends) == depth:
                    host_s = max(host_s, ends[0])
                device_s = max(device_s + gap_s + launch.wait_s, host_s + latency_s) + launch.kernel_s
                ends.append(device_s)
        ended_s = max(device_s, host_s)
        phases_s[phase] = ended_s - begun_s
        kernels_s[phase] = sum(launch.count * launch.kernel_s for launch in launches)
        begun_s = ended_s
    return TimePrediction(
        phases_s=phases_s, kernels_s=kernels_s, step_s=begun_s, host_s=host_s, launch_s=launch_s
    )  # fmt: skip
