"""Measured ceilings of a device, as curves between the measured points: matmuls, passes over
memory, launches.
"""

from bisect import bisect_left
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, log
from typing import TypeAlias

from ..config import FP8_MULTIPLE, SdpaBackend
from .communication import Collective, CollectiveCall
from .hardware import DeviceSpec
from .kernels import (
    ATTENTION_SLOWER,
    FACTOR_BYTES,
    KernelModel,
    KernelTime,
    Matmul,
    MatmulPrecision,
    ProductPrecision,
    Rates,
    transferred,
)
from .tape import MATMULS_OF, Form, Pass

CollectiveTimes: TypeAlias = Mapping[Collective, Mapping[int, float]]
"""Times of each collective by its bytes."""
FASTER_LAUNCHES, SLOWER_LAUNCHES = 1.4, 2.07
"""Nine of ten steps are launched by calls between the measured time divided by the first and
multiplied by the second: hosts of equal GPUs differ by so much, and one host from minute to minute
by as much. These are the ends of the eight hosts whose calls the published ceilings have: of lone
launches, beside the median of their GPU's, and in a step, beside the time that its curves have. No
step was fitted.
"""
PASS_SPREAD = 1.1
"""Nine of ten passes over memory take between the measured time divided and multiplied by this."""
FUSED_SLOWER, FUSED_SPREAD = 1.19, 1.73
"""A kernel that fuses operations takes so many times as long as a copy of the bytes that it must
move, and nine of ten take between that time divided and multiplied by the latter. These are the
median, and the ninth of ten distances from it, of the published fusion studies' operations that
torch.compile made one kernel of, on an H200: GELU and softmax in both directions and RMSNorm
forward, in fp32 and bf16.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """Times that `cs336 ceilings` has measured on one device. Compared by identity, to be
    hashable as cache keys.
    """

    matmuls: Mapping[MatmulPrecision, tuple[Matmul, ...]]
    copies: Mapping[int, float]
    """Times of copies by the bytes that they read and write."""
    adamw: Mapping[int, float]
    """Times of fused AdamW by the bytes that it moves."""
    launch_s: float
    """Time of a call of the host in a training step."""
    mixed_launch_s: float | None = None
    """The same in mixed precision; None if it was not measured."""
    inference_launch_s: float | None = None
    """The same in inference; None if it was not measured."""
    kernel_s: float
    """Time of a kernel that does next to nothing in a CUDA graph, where the device does not wait
    for the host.
    """
    multiprocessors: int = 1
    """1 if their number is not known."""
    passes: Mapping[Pass, Mapping[int, float]] = field(default_factory=dict)
    """Times of other passes than copies by the bytes that they read and write."""
    collectives: Mapping[int, CollectiveTimes] = field(default_factory=dict)
    """By the number of ranks among which they were measured."""
    queued_gap_s: float | None = None
    """Gap between two kernels that the host launched one by one, early enough; None if it was
    not measured.
    """
    is_measured: bool = True
    """Whether they were measured, and not computed from the device's data sheet."""
    is_of_other_chip: bool = False
    """Whether what was measured is of a device with another chip."""
    has_newer_attention: bool = True
    """Whether the times of attention are those of kernels that use what tensor cores have from
    Hopper on; on older devices they are FlashAttention 2's.
    """
    has_fp8: bool = True
    """Whether matmuls in fp8, if there are any, were measured, and not computed from bf16 ones."""
    is_in_doubt: bool = False
    """Whether so many of the times are in doubt that what is predicted from them is too."""
    is_shipped: bool = False
    """Whether they come with the program, and were not measured by its user."""
    on_host: bool = False
    """Whether the device is the host itself, a CPU: it runs each operation before it begins the
    next.
    """

    @property
    def gap_s(self) -> float:
        """Gap between two kernels; if it was not measured, the time of an empty kernel, which is
        mostly gap.
        """
        return self.kernel_s if self.queued_gap_s is None else self.queued_gap_s

    def matmul_time(
        self,
        precision: MatmulPrecision,
        rows: int,
        inner: int,
        columns: int,
        *,
        batch: int = 1,
        form: Form = Form.FORWARD,
    ) -> KernelTime | None:
        """Time of `batch` matmuls of (rows, inner) by (inner, columns) matrices, or of fused
        attention, whose sides are those of its scores; None if no matmul was measured at this
        precision.
        """
        model = kernel_model(self, precision)
        return None if model is None else model.time(form, (batch, rows, inner, columns))

    def has_matmul(
        self,
        precision: MatmulPrecision,
        rows: int,
        inner: int,
        columns: int,
        form: Form,
        batch: int,
    ) -> bool:
        """Whether this very matmul was measured."""
        model = kernel_model(self, precision)
        return model is not None and model.has(form, (batch, rows, inner, columns))

    def rates(self, precision: MatmulPrecision) -> Rates | None:
        """What the model of kernels knows of the device; None without matmuls at this precision."""
        matmuls = self.matmuls.get(precision, ())
        rates = [matmul.flops_per_s for matmul in matmuls if matmul.form not in MATMULS_OF]
        if not rates:
            return None
        return Rates(
            multiprocessors=self.multiprocessors,
            flops_per_s=max(rates),
            bytes_per_s=max(num_bytes / time_s for num_bytes, time_s in self.copies.items()),
            kernel_s=self.kernel_s,
            element_bytes=FACTOR_BYTES[precision],
        )

    def without(self, precision: MatmulPrecision, products: Set[tuple[int, int, int]]) -> "Curves":
        """The curves as if no matmul of these sides, (rows of all of a batch, inner, columns), had
        been measured.

        Rows and columns may be exchanged, and of all forms that have these sides none is kept.
        """
        kept = []
        for matmul in self.matmuls.get(precision, ()):
            if products.isdisjoint([matmul.sides, matmul.sides[::-1]]):
                kept.append(matmul)
        return replace(self, matmuls={**self.matmuls, precision: tuple(kept)})

    def pass_s(self, num_bytes: int, how: Pass = Pass.COPY) -> float:
        """Seconds of a pass over memory that reads and writes `num_bytes` in all; those of a copy
        if passes of this kind were not measured, and longer by FUSED_SLOWER of a fused one.
        """
        if how is Pass.FUSED:
            return FUSED_SLOWER * interpolated(self.copies, num_bytes)
        return interpolated(self.passes.get(how) or self.copies, num_bytes)


