"""A model of how long matmuls and fused attention take on a GPU: how many waves of tiles its
multiprocessors compute, and how many bytes they move.

The model knows three rates of a device. What it leaves open, the efficiency of each class of
kernels, is the median over those that `cs336 ceilings` has measured. No side of a kernel appears in
it so that more work would be faster, and measured kernels bound it: a kernel takes at least the
time of any smaller one that was measured, and at most that of any larger one. The numbers below
that no source is named for were fitted to the ceilings of an H100 and an H200, and to no step.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import product
from math import ceil, exp, inf, log2
from statistics import median
from typing import NamedTuple, TypeAlias

from ..config import Precision, SdpaBackend
from .tape import FP8_BYTES, MATMULS_OF, RESULT_BYTES, Form

Shape: TypeAlias = tuple[int, int, int, int]
"""Batch, rows, inner side and columns of a kernel."""
ALIGNED_BYTES = 16
"""Rows of a matrix whose length is no multiple of this keep cuBLAS from its fast kernels (NVIDIA's
guide to matmul performance, "tensor core requirements"). How many rows there are does not matter.
"""
TILES = (*product((64, 128), (64, 128, 256)), (256, 64), (256, 128))
"""Sides of the part of a result that one multiprocessor computes at a time, in cuBLAS."""
SPLITS = 1, 2, 4, 8
"""Parts into which the inner side may be split, for results of few tiles; they are added up."""
TILE_COST = 10.8
"""A tile takes longer by this over each of its sides: a small one loads more for each
multiplication.
"""
INNER_COST = 58.8
"""A tile takes as long as if its inner side were longer by this, before and after its loop."""
MEMORY_SHARE = 0.86
"""Share of the bandwidth of a copy with which a matmul reads and writes."""
SHARPNESS = 4
"""Exponent of the sum of the times of computing and of memory: the longer counts almost alone."""
EMPTY_KERNELS = 1.8
"""A kernel takes this many times an empty one, besides."""
QUERIES = 64
"""Rows and columns of scores that a multiprocessor computes at a time in fused attention."""
KEYS_COST = {2: 80, 4: 12}
"""Each tile of attention takes as long as if it had this many more keys for each of its matmuls, by
the bytes of an element: tensor cores leave less time to begin and to end.
"""
WIDTHS = 32, 64, 96, 128, 192, 256
"""Widths of heads for which fused attention has kernels; narrower heads are padded to them."""
ATTENTION_SLOWER: Mapping[SdpaBackend, Mapping[Form, Mapping[int, float]]] = {
    SdpaBackend.FLASH: {
        Form.ATTENTION: {64: 1.50, 128: 1.83},
        Form.ATTENTION_BACKWARD: {64: 1.56, 128: 1.82},
    },
    SdpaBackend.EFFICIENT: {
        Form.ATTENTION: {64: 3.43, 128: 3.61},
        Form.ATTENTION_BACKWARD: {64: 4.49, 128: 4.20},
    },
}
"""How many times as long as by cuDNN, which PyTorch itself chooses on Hopper, fused attention of
half precision takes by these backends, by the width of heads: FlashAttention 2 and xFormers'
kernels do not use what Hopper's tensor cores added. Times of the published causal study of an H200
at 32,768 tokens over those that its ceilings foretell by cuDNN.
"""
KNOT_OCTAVES = 2.0
"""Distance between the points of the curve from modelled to measured times, and the distance up to
which a measured kernel counts for one.
"""
STEEPNESS = 2
"""A time changes at most as this power of a side, next to a measured one."""
NEAR = 2.0
"""A kernel is extrapolated if each measured one of its class differs in a side by more than so many
powers of 2.
"""
FEW = 3
"""Fewer measured kernels than this do not tell how far the model is off."""
UNKNOWN_WITHIN = 0.2
"""How far it is taken to be off then, in powers of 2."""


class ProductPrecision(StrEnum):
    """Data type of the factors of a matmul. Sums are in fp32; fp8 is e4m3 with one scale for
    each matrix.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


