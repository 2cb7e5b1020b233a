"""Known devices, with the peaks of their data sheets. Unknown hardware has no peak, hence no
MFU.
"""

import csv
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..config import Precision
from .kernels import MatmulPrecision, ProductPrecision


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
    multiprocessors: int
    """1 if their number is not known."""
    source: str
    capability: str = ""
    """NVIDIA's number of what a chip can do (compute capability), such as 9.0; empty for others."""
    fp8_peak_flops_per_s: float | None = None
    """Peak with both factors in fp8, counted like the peaks above; None: unsupported or
    uncertain.
    """
    reached: Mapping[MatmulPrecision, float] = field(default_factory=dict)
    """Measured rates of large matmuls over those of an H200, by precision; absent where nobody
    published both.
    """
    has_mx: bool = False
    """Whether matmuls read scales of 32 elements each (MXFP8)."""
    link_bytes_per_s: float | None = None
    """Rate at which a GPU sends to others of its node, through NVLink, Infinity Fabric or, without
    them, PCIe: half of the data sheet's figure of both directions. None if boards differ in their
    links.
    """
    gpus_per_node: int | None = None
    """GPUs of the usual node; None if there is no usual one."""
    network: str | None = None
    """The network adapter that each GPU has in it."""
    network_bytes_per_s: float | None = None
    """Rate of that adapter in one direction."""
    memory_bytes: int | None = None
    """Memory, with 2^30 bytes for each GB of the data sheet; None if devices of these names
    differ in it.
    """

    @property
    def has_newer_attention(self) -> bool:
        """Whether attention as PyTorch chooses it uses instructions that tensor cores have from
        Hopper on (wgmma, tcgen05), which FlashAttention 2 does not know; cards for games have none.
        """
        return self.capability.partition(".")[0] in ("9", "10")

    def peak(self, precision: MatmulPrecision) -> float | None:
        """Peak of matmuls with factors of this precision; None: unsupported or uncertain."""
        if precision == ProductPrecision.FP8:
            return self.fp8_peak_flops_per_s
        return self.peak_flops_per_s.get(Precision(precision))

    def has_chip_of(self, other: "DeviceSpec") -> bool:
        """Whether both data sheets are of one chip, with other memory."""
        is_as_fast = self.peak_flops_per_s == other.peak_flops_per_s
        return is_as_fast and self.multiprocessors == other.multiprocessors

    def rate_over(self, other: "DeviceSpec", precision: MatmulPrecision) -> float | None:
        """How many times as fast as on another device matmuls are: as measured on both, or else by
        their peaks, of which newer devices reach less. None if a peak is not known.
        """
        if precision in self.reached and precision in other.reached:
            return self.reached[precision] / other.reached[precision]
        peak, reference = self.peak(precision), other.peak(precision)
        return None if peak is None or reference is None else peak / reference


DATA_SHEETS = Path(__file__).with_name("data_sheets.csv")
"""A row for each device: names, peaks in TFLOP/s, bandwidths in GB/s (that of links is of both
directions), memory in GB, and the GPUs and the network of the manufacturer's usual node (Gbit/s).
A cell is empty where DeviceSpec has None. What matmuls reached is of the tables that the package
aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0) has measured with TensorRT-LLM: the median, over all
shapes whose sides are at least 4,096, of the rate over that of an H200. Blackwell has no fp32 and
tf32, as editions of its data sheets disagree.
"""


def _device(row: Mapping[str, str]) -> DeviceSpec:
    """The device of a row of the table, in SI units."""

    def figure(column: str, unit: float) -> float | None:
        """The data sheet's value in this column, in SI units; None where the cell is empty."""
        return float(row[column]) * unit if row[column] else None

    def whole(column: str, unit: int = 1) -> int | None:
        """The same of a whole number."""
        return int(row[column]) * unit if row[column] else None

    peaks = {}
    for precision in Precision:
        if peak := figure(precision, 1e12):
            peaks[precision] = peak
    reached: dict[MatmulPrecision, float] = {}
    for factors in (ProductPrecision.BF16, ProductPrecision.FP8):
        if (rate := figure(f"reached_{factors}", 1.0)) is not None:
            reached[factors] = rate
    return DeviceSpec(
        names=tuple(row["names"].split(" or ")),
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=float(row["gb_per_s"]) * 1e9,
        multiprocessors=whole("multiprocessors") or 1,
        source=row["source"],
        capability=row["capability"],
        fp8_peak_flops_per_s=figure("fp8", 1e12),
        reached=reached,
        has_mx=bool(row["mx"]),
        link_bytes_per_s=figure("link_gb_per_s", 1e9 / 2),
        gpus_per_node=whole("node"),
        network=row["network"] or None,
        network_bytes_per_s=figure("network_gbit_per_s", 1e9 / 8),
        memory_bytes=whole("gb", 2**30),
    )


DEVICES = tuple(map(_device, csv.DictReader(DATA_SHEETS.read_text(encoding="utf-8").splitlines())))


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
    wanted = bare_name(name).casefold()
    exact, meant = [], []
    for device in DEVICES:
        if wanted in map(str.casefold, device.names):
            exact.append(device)
        if any(is_short_for(name, full_name) for full_name in device.names):
            meant.append(device)
    return tuple(exact or meant)


def is_short_for(name: str, device_name: str) -> bool:
    """Whether the name of a device contains all words of a short one, of which there must be at
    least one; words may be written together, as in `RTX4090`.
    """
    wanted, whole = _words(name), bare_name(device_name)
    full = f"{whole} {_FORM_FACTORS.get(whole, '')}"
    return bool(wanted) and wanted <= _words(full) | _joined_words(full)


def _joined_words(name: str) -> set[str]:
    """Pairs and longer runs of a name's words, without what is between them."""
    words = re.findall("[a-z0-9]+", name.casefold())
    runs = itertools.combinations(range(len(words) + 1), 2)
    return {"".join(words[first:stop]) for first, stop in runs}


def _words(name: str) -> set[str]:
    """The words of a device's name in lower case, without those that all NVIDIA devices share; SXM
    of any generation counts as the same word.
    """
    words = set(re.findall("[a-z0-9]+", name.casefold())) - {"nvidia", "tesla"}
    if any(re.fullmatch(r"sxm\d", word) for word in words):
        words.add("sxm")
    return words


def bare_name(device_name: str) -> str:
    """The name without the manufacturer's prefix, which some libraries leave out."""
    return device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")
