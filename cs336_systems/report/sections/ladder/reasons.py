"""Why a rung is faster than the one before: what it changes of kernels, bytes and times, in a sentence."""

from collections.abc import Iterator

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import Work
from cs336_systems.report.numbers import significant
from cs336_systems.report.sections.ladder.rows import LadderRow, Reason

MIN_CHANGE = 0.01
"""Relative, of a count, of bytes, of the peak, and of a class over the busy time, to be told."""
MIN_SHARE_CHANGE = 0.02
"""Of the step, in the share of it that the GPU is busy."""
MIN_CLASS_PART = 0.25
"""Of the change of the busy time, that the change of a class must come to."""
MAX_CLASSES = 3
"""Classes of kernels to tell of: those whose time changes most."""
GIGA = 1e9


def reasons(row: LadderRow, last: LadderRow | None) -> str:
    """`450 -> 310 kernels; GPU busy 9.50 -> 8.20 ms; ...`, from `last` to the row; without it, what there is."""
    found = [*_launches(row, last), *_busy(row, last), *_classes(row, last), *_bytes(row, last), *_memory(row, last)]
    return "; ".join(found) or "no change that is counted here"


def _launches(row: LadderRow, last: LadderRow | None) -> Iterator[str]:
    if row.reason is not None:
        earlier = last.reason.launches if last and last.reason else None
        yield from _change("", earlier, row.reason.launches, " operators" if _on_cpu(row.reason) else " kernels")


def _busy(row: LadderRow, last: LadderRow | None) -> Iterator[str]:
    """Always told where it is known; the share of the step where that says more: the GPU waited less, or longer."""
    if row.reason is None or row.busy_share is None:
        return
    now, share = _ms(row.reason.busy_s), _number(100 * row.busy_share)
    if last is None or last.reason is None or last.busy_share is None:
        yield f"GPU busy {now} ms ({share}% of the step)"
        return
    is_told = abs(row.busy_share - last.busy_share) >= MIN_SHARE_CHANGE
    shares = f" ({_number(100 * last.busy_share)} -> {share}% of the step)" if is_told else ""
    yield f"GPU busy {_ms(last.reason.busy_s)} -> {now} ms{shares}"


def _classes(row: LadderRow, last: LadderRow | None) -> Iterator[str]:
    """The classes that account for the change of the busy time; without an earlier profile, those with the most time.

    None where either profiled step was too slow to stand for the plain one.
    """
    if row.reason is None or row.is_slowed or (last is not None and last.is_slowed):
        return
    earlier = last.reason if last else None
    now, before = row.reason.class_s, earlier.class_s if earlier else {}

    def change_s(kind: KernelClass) -> float:
        return abs(now.get(kind, 0.0) - before.get(kind, 0.0))

    part_s = MIN_CLASS_PART * abs(row.reason.busy_s - earlier.busy_s) if earlier else 0.0
    least_s = max(MIN_CHANGE * row.reason.busy_s, part_s)
    for kind in sorted({**before, **now}, key=change_s, reverse=True)[:MAX_CLASSES]:
        if change_s(kind) >= least_s > 0:
            arrow = f"{_ms(before.get(kind, 0.0))} -> " if earlier else ""
            yield f"{kind} {arrow}{_ms(now.get(kind, 0.0))} ms"


def _bytes(row: LadderRow, last: LadderRow | None) -> Iterator[str]:
    """The least that must move, in closed form."""
    if row.traffic is None:
        return
    before = last.traffic if last else None
    yield from _change(
        "weights, gradients and AdamW move at least ",
        before.state / GIGA if before else None, row.traffic.state / GIGA, " GB",
    )  # fmt: skip
    yield from _change(
        "activations of the products at least ",
        before.activations / GIGA if before else None, row.traffic.activations / GIGA, " GB",
    )  # fmt: skip


def _memory(row: LadderRow, last: LadderRow | None) -> Iterator[str]:
    peak = row.row["peak_allocated_gib"]
    if peak is not None:
        yield from _change("peak ", last.row["peak_allocated_gib"] if last else None, peak, " GiB")


def _change(words: str, before: float | None, now: float, unit: str) -> Iterator[str]:
    """`words 450 -> 310 unit` where that is a change, `words 310 unit` where nothing is known from before."""
    if before is None:
        yield f"{words}{_number(now)}{unit}"
    elif abs(now - before) >= MIN_CHANGE * abs(before):
        yield f"{words}{_number(before)} -> {_number(now)}{unit}"


def _number(value: float) -> str:
    return significant(value, 3) if value else "0"


def _ms(time_s: float) -> str:
    return _number(time_s * 1e3)


def _on_cpu(reason: Reason) -> bool:
    return reason.work is Work.OPERATORS
