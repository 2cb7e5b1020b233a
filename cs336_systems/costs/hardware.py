"""Known devices, with the peaks of their data sheets. Unknown hardware has no peak, hence no
MFU.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..config import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Data sheet peaks of one device. Peaks are dense: half of the figure, if the data sheet
    gives the sparse one.
    """

    names: tuple[str, ...]
    """Names that NVML and PyTorch report, without a leading `NVIDIA` or `Tesla`."""
    peak_flops_per_s: Mapping[Precision, float]
    """Peaks of matmuls that accumulate in fp32, with tensor cores except in fp32. Absent:
    unsupported or uncertain.
    """
    memory_bandwidth_bytes_per_s: float
    source: str
    fp8_peak_flops_per_s: float | None = None
    """Peak with both factors in fp8, counted like the peaks above; None: unsupported or
    uncertain.
    """
    link_bytes_per_s: float | None = None
    """Rate of NVLink in one direction: half of the figure of the data sheet; None if boards
    differ in their links.
    """
    memory_bytes: int | None = None
    """Memory, with 2^30 bytes for each GB of the data sheet; None if devices of these names
    differ in it.
    """


def _spec(
    *names: str,
    gb_per_s: float,
    source: str,
    fp8: float | None = None,
    nvlink: float | None = None,
    gb: int | None = None,
    **peaks: float,
) -> DeviceSpec:
    """One row of the table: peaks in TFLOP/s, memory in GB, bandwidths in GB/s; NVLink's is that
    of both directions.
    """
    return DeviceSpec(
        names=names,
        peak_flops_per_s={Precision(name): peak * 1e12 for name, peak in peaks.items()},
        memory_bandwidth_bytes_per_s=gb_per_s * 1e9,
        source=source,
        fp8_peak_flops_per_s=None if fp8 is None else fp8 * 1e12,
        link_bytes_per_s=None if nvlink is None else nvlink * 1e9 / 2,
        memory_bytes=None if gb is None else gb * 2**30,
    )


_V100 = "NVIDIA V100 data sheet"
_A100 = "NVIDIA A100 data sheet"
_L40 = "NVIDIA L40 data sheet"
_L40S = "NVIDIA L40S data sheet"
_H100 = "NVIDIA H100 data sheet"
_H200 = "NVIDIA H200 data sheet"
_B200 = "NVIDIA DGX B200 data sheet; Blackwell architecture technical brief"
_GA102 = "NVIDIA Ampere GA102 architecture white paper"
_ADA = "NVIDIA Ada GPU architecture white paper"
_GB202 = "NVIDIA RTX Blackwell GPU architecture white paper"

