from pathlib import Path

import pytest

from cs336_systems.costs.hardware import find_device
from cs336_systems.record import load_records

ROOT = Path(__file__).parents[2]


def sparse(tflops_per_s: float) -> float:
    """A figure that the source gives with sparsity, two of every four elements 0, where it is twice the dense one."""
    return tflops_per_s / 2


# fp32, tf32, bf16, fp16, fp8 (accumulating in fp32; TFLOP/s, as the source gives them), bandwidth (GB/s); None: not in
# the source, or not accumulating in fp32. Written from memory of the sources, not from the table that is tested; looked
# up, in copies of the sheets, were L40, L40S, A40, B200 and RTX 4090.
PROMISED = {
    # NVIDIA V100 data sheet (single precision, deep learning)
    "Tesla V100-SXM2-16GB": (15.7, None, None, 125, None, 900),
    "Tesla V100-SXM2-32GB": (15.7, None, None, 125, None, 900),
    "Tesla V100-PCIE-16GB": (14, None, None, 112, None, 900),
    "Tesla V100-PCIE-32GB": (14, None, None, 112, None, 900),
    "Tesla V100S-PCIE-32GB": (16.4, None, None, 130, None, 1134),
    # NVIDIA T4 data sheet (single precision, mixed precision)
    "Tesla T4": (8.1, None, None, 65, None, 300),
    # NVIDIA A100 data sheet (156 | 312*, 312 | 624*, 312 | 624*)
    "NVIDIA A100-SXM4-40GB": (19.5, sparse(312), sparse(624), sparse(624), None, 1555),
    "NVIDIA A100-PCIE-40GB": (19.5, sparse(312), sparse(624), sparse(624), None, 1555),
    "NVIDIA A100-SXM4-80GB": (19.5, sparse(312), sparse(624), sparse(624), None, 2039),
    "NVIDIA A100 80GB PCIe": (19.5, sparse(312), sparse(624), sparse(624), None, 1935),
    # NVIDIA A10 data sheet (62.5 | 125*, 125 | 250*, 125 | 250*)
    "NVIDIA A10": (31.2, sparse(125), sparse(250), sparse(250), None, 600),
    # NVIDIA A30 data sheet (82 | 165*, 165 | 330*, 165 | 330*)
    "NVIDIA A30": (10.3, 82, sparse(330), sparse(330), None, 933),
    # NVIDIA A40 data sheet (74.8 | 149.6*, 149.7 | 299.4*, 149.7 | 299.4*)
    "NVIDIA A40": (37.4, sparse(149.6), sparse(299.4), sparse(299.4), None, 696),
    # NVIDIA L4 data sheet (with sparsity alone: 120*, 242*, 242*, 485*)
    "NVIDIA L4": (30.3, sparse(120), sparse(242), sparse(242), sparse(485), 300),
    # NVIDIA L40 data sheet (90.5 | 181*, 181.05 | 362.1*, 181.05 | 362.1*, 362 | 724*)
    "NVIDIA L40": (90.5, sparse(181), sparse(362.1), sparse(362.1), sparse(724), 864),
    # NVIDIA L40S data sheet (183 | 366*, 362.05 | 733*, 362.05 | 733*, 733 | 1,466*)
    "NVIDIA L40S": (91.6, sparse(366), 362.05, 362.05, sparse(1466), 864),
    # NVIDIA H100 data sheet (with sparsity alone)
    "NVIDIA H100 80GB HBM3": (67, sparse(989), sparse(1979), sparse(1979), sparse(3958), 3350),
    "NVIDIA H100 PCIe": (51, sparse(756), sparse(1513), sparse(1513), sparse(3026), 2000),
    "NVIDIA H100 NVL": (60, sparse(835), sparse(1671), sparse(1671), sparse(3341), 3900),
    # NVIDIA H200 data sheet (with sparsity alone)
    "NVIDIA H200": (67, sparse(989), sparse(1979), sparse(1979), sparse(3958), 4800),
    "NVIDIA H200 NVL": (60, sparse(835), sparse(1671), sparse(1671), sparse(3341), 4800),
    # NVIDIA DGX B200 data sheet, an eighth of the system: 72 PFLOP/s in fp8 with sparsity, 64 TB/s; bf16 half of fp8
    "NVIDIA B200": (None, None, sparse(36_000 / 8), sparse(36_000 / 8), sparse(72_000 / 8), 64_000 / 8),
    # NVIDIA Ampere GA102 white paper (with fp32 accumulate: 77.4/154.8, 154.8/309.6; GeForce 35.6/71, 71/142)
    "NVIDIA RTX A6000": (38.7, sparse(154.8), sparse(309.6), sparse(309.6), None, 768),
    "NVIDIA GeForce RTX 3090": (35.6, 35.6, sparse(142), sparse(142), None, 936),
    # NVIDIA Ada GPU architecture white paper (82.6/165.2, 165.2/330.4, 330.3/660.6 with fp32 accumulate)
    "NVIDIA GeForce RTX 4090": (82.6, sparse(165.2), sparse(330.4), sparse(330.4), sparse(660.6), 1008),
    # NVIDIA RTX Blackwell white paper (104.8/209.5, 209.5/419, 419/838 with fp32 accumulate)
    "NVIDIA GeForce RTX 5090": (104.8, 104.8, sparse(419), sparse(419), sparse(838), 1792),
}


