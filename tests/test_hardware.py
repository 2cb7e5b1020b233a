import subprocess
import sys
from collections import Counter

import pytest

from cs336_systems.config import Precision
from cs336_systems.hardware import DEVICES, find_device


@pytest.mark.parametrize(
    ("name", "bf16_tflops_per_s", "gb_per_s"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("A100-SXM4-40GB", 312, 1555),  # drivers before 470
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA H100 80GB HBM3", 989.5, 3350),
        ("NVIDIA H100 PCIe", 756.5, 2000),
        ("NVIDIA H100 NVL", 835.5, 3900),
        ("NVIDIA H200", 989.5, 4800),
        ("NVIDIA B200", 2250, 8000),
        ("NVIDIA L40S", 362.05, 864),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
    ],
)
def test_known_devices_are_found_by_the_names_that_nvml_gives(name, bf16_tflops_per_s, gb_per_s) -> None:
    device = find_device(name)
    assert device is not None
    assert device.peak_flops_per_s[Precision.BF16] == bf16_tflops_per_s * 1e12
    assert device.memory_bandwidth_bytes_per_s == gb_per_s * 1e9


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20",
        "NVIDIA H800",
        "NVIDIA H100",
        "NVIDIA A1000",
        "NVIDIA RTX A1000",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA A10G",
        "NVIDIA A10-8Q",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA L400",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Tesla T40 24GB",
        "AMD Instinct MI300X",
        "AMD EPYC 7763 64-Core Processor",
        "cpu",
        "NVIDIA ",
        "",
    ],
)
def test_unknown_devices_have_no_peak(name) -> None:
    assert find_device(name) is None


def test_volta_and_turing_promise_neither_bf16_nor_tf32() -> None:
    for name in ("Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB", "Tesla T4"):
        device = find_device(name)
        assert device is not None
        assert set(device.peak_flops_per_s) == {Precision.FP32, Precision.FP16}


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.names[0])
def test_peaks_are_dense_and_consistent(device) -> None:
    """A sparse figure among dense ones would break the ratios that tensor cores have had since Ampere."""
    peaks = device.peak_flops_per_s
    assert device.source
    assert all(1e12 < peak < 1e16 for peak in peaks.values())
    assert 1e11 < device.memory_bandwidth_bytes_per_s < 1e13
    if Precision.BF16 in peaks:
        assert peaks[Precision.BF16] == peaks[Precision.FP16]
    if Precision.TF32 in peaks:
        assert peaks[Precision.BF16] / peaks[Precision.TF32] == pytest.approx(2, rel=0.02)
        assert peaks[Precision.TF32] >= peaks[Precision.FP32]


def test_a_name_means_one_device() -> None:
    counts = Counter(name for device in DEVICES for name in device.names)
    assert counts.most_common(1)[0][1] == 1


def test_accounting_and_statistics_import_neither_torch_nor_scipy() -> None:
    program = """
import sys
import cs336_systems.hardware, cs336_systems.accounting
import cs336_systems.statistics, cs336_systems.analysis.compare, cs336_systems.quality
assert not {"torch", "scipy", "numpy"} & set(sys.modules)
cs336_systems.analysis.compare.compare([1, 2], [1, 2])
assert "torch" not in sys.modules and "scipy.stats" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