@lru_cache(maxsize=256)
def kernel_model(curves: Curves, precision: MatmulPrecision) -> KernelModel | None:
    """The model of the device's matmuls and attention; None without matmuls at this precision."""
    rates = curves.rates(precision)
    return None if rates is None else KernelModel(rates, curves.matmuls[precision])


@lru_cache(maxsize=64)
def with_backend(curves: Curves, backend: SdpaBackend) -> Curves:
    """The curves with fused attention by this backend of PyTorch's, from those measured with the
    backend that PyTorch chooses by itself. In fp32 these are the same, and so is FlashAttention 2
    where PyTorch chooses it: on an A100 it reaches 0.50 to 0.73 of the peak (Dao 2023), which is
    what cuDNN reaches on Hopper, and FlashAttention 2 does not.
    """
    slower = ATTENTION_SLOWER.get(backend)
    if slower is None or curves.on_host:
        return curves
    if not curves.has_newer_attention:
        chosen = ATTENTION_SLOWER[SdpaBackend.FLASH]
        slower = {form: _beside(by_width, chosen[form]) for form, by_width in slower.items()}
    matmuls = dict(curves.matmuls)
    for precision in {ProductPrecision.BF16, ProductPrecision.FP16} & {*matmuls}:
        slowed = []
        for matmul in matmuls[precision]:
            factor = _slower_by_width(slower, matmul)
            slowed.append(replace(matmul, time_s=factor * matmul.time_s))
        matmuls[precision] = tuple(slowed)
    return replace(curves, matmuls=matmuls)


def _beside(times: Mapping[int, float], chosen: Mapping[int, float]) -> dict[int, float]:
    """How many times as long one backend takes as the chosen one, by the width of heads, from what
    both take beside a third.
    """
    return {width: factor / chosen[width] for width, factor in times.items()}


def _slower_by_width(slower: Mapping[Form, Mapping[int, float]], matmul: Matmul) -> float:
    """How many times as long a kernel takes: as attention with the heads whose width is nearest."""
    if matmul.form is None or matmul.form not in slower:
        return 1.0
    by_width = slower[matmul.form]
    return by_width[min(by_width, key=lambda width: abs(log(width / matmul.inner)))]