@pytest.mark.parametrize("name", PROMISED)
def test_known_devices_have_the_dense_peaks_of_their_data_sheets(name: str) -> None:
    device = find_device(name)
    assert device is not None
    found: dict[str, float | None] = {str(precision): peak for precision, peak in device.peak_flops_per_s.items()}
    found |= {"fp8": device.fp8_peak_flops_per_s, "bandwidth": device.memory_bandwidth_bytes_per_s}
    quantities = {"fp32": 1e12, "tf32": 1e12, "bf16": 1e12, "fp16": 1e12, "fp8": 1e12, "bandwidth": 1e9}
    promised = {
        name: value * unit for (name, unit), value in zip(quantities.items(), PROMISED[name], strict=True) if value
    }
    assert {name: value for name, value in found.items() if value is not None} == pytest.approx(promised, rel=1e-9)


MEMORY_GB = {
    "Tesla V100S-PCIE-32GB": 32, "Tesla T4": 16, "NVIDIA A100-SXM4-40GB": 40, "NVIDIA A100-PCIE-40GB": 40,
    "NVIDIA A100-SXM4-80GB": 80, "NVIDIA A100 80GB PCIe": 80, "NVIDIA A10": 24, "NVIDIA A30": 24, "NVIDIA A40": 48,
    "NVIDIA L4": 24, "NVIDIA L40": 48, "NVIDIA L40S": 48, "NVIDIA H100 80GB HBM3": 80, "NVIDIA H100 PCIe": 80,
    "NVIDIA H100 NVL": 94, "NVIDIA H200": 141, "NVIDIA H200 NVL": 141, "NVIDIA B200": 1440 / 8, "NVIDIA RTX A6000": 48,
    "NVIDIA GeForce RTX 3090": 24, "NVIDIA GeForce RTX 4090": 24, "NVIDIA GeForce RTX 5090": 32,
}  # fmt: skip
"""As the sources above give it. Of the V100s above there are two kinds of boards each."""


def test_known_devices_have_the_memory_of_their_data_sheets() -> None:
    found = {name: device.memory_bytes for name in PROMISED if (device := find_device(name)) is not None}
    promised = {name: None if name not in MEMORY_GB else MEMORY_GB[name] * 2**30 for name in PROMISED}
    assert found == promised


def test_the_memory_of_a_data_sheet_is_what_the_driver_finds() -> None:
    """NVML's total on the GPUs of the published runs, less than which would be a count of GB as 10^9 bytes."""
    records = [load_records(runs)[0][0] for runs in (ROOT / "data/published/e2e_benchmark").glob("*/runs")]
    found = [record.environment for record in records if record.environment is not None]
    totals = {(environment.identity.device_name, environment.device_memory_bytes) for environment in found}
    assert "NVIDIA H200" in {name for name, _ in totals}
    for name, total_bytes in totals:
        device = find_device(name)
        assert device is not None
        assert total_bytes == pytest.approx(device.memory_bytes, rel=0.01)


def test_older_drivers_leave_the_maker_out() -> None:
    assert find_device("A100-SXM4-40GB") is find_device("NVIDIA A100-SXM4-40GB") is not None


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H20", "NVIDIA H100", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "cpu", ""],
)
def test_unknown_devices_have_no_peak(name) -> None:
    assert find_device(name) is None
