"""Measured ceilings of a device, as curves between the measured points: matmuls, passes over
memory, launches.
"""

from bisect import bisect_left
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import dist, exp, log

from ..config import Precision
from .communication import Collective, CollectiveCall
from .hardware import DeviceSpec
from .tape import MATMULS_OF, Form, Pass

ALIGNMENT = 8
"""Sides that are not multiples of this keep cuBLAS from its fast kernels: 16 bytes in half
precision (NVIDIA's guide to matmul performance, "tensor core requirements").
"""
SHEPARD_EXPONENT = 4
"""Exponent of the inverse distances that weight measured points (Shepard 1968). It is above 3, the
number of sides of a matmul, so that many far points do not outweigh a near one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """A measured matmul of (rows, inner) by (inner, columns) matrices."""

    rows: int
    inner: int
    columns: int
    batch: int = 1
    """Number of matmuls in a batched one; for attention, heads of all sequences."""
    form: Form | None = None
    """None for a linear layer's matmul, which stands for all forms. Fused attention has the
    sides of its scores.
    """
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

    def is_like(self, form: Form | None, is_batched: bool) -> bool:
        """Whether the matmul has this form, and is batched if and only if `is_batched`."""
        return self.form is form and (self.batch > 1) is is_batched


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """Times that `cs336 ceilings` has measured on one device. Compared by identity, to be
    hashable as cache keys.
    """

    matmuls: Mapping[Precision, tuple[Matmul, ...]]
    copies: Mapping[int, float]
    """Times of copies by the bytes that they read and write."""
    adamw: Mapping[int, float]
    """Times of fused AdamW by the bytes that it moves."""
    launch_s: float
    """Time that the host needs to launch a kernel that does next to nothing."""
    kernel_s: float
    """Time of such a kernel in a CUDA graph, where the device does not wait for the host."""
    passes: Mapping[Pass, Mapping[int, float]] = field(default_factory=dict)
    """Times of other passes than copies by the bytes that they read and write."""
    collectives: Mapping[int, Mapping[Collective, Mapping[int, float]]] = field(
        default_factory=dict
    )
    """Times of each collective by its bytes, by the number of ranks among which they were
    measured.
    """
    queued_gap_s: float | None = None
    """Gap between two kernels that the host launched one by one, early enough; None if it was
    not measured.
    """
    is_measured: bool = True
    """Whether they were measured, and not computed from the device's data sheet."""
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

    def matmul_s(
        self,
        precision: Precision,
        rows: int,
        inner: int,
        columns: int,
        *,
        batch: int = 1,
        form: Form = Form.FORWARD,
        moved_bytes: int = 0,
    ) -> float | None:
        """Time in seconds of `batch` matmuls of (rows, inner) by (inner, columns) matrices, or of
        fused attention, whose sides are those of its scores; None if no matmul was measured at
        this precision.

        The rate in FLOP/s is the geometric mean of measured rates, weighted by a power of the
        inverse distance between the logarithms of the sides, so a measured matmul has its measured
        time. A batch counts as one matmul with the rows of all.

        If no matmul of this form, batched alike, was measured, the rates of linear layers' matmuls
        are used, also with rows and columns exchanged. The time is then at least that of a copy
        that reads and writes `moved_bytes` (0: no such bound). Fused attention then takes half the
        time of all its matmuls, because it is causal.
        """
        if (rate := _rate(self, precision, (rows, inner, columns), batch, form)) is None:
            return None
        seconds = 2 * batch * rows * inner * columns / rate
        if any(matmul.is_like(form, batch > 1) for matmul in self.matmuls[precision]):
            # a measured rate of fused attention has the FLOPs of one matmul, but the time of all
            return seconds
        # a causal matmul computes half of its products
        num_matmuls = MATMULS_OF[form] / 2 if form in MATMULS_OF else 1
        least_s = self.pass_s(moved_bytes) if moved_bytes else 0.0
        return max(seconds * num_matmuls, least_s)

    def has_product(
        self, precision: Precision, rows: int, inner: int, columns: int, form: Form, batch: int
    ) -> bool:
        """Whether this very matmul was measured, so that its time is looked up rather than
        interpolated.
        """
        points = _surface(self, precision, _is_aligned(rows, inner, columns), form, batch > 1)
        return (log(batch * rows), log(inner), log(columns)) in dict(points)

    def without(self, precision: Precision, products: Set[tuple[int, int, int]]) -> "Curves":
        """The curves as if no matmul of these sides, (rows of all of a batch, inner, columns), had
        been measured.

        Rows and columns may be exchanged, and of all forms that have these sides none is kept.
        """
        kept = tuple(
            matmul
            for matmul in self.matmuls.get(precision, ())
            if products.isdisjoint([matmul.sides, matmul.sides[::-1]])
        )
        return replace(self, matmuls={**self.matmuls, precision: kept})

    def pass_s(self, num_bytes: int, how: Pass = Pass.COPY) -> float:
        """Seconds of a pass over memory that reads and writes `num_bytes` in all; those of a copy
        if passes of this kind were not measured.
        """
        return interpolated(self.passes.get(how) or self.copies, num_bytes)


