"""Shares between two readings of a GPU whose load is known at any time."""

import pynvml
import pytest

from cs336.measure import gpm
from cs336.measure.gpm import GROWTH, LEAST_SPAN_S, REFRESH_S, ActivityMonitor
from tests.fake_nvml import fake_driver, unsupported

PEAK_PCIE = 16 * 32e9 * 128 / 130 / 8
"""Sixteen lanes of generation 5, whose transfers carry 128 bits of 130."""
STEP_S = 0.03


class Gpu:
    """A GPU whose load changes with time; `now_s` is the clock of program and GPU."""

    def __init__(self, loads):
        self.loads, self.now_s, self.readings_s = loads, 0.0, []
        self.unknown = set()

    def total(self, metric, until_s):
        """The load times the time until then."""
        return sum(
            max(0.0, min(until_s, end_s) - start_s) * load.get(metric, 0.0)
            for start_s, end_s, load in self.loads
        )

    def read(self, _handle, sample):
        sample.at_s = self.now_s
        self.readings_s.append(self.now_s)

    def metrics(self, request):
        first_s, last_s = request.sample1.at_s, request.sample2.at_s
        for number in range(request.numMetrics):
            metric = request.metrics[number]
            grown = self.total(metric.metricId, last_s) - self.total(metric.metricId, first_s)
            metric.value = grown / (last_s - first_s)
            metric.nvmlReturn = (
                pynvml.NVML_ERROR_NOT_SUPPORTED if metric.metricId in self.unknown else 0
            )


class Request:
    """The structure in which metrics are asked for, without C."""

    def __init__(self):
        self.metrics = [type("Metric", (), {})() for _ in range(20)]


@pytest.fixture
def gpu(monkeypatch):
    warm = {pynvml.NVML_GPM_METRIC_SM_UTIL: 5.0}
    busy = {
        pynvml.NVML_GPM_METRIC_SM_UTIL: 80.0,
        pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 60.0,
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 25.0,
        pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 1000.0,
        pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: 3000.0,
    }
    made = Gpu([(0.0, 1.0, warm), (1.0, 1e9, busy)])
    made.unknown = {
        pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
        pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    }
    fake_driver(monkeypatch)
    answers = {
        "nvmlGpmQueryDeviceSupport": lambda _: type("Support", (), {"isSupportedDevice": 1}),
        "nvmlGpmSampleAlloc": lambda: type("Sample", (), {})(),
        "nvmlGpmSampleGet": made.read,
        "nvmlGpmMetricsGet": made.metrics,
        "c_nvmlGpmMetricsGet_t": Request,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda _: 5,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(gpm, "perf_counter", lambda: made.now_s)
    return made


def run(gpu, steps, from_s=1.0):
    monitor = ActivityMonitor("GPU-0")
    gpu.now_s = from_s
    monitor.between_steps()
    for _ in range(steps):
        gpu.now_s += STEP_S
        monitor.between_steps()
    monitor.between_steps(is_end=True)
    return monitor.activity()


def test_shares_are_those_of_the_measured_steps(gpu):
    activity = run(gpu, 100)
    assert activity.sm_share == pytest.approx(0.8)
    assert activity.tensor_share == pytest.approx(0.6)
    assert activity.dram_share == pytest.approx(0.25)
    assert activity.nvlink_bytes_per_s is None
    assert activity.pcie_bytes_per_s == pytest.approx(3000 * 2**20)
    assert activity.pcie_peak_bytes_per_s == pytest.approx(PEAK_PCIE)
    # a reading may be as old as the refresh, and even then it is of measured steps
    assert gpu.readings_s[0] >= 1.0 + REFRESH_S
    assert activity.span_s == pytest.approx(100 * STEP_S - (gpu.readings_s[0] - 1.0))


def test_readings_become_rare_and_reach_to_the_last_steps(gpu):
    monitor = ActivityMonitor("GPU-0")
    for step in range(100_000):
        gpu.now_s = STEP_S * step
        monitor.between_steps()
    assert len(gpu.readings_s) < 60
    span_s = monitor.activity().span_s
    assert span_s >= (gpu.now_s - gpu.readings_s[0] - 2 * STEP_S) / GROWTH


def test_steps_that_are_over_at_once_have_no_shares(gpu):
    assert run(gpu, int(LEAST_SPAN_S / STEP_S)) is None


def test_gpus_without_counters_have_no_shares(gpu, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlGpmQueryDeviceSupport", unsupported)
    assert run(gpu, 100) is None
    assert ActivityMonitor(None).activity() is None


def test_a_driver_that_stops_to_answer_gives_no_shares(gpu, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlGpmSampleGet", unsupported)
    assert run(gpu, 100) is None


def test_metrics_are_asked_for_in_the_driver_s_own_structure(monkeypatch):
    """Identifiers are those of nvml.h; the structure of pynvml has room for all that are asked."""
    request = pynvml.c_nvmlGpmMetricsGet_t()
    assert len(request.metrics) > len(gpm._METRICS)
    assert list(gpm._METRICS) == [2, 5, 10, 60, 61, 21, 20]