MatmulPrecision = Precision | ProductPrecision
"""Equal names are equal keys: fp8 is a precision of matmuls, and not of a whole step."""
FACTOR_BYTES: dict[MatmulPrecision, int] = {
    ProductPrecision.FP32: 4,
    ProductPrecision.TF32: 4,
    ProductPrecision.BF16: 2,
    ProductPrecision.FP16: 2,
    ProductPrecision.FP8: FP8_BYTES,
}


class KernelClass(NamedTuple):
    """Kernels that are modelled alike."""

    form: Form
    is_batched: bool
    is_aligned: bool
    width: int = 0
    """Of the heads of fused attention, padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """A measured matmul of (rows, inner) by (inner, columns) matrices, or fused attention with the
    sides of its scores.
    """

    rows: int
    inner: int
    columns: int
    batch: int = 1
    """Number of matmuls in a batched one; for attention, heads of all sequences."""
    form: Form | None = None
    """None for a linear layer's matmul of a study that did not name its form."""
    time_s: float

    @property
    def multiplications(self) -> int:
        """Number of multiply-adds of the whole batch."""
        return self.batch * self.rows * self.inner * self.columns

    @property
    def flops_per_s(self) -> float:
        """Measured FLOPs per second, where a multiply-add counts as two."""
        return 2 * self.multiplications / self.time_s

    @property
    def sides(self) -> tuple[int, int, int]:
        """Rows of all matmuls of a batch, inner side, columns."""
        return self.batch * self.rows, self.inner, self.columns

    @property
    def shape(self) -> Shape:
        """Batch, rows, inner side, columns."""
        return self.batch, self.rows, self.inner, self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the model knows of a device at one precision."""

    multiprocessors: int
    """1 if their number is not known: then none of them is ever idle."""
    flops_per_s: float
    """Highest rate of a matmul."""
    bytes_per_s: float
    """Highest rate of a copy, bytes read and written."""
    kernel_s: float
    """Time of an empty kernel."""
    element_bytes: int
    """Bytes of an element of both factors."""

    @property
    def result_bytes(self) -> int:
        """Bytes of an element of the result; that of an fp8 matmul is in bf16."""
        return max(RESULT_BYTES, self.element_bytes)

    def class_of(self, form: Form | None, shape: Shape) -> KernelClass:
        """The class of a kernel, given batch, rows, inner side and columns."""
        form = form or Form.FORWARD
        batch, rows, inner, columns = shape
        if form in MATMULS_OF:
            return KernelClass(form, True, True, padded(inner))
        # lengths of the rows of the three matrices in memory
        lengths = (rows, columns) if form is Form.WEIGHT else (inner, columns)
        is_aligned = not any(length * self.element_bytes % ALIGNED_BYTES for length in lengths)
        return KernelClass(form, batch > 1, is_aligned)

    @lru_cache(maxsize=2**16)  # noqa: B019 (rates are few)
    def model_s(self, form: Form, shape: Shape) -> float:
        """Time of a kernel whose class reaches all that the model expects; it never falls as a side
        grows.
        """
        batch, rows, inner, columns = shape
        if form in MATMULS_OF:
            return self._attention_s(form, batch, rows, inner)
        moved_bytes = batch * self.element_bytes * (rows * inner + inner * columns)
        moved_bytes += batch * self.result_bytes * rows * columns
        memory_s = moved_bytes / (MEMORY_SHARE * self.bytes_per_s)
        compute_s = min(self._tiled_s(shape, tile) for tile in TILES)
        longer_s: float = (compute_s**SHARPNESS + memory_s**SHARPNESS) ** (1 / SHARPNESS)
        return longer_s + EMPTY_KERNELS * self.kernel_s

    def _tiled_s(self, shape: Shape, tile: tuple[int, int]) -> float:
        """Time to compute a matmul tile by tile, its inner side split if that is faster."""
        batch, rows, inner, columns = shape
        high, wide = tile
        tiles = batch * ceil(rows / high) * ceil(columns / wide)
        multiplications = high * wide * (1 + TILE_COST * (1 / high + 1 / wide))
        wave_s = 2 * multiplications * self.multiprocessors / self.flops_per_s
        # the parts are written and read in fp32
        part_s = 2 * batch * rows * columns / self.bytes_per_s
        times_s = []
        for parts in SPLITS:
            waves = ceil(tiles * parts / self.multiprocessors)
            time_s = waves * wave_s * (inner / parts + INNER_COST)
            if parts > 1:
                time_s += part_s * (parts + 1)
            times_s.append(time_s)
        return min(times_s)

    def _attention_s(self, form: Form, heads: int, context: int, d_head: int) -> float:
        """Time of causal attention: its tiles differ in length, and the longest may be the last."""
        tiles = ceil(context / QUERIES)
        more_keys = KEYS_COST[self.element_bytes] * MATMULS_OF[form]
        all_scores = heads * tiles * QUERIES * ((tiles + 1) / 2 * QUERIES + more_keys)
        longest_scores = QUERIES * (tiles * QUERIES + more_keys)
        scores = all_scores + self.multiprocessors * longest_scores
        multiplications = MATMULS_OF[form] * scores * padded(d_head)
        return 2 * multiplications / self.flops_per_s + EMPTY_KERNELS * self.kernel_s


def padded(d_head: int) -> int:
    """Width of the kernel of fused attention that computes heads of this width."""
    return next((width for width in WIDTHS if width >= d_head), d_head)


class KernelTime(NamedTuple):
    """Time of a kernel, and how sure it is."""

    time_s: float
    low_s: float
    high_s: float
    """Nine of ten kernels of the class lie between these."""
    is_extrapolated: bool
    """Whether none that was measured is like it."""


class _Measured:
    """The measured kernels of a class, and the curve from modelled to measured times."""

    def __init__(self, kernels: Sequence[Matmul], modelled_s: Sequence[float]) -> None:
        """Draw the curve through means of its neighbours, so that it never falls."""
        self.kernels = kernels
        points = [
            (log2(model_s), log2(kernel.time_s))
            for kernel, model_s in zip(kernels, modelled_s, strict=True)
        ]
        middle = median(measured - modelled for modelled, measured in points)
        first, last = min(points)[0], max(points)[0]
        count = 1 + ceil((last - first) / KNOT_OCTAVES)
        self._knots = [first + KNOT_OCTAVES * number for number in range(count)]
        self._heights: list[float] = []
        highest = -inf
        for knot in self._knots:
            total, weight = middle, 1.0
            for modelled, measured in points:
                nearness = exp(-2 * ((modelled - knot) / KNOT_OCTAVES) ** 2)
                total += nearness * (measured - modelled)
                weight += nearness
            highest = max(highest, knot + total / weight)
            self._heights.append(highest)
        off = sorted(abs(measured - self._curve(modelled)) for modelled, measured in points)
        self.within = off[ceil(0.9 * len(off)) - 1] if len(off) >= FEW else UNKNOWN_WITHIN
        """Distance in powers of 2 within which nine of ten are from the curve."""

    def time_s(self, modelled_s: float) -> float:
        """Time of a kernel of the class whose modelled time is known."""
        return float(2 ** self._curve(log2(modelled_s)))

    def _curve(self, modelled: float) -> float:
        """Logarithm of the time; beyond the measured ones it grows as the model's."""
        knots, heights = self._knots, self._heights
        if modelled <= knots[0]:
            return heights[0] + modelled - knots[0]
        if modelled >= knots[-1]:
            return heights[-1] + modelled - knots[-1]
        above = bisect_right(knots, modelled)
        share = (modelled - knots[above - 1]) / KNOT_OCTAVES
        return (1 - share) * heights[above - 1] + share * heights[above]


