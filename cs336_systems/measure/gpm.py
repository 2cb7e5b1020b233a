"""How busy the units of a GPU are, by the counters of the driver's library (NVML's GPM): of Hopper
and newer, without a profiler and without root.
"""

import contextlib
import math
from time import perf_counter
from typing import Any

import pynvml

from ..record import Activity

REFRESH_S = 0.1
"""The driver renews what a reading returns about this often (nvml.h), so that a reading may be so
much older than it seems.
"""
LEAST_SPAN_S = 2 * REFRESH_S
"""Least time between the two readings that counters are compared over."""
GROWTH = 1.25
"""Factor by which the span grows from one reading to the next: an hour needs about 45 readings, and
the last covers four fifths of the steps at least.
"""

PCIE_LANE_BYTES_PER_S = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
"""Rate of one lane in one direction by the generation of PCIe: transfers less their encoding."""
_METRICS = (
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
)
_MIB = 2**20


class ActivityMonitor:
    """Compares the counters of one GPU at two moments of its steps; of a GPU that has none, or
    whose driver stops to answer, nothing is known.

    The first reading comes REFRESH_S after the first step has begun, so that it is of measured
    steps only. A reading takes time on the host, so none is taken inside of a step.
    """

    def __init__(self, uuid: str | None) -> None:
        self._handle: Any = None
        with contextlib.suppress(pynvml.NVMLError):
            handle = _with_counters(uuid)
            if handle is not None:
                self._first, self._last = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
                self._handle = handle
        self._first_s: float | None = None
        self._span_s = 0.0
        """Time between the readings; 0 without a second one."""
        self._due_s: float | None = None
        """When the next reading is due; None before the first step."""

    def between_steps(self, *, is_end: bool = False) -> None:
        """Read the counters if it is time; call this before the first measured step and after each.

        Readings become rarer. With `is_end` no later step follows, so that one is due at once.
        """
        if self._handle is None:
            return
        try:
            self._look(perf_counter(), is_end)
        except pynvml.NVMLError:
            self._handle = None

    def activity(self) -> Activity | None:
        """What the counters say of the time between the readings; None if that was too short."""
        if self._handle is None or not self._span_s:
            return None
        with contextlib.suppress(pynvml.NVMLError):
            sm, tensor, dram, *rates = self._metrics()
            return Activity(
                span_s=self._span_s,
                sm_share=_share(sm),
                tensor_share=_share(tensor),
                dram_share=_share(dram),
                nvlink_bytes_per_s=_busier(rates[:2]),
                pcie_bytes_per_s=_busier(rates[2:]),
                pcie_peak_bytes_per_s=self._pcie_peak(),
            )
        return None

    def _look(self, now_s: float, is_end: bool) -> None:
        """Take the reading that is due between two steps at `now_s`, in seconds; `is_end` if no
        step follows.

        The first call takes none: what the driver gives then may be of REFRESH_S earlier, so of
        before the steps. Next comes the first reading, which stays, and then the last one, which is
        taken again whenever the span between both has grown by GROWTH. At the end the last one is
        due at once, and a first one would be of no use.
        """
        if self._due_s is None:
            self._due_s = now_s + REFRESH_S
        elif self._first_s is None:
            if now_s >= self._due_s and not is_end:
                pynvml.nvmlGpmSampleGet(self._handle, self._first)
                self._first_s = now_s
                self._due_s = now_s + LEAST_SPAN_S
        elif now_s >= self._due_s or (is_end and now_s - self._first_s >= LEAST_SPAN_S):
            pynvml.nvmlGpmSampleGet(self._handle, self._last)
            self._span_s = now_s - self._first_s
            self._due_s = self._first_s + GROWTH * self._span_s

    def _metrics(self) -> list[float | None]:
        """The values of _METRICS between the readings; None for what this GPU does not count."""
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_METRICS)
        request.sample1, request.sample2 = self._first, self._last
        for number, metric in enumerate(_METRICS):
            request.metrics[number].metricId = metric
        pynvml.nvmlGpmMetricsGet(request)
        return [_value(request.metrics[number]) for number in range(len(_METRICS))]

    def _pcie_peak(self) -> float | None:
        """What the GPU's link to the host can move in one direction as it runs now."""
        with contextlib.suppress(pynvml.NVMLError):
            width = pynvml.nvmlDeviceGetCurrPcieLinkWidth(self._handle)
            generation = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(self._handle)
            if generation in PCIE_LANE_BYTES_PER_S:
                return float(width * PCIE_LANE_BYTES_PER_S[generation]) or None
        return None


def _with_counters(uuid: str | None) -> Any:  # noqa: ANN401 (a handle of pynvml)
    """The handle of the GPU, or None if it has no such counters."""
    if uuid is None:
        return None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return handle if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice else None


def _value(metric: Any) -> float | None:  # noqa: ANN401 (a structure of pynvml)
    """The metric's value; None where this GPU does not count it."""
    value = float(metric.value)
    return value if metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(value) else None


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _busier(directions: list[float | None]) -> float | None:
    """The larger rate, in bytes/s from MiB/s; None if none is known."""
    known = [rate for rate in directions if rate is not None]
    return max(known) * _MIB if known else None
