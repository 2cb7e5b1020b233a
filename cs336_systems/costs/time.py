"""Time of a step, predicted from its configuration and from the measured ceilings of a device,
without torch.

The step's tape has its operations, with the sizes and bytes of each. A kernel takes the time of a
similar one in the measured ceilings. The host launches kernels in order into a queue, from which
the device takes them.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache, lru_cache
from itertools import chain
from math import exp, hypot, log
from statistics import fmean, median
from sys import maxsize
from typing import Any, NamedTuple

from ..choices import EXCHANGES
from ..config import Attention, Device, Mode, Phase, Precision, RunConfig, SdpaBackend
from .accounting import count_parameters, step_flops, updated_parameters
from .compiled import compiled_tape, has_compiled_kernels, uncompiled
from .curves import (
    FASTER_LAUNCHES,
    FUSED_SPREAD,
    PASS_SPREAD,
    SLOWER_LAUNCHES,
    Curves,
    interpolated,
    with_backend,
)
from .kernels import KernelTime, MatmulPrecision, ProductPrecision
from .memory import is_fast_step, is_predictable, is_predictable_fast
from .shards import FP32_BYTES, plain
from .tape import FP8_BYTES, MATMULS_OF, REPEATED, Form, Operation, OperationKind, Pass, phases_of
from .traces import MICRO_BATCHES, as_costed, own_parameters, prepare, require_tape, tape_of

CONVOLUTIONS = ("convolution", "cudnn_convolution", "miopen_convolution")
"""Operators that multiply matrices, of which a tape has no FLOPs."""
NO_CONVOLUTIONS = "the model computes convolutions, whose time is not known"
QUEUE_DEPTH = 1024
"""Launches that CUDA's driver queues before the host has to wait for the device."""
MAX_BACKLOG_SHARE = 0.05
"""Launching limits a phase if the device ends it at most this share of its time after the host,
and MAX_BACKLOG_S.
"""
MAX_BACKLOG_S = 1e-3
"""Longest time from the last launch of a phase to its end if launching limits it. Launching also
takes long if the device lags behind, since the host waits while the queue is full, but then about a
thousand kernels are left to run.
"""
MIN_LAUNCHED_SHARE = 0.5
"""Launching limits a step if the phases that it limits take more than this share of it."""
STEP_SPREAD = 1.06
"""A step whose matmuls were all measured takes between its predicted time divided and multiplied by
this in nine of ten cases: kernels run with other caches and clocks than in loops. From 60 steps on
an H100.
"""
DEVICE_SPREAD = 1.2
"""The same of devices that were not measured, whose efficiencies are those of another of the same
chip.
"""
CHIP_SPREAD = 1.3
"""The same if the other has another chip: where matmuls were measured on both (`reached` of
`data_sheets.csv`), 12 of 13 rates over an H200's are within this factor of what the peaks say.
"""
MAX_EXTRAPOLATION = 256
"""A step is predicted if its feed-forward matmul has at most this many times the multiplications of
the largest matmul that was measured. Small matmuls do not tell the rate of large ones: in fp32 an
H100 reaches 5 TFLOP/s with matrices of side 256, and 38 to 51 from side 1024 on.
"""


