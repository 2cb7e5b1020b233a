"""Why a rung is faster than the one before: what it changes of kernels, bytes and times, in a sentence."""

from collections.abc import Iterator

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import Work
from cs336_systems.report.formats import significant
from cs336_systems.report.ladder.rows import LadderRow, Reason

MIN_CHANGE = 0.05
"""Relative, of a count, of bytes or of a time, to be told."""
MIN_BUSY_CHANGE = 0.02
"""Of the step, in the share of it that the GPU is busy."""
MAX_CLASSES = 2
"""Classes of kernels to tell of: those whose time changes most."""
GIGA, GIB = 1e9, 2**30


def reasons(row: LadderRow, last: LadderRow | None) -> str:
    """`450 -> 310 kernels; optimizer 2.10 -> 0.800 ms; ...`, from `last` to the row; without it, what there is."""
    found = [*_launches(row, last), *_busy(row, last), *_classes(row, last), *_bytes(row, last),
             *_memory(row, last), *_waiting(row, last)]  # fmt: skip
    return "; ".join(found) or "nothing that is counted here"


def _launches(row: LadderRow, last: LadderRow | None) -> Iterator[str]:
    if row.reason is not None:
        earlier = last.reason.launches if last and last.reason else None
        yield from _change("", earlier, row.reason.launches, " operators" if _on_cpu(row.reason) else " kernels")


def _busy(row: LadderRow, last: LadderRow | None) -> Iterator[str]:
    share, earlier = row.busy_share, last.busy_share if last else None
    if share is not None and earlier is None:
        yield f"GPU busy {share:.0%}"
    elif share is not None and earlier is not None and abs(share - earlier) >= MIN_BUSY_CHANGE:
        yield f"GPU busy {earlier:.0%} -> {share:.0%}"


def _classes(row: LadderRow, last: LadderRow | None) -> Iterator[str]:
    """The classes whose time changes most; of the first rung, those with the most time."""
    if row.reason is None:
        return
    now, before = row.reason.class_s, last.reason.class_s if last and last.reason else {}

    def change_s(kind: KernelClass) -> float:
        return abs(now.get(kind, 0.0) - before.get(kind, 0.0))

    worth_s = MIN_CHANGE * sum((before or now).values())
    largest = sorted({**before, **now}, key=change_s, reverse=True)[:MAX_CLASSES]
    for kind in largest:
        if change_s(kind) >= worth_s > 0:
            earlier = f"{_ms(before.get(kind, 0.0))} -> " if before else ""
            yield f"{kind} {earlier}{_ms(now.get(kind, 0.0))} ms"


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


def _waiting(row: LadderRow, last: LadderRow | None) -> Iterator[str]:
    if row.compile_s is not None:
        yield from _change("compiled in ", last.compile_s if last else None, row.compile_s, " s")


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