def _is_aligned(*sides: int) -> bool:
    """Whether every side of the matrices is a multiple of ALIGNMENT, as fast kernels need it."""
    return all(side % ALIGNMENT == 0 for side in sides)


Point = tuple[tuple[float, float, float], float]
"""Logarithms of the three sides, and the rate there."""


@lru_cache(maxsize=1024)
def _surface(
    curves: Curves, precision: Precision, is_aligned: bool, form: Form, is_batched: bool
) -> tuple[Point, ...]:
    """The measured matmuls between which the rate of another is interpolated, each as the
    logarithms of its sides and of its rate.

    They are those of the same form and batching; where none was measured, those of linear layers.
    Of these, the ones that are aligned alike are taken, if there are any.
    """
    measured = curves.matmuls.get(precision, ())
    alike = [matmul for matmul in measured if matmul.is_like(form, is_batched)]
    if not alike:
        alike = [matmul for matmul in measured if matmul.form is None]
    kept = [
        matmul
        for matmul in alike
        if _is_aligned(matmul.rows, matmul.inner, matmul.columns) is is_aligned
    ]
    points: list[Point] = []
    for matmul in kept or alike:
        rows, inner, columns = map(log, matmul.sides)
        points.append(((rows, inner, columns), matmul.flops_per_s))
        # a linear layer's matmul is as fast with rows and columns exchanged
        if matmul.form is None and rows != columns:
            points.append(((columns, inner, rows), matmul.flops_per_s))
    return tuple(points)


@lru_cache(maxsize=4096)
def _rate(
    curves: Curves, precision: Precision, sides: tuple[int, int, int], batch: int, form: Form
) -> float | None:
    """FLOPs per second of a matmul with these `sides` (rows, inner, columns), interpolated from
    measured ones: their rates, weighted by distance in the logarithms of the sides (Shepard 1968).

    None if no such matmul was measured.
    """
    here = (log(batch * sides[0]), log(sides[1]), log(sides[2]))
    points = _surface(curves, precision, _is_aligned(*sides), form, batch > 1)
    distances = [dist(here, there) for there, _ in points]
    if not points:
        return None
    nearest = min(distances)
    if nearest == 0:
        return points[distances.index(0)][1]
    weights = [(nearest / distance) ** SHEPARD_EXPONENT for distance in distances]
    total = sum(weight * log(rate) for weight, (_, rate) in zip(weights, points, strict=True))
    return exp(total / sum(weights))


def interpolated(curve: Mapping[int, float], num_bytes: int) -> float:
    """Time at so many bytes, from measured times.

    Between two sizes that were measured, the logarithm of the time is linear in that of the size.
    Beyond them, the time is that of the smallest, or grows as the size.
    """
    sizes = sorted(curve)
    if num_bytes <= sizes[0]:
        return curve[sizes[0]]
    if num_bytes >= sizes[-1]:
        return curve[sizes[-1]] * num_bytes / sizes[-1]
    above = bisect_left(sizes, num_bytes)
    low, high = sizes[above - 1], sizes[above]
    share = log(num_bytes / low) / log(high / low)
    return exp((1 - share) * log(curve[low]) + share * log(curve[high]))


def time_s(
    counts: Mapping[CollectiveCall, int], curves: Mapping[Collective, Mapping[int, float]]
) -> float | None:
    """Time of the calls one after the other, from measured times by bytes; None if a kind was
    not measured.
    """
    if any(not curves.get(call.collective) for call in counts):
        return None
    return sum(
        count * interpolated(curves[call.collective], call.num_bytes)
        for call, count in counts.items()
    )


# ---- without measured ceilings: a data sheet, and efficiencies that H100 and H200 reach at large
# sizes, rounded down

MATMUL_EFFICIENCY = 0.7
"""Share of the peak that a matmul reaches, whatever its size."""
MEMORY_EFFICIENCY = 0.85
"""Share of the memory bandwidth that every kernel except matmuls reaches."""
LINK_EFFICIENCY = 0.75
"""Share of NVLink's rate in one direction that a collective reaches."""
LAUNCH_S = 7e-6
"""Time that a host needs to launch a kernel."""
KERNEL_S = 1.5e-6
"""Least time of a kernel."""
_SIDE = 2**20
"""Of the one matmul of the curves: more than any step has, because the efficiency is that of all
matmuls.
"""


def data_sheet_curves(device: DeviceSpec) -> Curves:
    """Times of a device that reaches the stated share of each rate that its data sheet promises."""
    bandwidth = MEMORY_EFFICIENCY * device.memory_bandwidth_bytes_per_s
    smallest = round(KERNEL_S * bandwidth)
    passes = {smallest: KERNEL_S, 1000 * smallest: 1000 * KERNEL_S}
    matmuls = {}
    for precision, peak in device.peak_flops_per_s.items():
        time_s = 2 * _SIDE**3 / (MATMUL_EFFICIENCY * peak)
        matmuls[precision] = (Matmul(rows=_SIDE, inner=_SIDE, columns=_SIDE, time_s=time_s),)
    return Curves(
        matmuls=matmuls,
        copies=passes,
        adamw=passes,
        launch_s=LAUNCH_S,
        kernel_s=KERNEL_S,
        is_measured=False,
    )
