"""How much shorter a remedy can make the steps of a profile at most.

A step is its longest chain of work, on the host or the device, of which each part begins after the
one before. It gets shorter by no more than what the remedy takes out of such a chain; and what is
left for the device still takes its time. With the device's work that goes, `device_s`, and the time
of the host that goes, `host_s`, the gain is at most `device_s` and the smaller one of `host_s` and
the time without work on the device. Time without work of one cause is no bound: while the host
loads the next batch, the device may run what was launched before, or what a CUDA graph launched at
once.
"""

import re
from collections.abc import Collection, Iterable

from ....analysis.kernels.calls import ApiCallKind
from ....analysis.kernels.classes import KernelClass
from ....analysis.kernels.phases import LaunchPhase, PhaseSource
from ....analysis.kernels.step_profile import HostCalls, IdleCause, KernelTimes, StepProfile, Work
from ....analysis.remedies import Remedy
from .entry import Explained
from .sums import added, collectives_s, copies_alone_s, idle, kernel_s, total

_OF_MODEL = (
    LaunchPhase.FORWARD,
    LaunchPhase.LOSS,
    LaunchPhase.BACKWARD,
    LaunchPhase.WEIGHT_GRADIENTS,
    LaunchPhase.UNATTRIBUTED,
)
"""What torch.compile and autocast may change: what is in no phase may be the model's too."""
_UNCHANGED = (
    KernelClass.MATMUL,
    KernelClass.ATTENTION,
    KernelClass.RECURRENCE,
    KernelClass.COMMUNICATION,
)
"""Kernels that torch.compile calls as they are; it gives convolutions another layout."""
_FULL_PRECISION = re.compile(r"sgemm|f32f32_f32f32_f32")
"""Part of the names of fp32 products of cuBLAS and CUTLASS: ampere_sgemm_, simt_sgemm,
xmma_gemm_f32f32_f32f32_f32_.
"""
LOADS_ITSELF = "_SingleProcessDataLoaderIter"
"""Part of the range's name where no other process loads."""


def is_full_precision(kernel: KernelTimes) -> bool:
    """Whether the kernel is a matmul in true fp32, which no tensor core computes."""
    is_named = _FULL_PRECISION.search(kernel.name) and "tf32" not in kernel.name
    return kernel.kind is KernelClass.MATMUL and bool(is_named)


def gain_s(entry: Explained, remedy: Remedy) -> float:
    """The most by which all steps of the profile together get shorter."""
    profile = entry.profile
    if remedy is Remedy.COMPILE:
        fused = (times for times in profile.classes if times.kind not in _UNCHANGED)
        device_s = added(times for times in fused if times.phase in _OF_MODEL).total_s
        return _phases_gain_s(entry, _OF_MODEL, device_s)
    if remedy is Remedy.OPTIMIZER:
        phases = [LaunchPhase.OPTIMIZER]
        device_s = kernel_s(profile, phases)
        if PhaseSource.RANGES not in profile.phases_from:
            phases.append(LaunchPhase.UNATTRIBUTED)  # the first kernel may be all that shows it
        return _phases_gain_s(entry, phases, device_s)
    if remedy is Remedy.GRAPHS:
        return at_most_s(entry, host_s=entry.span().profiled_s - _data_s(entry))
    if remedy is Remedy.OVERLAP:
        late = (row for row in profile.idle if row.phase is LaunchPhase.COMMUNICATION)
        device_s = collectives_s(profile, exposed=True)
        return at_most_s(entry, device_s=device_s, host_s=added(late).total_s)
    if remedy is Remedy.TF32:
        full = filter(is_full_precision, profile.kernels_of(None))
        return at_most_s(entry, device_s=added(full).total_s)
    if remedy is Remedy.ATTENTION:
        return entry.span().whole_s
    return at_most_s(entry, device_s=kernel_s(profile, _OF_MODEL))


def data_gain_s(entry: Explained) -> float:
    """The most that is gained where each batch is ready in time.

    How long the host waits for other processes that load depends on how long it takes for the
    rest of the step, which a profiler makes longer; so only what it loads itself is a bound.
    """
    host_s = entry.span().profiled_s
    if LOADS_ITSELF in range_of_data(entry.profile):
        host_s = _data_s(entry)
    return at_most_s(entry, host_s=host_s)


def range_of_data(profile: StepProfile) -> str:
    """The range of the longest wait for data that has one; empty if none has."""
    waits = (gap for gap in profile.gaps if gap.cause is IdleCause.DATA)
    return next((gap.host_range for gap in waits if gap.host_range), "")


def calls_gain_s(entry: Explained, calls: Iterable[HostCalls]) -> float:
    """The most that is gained where the host does not make these calls, and so does not wait in
    them.
    """
    return at_most_s(entry, host_s=added(calls).total_s)


def waits_gain_s(entry: Explained) -> float:
    """The most that is gained where the host never waits for the device."""
    waits = [call for call in entry.profile.host_calls if call.is_wait]
    return at_most_s(entry, host_s=added(waits).total_s + _unseen_s(entry))


def allocations_gain_s(entry: Explained) -> float:
    """The most that is gained where nothing is allocated or freed."""
    allocates = ApiCallKind.ALLOCATE.is_done_by
    calls = (call for call in entry.profile.host_calls if allocates(call.name))
    return calls_gain_s(entry, calls)


def between_gain_s(entry: Explained) -> float:
    """The most that is gained where the device begins each kernel at once that is launched in
    time.
    """
    return at_most_s(entry, host_s=idle(entry.profile, IdleCause.BETWEEN_KERNELS).total_s)


def copies_gain_s(entry: Explained) -> float:
    """The most that is gained where copies run beside kernels, and the host does not wait for
    them.
    """
    # what waits for a pageable copy is a call of its own
    calls = [call for call in entry.profile.host_calls if call.is_wait or "Mem" in call.name]
    host_s = added(calls).total_s + _unseen_s(entry)
    return at_most_s(entry, device_s=copies_alone_s(entry.profile), host_s=host_s)


def at_most_s(entry: Explained, *, device_s: float = 0.0, host_s: float = 0.0) -> float:
    """The most that is gained where the device has so much less work, and the host so much less
    to do.
    """
    span = entry.span()
    if entry.profile.work is not Work.KERNELS:
        return min(host_s, span.whole_s)
    return min(device_s + min(host_s, span.idle_s), span.whole_s)


def _phases_gain_s(entry: Explained, phases: Collection[LaunchPhase], device_s: float) -> float:
    """The most that is gained where the host has nothing to do in the phases, and the device so
    much less.
    """
    profile = entry.profile
    span = entry.span()
    host_s = total(times.host_s for times in profile.phases if times.phase in phases)
    if not host_s:  # the file does not show the phases on the host
        host_s = span.profiled_s
    between = [idle(profile, IdleCause.BETWEEN_KERNELS, phase) for phase in phases]
    most_s = at_most_s(entry, device_s=device_s, host_s=host_s + added(between).total_s)
    if entry.config is None or not span.by_clock:
        return most_s
    # a step of this program ends with a synchronisation, so that nothing of the next one is gained
    return min(most_s, sum(entry.span(phase).whole_s for phase in phases))


def _data_s(entry: Explained) -> float:
    """How long the host is in ranges of data."""
    phases = entry.profile.phases
    return total(times.host_s for times in phases if times.phase is LaunchPhase.DATA)


def _unseen_s(entry: Explained) -> float:
    """How long the device is still in a step that the host has left; what the host calls in that
    time is not in the profile.
    """
    return max(entry.span().profiled_s - sum(entry.profile.step_s), 0.0)