class StepLimit(StrEnum):
    """What decides how long a step takes."""

    DEVICE = "device"
    LAUNCHES = "launches"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """`count` equal kernels that the host launches one after the other."""

    host_s: float
    """Time that the host needs for each, with the views that lead to it."""
    kernel_s: float
    """Time that the device needs for each."""
    count: int = 1
    waits: bool = False
    """Whether the host waits for the device before it launches the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePrediction:
    """Times of a step that is timed from an idle device to an idle device."""

    phases_s: Mapping[Phase, float]
    """Time of each phase on the device's clock, with the time in which the device waits for the
    host.
    """
    kernels_s: Mapping[Phase, float]
    """Time of the kernels of each phase."""
    step_s: float
    host_phases_s: Mapping[Phase, float]
    """Time in which the host launches each phase, or waits for room in the queue; empty on a
    CPU.
    """
    launch_s: float
    """Time that the host needs to launch everything, if it never waits for room in the queue."""
    low_s: float | None = None
    high_s: float | None = None
    """Nine of ten such steps take between these; None if it is not known."""
    extrapolated_share: float = 0.0
    """Share of the time of kernels in those that are unlike all measured ones."""

    @property
    def busy_share(self) -> float:
        """Part of the step in which a kernel runs."""
        return sum(self.kernels_s.values()) / self.step_s

    @property
    def limit(self) -> StepLimit:
        """What limits the step; LAUNCHES where a measured step gets the warning `launch-bound`."""
        phases_s = {phase: [time_s] for phase, time_s in self.phases_s.items()}
        host_phases_s = {phase: [time_s] for phase, time_s in self.host_phases_s.items()}
        launched_s = sum(limited_by_launches(phases_s, host_phases_s).values())
        if launched_s > MIN_LAUNCHED_SHARE * self.step_s:
            return StepLimit.LAUNCHES
        return StepLimit.DEVICE

    @property
    def limit_of_whole(self) -> StepLimit:
        """What limits the step, judged by the whole step only, as for records without the host's
        time per phase.
        """
        host_s = sum(self.host_phases_s.values())
        return replace(
            self, phases_s={Phase.STEP: self.step_s}, host_phases_s={Phase.STEP: host_s}
        ).limit


def limited_by_launches(
    phases_s: Mapping[Phase, Sequence[float]], host_phases_s: Mapping[Phase, Sequence[float]]
) -> dict[Phase, float]:
    """The phases at whose end the device has caught up with the host, and their mean time on the
    device.

    A faster device would not end such a phase earlier. Both arguments have the phases of a step in
    order, each with its times in the same steps: on the device, which is idle when a step begins,
    and on the host, which launches it. The backlog at the end of a phase is the device's time since
    the step began less the host's. It is compared with the time of the phase itself, because a
    short phase that is launched at once has a short backlog too. A phase at whose end the host
    waits for the device, for example to read a value, wrongly seems limited by launches.
    """
    if not host_phases_s:
        return {}
    limited: dict[Phase, float] = {}
    backlogs_s = [0.0] * max(map(len, phases_s.values()), default=0)
    for phase, times_s in phases_s.items():
        on_host_s = host_phases_s.get(phase, [0.0] * len(times_s))
        steps = zip(backlogs_s, times_s, on_host_s, strict=False)
        backlogs_s = [backlog_s + device_s - host_s for backlog_s, device_s, host_s in steps]
        time_s = fmean(times_s)
        if median(backlogs_s) <= min(MAX_BACKLOG_S, MAX_BACKLOG_SHARE * time_s):
            limited[phase] = time_s
    return limited


def step_time(config: RunConfig, curves: Curves) -> TimePrediction | None:
    """Predict the time of a step of a CUDA run on the device that has these curves.

    Of a step on several ranks these are the kernels of one rank, without any communication. Each
    call of the host is assumed to take as long as one launch (`host_calls`).

    None for what is not predicted: eager steps that `predict_memory` does not predict; compiled
    ones that `predict_compiled_memory` does not, or whose tapes are not at hand, as compiling takes
    half a minute, or that several ranks share, as what the wrappers of ranks make the host do
    between compiled parts is not known; a user's own optimizer, or own way to share a step; other
    shortcuts, except CUDA graphs alone and all of `--fast` together; tokens from a file; fp16,
    whose gradient scaler waits for the device; the math backend of PyTorch's attention; and
    precisions in which no matmul, or none that is large enough, was measured.
    """
    alone = config.alone
    if config.has_own_parts or not has_known_kernels(alone, curves):
        return None
    if config.is_shared and not (is_predictable(alone) or is_predictable_fast(alone)):
        return None
    return _step_time(as_costed(config), with_backend(curves, config.model.sdpa_backend))


def prepare_forecasts(configs: Iterable[RunConfig], *, of_users: bool = False) -> None:
    """Trace the steps of which forecasts will be asked for, in one process; later each would be
    traced by its own.

    Users' own models are traced only if `of_users`, because that runs their code.
    """
    steps: list[RunConfig] = []
    for config in configs:
        if of_users or config.model_factory is None:
            steps += steps_to_trace(config)
    prepare(steps)


def steps_to_trace(config: RunConfig) -> list[RunConfig]:
    """The steps whose tapes forecasts of this configuration need: its own, and that of one rank
    alone; none where nothing is foretold.
    """
    if config.device is not Device.CUDA or config.has_own_parts:
        return []
    steps = [config, config.alone] if config.is_shared else [config]
    if config.parallel in EXCHANGES:
        steps.append(plain(config))
    return [step for step in steps if step == step.without_shortcuts or is_fast_step(step)]


def require_tapes(config: RunConfig) -> None:
    """Raise TorchError if a tape is missing that forecasts of this configuration need, and no
    PyTorch that can trace it is installed.
    """
    for step in steps_to_trace(config):
        require_tape(step)


def has_known_kernels(config: RunConfig, curves: Curves) -> bool:
    """Whether the kernels of a step, on each rank, are known from its configuration, and curves
    have their times.
    """
    is_math = (
        config.model.attention is Attention.SDPA and config.model.sdpa_backend is SdpaBackend.MATH
    )
    refused = config.tokens is not None or config.precision is Precision.FP16 or is_math
    is_known = (
        is_predictable(config.without_graph)
        or is_predictable_fast(config)
        or has_compiled_kernels(config)
    )
    if refused or not is_known or has_convolutions(config):
        return False
    return has_large_matmuls(config, curves)


def has_convolutions(config: RunConfig) -> bool:
    """Whether a user's own model computes convolutions, of which a tape has neither the FLOPs nor
    what tells their time.
    """
    eager = uncompiled(config)
    if config.model_factory is None or not is_predictable(eager):
        return False
    return any(label.startswith(CONVOLUTIONS) for _, label, *_ in tape_of(as_costed(eager)).kinds)


def has_large_matmuls(config: RunConfig, curves: Curves) -> bool:
    """Whether a measured matmul is large enough to tell the rate of the step's large matmuls
    (MAX_EXTRAPOLATION).

    These are those of the feed-forward network, or the largest of a user's own model.
    """
    model = config.model
    if config.model_factory is None:
        needed = config.batch_size * model.context_length * model.d_model * model.d_ff
    elif is_predictable(eager := uncompiled(config)):
        needed = max((matmul.multiplications for matmul in _matmuls(eager)), default=0)
    else:
        return False
    needed_precisions: list[MatmulPrecision] = [config.precision]
    if config.fp8:
        needed_precisions.append(ProductPrecision.FP8)
    for precision in needed_precisions:
        measured = curves.matmuls.get(precision, ())
        largest = max((matmul.multiplications for matmul in measured), default=0)
        if needed > MAX_EXTRAPOLATION * largest:
            return False
    return True


@lru_cache(maxsize=4096)
def _step_time(config: RunConfig, curves: Curves) -> TimePrediction:
    """The same, of a step that is known to be predicted: its operations are launched one by one,
    or as one graph per phase. From the third micro-batch on, each adds as much to a fast step as
    the third.
    """
    if config.fused_blocks and config.accumulate_steps > MICRO_BATCHES + 1:
        two = _step_time(replace(config, accumulate_steps=MICRO_BATCHES), curves)
        three = _step_time(replace(config, accumulate_steps=MICRO_BATCHES + 1), curves)
        return _continued(two, three, config.accumulate_steps - MICRO_BATCHES - 1)
    phases = operations(config)
    likely = _replayed(phases, config, curves)
    spread = kernel_spread(chain.from_iterable(phases.values()), config.precision, curves)
    low = _replayed(phases, config, curves, 1 / spread.factor, 1 / FASTER_LAUNCHES)
    high = _replayed(phases, config, curves, spread.factor, SLOWER_LAUNCHES)
    return replace(
        likely, low_s=low.step_s, high_s=high.step_s, extrapolated_share=spread.extrapolated_share
    )


def _continued(before: TimePrediction, last: TimePrediction, times: int) -> TimePrediction:
    """The step that has so many times more what the last one has more than the one before it."""
    longer: dict[str, Any] = {}
    for name in ("step_s", "launch_s", "low_s", "high_s"):
        one, two = getattr(before, name), getattr(last, name)
        longer[name] = two + times * (two - one)
    for name in ("phases_s", "kernels_s", "host_phases_s"):
        of_one, of_two = getattr(before, name), getattr(last, name)
        longer[name] = {phase: two + times * (two - of_one[phase]) for phase, two in of_two.items()}
    return replace(last, **longer)


def _replayed(
    phases: Mapping[Phase, Sequence[Operation]],
    config: RunConfig,
    curves: Curves,
    kernel_factor: float = 1.0,
    host_factor: float = 1.0,
) -> TimePrediction:
    """The step if all kernels, and all calls of the host, take these times as long as is likely."""
    is_replayed = config.cuda_graph and not curves.on_host
    call_s = host_factor * call_time_s(config, curves)

    @cache
    def launch_of(operation: Operation) -> KernelLaunch:
        """Time that an operation takes the host to launch, which is 0 in a CUDA graph, and its
        kernel to run; both in seconds.
        """
        return KernelLaunch(
            host_s=0.0 if is_replayed else operation.host_calls * call_s,
            kernel_s=kernel_factor * kernel_time(operation, config.precision, curves).time_s,
            count=operation.launches,
            waits=operation.waits,
        )

    launches = {phase: [*map(launch_of, launched)] for phase, launched in phases.items()}
    if curves.on_host:
        return replace(replay(launches, waits=True), host_phases_s={})
    # one launch, without gaps: short kernels were timed in a graph, including the gap
    if is_replayed:
        first = KernelLaunch(host_s=call_s, kernel_s=0.0)
        graphs = {phase: [first, *kernels] for phase, kernels in launches.items()}
        return replay(graphs, depth=maxsize)
    return replay(launches, curves.gap_s)


def call_time_s(config: RunConfig, curves: Curves) -> float:
    """Time of one of the calls by which the host launches such a step."""
    if config.mode is Mode.INFERENCE:
        return curves.inference_launch_s or curves.launch_s
    if config.precision is Precision.BF16:
        return curves.mixed_launch_s or curves.launch_s
    return curves.launch_s


def operations(config: RunConfig) -> dict[Phase, list[Operation]]:
    """Operations of each phase of a step in the steady state.

    Those of a rank are those of one process, but that its optimizer updates its share.
    """
    alone = config.alone
    tape = compiled_tape(alone) if has_compiled_kernels(alone) else tape_of(alone)
    micro_batches: defaultdict[Phase, list[list[Operation]]] = defaultdict(list)
    for phase, _, (first, stop) in phases_of(tape, -1):
        if phase is not Phase.STEP and first < stop:
            launched = tape.launches[first:stop]
            micro_batches[phase].append([tape.operations[number] for number in launched])
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        # of a fast step few micro-batches are traced
        if lists := micro_batches.get(phase):
            lists += [lists[-1]] * (config.accumulate_steps - len(lists))
    phases = {phase: [*chain.from_iterable(lists)] for phase, lists in micro_batches.items()}
    if config.is_shared and Phase.OPTIMIZER in phases:
        share = updated_parameters(config) / count_parameters(config.model)
        phases[Phase.OPTIMIZER] = [
            replace(operation, moved_bytes=round(share * operation.moved_bytes))
            for operation in phases[Phase.OPTIMIZER]
        ]
    return phases


def host_calls(config: RunConfig) -> int:
    """Number of calls by which the host launches an eager step: operations, and views of
    tensors.
    """
    launched = chain.from_iterable(operations(config).values())
    return sum(operation.launches * operation.host_calls for operation in launched)


def kernel_time(operation: Operation, precision: Precision, curves: Curves) -> KernelTime:
    """Time of one kernel of an operation."""
    if operation.is_matmul:
        time = curves.matmul_time(
            factors_of(operation, precision),
            *operation.sides,
            batch=operation.batch,
            form=operation.form,
        )
        assert time is not None
        return time
    if operation.kind is OperationKind.ADAMW:
        time_s = interpolated(curves.adamw, operation.moved_bytes)
    else:
        time_s = curves.pass_s(operation.moved_bytes, operation.how)
    spread = FUSED_SPREAD if operation.how is Pass.FUSED else PASS_SPREAD
    return KernelTime(time_s, time_s / spread, time_s * spread, is_extrapolated=False)


def factors_of(operation: Operation, precision: Precision) -> ProductPrecision:
    """The precision of a matmul's factors in a step of this precision: its own, or fp8, or fp32
    where autocast leaves a matmul in it, as it does those of experts that run as one kernel.
    """
    if operation.element_bytes == FP8_BYTES:
        return ProductPrecision.FP8
    is_half = precision in (Precision.BF16, Precision.FP16)
    if is_half and operation.element_bytes == FP32_BYTES:
        return ProductPrecision.FP32
    return ProductPrecision(precision)


def spread_of(curves: Curves) -> float:
    """How far a step is off beside its kernels, by what the curves stand on."""
    if curves.is_measured:
        return STEP_SPREAD
    return CHIP_SPREAD if curves.is_of_other_chip else DEVICE_SPREAD


class KernelSpread(NamedTuple):
    """How sure the time of all kernels of a step is."""

    factor: float
    """Nine of ten take between the time divided and multiplied by this."""
    extrapolated_share: float


def kernel_spread(
    launched: Iterable[Operation], precision: Precision, curves: Curves, step_spread: float = 0.0
) -> KernelSpread:
    """How sure the time of these operations is, of a step that differs from its kernels by
    `step_spread`; by default as steps on one device do.

    Kernels of one form are off together, so that their errors add up; those of different forms are
    not, so that the squares do.
    """
    all_s = extrapolated_s = 0.0
    errors_s: defaultdict[Form | Pass, float] = defaultdict(float)
    for operation, count in Counter(launched).items():
        time = kernel_time(operation, precision, curves)
        total_s = count * operation.launches * time.time_s
        all_s += total_s
        kind = operation.form if operation.is_matmul else operation.how
        errors_s[kind] += total_s * log(time.high_s / time.low_s) / 2
        if time.is_extrapolated:
            extrapolated_s += total_s
    spread = step_spread or spread_of(curves)
    if not all_s:
        return KernelSpread(spread, 0.0)
    error = hypot(log(spread), *(error_s / all_s for error_s in errors_s.values()))
    return KernelSpread(exp(error), extrapolated_s / all_s)


def measured_share(config: RunConfig, curves: Curves) -> float:
    """Share of the time of a step's matmuls, fused attention included, that is known because they
    were measured.
    """
    measured_s = all_s = 0.0
    for matmul, count in _matmuls(config).items():
        time = kernel_time(matmul, config.precision, curves)
        total_s = count * matmul.launches * time.time_s
        all_s += total_s
        factors = factors_of(matmul, config.precision)
        if curves.has_matmul(factors, *matmul.sides, matmul.form, matmul.batch):
            measured_s += total_s
    return measured_s / all_s


@lru_cache(maxsize=256)
def without_products(
    curves: Curves, precision: Precision, configs: tuple[RunConfig, ...]
) -> Curves:
    """The curves without the matmuls of these configurations, which then have to be foretold from
    those of others.
    """
    products: defaultdict[MatmulPrecision, set[tuple[int, int, int]]] = defaultdict(set)
    for matmul in chain.from_iterable(map(_matmuls, configs)):
        rows, inner, columns = matmul.sides
        products[factors_of(matmul, precision)].add((matmul.batch * rows, inner, columns))
    for factors, sides in products.items():
        curves = curves.without(factors, sides)
    return curves


@lru_cache(maxsize=1024)
def _matmuls(config: RunConfig) -> Counter[Operation]:
    """The matmuls of a step, and how often each occurs."""
    launched = chain.from_iterable(operations(config).values())
    return Counter(operation for operation in launched if operation.is_matmul)


def replay(
    phases: Mapping[Phase, Sequence[KernelLaunch]],
    gap_s: float = 0.0,
    depth: int = QUEUE_DEPTH,
    *,
    waits: bool = False,
) -> TimePrediction:
    """Simulate a host that launches the kernels of a step in order, and a device that runs them.

    A kernel starts with its launch, but not before `gap_s` after the end of the kernel before it.
    The host waits while `depth` launched kernels have not ended, or, if it `waits`, before each
    launch until all have.
    """
    host_s = launch_s = 0.0
    device_s = -gap_s  # it has been idle
    ends: deque[float] = deque(maxlen=depth)
    """When each of the last `depth` kernels ends, in order."""
    phases_s, kernels_s, host_phases_s = {}, {}, {}
    begun_s = host_begun_s = 0.0
    for phase, launches in phases.items():
        for launch in launches:
            host_each_s, kernel_s = launch.host_s, launch.kernel_s
            if launch.waits and device_s > host_s:
                host_s = device_s
            for _ in range(launch.count):  # no calls of max, for speed
                if waits and device_s > host_s:
                    host_s = device_s
                host_s += host_each_s
                launch_s += host_each_s
                if len(ends) == depth and ends[0] > host_s:
                    host_s = ends[0]
                device_s += gap_s
                device_s = (host_s if host_s > device_s else device_s) + kernel_s
                ends.append(device_s)
        ended_s = max(device_s, host_s)
        phases_s[phase] = ended_s - begun_s
        kernels_s[phase] = sum(launch.count * launch.kernel_s for launch in launches)
        host_phases_s[phase] = host_s - host_begun_s
        begun_s, host_begun_s = ended_s, host_s
    return TimePrediction(
        phases_s=phases_s,
        kernels_s=kernels_s,
        step_s=begun_s,
        host_phases_s=host_phases_s,
        launch_s=launch_s,
    )


OUTSIDE = "outside of the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCosts:
    """Parameters of a module, and what its kernels compute and move, all modules of a list
    together.
    """

    parameters: int
    forward_flops: int | None = None
    backward_flops: int | None = None
    """None if the step is not traced.

    What a checkpoint or fused attention computes again counts again, as in
    torch.utils.flop_counter.
    """
    forward_moved_bytes: int | None = None
    backward_moved_bytes: int | None = None


def costs_by_module(config: RunConfig) -> dict[str, ModuleCosts]:
    """Costs of a step on one rank by the paths of modules, down to `module_depth`; parameters alone
    without a tape.

    Left out: the optimizer.
    """
    alone = config.alone
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path, count in own_parameters(alone).items():
        counts[_shown(path, config.module_depth)]["parameters"] += count
    names = ["parameters"]
    if is_predictable(alone):
        names = [field.name for field in fields(ModuleCosts)]
        tape = tape_of(alone)
        for phase, _, (first, stop) in phases_of(tape, -1):
            if phase not in (Phase.FORWARD, Phase.BACKWARD):
                continue
            for number, place in zip(
                tape.launches[first:stop], tape.places[first:stop], strict=True
            ):
                module = counts[_shown(place, config.module_depth)]
                operation = tape.operations[number]
                module[f"{phase}_flops"] += flops_of(operation)
                module[f"{phase}_moved_bytes"] += operation.launches * operation.moved_bytes
    costs = {}
    for path, module in counts.items():
        costs[path] = ModuleCosts(**{name: module[name] for name in names})
    return costs


def _shown(path: str | None, depth: int) -> str:
    """The path of a module down to `depth` levels; a list and the number in it are one."""
    if path is None:
        return OUTSIDE
    words = path.replace(REPEATED, "*").split(".")[:depth]
    return ".".join(words).replace("*", REPEATED) or "the model itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedFlops:
    """How the FLOPs of a step that the hardware executes differ from the model's, which MFU has."""

    counted: int
    """The model's FLOPs, as in step_flops."""
    recomputed: int
    """FLOPs between checkpoints, and of scores in the backward pass of fused attention, which are
    executed again.
    """
    skipped: int
    """FLOPs of masked pairs of a query and a later key, which causal fused attention skips."""


def uncounted_flops(config: RunConfig) -> UncountedFlops | None:
    """The difference on one rank; None for a step without a tape, and for a user's own model."""
    counted, alone = step_flops(config), config.alone
    if counted is None or not is_predictable(alone):
        return None
    tape, executed, fused = tape_of(alone), 0, 0
    for phase, _, (first, stop) in phases_of(tape, -1):
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            for number in tape.launches[first:stop]:
                operation = tape.operations[number]
                executed += flops_of(operation)
                fused += flops_of(operation) if operation.form in MATMULS_OF else 0
    context = config.model.context_length
    skipped = fused * (context - 1) // (2 * context)
    return UncountedFlops(counted=counted, recomputed=executed - counted, skipped=skipped)


def flops_of(operation: Operation) -> int:
    """FLOPs of matmuls, fused attention in full; those of other operations do not count."""
    if not operation.is_matmul:
        return 0
    matmuls = operation.launches * MATMULS_OF.get(operation.form, 1)
    return 2 * operation.multiplications * matmuls