def interpolated(curve: Mapping[int, float], num_bytes: int) -> float:
    """Time at so many bytes, from measured times.

    Between two sizes that were measured, the logarithm of the time is linear in that of the size,
    and no size takes less than a smaller one. Beyond them, the time is that of the smallest, or
    grows as the size.
    """
    sizes = sorted(curve)
    above = bisect_left(sizes, num_bytes)
    low_s = max((curve[size] for size in sizes[:above]), default=curve[sizes[0]])
    if above == 0:
        return low_s
    if above == len(sizes):
        return low_s * num_bytes / sizes[-1]
    low, high = sizes[above - 1], sizes[above]
    share = log(num_bytes / low) / log(high / low)
    return exp((1 - share) * log(low_s) + share * log(max(low_s, curve[high])))


def time_s(counts: Mapping[CollectiveCall, int], curves: CollectiveTimes) -> float | None:
    """Time of the calls one after the other, from measured times by bytes; None if a kind was
    not measured.
    """
    if any(not curves.get(call.collective) for call in counts):
        return None
    return sum(
        count * interpolated(curves[call.collective], call.num_bytes)
        for call, count in counts.items()
    )


def with_fp8(curves: Curves, device: DeviceSpec | None) -> Curves:
    """The curves with matmuls in fp8 where none was measured: as efficient as those in bf16 at the
    peaks of the device's data sheet. Unchanged if it has no such peaks.
    """
    fp8, bf16 = ProductPrecision.FP8, ProductPrecision.BF16
    if device is None or curves.matmuls.get(fp8):
        return curves
    rates, peak, reference = curves.rates(bf16), device.peak(fp8), device.peak(bf16)
    if rates is None or peak is None or reference is None:
        return curves
    like = replace(
        rates, flops_per_s=rates.flops_per_s * peak / reference, element_bytes=FACTOR_BYTES[fp8]
    )
    linear = []
    for matmul in curves.matmuls[bf16]:
        is_of_layer = matmul.form not in MATMULS_OF and matmul.batch == 1
        if is_of_layer and is_for_fp8(matmul):
            linear.append(matmul)
    matmuls = {**curves.matmuls, fp8: transferred(linear, rates, like)}
    return replace(curves, matmuls=matmuls, has_fp8=False)


def is_for_fp8(matmul: Matmul) -> bool:
    """Whether hardware multiplies matrices of these sides in fp8."""
    return matmul.inner % FP8_MULTIPLE == 0 and matmul.columns % FP8_MULTIPLE == 0


def transferred_curves(curves: Curves, source: DeviceSpec, target: DeviceSpec) -> Curves:
    """Times of a device that reaches as much of its data sheet as the one that was measured, or
    as much more or less of it as published measurements of matmuls say.

    Matmuls are absent at precisions whose peak either data sheet lacks.
    """
    by_memory = source.memory_bandwidth_bytes_per_s / target.memory_bandwidth_bytes_per_s
    copies = {num_bytes: by_memory * time_s for num_bytes, time_s in curves.copies.items()}
    passes = {}
    for how, times_s in curves.passes.items():
        passes[how] = {num_bytes: by_memory * time_s for num_bytes, time_s in times_s.items()}
    matmuls: dict[MatmulPrecision, tuple[Matmul, ...]] = {}
    for precision in ProductPrecision:
        rates = curves.rates(precision)
        faster = target.rate_over(source, precision)
        if rates is not None and faster is not None:
            like = replace(
                rates,
                flops_per_s=rates.flops_per_s * faster,
                bytes_per_s=rates.bytes_per_s / by_memory,
                multiprocessors=target.multiprocessors,
            )
            matmuls[precision] = transferred(curves.matmuls[precision], rates, like)
    return replace(
        curves,
        matmuls=matmuls,
        copies=copies,
        adamw={num_bytes: by_memory * time_s for num_bytes, time_s in curves.adamw.items()},
        passes=passes,
        collectives={},
        multiprocessors=target.multiprocessors,
        is_measured=False,
        has_newer_attention=target.has_newer_attention,
        is_of_other_chip=not target.has_chip_of(source),
        is_shipped=False,
    )
