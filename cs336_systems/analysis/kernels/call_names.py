"""Functions of the runtimes and drivers of devices by name: which launch work, and which wait for the device."""

import re

# nsys appends the version of the interface, and both profilers the variant for per-thread default streams:
# cudaLaunchKernel_v7000, cudaMemcpyAsync_ptsz_v7000
_VARIANT = re.compile(r"(?:_ptsz|_ptds|_spt|_v\d{1,6})+$")
KERNEL = re.compile(
    r"^(?:cuda|cu|hip)(?:Ext)?(?:Module)?(?:Launch(?:Cooperative|ByPtr)?(?:Kernel|$)|GraphLaunch)|^urEnqueue\w{0,20}KernelLaunch"
)
"""CUDA's, HIP's and Level Zero's: cudaLaunchKernelExC, cuLaunchKernelEx, hipExtModuleLaunchKernel, cudaGraphLaunch."""
_LAUNCH = re.compile(rf"{KERNEL.pattern}|^(?:cuda|cu|hip)Mem(?:cpy|set)|^urEnqueueUSM")
_SYNCHRONISE = re.compile(
    r"^(?:cuda|cu|hip)(?:\w{0,40}Synchronize$|Memcpy(?!\w{0,40}Async))|^ur(?:QueueFinish|EventWait)$"
)
"""Functions that return when the device has finished: synchronisations, and copies that are not asynchronous."""
_ALL_OF_DEVICE = re.compile(r"^(?:cuda|cu|hip)(?:Device|Ctx)Synchronize$")
_CAPTURE = re.compile(r"^(?:cuda|cu|hip)Stream(Begin|End)Capture")
STREAM_WAIT = re.compile(r"^(?:cuda|cu|hip)StreamWaitEvent$")
"""The function that makes a stream, and not the host, wait for the work of another stream."""
TO_HOST = re.compile(r"Device-?to-?Host|DtoH|D2H", re.I)


def call_name(name: str) -> str:
    """The function's name without suffixes for version and variant."""
    return _VARIANT.sub("", name)


def is_launch(name: str) -> bool:
    """Whether the function `name` launches kernels, copies or fills."""
    return _LAUNCH.match(call_name(name)) is not None


def is_synchronisation(name: str) -> bool:
    """Whether the function `name` returns only after the device has finished some work."""
    return _SYNCHRONISE.match(call_name(name)) is not None


def is_kernel_launch(name: str) -> bool:
    """Whether the function `name` launches one kernel, not a graph of them."""
    return KERNEL.match(call_name(name)) is not None and "Graph" not in name


def is_for_device(name: str) -> bool:
    """Whether the function `name` waits for all work of a device."""
    return _ALL_OF_DEVICE.match(call_name(name)) is not None


def is_capture(name: str) -> int:
    """1 for the function that begins the capture of a graph, -1 for the one that ends it, 0 for others."""
    found = _CAPTURE.match(name)
    return 0 if found is None else 1 if found[1] == "Begin" else -1
