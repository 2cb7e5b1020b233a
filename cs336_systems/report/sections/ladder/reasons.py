"""Why a rung is faster than the one before: the changes of its kernels, bytes and times, in a sentence."""

from collections.abc import Iterator, Mapping

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import Work
from cs336_systems.report.columns import Row, short
from cs336_systems.report.numbers import GIGA
from cs336_systems.report.sections.ladder.rows import is_slowed

MIN_CHANGE = 0.01
"""Smallest relative change that is mentioned, of a count, of bytes, of the peak, or of a class over the busy time."""
MIN_SHARE_CHANGE = 0.02
"""Smallest change that is mentioned of the share of the step in which the GPU is busy."""
MIN_CLASS_PART = 0.25
"""Smallest change of a class that is mentioned, as a part of the change of the busy time."""
MAX_CLASSES = 3
"""Most classes of kernels that are named: those whose time changes most."""


def reasons(row: Row, last: Row | None) -> str:
    """`450 -> 310 kernels; GPU busy 9.50 -> 8.20 ms; ...`: the changes from `last` to the row, or the row's values."""
    unit = " operators" if row["work"] is Work.OPERATORS else " kernels"
    found = [
        *_change("", "launches_per_step", unit, row, last),
        *_busy(row, last),
        *_classes(row, last),
        *_change("weights, gradients and AdamW move at least ", "least_state_bytes", " GB", row, last, 1 / GIGA),
        *_change("activations of the products at least ", "least_activations_bytes", " GB", row, last, 1 / GIGA),
        *_change("peak ", "peak_allocated_gib", " GiB", row, last),
    ]
    return "; ".join(found) or "no change that is counted here"


def _change(words: str, key: str, unit: str, row: Row, last: Row | None, scale: float = 1) -> Iterator[str]:
    """`words 450 -> 310 unit` where that is a change, `words 310 unit` where nothing is known from before."""
    now = row[key]
    if now is None:
        return
    if last is None or last[key] is None:
        yield f"{words}{short(now * scale)}{unit}"
    elif abs(now - last[key]) >= MIN_CHANGE * abs(last[key]):
        yield f"{words}{short(last[key] * scale)} -> {short(now * scale)}{unit}"


def _busy(row: Row, last: Row | None) -> Iterator[str]:
    """Always said where it is known; the share of the step where it changes: the GPU waited less, or longer."""
    if row["busy_share"] is None:
        return
    now, share = short(row["busy_ms"]), short(100 * row["busy_share"])
    if last is None or last["busy_share"] is None:
        yield f"GPU busy {now} ms ({share}% of the step)"
        return
    is_changed = abs(row["busy_share"] - last["busy_share"]) >= MIN_SHARE_CHANGE
    shares = f" ({short(100 * last['busy_share'])} -> {share}% of the step)" if is_changed else ""
    yield f"GPU busy {short(last['busy_ms'])} -> {now} ms{shares}"


def _classes(row: Row, last: Row | None) -> Iterator[str]:
    """The classes that account for the change of the busy time; without an earlier profile, those with the most time.

    None where either profiled step was too slow to stand for the plain one.
    """
    if row["class_s"] is None or is_slowed(row) or is_slowed(last):
        return
    earlier = last if last and last["class_s"] is not None else None
    now: Mapping[KernelClass, float] = row["class_s"]
    before: Mapping[KernelClass, float] = earlier["class_s"] if earlier else {}

    def change_s(kind: KernelClass) -> float:
        return abs(now.get(kind, 0.0) - before.get(kind, 0.0))

    part_ms = MIN_CLASS_PART * abs(row["busy_ms"] - earlier["busy_ms"]) if earlier else 0.0
    least_s = max(MIN_CHANGE * row["busy_ms"], part_ms) / 1e3
    for kind in sorted({**before, **now}, key=change_s, reverse=True)[:MAX_CLASSES]:
        if change_s(kind) >= least_s > 0:
            arrow = f"{short(before.get(kind, 0.0) * 1e3)} -> " if earlier else ""
            yield f"{kind} {arrow}{short(now.get(kind, 0.0) * 1e3)} ms"