class KernelModel:
    """Times of the kernels of one device at one precision."""

    def __init__(self, rates: Rates, measured: Iterable[Matmul]) -> None:
        self.rates = rates
        self._times: dict[tuple[Form, Shape], KernelTime] = {}
        by_class: defaultdict[KernelClass, list[Matmul]] = defaultdict(list)
        for kernel in measured:
            by_class[rates.class_of(kernel.form, kernel.shape)].append(kernel)
        self._classes: dict[KernelClass, _Measured] = {}
        for kind, kernels in by_class.items():
            model_s = [rates.model_s(kind.form, kernel.shape) for kernel in kernels]
            self._classes[kind] = _Measured(kernels, model_s)

    def has(self, form: Form, shape: Shape) -> bool:
        """Whether this very kernel was measured."""
        known = self._classes.get(self.rates.class_of(form, shape))
        return known is not None and any(kernel.shape == shape for kernel in known.kernels)

    def time(self, form: Form, shape: Shape) -> KernelTime:
        """Time of a kernel, given batch, rows, inner side and columns."""
        key = form, shape
        if key not in self._times:
            self._times[key] = self._time(form, shape)
        return self._times[key]

    def _time(self, form: Form, shape: Shape) -> KernelTime:
        """The same, computed."""
        kind = self.rates.class_of(form, shape)
        known = self._classes.get(kind)
        alike = known or self._most_like(kind)
        least_s, most_s, octaves = 0.0, inf, inf
        for kernel in known.kernels if known else ():
            other = kernel.shape
            pairs = list(zip(other, shape, strict=True))
            shorter = longer = 1.0
            for side, wanted in pairs:
                if wanted < side:
                    shorter *= wanted / side
                else:
                    longer *= wanted / side
            least_s = max(least_s, kernel.time_s * shorter**STEEPNESS)
            most_s = min(most_s, kernel.time_s * longer**STEEPNESS)
            octaves = min(octaves, max(abs(log2(side / wanted)) for side, wanted in pairs))
        modelled_s = alike.time_s(self.rates.model_s(kind.form, shape))
        spread = 2 ** (alike.within * (max(1.0, octaves) if known else 2.0))

        def bounded(time_s: float) -> float:
            """The time between those of smaller and of larger kernels."""
            return min(max(time_s, least_s), most_s)

        return KernelTime(
            bounded(modelled_s),
            bounded(modelled_s / spread),
            bounded(modelled_s * spread),
            is_extrapolated=octaves > NEAR,
        )

    def _most_like(self, kind: KernelClass) -> _Measured:
        """The measured kernels of the class that shares most with one of which none was
        measured.
        """

        def unlikeness(other: KernelClass) -> tuple[bool, bool, bool, bool, float]:
            """What differs, the most important first."""
            is_attention = (other.form in MATMULS_OF) is (kind.form in MATMULS_OF)
            octaves = abs(log2(other.width / kind.width)) if kind.width and other.width else 0.0
            # rows that are not aligned make a matmul several times as slow, and a batch does not
            return (
                not is_attention,
                other.is_aligned is not kind.is_aligned,
                other.is_batched is not kind.is_batched,
                other.form is not kind.form,
                octaves,
            )

        return self._classes[min(self._classes, key=unlikeness)]


def transferred(kernels: Iterable[Matmul], source: Rates, target: Rates) -> tuple[Matmul, ...]:
    """The kernels as another device would run them that reaches as much of its rates."""
    on_target = []
    for kernel in kernels:
        form = kernel.form or Form.FORWARD
        source_s, target_s = (rates.model_s(form, kernel.shape) for rates in (source, target))
        on_target.append(replace(kernel, time_s=kernel.time_s * target_s / source_s))
    return tuple(on_target)