DEVICES: tuple[DeviceSpec, ...] = (
    _spec(
        "V100-SXM2-16GB",
        "V100-SXM2-32GB",
        fp32=15.7,
        fp16=125,
        gb_per_s=900,
        nvlink=300,
        source=_V100,
    ),
    _spec("V100-PCIE-16GB", "V100-PCIE-32GB", fp32=14, fp16=112, gb_per_s=900, source=_V100),
    _spec("V100S-PCIE-32GB", fp32=16.4, fp16=130, gb_per_s=1134, gb=32, source=_V100),
    _spec("T4", fp32=8.1, fp16=65, gb_per_s=300, gb=16, source="NVIDIA T4 data sheet"),
    _spec(
        "A100-SXM4-40GB",
        "A100-PCIE-40GB",
        fp32=19.5,
        tf32=156,
        bf16=312,
        fp16=312,
        gb_per_s=1555,
        gb=40,
        source=_A100,
    ),
    _spec(
        "A100-SXM4-80GB",
        fp32=19.5,
        tf32=156,
        bf16=312,
        fp16=312,
        gb_per_s=2039,
        nvlink=600,
        gb=80,
        source=_A100,
    ),
    _spec(
        "A100 80GB PCIe",
        fp32=19.5,
        tf32=156,
        bf16=312,
        fp16=312,
        gb_per_s=1935,
        gb=80,
        source=_A100,
    ),
    _spec(
        "A10",
        fp32=31.2,
        tf32=62.5,
        bf16=125,
        fp16=125,
        gb_per_s=600,
        gb=24,
        source="NVIDIA A10 data sheet",
    ),
    _spec(
        "A30",
        fp32=10.3,
        tf32=82,
        bf16=165,
        fp16=165,
        gb_per_s=933,
        gb=24,
        source="NVIDIA A30 data sheet",
    ),
    _spec(
        "A40",
        fp32=37.4,
        tf32=74.8,
        bf16=149.7,
        fp16=149.7,
        gb_per_s=696,
        gb=48,
        source="NVIDIA A40 data sheet",
    ),
    _spec(
        "L4",
        fp32=30.3,
        tf32=60,
        bf16=121,
        fp16=121,
        fp8=242.5,
        gb_per_s=300,
        gb=24,
        source="NVIDIA L4 data sheet",
    ),
    _spec(
        "L40",
        fp32=90.5,
        tf32=90.5,
        bf16=181.05,
        fp16=181.05,
        fp8=362,
        gb_per_s=864,
        gb=48,
        source=_L40,
    ),
    _spec(
        "L40S",
        fp32=91.6,
        tf32=183,
        bf16=362.05,
        fp16=362.05,
        fp8=733,
        gb_per_s=864,
        gb=48,
        source=_L40S,
    ),
    _spec(
        "H100 80GB HBM3",
        fp32=67,
        tf32=494.5,
        bf16=989.5,
        fp16=989.5,
        fp8=1979,
        gb_per_s=3350,
        nvlink=900,
        gb=80,
        source=_H100,
    ),
    _spec(
        "H100 PCIe",
        fp32=51,
        tf32=378,
        bf16=756.5,
        fp16=756.5,
        fp8=1513,
        gb_per_s=2000,
        gb=80,
        source=_H100,
    ),
    _spec(
        "H100 NVL",
        fp32=60,
        tf32=417.5,
        bf16=835.5,
        fp16=835.5,
        fp8=1670.5,
        gb_per_s=3900,
        gb=94,
        source=_H100,
    ),
    _spec(
        "H200",
        fp32=67,
        tf32=494.5,
        bf16=989.5,
        fp16=989.5,
        fp8=1979,
        gb_per_s=4800,
        nvlink=900,
        gb=141,
        source=_H200,
    ),
    _spec(
        "H200 NVL",
        fp32=60,
        tf32=417.5,
        bf16=835.5,
        fp16=835.5,
        fp8=1670.5,
        gb_per_s=4800,
        gb=141,
        source=_H200,
    ),
    # editions disagree on fp32 and tf32 of a B200
    _spec("B200", bf16=2250, fp16=2250, fp8=4500, gb_per_s=8000, nvlink=1800, gb=180, source=_B200),
    _spec(
        "RTX A6000",
        fp32=38.7,
        tf32=77.4,
        bf16=154.8,
        fp16=154.8,
        gb_per_s=768,
        gb=48,
        source=_GA102,
    ),
    _spec(
        "GeForce RTX 3090",
        fp32=35.6,
        tf32=35.6,
        bf16=71,
        fp16=71,
        gb_per_s=936,
        gb=24,
        source=_GA102,
    ),
    _spec(
        "GeForce RTX 4090",
        fp32=82.6,
        tf32=82.6,
        bf16=165.2,
        fp16=165.2,
        fp8=330.3,
        gb_per_s=1008,
        gb=24,
        source=_ADA,
    ),
    _spec(
        "GeForce RTX 5090",
        fp32=104.8,
        tf32=104.8,
        bf16=209.5,
        fp16=209.5,
        fp8=419,
        gb_per_s=1792,
        gb=32,
        source=_GB202,
    ),
)


def faster_precisions(device: DeviceSpec) -> tuple[Precision, ...]:
    """Precisions with a higher peak than true fp32, thanks to tensor cores: TF32, and bf16 or
    else fp16.
    """
    peaks = device.peak_flops_per_s
    half = Precision.BF16 if Precision.BF16 in peaks else Precision.FP16
    full = peaks.get(Precision.FP32, 0.0)
    return tuple(
        precision for precision in (Precision.TF32, half) if peaks.get(precision, 0.0) > full
    )


_FORM_FACTORS = {"H100 80GB HBM3": "SXM5", "H200": "SXM5"}
"""Form factors of devices whose names lack it; data sheets differ by form factor."""


def find_device(device_name: str) -> DeviceSpec | None:
    """The device of exactly this name, or None. A MIG slice, laptop GPU or export version is
    another device.
    """
    name = bare_name(device_name)
    return next((device for device in DEVICES if name in device.names), None)


def devices_called(name: str) -> tuple[DeviceSpec, ...]:
    """Devices that a short name may mean: the one of exactly that name, or all whose names contain
    all of its words.

    Examples: `4090`, `h100 pcie`, `A100-80GB`. SXM stands for each of its generations.
    """
    if (device := find_device(name)) is not None:
        return (device,)
    exact = [
        device
        for device in DEVICES
        if bare_name(name).casefold() in map(str.casefold, device.names)
    ]
    meant = [device for device in DEVICES if any(is_short_for(name, full) for full in device.names)]
    return tuple(exact or meant)


def is_short_for(name: str, device_name: str) -> bool:
    """Whether the name of a device contains all words of a short one, of which there must be at
    least one.
    """
    wanted, whole = _words(name), bare_name(device_name)
    return bool(wanted) and wanted <= _words(f"{whole} {_FORM_FACTORS.get(whole, '')}")


def _words(name: str) -> set[str]:
    words = set(re.findall("[a-z0-9]+", name.casefold())) - {"nvidia", "tesla"}
    return words | {"sxm"} if any(re.fullmatch(r"sxm\d", word) for word in words) else words


def bare_name(device_name: str) -> str:
    """The name without the manufacturer's prefix, which some libraries leave out."""
    return device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")
