"""What a device reaches at its best, as curves between the points that were measured: matmuls, passes, launches."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import dist, exp, log

from cs336_systems.config import Precision

ALIGNMENT = 8
"""Sides that are not multiples of this keep cuBLAS from its fast kernels: 16 bytes in half precision (NVIDIA's guide
to matmul performance, "tensor core requirements")."""
SHEPARD_EXPONENT = 4
"""Of inverse distances. Above the three dimensions of a matmul, so that many far points do not outweigh a near one
(Shepard 1968)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """A measured matmul of (rows, inner) by (inner, columns) matrices."""

    rows: int
    inner: int
    columns: int
    time_s: float

    @property
    def flops_per_s(self) -> float:
        return 2 * self.rows * self.inner * self.columns / self.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Times that `cs336 ceilings` has measured on one device."""

    matmuls: Mapping[Precision, tuple[Matmul, ...]]
    copies: Mapping[int, float]
    """Times of copies by the bytes that they read and write."""
    adamw: Mapping[int, float]
    """Times of fused AdamW by the bytes that it moves."""
    launch_s: float
    """Time that the host needs to launch a kernel that does next to nothing."""
    kernel_s: float
    """Time of such a kernel in a CUDA graph, where no host is waited for."""

    def matmul_s(self, precision: Precision, rows: int, inner: int, columns: int, batch: int = 1) -> float | None:
        """Time of a matmul; None at a precision of which none was measured.

        Its rate is the mean of those measured, weighted by the inverse of a power of the distance, in which each side
        counts by its logarithm; of a batch it is that of the matmul with the rows of all. A matmul and its transpose,
        with rows and columns exchanged, count as equally fast. One that was measured has the time measured.
        """
        points = _surface(self.matmuls.get(precision, ()), _is_aligned(rows, inner, columns))
        return 2 * batch * rows * inner * columns / _rate(points, batch * rows, inner, columns) if points else None

    def copy_s(self, num_bytes: int) -> float:
        """Time of an element-wise kernel that reads and writes so many bytes: that of a copy."""
        return interpolated(self.copies, num_bytes)

    def adamw_s(self, num_bytes: int) -> float:
        """Time of fused AdamW that moves so many bytes."""
        return interpolated(self.adamw, num_bytes)


def _is_aligned(*sides: int) -> bool:
    return all(side % ALIGNMENT == 0 for side in sides)


Point = tuple[tuple[float, float, float], float]
"""Logarithms of the three sides, and the rate there."""


@lru_cache(maxsize=64)
def _surface(measured: tuple[Matmul, ...], is_aligned: bool) -> tuple[Point, ...]:
    """Points of matmuls that are aligned, or are not, if there are any of that kind; otherwise of all."""
    alike = [each for each in measured if _is_aligned(each.rows, each.inner, each.columns) is is_aligned]
    return tuple(
        ((log(rows), log(each.inner), log(columns)), each.flops_per_s)
        for each in alike or measured
        for rows, columns in ((each.rows, each.columns), (each.columns, each.rows))
    )


@lru_cache(maxsize=4096)
def _rate(points: tuple[Point, ...], rows: int, inner: int, columns: int) -> float:
    here = (log(rows), log(inner), log(columns))
    distances = [dist(here, there) for there, _ in points]
    if (nearest := min(distances)) == 0:
        return next(rate for (_, rate), distance in zip(points, distances, strict=True) if distance == 0)
    weights = [(nearest / distance) ** SHEPARD_EXPONENT for distance in distances]
    total = sum(weight * log(rate) for weight, (_, rate) in zip(weights, points, strict=True))
    return exp(total / sum(weights))


def interpolated(curve: Mapping[int, float], num_bytes: int) -> float:
    """Time at so many bytes, from measured times.

    Between two sizes that were measured, the logarithm of the time is linear in that of the size. Beyond them, the time
    is that of the smallest, or grows as the size.
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
