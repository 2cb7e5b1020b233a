from math import ceil, log

import pytest

from cs336.config import Precision
from cs336.costs.hardware import DEVICES, DeviceSpec, find_device
from cs336.costs.time import CHIP_SPREAD, DEVICE_SPREAD, spread_of
from cs336.record import load_records
from cs336.studies.ceilings_files import data_sheet_curves
from tests.committed import committed_runs

# fp32, tf32, bf16, fp8 (TFLOP/s) and bandwidth (GB/s), as the data sheets give them, halved where
# they give sparse ones
PROMISED = {
    "Tesla V100-SXM2-16GB": (15.7, None, None, None, 900),
    "NVIDIA A100-SXM4-80GB": (19.5, 312 / 2, 624 / 2, None, 2039),
    "NVIDIA L40S": (91.6, 366 / 2, 362.05, 1466 / 2, 864),
    "NVIDIA H100 80GB HBM3": (67, 989 / 2, 1979 / 2, 3958 / 2, 3350),
    "NVIDIA H200": (67, 989 / 2, 1979 / 2, 3958 / 2, 4800),
    # an eighth of a DGX B200
    "NVIDIA B200": (None, None, 36_000 / 8 / 2, 72_000 / 8 / 2, 64_000 / 8),
    # an eighth of a DGX B300, and a 72nd of a GB200 and a GB300 NVL72
    "NVIDIA B300": (None, None, 36_000 / 8 / 2, 72_000 / 8 / 2, 64_000 / 8),
    "NVIDIA GB200": (None, None, 360_000 / 72 / 2, 720_000 / 72 / 2, 576_000 / 72),
    "NVIDIA GB300": (None, None, 360_000 / 72 / 2, 720_000 / 72 / 2, 576_000 / 72),
    "AMD Instinct MI300X": (163.4, 653.7, 1307.4, 2614.9, 5300),
    "AMD Instinct MI355X": (157.3, None, 5033.2 / 2, 10_066.4 / 2, 8000),
    "NVIDIA GeForce RTX 4090": (82.6, 165.2 / 2, 330.4 / 2, 660.6 / 2, 1008),
}


@pytest.mark.parametrize("name", PROMISED)
def test_known_devices_have_the_dense_peaks_of_their_data_sheets(name: str) -> None:
    device = find_device(name)
    assert device is not None
    peaks = [
        device.peak_flops_per_s.get(precision)
        for precision in (Precision.FP32, Precision.TF32, Precision.BF16)
    ]
    rates = [*peaks, device.fp8_peak_flops_per_s, device.memory_bandwidth_bytes_per_s]
    units = (1e12, 1e12, 1e12, 1e12, 1e9)
    assert rates == [
        value and pytest.approx(value * unit)
        for value, unit in zip(PROMISED[name], units, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.names[0])
def test_no_peak_is_twice_too_high(device: DeviceSpec) -> None:
    """Tensor cores multiply twice as fast in types of half the width, so that a single sparse
    peak would stand out.
    """
    peaks = device.peak_flops_per_s
    half, single = peaks[Precision.FP16], peaks.get(Precision.TF32)
    assert peaks.get(Precision.BF16, half) == half
    assert single is None or half / single == pytest.approx(2, rel=0.02)
    assert (
        device.fp8_peak_flops_per_s is None
        or device.fp8_peak_flops_per_s / half == pytest.approx(2, rel=0.03)
    )


def test_the_memory_of_a_data_sheet_is_what_the_driver_finds() -> None:
    """NVML's total on the GPUs of the published runs, less than which would be a count of GB as
    10^9 bytes.
    """
    records = [load_records(runs)[0][0] for runs in committed_runs()]
    environments = [record.environment for record in records if record.environment is not None]
    totals = {
        (environment.identity.device_name, environment.device_memory_bytes)
        for environment in environments
    }
    assert "NVIDIA H200" in {name for name, _ in totals}
    for name, total_bytes in totals:
        device = find_device(name)
        assert device is not None
        assert total_bytes == pytest.approx(device.memory_bytes, rel=0.01)


def test_older_drivers_leave_the_maker_out() -> None:
    assert find_device("A100-SXM4-40GB") is find_device("NVIDIA A100-SXM4-40GB") is not None


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20",
        "NVIDIA H100",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "cpu",
        "",
    ],
)
def test_unknown_devices_have_no_peak(name) -> None:
    assert find_device(name) is None


def test_peaks_tell_the_rates_of_nine_of_ten_other_chips_within_their_spread() -> None:
    reference = find_device("H200")
    assert reference is not None
    off = []
    for device in DEVICES:
        for precision, reached in device.reached.items():
            promised, of_reference = device.peak(precision), reference.peak(precision)
            assert promised is not None
            assert of_reference is not None
            if device is not reference:
                off.append(abs(log(promised / of_reference / reached)))
    assert len(off) == 13
    assert sorted(off)[ceil(0.9 * len(off)) - 1] == pytest.approx(log(CHIP_SPREAD), rel=0.05)


@pytest.mark.parametrize(
    ("name", "spread"),
    [("H100 80GB HBM3", DEVICE_SPREAD), ("H200 NVL", CHIP_SPREAD), ("B200", CHIP_SPREAD)],
)
def test_another_chip_is_less_sure_than_other_memory(name: str, spread: float) -> None:
    device = find_device(name)
    assert device is not None
    assert spread_of(data_sheet_curves(device)) == spread
