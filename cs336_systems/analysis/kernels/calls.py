"""What a call of a device's runtime or driver does, by its name."""

import re
from enum import Enum

import numpy as np

from ..columns import Ints, Mask
from .trace import MAX_TIME_NS, Trace, Union

# nsys appends the version of the interface, and both profilers the variant for per-thread default
# streams: cudaLaunchKernel_v7000, cudaMemcpyAsync_ptsz_v7000
_VARIANT = re.compile(r"(?:_ptsz|_ptds|_spt|_v\d{1,6})+$")


class ApiCallKind(Enum):
    """What a call of CUDA's, HIP's or Level Zero's runtime or driver does, as a pattern of the
    function's name.
    """

    ONE_KERNEL = (
        r"(?:cuda|cu|hip)(?:Ext)?(?:Module)?Launch(?:Cooperative|ByPtr)?(?:Kernel|$)"
        r"|urEnqueue\w*KernelLaunch"
    )
    """Launches one kernel: cudaLaunchKernelExC, cuLaunchKernelEx, hipExtModuleLaunchKernel."""
    KERNELS = rf"{ONE_KERNEL}|(?:cuda|cu|hip)GraphLaunch"
    LAUNCH = rf"{KERNELS}|(?:cuda|cu|hip)Mem(?:cpy|set)|urEnqueueUSM"
    """Launches kernels, copies or fills."""
    WAIT = (
        r"(?:cuda|cu|hip)(?:\w{0,40}Synchronize$|Memcpy(?!\w{0,40}Async))|ur(?:QueueFinish"
        r"|EventWait)$"
    )
    """Returns when the device has finished some work: synchronisations, and copies that are not
    asynchronous.
    """
    ALLOCATE = r"(?:cuda|cu|hip)(?:Malloc|Free|HostAlloc|HostFree|Mem(?:Alloc|Free|Create|Map))"
    """Allocates or frees memory of the device, or memory of the host that devices reach."""
    WAIT_FOR_DEVICE = r"(?:cuda|cu|hip)(?:Device|Ctx)Synchronize$"
    STREAM_WAIT = r"(?:cuda|cu|hip)StreamWaitEvent$"
    """Makes a stream, and not the host, wait for the work of another stream."""
    BEGIN_CAPTURE = r"(?:cuda|cu|hip)StreamBeginCapture"
    END_CAPTURE = r"(?:cuda|cu|hip)StreamEndCapture"

    def is_done_by(self, name: str) -> bool:
        """Whether the function of this name does it."""
        return re.match(self.value, call_name(name)) is not None


TO_HOST = re.compile(r"Device-?to-?Host|DtoH|D2H", re.I)
TO_DEVICE = re.compile(r"Host-?to-?Device|HtoD|H2D", re.I)


def call_name(name: str) -> str:
    """The function's name without suffixes for version and variant."""
    return _VARIANT.sub("", name)


def lost_launches(trace: Trace) -> Mask:
    """Whether each call launched a kernel that is not in the file; calls while a graph is captured
    launch none.
    """
    api = trace.api_calls

    def starts(kind: ApiCallKind) -> Ints:
        return np.sort(api.start_ns[trace.named(api, kind.is_done_by)])

    begins, ends = starts(ApiCallKind.BEGIN_CAPTURE), starts(ApiCallKind.END_CAPTURE)
    captures = Union(begins, np.append(ends, MAX_TIME_NS)[np.searchsorted(ends, begins)])
    is_lost = trace.named(api, ApiCallKind.ONE_KERNEL.is_done_by)
    is_lost &= captures.within(api.start_ns, api.start_ns + 1) == 0
    launching = np.append(trace.kernels.call, trace.copies.call)
    is_lost[launching[launching >= 0]] = False
    return is_lost
